r"""Models with a closed form (section 3.3): $f_\theta(x) = s \sum_i \sigma(\theta_i)\varphi_i(x)$.

The features $\varphi_i$ are fixed, so $\partial_{\theta_i} f = s\,\sigma'(\theta_i)\,\varphi_i$ and

$$\mathcal{J}_{ij}(\theta; p_X) = \sigma'(\theta_i)\,\sigma'(\theta_j)\,\Phi_{ij}, \qquad
  \Phi = s^2\, E_{p_X}[\varphi\varphi^\top].$$

``gram`` returns this $\Phi$, the factor $s^2$ included; $s = 1/\sqrt P$ unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsmap.errors import InputError


class Squash(NamedTuple):
    r"""An increasing function $\sigma$ and the logarithm of its derivative."""

    name: str
    value: Callable[[Tensor], Tensor]  # σ(θ), element by element
    # log σ'(θ), finite wherever the true value is a finite float
    log_slope: Callable[[Tensor], Tensor]


def log_sech_squared(theta: Tensor) -> Tensor:
    r"""$\log \tanh'(\theta) = \log \mathrm{sech}^2\theta$, exact in the tails.

    Examples:
        >>> log_sech_squared(torch.tensor([0.0, 30.0, -2000.0], dtype=torch.float64)).tolist()
        [0.0, -58.61370563888011, -3998.61370563888]
    """
    return 2 * math.log(2) - 2 * torch.logaddexp(theta, -theta)


TANH = Squash("tanh", torch.tanh, log_sech_squared)
EXP = Squash("exp", torch.exp, lambda theta: theta)
IDENTITY = Squash("identity", lambda theta: theta, torch.zeros_like)
SQUASHES = {squash.name: squash for squash in (TANH, EXP, IDENTITY)}


class BasisModel(nn.Module):
    r"""$f_\theta(x) = s \sum_i \sigma(\theta_i)\,\varphi_i(x)$ with features given by a subclass.

    Parameters start at zero, as in the authors' code.

    Args:
        num_features: P.
        squash: $\sigma$, by name or as a :class:`Squash`.
        scale: $s$; $1/\sqrt P$ (authors' code) if None.
        dtype: Of the parameters; torch's default if None.
    """

    def __init__(
        self,
        num_features: int,
        squash: str | Squash,
        *,
        scale: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_features < 1:
            message = f"a basis model needs at least one feature, got {num_features}."
            raise InputError(message)
        if isinstance(squash, str) and squash not in SQUASHES:
            message = (
                f"squash must be one of {', '.join(map(repr, SQUASHES))} or a Squash, got "
                f"{squash!r}. For another increasing function give Squash(name, value, log_slope)."
            )
            raise InputError(message)
        self.squash = SQUASHES[squash] if isinstance(squash, str) else squash
        self.scale = 1 / math.sqrt(num_features) if scale is None else scale
        self.theta = nn.Parameter(torch.zeros(num_features, dtype=dtype))  # [P]

    def phi(self, x: Tensor) -> Tensor:
        r"""The features $\varphi_i(x)$ without the factor $s$, ``[S]`` to ``[S, P]``."""
        raise NotImplementedError

    def design(self, x: Tensor) -> Tensor:
        r"""$s\,\varphi_i(x)$, ``[S, P]``: the function is ``design(x) @ squash(theta)``."""
        return self.scale * self.phi(x.reshape(-1))

    def forward(self, x: Tensor) -> Tensor:
        """The function at ``x``, ``[S]`` or ``[S, 1]``, in the shape of ``x``."""
        return (self.design(x) @ self.squash.value(self.theta)).reshape(x.shape)

    def gram(self, x: Tensor) -> Tensor:
        r"""$\Phi$ for $p_X$ = the empirical distribution of the points, ``[P, P]``."""
        design = self.design(x)
        return design.mT @ design / len(design)

    def factor(self, x: Tensor) -> Tensor:
        r"""A square root of $\Phi$ for the empirical $p_X$: $F^\top F = \Phi$, ``[min(S, P), P]``.

        F keeps eigenvalues of $\Phi$ down to $10^{-32}$ of the largest; $\Phi$ itself loses them.
        """
        design = self.design(x)
        rows: Tensor = design / math.sqrt(len(design))
        return rows if len(rows) <= rows.shape[-1] else torch.linalg.qr(rows, mode="r").R


class FourierBasis(BasisModel):
    r"""$\{\cos(i\pi x), \sin(i\pi x)\}$, $i = 1 \ldots n$: P = 2n, cosines first.

    Examples:
        >>> model = FourierBasis(2, dtype=torch.float64)
        >>> model.uniform_gram(-1.0, 1.0).diagonal().tolist()  # Φ = I/2, times 1/P = 1/4
        [0.125, 0.125, 0.125, 0.125]
    """

    frequencies: Tensor

    def __init__(
        self,
        num_frequencies: int,
        squash: str | Squash = "tanh",
        **options: Any,
    ) -> None:
        super().__init__(2 * num_frequencies, squash, **options)
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
    r"""Gaussian bumps $\varphi_i(x) = \exp(-(x - c_i)^2 / w)$, and a constant if ``bias``."""

    centers: Tensor

    def __init__(
        self,
        centers: Sequence[float] | Tensor,
        width: float,
        squash: str | Squash = "exp",
        *,
        bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(len(centers) + bias, squash, **options)
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
    """A linear model on evenly spaced radial basis functions on [0, 1] and a bias (Fig. A.1).

    The width of a bump equals the spacing of the centers, and there is no factor 1/√P.
    """

    def __init__(self, num_centers: int, *, dtype: torch.dtype | None = None) -> None:
        if num_centers < 2:
            message = f"num_centers must be at least 2 to have a spacing, got {num_centers}."
            raise InputError(message)
        centers = torch.linspace(0.0, 1.0, num_centers, dtype=dtype)
        width = 1 / (num_centers - 1)
        super().__init__(centers, width, "identity", bias=True, scale=1.0, dtype=dtype)
