r"""$\log\det(D \Phi D + \epsilon I)$ of basis models, $D = \mathrm{diag}\,\sigma'(\theta)$.

What is measured is ``log_slope`` $= \log|\sigma'(\theta)|$, ``[..., P]``: leading dimensions are
members of a batch (seeds, sizes, jitters), all of them one computation. $\Phi$ holds the model's
factor $s^2$ (``BasisModel.gram``). Which form is right depends on $\Phi$ and $\epsilon$:

| form | $\Phi$ | $\epsilon$ | |
|---|---|---|---|
| :class:`Invertible` | invertible | 0 | exact in log space, $2\sum\log\sigma' + \log\det\Phi$ |
| :class:`Diagonal` | diagonal | $\geq 0$ | exact in log space |
| :class:`Dual` | any rank, given as $F^\top F$ | > 0 | graded QR |
| :class:`~fsmap.objective.lattice.FourierLattice` | Fourier features on a lattice | > 0 | exact |

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
from fsmap.linalg.probes import Stream
from fsmap.types import Draws, ModelFn, Params

PAPER_JITTER = 1e-32
"""What the authors' code adds inside the logarithm: the *paper's protocol*. It cuts the exact
objective off where σ'²Φᵢᵢ falls below it, for tanh near |θ| = 18."""


class Form(Protocol):
    """A way to compute the log-determinant."""

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det$, ``[..., P]`` to ``[...]``."""


class Invertible(NamedTuple):
    r"""$\epsilon = 0$: $\log\det\mathcal{J} = 2\sum_i \log\sigma'(\theta_i) + \log\det\Phi$.

    Attributes:
        log_det_gram: $\log\det\Phi$, ``[]``.
    """

    log_det_gram: Tensor

    @classmethod
    def from_gram(cls, gram: Tensor) -> Invertible:
        r"""Take $\log\det\Phi$, and refuse a $\Phi$ whose rounding errors would decide it.

        Args:
            gram: $\Phi$, ``[P, P]``.

        Returns:
            The form.

        Raises:
            SingularGeometryError: If the smallest eigenvalue is not above rounding.
        """
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
        r"""$\log\det\mathcal{J}$.

        Args:
            log_slope: $\log|\sigma'(\theta)|$, ``[..., P]``.

        Returns:
            ``[...]``.
        """
        return 2 * log_slope.sum(-1) + self.log_det_gram


class Diagonal(NamedTuple):
    r"""Orthogonal features: $\sum_i \log(\sigma'(\theta_i)^2\,\Phi_{ii} + \epsilon)$, in log space.

    With ``jitter=PAPER_JITTER`` this is the paper's protocol for the Fourier model.

    Attributes:
        diagonal: $\Phi_{ii}$, ``[P]``.
        jitter: $\epsilon \geq 0$: a number, or a tensor that broadcasts against the members.
    """

    diagonal: Tensor
    jitter: float | Tensor

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det(\mathcal{J} + \epsilon I)$.

        Args:
            log_slope: $\log|\sigma'(\theta)|$, ``[..., P]``.

        Returns:
            ``[...]``.
        """
        log_jitter = log_of(self.jitter, log_slope)[..., None]  # [..., 1]
        return torch.logaddexp(2 * log_slope + self.diagonal.log(), log_jitter).sum(-1)


class Dual(NamedTuple):
    r"""$P\log\epsilon + \log\det(I + F D^2 F^\top/\epsilon)$ for $\Phi = F^\top F$ of any rank.

    The weights $\sigma'^2/\epsilon$ easily span sixty orders of magnitude. Neither $\Phi$ nor the
    sum $F D^2 F^\top$ is formed, since both would bury small weights under the rounding errors of
    large ones: a QR decomposition of the rows $\sigma'_i F_{\cdot i}/\sqrt\epsilon$, the longest
    first, and of $I$ below them keeps every row to its own relative accuracy.

    Attributes:
        factor: F, ``[r, P]`` (``BasisModel.factor``).
        jitter: $\epsilon > 0$: a number, or a tensor that broadcasts against the members.
    """

    factor: Tensor
    jitter: float | Tensor

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det(\mathcal{J} + \epsilon I)$.

        Args:
            log_slope: $\log|\sigma'(\theta)|$, ``[..., P]``.

        Returns:
            ``[...]``.
        """
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

    Attributes:
        form: How the log-determinant is computed.
        log_slope: $\theta \mapsto \log|\sigma'(\theta)|$ (``model.squash.log_slope``).
        name: Name of the parameter.
    """

    form: Form
    log_slope: Callable[[Tensor], Tensor]
    name: str = "theta"

    def draw(self, f: ModelFn, params: Params, stream: Stream) -> Draws:
        """Nothing."""
        return Draws()

    def value(self, f: ModelFn, params: Params, draws: Draws) -> Tensor:
        """Nats."""
        return -0.5 * self.form.value(self.log_slope(params[self.name]))


def log_of(jitter: float | Tensor, like: Tensor) -> Tensor:
    r"""$\log\epsilon$ with the dtype of ``like``; $-\infty$ for zero.

    Args:
        jitter: A number or a tensor.
        like: Where dtype and device come from.

    Returns:
        The logarithm, with the shape of ``jitter``.

    Raises:
        InputError: If the jitter is a negative number, or no number.
    """
    if isinstance(jitter, Tensor):
        return jitter.to(like).log()
    if not jitter >= 0:
        message = f"jitter must be ≥ 0, got {jitter:g}. It is the ε of log det(𝒥 + εI)."
        raise InputError(message)
    return like.new_full((), math.log(jitter) if jitter else -math.inf)
