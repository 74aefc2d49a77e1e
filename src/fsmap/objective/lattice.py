r"""Fourier features on equidistant points: $\log\det(D\Phi D + \epsilon I)$ in closed form.

On M equidistant points of $[-1, 1]$, both ends included, there are $n = M - 1$ different points of
the period. Frequencies $i \equiv \pm c \pmod n$ take the same values there up to a sign: they are
*aliases*, and form one class. On the n points different classes are orthogonal, so $\Phi$ is block
diagonal with blocks of rank one; the point x = 1, which repeats x = -1, adds one more rank-one
matrix. Hence, with $S_c = \sum_{i \in c} \sigma'(\theta_i)^2$,

$$\det(\mathcal{J} + \epsilon I) = \Big[\prod_c \epsilon^{|c|-1} (\epsilon + \kappa_c S_c)\Big]
  \Big[1 + \frac{s^2}{M} \sum_{c \,\in\, \cos} \frac{S_c}{\epsilon + \kappa_c S_c}\Big].$$

All terms are positive and are added in log space: no rounding error, whatever $\epsilon$ is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.errors import InputError, SingularGeometryError
from fsmap.objective.basis import log_of


class FourierLattice(NamedTuple):
    r"""$\log\det(\mathcal{J} + \epsilon I)$ for ``FourierBasis`` and M equidistant points.

    Attributes:
        members: Parameters of each class, padded with P, ``[C, m]``.
        log_kappa: $\log\kappa_c$, $-\infty$ for sines that vanish on the lattice, ``[C]``.
        cosine: Whether the class is one of cosines, ``[C]``.
        log_repeat: $\log(s^2/M)$, the weight of the repeated end point, ``[]``.
        jitter: $\epsilon$: a number, or a tensor that broadcasts against the members of a batch.
    """

    members: Tensor
    log_kappa: Tensor
    cosine: Tensor
    log_repeat: Tensor
    jitter: float | Tensor

    @property
    def rank(self) -> int:
        r"""Rank of $\Phi$: the number of classes that do not vanish on the lattice."""
        return int((self.log_kappa > -math.inf).sum())

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det(\mathcal{J} + \epsilon I)$.

        Args:
            log_slope: $\log|\sigma'(\theta)|$, ``[..., P]``.

        Returns:
            ``[...]``.

        Raises:
            SingularGeometryError: If there is no jitter and $\Phi$ is singular.
        """
        num_params, classes = log_slope.shape[-1], len(self.members)
        if isinstance(self.jitter, float | int) and not self.jitter and self.rank < num_params:
            message = (
                f"Φ has rank {self.rank} < P = {num_params} on this lattice, so log det is −∞ "
                "without jitter. Use more points or a jitter > 0."
            )
            raise SingularGeometryError(message)
        log_jitter = log_of(self.jitter, log_slope)[..., None]  # [..., 1]
        nothing = log_slope.new_full((*log_slope.shape[:-1], 1), -math.inf)
        padded = torch.cat([2 * log_slope, nothing], dim=-1)  # [..., P + 1]
        log_s = padded[..., self.members].logsumexp(-1)  # [..., C]
        block = torch.logaddexp(log_jitter, self.log_kappa + log_s)  # [..., C]
        repeat = (log_s - block)[..., self.cosine].logsumexp(-1) + self.log_repeat  # [...]
        spare = num_params - classes  # Σ (|c| − 1)
        jitters = spare * log_jitter[..., 0] if spare else 0.0
        return jitters + block.sum(-1) + torch.nn.functional.softplus(repeat)


def fourier_lattice(
    num_frequencies: int,
    num_points: int,
    jitter: float | Tensor,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> FourierLattice:
    r"""The closed form for $\{\cos i\pi x, \sin i\pi x\}$ on ``linspace(-1, 1, M)``.

    Args:
        num_frequencies: P/2.
        num_points: M, at least 2.
        jitter: $\epsilon$.
        scale: $s$ of the model; $1/\sqrt P$ if None.
        dtype: Of the constants.

    Returns:
        The form.

    Raises:
        InputError: If there are fewer than 2 points.
    """
    if num_points < 2:
        message = f"num_points must be at least 2 (both ends of [-1, 1]), got {num_points}."
        raise InputError(message)
    around = num_points - 1  # n
    square = 1 / (2 * num_frequencies) if scale is None else scale**2
    classes: dict[tuple[bool, int], list[int]] = {}
    for parameter in range(2 * num_frequencies):
        is_cosine, frequency = parameter < num_frequencies, parameter % num_frequencies + 1
        alias = min(frequency % around, -frequency % around)
        classes.setdefault((is_cosine, alias), []).append(parameter)
    longest = max(map(len, classes.values()))
    padding = 2 * num_frequencies
    members = [c + [padding] * (longest - len(c)) for c in classes.values()]
    kappa = [around / num_points * square * _power(*key, around) for key in classes]
    return FourierLattice(
        torch.tensor(members),
        torch.tensor(kappa, dtype=dtype).log(),
        torch.tensor([is_cosine for is_cosine, _ in classes]),
        torch.tensor(square / num_points, dtype=dtype).log(),
        jitter,
    )


def _power(is_cosine: bool, alias: int, around: int) -> float:
    """Mean square of a wave over the n points: 1/2, but at both ends of the spectrum 1 or 0."""
    if alias % around == 0 or 2 * alias == around:
        return float(is_cosine)
    return 0.5
