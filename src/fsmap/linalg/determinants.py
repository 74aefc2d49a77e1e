r"""Log-determinants of $A^\top D A + \epsilon I$ ``[P, P]``, with D = diag(signs).

From the rows A ``[Q, P]``, or from their Gram matrix AAᵀ. Everything here is float64 linear
algebra, differentiable and vmappable: nan, not an error, where a matrix is not positive definite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fsmap.errors import InputError


def dense(rows: Tensor, signs: Tensor | None, jitter: Tensor) -> Tensor:
    """Cholesky of AᵀDA + εI."""
    return positive_log_det(normal_matrix(rows, signs) + _identity(rows.shape[1], jitter))


def dual(gram: Tensor, signs: Tensor | None, jitter: Tensor, P: int) -> Tensor:
    """(P − Q) log ε + log det(AAᵀ + εI), Sylvester; from AAᵀ."""
    Q = len(gram)
    inner = gram + _identity(Q, jitter)
    value = positive_log_det(inner) if signs is None else _signed(gram, signs, jitter)
    return value if P == Q else (P - Q) * jitter.log() + value


def svd_clip(rows: Tensor, signs: Tensor | None, jitter: Tensor) -> Tensor:
    """Σ log max(σ², ε) over all P singular values."""
    squares = _squared_singular_values(rows, signs, "svd_clip")
    missing = rows.shape[1] - len(squares)
    clipped = torch.maximum(squares, jitter).log().sum()
    return clipped if missing == 0 else clipped + missing * jitter.log()


def pseudo(
    rows: Tensor, signs: Tensor | None, jitter: Tensor, precision: torch.dtype = torch.float64
) -> Tensor:
    """Σ log σ² over the singular values with σ² > ε and above the rounding of ``precision``."""
    squares = _squared_singular_values(rows, signs, "pseudo")
    rounding = max(rows.shape) * torch.finfo(precision).eps * squares.max().sqrt()
    kept = squares > torch.maximum(rounding.square(), jitter)
    return torch.where(kept, squares, torch.ones_like(squares)).log().sum()


def rounding_at_most(trace: Tensor, jitter: Tensor, precision: torch.dtype, count: int) -> Tensor:
    """As :func:`rounding`, without the eigenvalues: larger, from the trace of 𝒥 alone."""
    shift = torch.finfo(precision).eps * trace.clamp_min(0).sqrt()
    noise = torch.finfo(torch.float64).eps * count * trace.abs()
    return count * torch.log1p(shift / jitter.sqrt() + (shift.square() + noise) / jitter)


@torch.no_grad()
def rounding(
    squares: Tensor,
    value: Tensor,
    jitter: Tensor,
    precision: torch.dtype,
    *,
    zeros: int = 0,
    factorized: bool = True,
    clip: bool = False,
) -> Tensor:
    r"""How far a log det may be from that of the exact Jacobian, because entries are rounded.

    Rows that are rounded to ``precision`` differ from the exact ones by a matrix of norm
    $\delta \le u\,\lVert A\rVert_F$, u its machine epsilon, so no singular value moves by more than
    δ. That is the bound for smooth models; where a rounded input crosses a kink of ReLU, entries
    jump. A matrix that is factorized rounds its eigenvalues to float64 once more.

    Args:
        squares: σ² of the rows, all min(Q, P).
        value: The log det that was computed.
        jitter: ε.
        precision: Of the model.
        zeros: P − Q where that is positive: eigenvalues that are zero whatever the rows are.
        factorized: Whether it came from a Cholesky factor, in which such zeros are rounded, too.
        clip: Whether eigenvalues below ε count as ε (``svd_clip``), or ε is added.

    Returns:
        The largest distance; infinite if an eigenvalue may be zero and ε = 0.
    """
    total = squares.clamp_min(0).sum()
    shift = torch.finfo(precision).eps * total.sqrt()
    noise = torch.finfo(torch.float64).eps * total * (len(squares) + zeros if factorized else 1)
    root = squares.clamp_min(0).sqrt()
    low = ((root - shift).clamp_min(0).square() - noise).clamp_min(0)
    high = (root + shift).square() + noise
    low, high = (torch.maximum(s, jitter) if clip else s + jitter for s in (low, high))
    least = low.log().sum() + (zeros * jitter.log() if zeros else 0)
    most = high.log().sum() + (zeros * jitter.log() if zeros else 0)
    return torch.maximum(value - least, most - value)


FROM_ROWS = {"dense": dense, "svd_clip": svd_clip}


def normal_matrix(rows: Tensor, signs: Tensor | None) -> Tensor:
    """AᵀDA."""
    return rows.mT @ (rows if signs is None else signs[:, None] * rows)


def positive_log_det(matrix: Tensor) -> Tensor:
    """Log det of a positive definite matrix; nan where it is not."""
    if not matrix.requires_grad:
        return _factorize(matrix)[0]
    value: Tensor = _PositiveLogDet.apply(matrix)[0]  # type: ignore[no-untyped-call]
    return value


def _factorize(matrix: Tensor) -> tuple[Tensor, Tensor]:
    factor, info = torch.linalg.cholesky_ex(matrix)
    value = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.where(info == 0, value, torch.nan), factor


class _PositiveLogDet(torch.autograd.Function):
    """2 Σ log diag of the Cholesky factor; its derivative is the inverse, not the factor's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor]:
        return _factorize(matrix)

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]
    ) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        matrix, factor = ctx.saved_tensors
        # The inverse from the factor is cheaper, but has no derivative in the matrix.
        twice = torch.is_grad_enabled()
        return grad * (torch.linalg.inv(matrix) if twice else torch.cholesky_inverse(factor))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, None]:
        (matrix,) = ctx.saved_tensors
        return (torch.linalg.inv(matrix) * tangent.mT).sum((-2, -1)), None


def _signed(gram: Tensor, signs: Tensor, jitter: Tensor) -> Tensor:
    """Log det(εI + DG) where D has negative entries."""
    # det(εI + DG) = det D · det(εD + G), and by Haynsworth's inertia additivity AᵀDA + εI is
    # positive definite if and only if the symmetric εD + G has as many positive eigenvalues as D.
    D = torch.where(signs < 0, -1.0, 1.0).to(gram)  # a zero sign has a zero row: either is right
    eigenvalues = torch.linalg.eigvalsh(gram + jitter * torch.diag(D))
    definite = (eigenvalues > 0).sum() == (D > 0).sum()
    return torch.where(definite, eigenvalues.abs().log().sum(), torch.nan)


def _identity(n: int, jitter: Tensor) -> Tensor:
    return jitter * torch.eye(n, dtype=torch.float64, device=jitter.device)


def _squared_singular_values(rows: Tensor, signs: Tensor | None, method: str) -> Tensor:
    if signs is not None:
        message = f"{method} needs a metric without negative eigenvalues; use method='dense'"
        raise InputError(message)
    values: Tensor = torch.linalg.svdvals(rows)
    return values.square()
