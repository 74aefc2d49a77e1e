r"""log det(𝒥 + εI) (``eq:jitter-fs-map``, ``eq:mc_fsmap``): methods and variants.

With whitened rows A = LᵀJ/√S ``[Q, P]``, 𝒥 = AᵀA:

* ``dense``: Cholesky of the P×P matrix AᵀA + εI.
* ``dual``: (P−Q) log ε + log det(AAᵀ + εI), Sylvester; the Q×Q matrix.
* ``slq``: :mod:`fsmap.linalg.slq`, products only.

Other numbers: ``svd_clip`` is Σ log max(σ², ε) over all P singular values (appendix B.9: zero ones
count as √ε); ``pseudo`` is the log pseudo-determinant, for continuous symmetries (appendix B.6);
``first_order`` is P log ε + Tr 𝒥/ε (``eq:first-order``). For ``pseudo`` ε is a cut-off, not a
jitter: eigenvalues up to ε count as zero, or up to rounding if that is larger.

Linear algebra runs in float64 whatever the model's dtype: the Gram matrix of a float32 Jacobian
keeps eigenvalues down to 1e-14 of the largest, in float32 only down to 1e-7.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fsmap.errors import InputError, MemoryLimitError, SingularGeometryError
from fsmap.functional import (
    SHARE,
    check_finite,
    check_params,
    check_points,
    count,
    finite,
    fits,
    free_bytes,
    holds,
    num_points,
    number,
)
from fsmap.linalg.estimators import exact
from fsmap.linalg.jacobian import (
    Metric,
    Site,
    alone,
    linearize,
    recorded_calls,
    resolve,
    written_out,
)
from fsmap.linalg.slq import rounding_at_most, slq
from fsmap.types import Estimate, Inputs, ModelFn, Params

METHODS = ("auto", "dense", "dual", "slq", "svd_clip", "pseudo", "first_order")
TINY = 1e-6  # errors below this share of a log det are given as zero
LARGEST_MATRIX = 4096  # side up to which "auto" factorises; above it Lanczos is cheaper


def log_det(
    f: ModelFn,
    params: Params,
    x: Inputs,
    *,
    jitter: float | Tensor,
    method: str = "auto",
    metric: Metric | Tensor | None = None,
    probes: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    return_estimate: bool = False,
) -> Tensor | Estimate:
    r"""$\log\det(\mathcal J(\theta; p_X) + \epsilon I)$ in nats; differentiable, in ``jitter`` too.

    Args:
        f: Model function.
        params: Parameters.
        x: Evaluation points, a sample of p_X, [S, ...].
        jitter: ε. Part of the objective, not a numerical guard; 0 is allowed where S·K ≥ P.
        method: ``auto`` is dense, dual or slq by shape; the top of this module describes all.
        metric: g; see :mod:`fsmap.metric`.
        probes: For ``slq``: how many, or the probes themselves.
        generator: For ``slq``; None is torch's own.
        return_estimate: Return value and standard error instead of the value.

    Returns:
        The value, or an ``Estimate``. Its ``stderr`` bounds the effect of rounding the Jacobian to
        the model's dtype (0 if that is far below the value; kinks of ReLU are not included); for
        ``slq`` it includes the error of probes and Lanczos.

    Raises:
        SingularGeometryError: If 𝒥 + εI is not positive definite; if ε = 0 and eigenvalues cannot
            be told from zero in the model's dtype; and, unless ``return_estimate``, if rounding
            may change the value by more than 1 nat and 5 %.

    Example:
        >>> import torch, fsmap
        >>> f, params = fsmap.functional(torch.nn.Linear(2, 1, bias=False))
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # 𝒥 = I/2
        >>> round(fsmap.log_det(f, params, x, jitter=1.5).item(), 6)  # 2 log 2
        1.386294
    """
    check_points(x)
    check_params(params)
    try:
        device = next(iter(params.values())).device
        eps = torch.as_tensor(jitter, dtype=torch.float64, device=device).reshape(())
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"jitter must be one number >= 0, got {jitter!r}") from error
    site, share = Site(f, params, x, metric), math.inf if return_estimate else 0.05
    try:
        found = evaluate(site, eps, method, probes=probes, generator=generator, rounding=share)
        defined = holds(torch.isfinite(found.value), otherwise=True)
    except LinAlgError:  # what the decompositions raise for a matrix with NaN
        defined = False
    if not defined:
        check_finite(params)
        finite(site.output())
        raise SingularGeometryError(
            f"J(theta; p_X) + {float(eps):.3g} I is not positive definite ({method=}): the "
            "geometry is singular here (Theorems 1, 2), or small eigenvalues are lost in rounding. "
            "Raise jitter, leave the zero eigenvalues out with method='pseudo', or run "
            "fsmap.doctor to see which parameters cause them."
        )
    return found if return_estimate else found.value


def evaluate(
    site: Site,
    jitter: Tensor,
    method: str = "auto",
    *,
    probes: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    rounding: float | None = None,
) -> Estimate:
    """:func:`log_det` without checks of values: it can be vmapped, and is nan where undefined.

    SingularGeometryError is raised if rounding may change the value by more than 1 nat plus the
    share ``rounding`` of it. None skips this check, which may need all eigenvalues.
    """
    size, dtype = sizes(*site[:3]), next(iter(site.params.values())).dtype
    P, method = size.P, choose(method, size, jitter.device)
    if method != "pseudo":
        check_jitter(jitter, size.rows, P)
    if method == "slq":
        return slq(site, jitter, probes, generator)
    if method == "first_order":
        value = P * jitter.log() + exact(site) / jitter
        return Estimate(value, torch.zeros_like(value))
    if not fits(size.bytes(method), jitter.device):
        limit = SHARE * free_bytes(jitter.device) / 1e9
        raise MemoryLimitError(
            f"the Jacobian [{size.rows}, {P}] with {method=} needs {size.bytes(method) / 1e9:.2f} "
            f"GB, {limit:.2f} GB may be used on {jitter.device}. Use fewer evaluation points, or "
            "method='dual' or 'slq', which need less."
        )
    if method == "dual":
        factors = linearize(*site[:3])  # without A where layers are linear
        gram = site.resolve(factors.out).gram(factors.gram(), num_points(site.x))
        value, missing = positive_log_det(gram, jitter), P - len(gram)
        value = value + missing * jitter.log() if missing else value  # Sylvester
        total, small = gram.trace(), gram
    else:
        rows = whitened_rows(*site)
        if method == "pseudo":  # the model's precision decides which count as zero
            value, rounding = pseudo(rows, jitter, dtype), None
        elif method == "svd_clip":
            value = svd_clip(rows, jitter)
        else:
            value = positive_log_det(rows.mT @ rows, jitter)
        small = rows.detach() if len(rows) < P else rows.detach().mT
        total = small.square().sum()
    found = None if rounding is None else number(value)  # waits for a GPU
    if rounding is None or found is None or not math.isfinite(found):
        return Estimate(value, torch.zeros_like(value))
    error = torch.zeros_like(value)
    if rounding_at_most(total, jitter, dtype, P) > TINY * (1 + value.abs()):
        gram = small if method == "dual" else small @ small.mT
        error = rounding_bound(gram, value, jitter, dtype, P, clip=method == "svd_clip")
    if not math.isfinite(error) or float(error) > 1 + rounding * abs(found):
        raise SingularGeometryError(
            f"J(theta; p_X) + {float(jitter):.3g} I cannot be told from a singular matrix in "
            f"{str(dtype).removeprefix('torch.')} ({method=}): rounding of the Jacobian may move "
            f"log det = {found:.4g} by {float(error):.3g}. Raise jitter, compute in float64 "
            "(module.double()), leave the zero eigenvalues out with method='pseudo', or take value "
            "and error with return_estimate=True."
        )
    return Estimate(value, error)


def whitened_rows(
    f: ModelFn, params: Params, x: Inputs, metric: Metric | Tensor | None = None
) -> Tensor:
    """A = LᵀJ/√S in float64, ``[Q, P]``: 𝒥 = AᵀA."""
    J, out = written_out(f, params, x)
    return resolve(metric, x, out).rows(J.double())


class Sizes(NamedTuple):
    """Sizes of the Jacobian, and the memory that ``dual`` needs."""

    rows: int  # S·K
    P: int
    gram: int  # bytes of the factored Jacobian and its Gram matrix, with what a gradient keeps

    def bytes(self, method: str) -> int:
        """Memory that a method needs."""
        if method == "dual":
            return self.gram
        side = self.P if method == "dense" else min(self.rows, self.P)
        return 8 * (3 * self.rows * self.P + 2 * side**2)


def sizes(f: ModelFn, params: Params, x: Inputs) -> Sizes:
    """Sizes from a pass at one point."""
    calls, S, P = recorded_calls(f, params, x), num_points(x), count(params)
    if not alone(f, params, x):
        rows = calls.outputs
        return Sizes(rows, P, 8 * (3 * rows * P + 6 * rows**2))
    rows = S * calls.outputs
    factors = 3 * S * calls.numbers_per_point(params)
    return Sizes(rows, P, 8 * (factors + (6 + len(calls.layers)) * rows**2))


def choose(method: str, size: Sizes, device: torch.device) -> str:
    """The method that ``auto`` stands for: by shape and memory, never by values."""
    if method not in METHODS:
        raise InputError(f"unknown log_det method {method!r}; known: {', '.join(METHODS)}")
    if method != "auto":
        return method
    direct = "dense" if size.P <= size.rows else "dual"
    small = min(size.rows, size.P) <= LARGEST_MATRIX
    return direct if small and fits(size.bytes(direct), device) else "slq"


def check_jitter(jitter: Tensor, rows: int, P: int) -> None:
    """Raise InputError if ε < 0, or ε = 0 with S·K < P (inside vmap: nothing)."""
    eps = number(jitter)
    if eps is not None and not eps >= 0:
        raise InputError(f"jitter must be >= 0, got {eps:g}")
    if eps == 0 and rows < P:
        raise InputError(
            f"jitter must be > 0 when S*K < P, got jitter=0 with S*K={rows}, {P=}: J has at "
            f"least {P - rows} zero eigenvalues. Raise num_points or jitter; see "
            "docs/guide/pathologies.md."
        )


# Log-determinants of AᵀA + εI from the rows A [Q, P] or their Gram matrix, in float64,
# differentiable and vmappable: nan, not an error, if a matrix is not positive definite.


def svd_clip(rows: Tensor, jitter: Tensor) -> Tensor:
    """Σ log max(σ², ε) over all P singular values."""
    squares = torch.linalg.svdvals(rows).square()
    missing = rows.shape[1] - len(squares)
    clipped = torch.maximum(squares, jitter).log().sum()
    return clipped if missing == 0 else clipped + missing * jitter.log()


def pseudo(rows: Tensor, jitter: Tensor, precision: torch.dtype) -> Tensor:
    """Σ log σ² over the singular values with σ² > ε and above the rounding of ``precision``."""
    squares = torch.linalg.svdvals(rows).square()
    rounding = max(rows.shape) * torch.finfo(precision).eps * squares.max().sqrt()
    kept = squares > torch.maximum(rounding.square(), jitter)
    return torch.where(kept, squares, torch.ones_like(squares)).log().sum()


@torch.no_grad()
def rounding_bound(
    gram: Tensor, value: Tensor, jitter: Tensor, precision: torch.dtype, P: int, *, clip: bool
) -> Tensor:
    r"""A bound on the error of a log det that the rounding of the Jacobian's entries causes.

    Rows that are rounded to ``precision`` differ from the exact ones by a matrix of norm
    $\delta \le u\,\lVert A\rVert_F$, u its machine epsilon, so no singular value moves by more than
    δ. That is the bound for smooth models; where a rounded input crosses a kink of ReLU, entries
    jump. ``gram`` is the smaller of AAᵀ and AᵀA. With ``clip`` eigenvalues below ε count as ε
    (``svd_clip``). Infinite if an eigenvalue may be zero and ε = 0.
    """
    root = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    total, missing = root.square().sum(), P - len(root)
    shift = torch.finfo(precision).eps * total.sqrt()
    noise = torch.finfo(torch.float64).eps * len(root) * total
    low = ((root - shift).clamp_min(0).square() - noise).clamp_min(0)
    high = (root + shift).square() + noise
    low, high = (torch.maximum(s, jitter) if clip else s + jitter for s in (low, high))
    zeros = missing * jitter.log() if missing else 0
    return torch.maximum(value - low.log().sum() - zeros, high.log().sum() + zeros - value)


def positive_log_det(matrix: Tensor, jitter: Tensor) -> Tensor:
    """Log det of a matrix + εI by Cholesky; nan where that is not positive definite."""
    matrix = matrix + torch.diag_embed(jitter.expand(len(matrix)))
    value: Tensor = _PositiveLogDet.apply(matrix)[0]  # type: ignore[no-untyped-call]
    return value


class _PositiveLogDet(torch.autograd.Function):
    """2 Σ log diag of the Cholesky factor; its derivative is the inverse, not the factor's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor]:
        factor, info = torch.linalg.cholesky_ex(matrix)
        value = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return torch.where(info == 0, value, torch.nan), factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
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
