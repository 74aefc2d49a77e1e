r"""Models with a closed form (section 3.3): $f_\theta(x) = s \sum_i \sigma(\theta_i)\varphi_i(x)$.

The features $\varphi_i$ are fixed, so $\partial_{\theta_i} f = s\,\sigma'(\theta_i)\,\varphi_i$ and

$$\mathcal{J}_{ij}(\theta; p_X) = \sigma'(\theta_i)\,\sigma'(\theta_j)\,\Phi_{ij}, \qquad
  \Phi = s^2\, E_{p_X}[\varphi\varphi^\top].$$

``gram`` returns this $\Phi$, the factor $s^2$ included; $s = 1/\sqrt P$ unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fsmap.errors import InputError
from fsmap.models.squash import SquashLike, find_squash


class BasisModel(nn.Module):
    r"""$f_\theta(x) = s \sum_i \sigma(\theta_i)\,\varphi_i(x)$ with features given by a subclass.

    Parameters start at zero, as in the authors' code.

    Args:
        num_features: P.
        squash: $\sigma$, by name or as a :class:`~fsmap.models.squash.Squash`.
        scale: $s$; $1/\sqrt P$ (authors' code) if None.
        dtype: Of the parameters; torch's default if None.
    """

    def __init__(
        self,
        num_features: int,
        squash: SquashLike,
        *,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_features < 1:
            message = f"a basis model needs at least one feature, got {num_features}."
            raise InputError(message)
        self.squash = find_squash(squash)
        self.scale = 1 / math.sqrt(num_features) if scale is None else scale
        self.theta = nn.Parameter(torch.zeros(num_features, dtype=dtype))  # [P]

    def phi(self, x: Tensor) -> Tensor:
        r"""The features $\varphi_i(x)$ without the factor $s$.

        Args:
            x: ``[S]``.

        Returns:
            ``[S, P]``.
        """
        raise NotImplementedError

    def design(self, x: Tensor) -> Tensor:
        r"""The design matrix $s\,\varphi_i(x)$: the function is ``design(x) @ squash(theta)``.

        Args:
            x: ``[S]`` or ``[S, 1]``.

        Returns:
            ``[S, P]``.
        """
        return self.scale * self.phi(x.reshape(-1))

    def forward(self, x: Tensor) -> Tensor:
        """The function at ``x``.

        Args:
            x: ``[S]`` or ``[S, 1]``.

        Returns:
            The shape of ``x``.
        """
        return (self.design(x) @ self.squash.value(self.theta)).reshape(x.shape)

    def gram(self, x: Tensor) -> Tensor:
        r"""$\Phi$ for $p_X$ = the empirical distribution of the points.

        Args:
            x: ``[S]`` or ``[S, 1]``.

        Returns:
            ``[P, P]``; its rank is at most S.
        """
        design = self.design(x)
        return design.mT @ design / len(design)

    def factor(self, x: Tensor) -> Tensor:
        r"""A square root of $\Phi$ for the empirical $p_X$: $F^\top F = \Phi$.

        Working with F keeps singular values down to $10^{-16}$ of the largest, that is
        eigenvalues of $\Phi$ down to $10^{-32}$ of the largest; $\Phi$ itself loses them.

        Args:
            x: ``[S]`` or ``[S, 1]``.

        Returns:
            ``[min(S, P), P]``.
        """
        design = self.design(x)
        rows: Tensor = design / math.sqrt(len(design))
        return rows if len(rows) <= rows.shape[-1] else torch.linalg.qr(rows, mode="r").R


class FourierBasis(BasisModel):
    r"""$\{\cos(i\pi x), \sin(i\pi x)\}$, $i = 1 \ldots n$: P = 2n, cosines first.

    Args:
        num_frequencies: n.
        squash: $\sigma$.
        scale: $s$; $1/\sqrt P$ if None.
        dtype: Of the parameters and frequencies.

    Examples:
        >>> model = FourierBasis(2, dtype=torch.float64)
        >>> model.uniform_gram(-1.0, 1.0).diagonal().tolist()  # Φ = I/2, times 1/P = 1/4
        [0.125, 0.125, 0.125, 0.125]
    """

    frequencies: Tensor

    def __init__(
        self,
        num_frequencies: int,
        squash: SquashLike = "tanh",
        *,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(2 * num_frequencies, squash, scale=scale, dtype=dtype)
        frequencies = math.pi * torch.arange(1, num_frequencies + 1, dtype=self.theta.dtype)
        self.register_buffer("frequencies", frequencies)  # [n]

    def phi(self, x: Tensor) -> Tensor:
        """Cosines, then sines, ``[S, P]``."""
        angles = x[:, None] * self.frequencies  # [S, n]
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def uniform_gram(self, low: float, high: float) -> Tensor:
        r"""$\Phi$ for $p_X = \mathrm{Uniform}(low, high)$, in closed form; $s^2 I/2$ on (-1, 1).

        Products of cosines and sines become sums and differences of frequencies, whose mean over
        the interval is $E\cos\kappa x = \cos(\kappa m)\,\mathrm{sinc}(\kappa h)$ with midpoint m
        and half-width h.

        Args:
            low: Left end.
            high: Right end.

        Returns:
            ``[P, P]``.
        """
        k, middle, half = self.frequencies, (low + high) / 2, (high - low) / 2
        minus, plus = k[:, None] - k, k[:, None] + k  # [n, n]

        def mean(wave: Callable[[Tensor], Tensor], kappa: Tensor) -> Tensor:
            return wave(kappa * middle) * torch.sinc(kappa * half / math.pi)

        cc = mean(torch.cos, minus) + mean(torch.cos, plus)
        ss = mean(torch.cos, minus) - mean(torch.cos, plus)
        cs = mean(torch.sin, plus) - mean(torch.sin, minus)  # E cos(k_i x) sin(k_j x), times 2
        top, bottom = torch.cat([cc, cs], dim=1), torch.cat([cs.mT, ss], dim=1)
        return self.scale**2 * torch.cat([top, bottom]) / 2


class BumpBasis(BasisModel):
    r"""Gaussian bumps $\varphi_i(x) = \exp(-(x - c_i)^2 / w)$, and a constant if ``bias``.

    Args:
        centers: $c_i$.
        width: $w$; the bump's variance is $w/2$.
        squash: $\sigma$.
        bias: Whether the last feature is the constant 1.
        scale: $s$; $1/\sqrt P$ if None.
        dtype: Of the parameters and centers.
    """

    centers: Tensor

    def __init__(
        self,
        centers: Sequence[float] | Tensor,
        width: float,
        squash: SquashLike = "exp",
        *,
        bias: bool = False,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(len(centers) + bias, squash, scale=scale, dtype=dtype)
        if not width > 0:
            message = f"width must be > 0, got {width:g}. It is the w of exp(-(x - c)²/w)."
            raise InputError(message)
        self.width, self.bias = width, bias
        self.register_buffer("centers", torch.as_tensor(centers, dtype=self.theta.dtype))  # [C]

    def phi(self, x: Tensor) -> Tensor:
        """Bumps, then the constant if there is one, ``[S, P]``."""
        bumps = torch.exp(-(x[:, None] - self.centers).square() / self.width)  # [S, C]
        return torch.cat([bumps, bumps.new_ones(len(x), 1)], dim=-1) if self.bias else bumps

    def uniform_gram(self, low: float, high: float) -> Tensor:
        r"""$\Phi$ for $p_X = \mathrm{Uniform}(low, high)$, in closed form (error functions).

        A product of two bumps is a bump of half the width at the middle of their centers.

        Args:
            low: Left end.
            high: Right end.

        Returns:
            ``[P, P]``.
        """
        c, w = self.centers, self.width
        middle, apart = (c[:, None] + c) / 2, c[:, None] - c  # [C, C]
        pairs = torch.exp(-apart.square() / (2 * w)) * _mass(middle, w / 2, low, high)
        if self.bias:
            ones = _mass(c, w, low, high)[:, None]  # [C, 1]
            last = torch.cat([ones.mT, c.new_ones(1, 1)], dim=1)  # [1, C + 1]
            pairs = torch.cat([torch.cat([pairs, ones], dim=1), last])
        return self.scale**2 * pairs


def _mass(center: Tensor, width: float, low: float, high: float) -> Tensor:
    """Mean of exp(-(x - center)²/width) over Uniform(low, high)."""
    root = math.sqrt(width)
    area = torch.erf((high - center) / root) - torch.erf((low - center) / root)
    return math.sqrt(math.pi * width) / 2 * area / (high - low)


class RBFBasis(BumpBasis):
    """A linear model on evenly spaced radial basis functions and a bias (Fig. A.1).

    The width of a bump equals the spacing of the centers, and there is no factor 1/√P.

    Args:
        num_centers: How many bumps; P is one more.
        low: First center.
        high: Last center.
        dtype: Of the parameters and centers.
    """

    def __init__(
        self,
        num_centers: int,
        low: float = 0.0,
        high: float = 1.0,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_centers < 2:
            message = f"num_centers must be at least 2 to have a spacing, got {num_centers}."
            raise InputError(message)
        centers = torch.linspace(low, high, num_centers, dtype=dtype)
        width = (high - low) / (num_centers - 1)
        super().__init__(centers, width, "identity", bias=True, scale=1.0, dtype=dtype)
