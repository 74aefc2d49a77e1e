r"""$\log\det(D \Phi D + \epsilon I)$ of basis models, $D = \mathrm{diag}\,\sigma'(\theta)$.

What is measured is ``log_slope`` $= \log|\sigma'(\theta)|$, ``[..., P]``: leading dimensions are
members of a batch (seeds, sizes, jitters), all of them one computation. $\Phi$ holds the model's
factor $s^2$ (``BasisModel.gram``). Which form is right depends on $\Phi$ and $\epsilon$:

| form | $\Phi$ | $\epsilon$ | |
|---|---|---|---|
| :class:`Invertible` | invertible | 0 | exact in log space, $2\sum\log\sigma' + \log\det\Phi$ |
| :class:`Diagonal` | diagonal | $\geq 0$ | exact in log space |
| :class:`Dual` | any rank, given as $F^\top F$ | > 0 | graded QR |
| :class:`FourierLattice` | Fourier features on a lattice | > 0 | exact |

With $\Phi$ invertible and $\epsilon = 0$ the value depends on $p_X$ by a constant only: the image
of a basis model is flat (appendix B.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fsmap.errors import InputError, SingularGeometryError
from fsmap.px import Stream
from fsmap.types import Draws, ModelFn, Params

PAPER_JITTER = 1e-32
"""What the authors' code adds inside the logarithm: the *paper's protocol*. It cuts the exact
objective off where σ'²Φᵢᵢ falls below it, for tanh near |θ| = 18."""


class Form(Protocol):
    """A way to compute the log-determinant."""

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det$, ``[..., P]`` to ``[...]``."""


class Invertible(NamedTuple):
    r"""$\epsilon = 0$: $\log\det\mathcal{J} = 2\sum_i \log\sigma'(\theta_i) + \log\det\Phi$."""

    log_det_gram: Tensor  # []

    @classmethod
    def from_gram(cls, gram: Tensor) -> Invertible:
        r"""Take $\log\det\Phi$, and refuse a $\Phi$ whose rounding errors would decide it."""
        eigenvalues = torch.linalg.eigvalsh(gram)  # ascending
        floor = len(gram) * torch.finfo(gram.dtype).eps * eigenvalues[-1]
        rank = int((eigenvalues > floor).sum())
        if rank < len(gram):
            message = (
                f"Φ has {rank} of {len(gram)} eigenvalues above rounding ({floor:.1e}): without "
                "jitter its log-determinant is noise or −∞ (Theorem 1). Use more evaluation "
                "points, or Dual(factor, jitter)."
            )
            raise SingularGeometryError(message)
        return cls(eigenvalues.log().sum())

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det\mathcal{J}$."""
        return 2 * log_slope.sum(-1) + self.log_det_gram


class Diagonal(NamedTuple):
    r"""Orthogonal features: $\sum_i \log(\sigma'(\theta_i)^2\,\Phi_{ii} + \epsilon)$, in log space.

    With ``jitter=PAPER_JITTER`` this is the paper's protocol for the Fourier model.
    """

    diagonal: Tensor  # [P]
    jitter: float | Tensor  # ε ≥ 0; a tensor broadcasts against the members

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det(\mathcal{J} + \epsilon I)$."""
        log_jitter = log_of(self.jitter, log_slope)[..., None]  # [..., 1]
        return torch.logaddexp(2 * log_slope + self.diagonal.log(), log_jitter).sum(-1)


class Dual(NamedTuple):
    r"""$P\log\epsilon + \log\det(I + F D^2 F^\top/\epsilon)$ for $\Phi = F^\top F$ of any rank.

    The weights $\sigma'^2/\epsilon$ easily span sixty orders of magnitude. Neither $\Phi$ nor the
    sum $F D^2 F^\top$ is formed, since both would bury small weights under the rounding errors of
    large ones: a QR decomposition of the rows $\sigma'_i F_{\cdot i}/\sqrt\epsilon$, the longest
    first, and of $I$ below them keeps every row to its own relative accuracy.
    """

    factor: Tensor  # [r, P]  F (``BasisModel.factor``)
    jitter: float | Tensor  # ε > 0; a tensor broadcasts against the members

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det(\mathcal{J} + \epsilon I)$."""
        log_jitter = log_of(self.jitter, log_slope)  # [...]
        half_log_weight = log_slope - 0.5 * log_jitter[..., None]  # [..., P]  log(σ'/√ε)
        num_params = log_slope.shape[-1]
        graded = _GradedLogDet.apply(half_log_weight, self.factor)  # type: ignore[no-untyped-call]
        log_det: Tensor = graded[0]
        return num_params * log_jitter + log_det


class _GradedLogDet(torch.autograd.Function):
    """log det(I + F diag(w²) Fᵀ) and its derivative 2 hᵢ, hᵢ the leverage of row i, in [0, 1]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(log_weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        rows = log_weight.exp()[..., None] * factor.mT  # [..., P, r]
        order = rows.norm(dim=-1).argsort(dim=-1, descending=True)
        graded = torch.take_along_dim(rows, order[..., None], dim=-2)
        identity = torch.eye(rows.shape[-1], dtype=rows.dtype, device=rows.device)
        below = identity.expand(*rows.shape[:-2], -1, -1)
        upper = torch.linalg.qr(torch.cat([graded, below], dim=-2), mode="r").R  # [..., r, r]
        log_det = 2 * upper.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        solved = torch.linalg.solve_triangular(upper, rows, upper=True, left=False)
        return log_det, solved.square().sum(-1)  # [...], [..., P]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (leverage,) = ctx.saved_tensors
        return 2 * grad[..., None] * leverage, None


class LogDetBasis(NamedTuple):
    r"""The geometry term $-\tfrac12\log\det(\mathcal{J} + \epsilon I)$ with $\Phi$ known before.

    A drop-in for ``LogDet`` where the model is a ``BasisModel``: nothing is drawn, no Jacobian is
    taken.
    """

    form: Form
    log_slope: Callable[[Tensor], Tensor]  # θ ↦ log |σ'(θ)| (``model.squash.log_slope``)
    name: str = "theta"  # of the parameter

    def draw(self, f: ModelFn, params: Params, stream: Stream) -> Draws:
        """Nothing."""
        return Draws()

    def value(self, f: ModelFn, params: Params, draws: Draws) -> Tensor:
        """Nats."""
        return -0.5 * self.form.value(self.log_slope(params[self.name]))


def log_of(jitter: float | Tensor, like: Tensor) -> Tensor:
    r"""$\log\epsilon$ with the dtype of ``like``; $-\infty$ for zero."""
    if isinstance(jitter, Tensor):
        return jitter.to(like).log()
    if not jitter >= 0:
        message = f"jitter must be ≥ 0, got {jitter:g}. It is the ε of log det(𝒥 + εI)."
        raise InputError(message)
    return like.new_full((), math.log(jitter) if jitter else -math.inf)


class FourierLattice(NamedTuple):
    r"""$\log\det(\mathcal{J} + \epsilon I)$ for ``FourierBasis`` and M equidistant points.

    On M equidistant points of $[-1, 1]$, both ends included, there are $n = M - 1$ different points
    of the period. Frequencies $i \equiv \pm c \pmod n$ take the same values there up to a sign:
    they are *aliases*, and form one class. On the n points different classes are orthogonal, so
    $\Phi$ is block diagonal with blocks of rank one; the point x = 1, which repeats x = -1, adds
    one more rank-one matrix. Hence, with $S_c = \sum_{i \in c} \sigma'(\theta_i)^2$,

    $$\det(\mathcal{J} + \epsilon I) = \Big[\prod_c \epsilon^{|c|-1} (\epsilon + \kappa_c S_c)\Big]
      \Big[1 + \frac{s^2}{M} \sum_{c \,\in\, \cos} \frac{S_c}{\epsilon + \kappa_c S_c}\Big].$$

    All terms are positive and are added in log space: no rounding error, whatever $\epsilon$ is.
    """

    members: Tensor  # [C, m]  parameters of each class, padded with P
    log_kappa: Tensor  # [C]  −∞ for sines that vanish on the lattice
    cosine: Tensor  # [C]  whether the class is one of cosines
    log_repeat: Tensor  # []  log(s²/M), the weight of the repeated end point
    jitter: float | Tensor  # ε; a tensor broadcasts against the members of a batch

    @property
    def rank(self) -> int:
        r"""Rank of $\Phi$: the number of classes that do not vanish on the lattice."""
        return int((self.log_kappa > -math.inf).sum())

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det(\mathcal{J} + \epsilon I)$."""
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

    ``num_frequencies`` is P/2, ``scale`` is $s$ of the model; $1/\sqrt P$ if None.
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
