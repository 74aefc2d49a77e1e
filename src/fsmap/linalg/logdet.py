r"""log det(𝒥 + εI) (``eq:jitter-fs-map``, ``eq:mc_fsmap``) by three methods that agree, and three named variants.

With whitened rows A = LᵀJ/√S ``[Q, P]``, 𝒥 = AᵀA:

* ``dense``: Cholesky of the P×P matrix AᵀA + εI.
* ``dual``: (P−Q) log ε + log det(AAᵀ + εI), Sylvester; the Q×Q matrix.
* ``slq``: :mod:`fsmap.linalg.slq`, products only.

Other numbers: ``svd_clip`` is Σ log max(σ², ε) over all P singular values (appendix B.9: zero ones count as √ε); ``pseudo`` is the log
pseudo-determinant, for continuous symmetries (appendix B.6); ``first_order`` is P log ε + Tr 𝒥/ε (``eq:first-order``).

Linear algebra runs in float64 whatever the model's dtype: the Gram matrix of a float32 Jacobian keeps eigenvalues down to
1e-14 of the largest, in float32 they would drown at 1e-7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsmap.errors import InputError, SingularGeometryError
from fsmap.functional import count
from fsmap.linalg import memory, points
from fsmap.linalg.jacobian import jacobian, outputs
from fsmap.linalg.metric import Metric
from fsmap.linalg.slq import slq
from fsmap.linalg.trace import exact, resolve
from fsmap.types import Estimate, Inputs, ModelFn, Params

METHODS = ("auto", "dense", "dual", "slq", "svd_clip", "pseudo", "first_order")
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
    chunk: int | None = None,
) -> Tensor | Estimate:
    r"""$\log\det(\mathcal J(\theta; p_X) + \epsilon I)$ in nats, differentiable in ``params`` and ``jitter``.

    Args:
        f: Model function.
        params: Parameters.
        x: Evaluation points, a sample of p_X, [S, ...].
        jitter: ε. Part of the objective, not a numerical guard; 0 is allowed where S·K ≥ P.
        method: ``auto`` picks dense, dual or slq by shape; the others are explained at the top of this module.
        metric: g; see :mod:`fsmap.metric`.
        probes: For ``slq``: how many, or the probes themselves.
        generator: For ``slq``; None is torch's own.
        return_estimate: Return value and standard error instead of the value.
        chunk: Points of the Jacobian, or probes of ``slq``, at a time.

    Returns:
        The value, or an ``Estimate`` (stderr 0 for all but ``slq``).

    Raises:
        InputError: For a bad ``x``, ``jitter``, ``method`` or metric.
        SingularGeometryError: If 𝒥 + εI is not positive definite.
        MemoryLimitError: If the Jacobian would not fit.

    Example:
        >>> import torch, fsmap
        >>> f, params = fsmap.functional(torch.nn.Linear(2, 1, bias=False))
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # 𝒥 = I/2
        >>> round(fsmap.log_det(f, params, x, jitter=1.5).item(), 6)  # 2 log 2
        1.386294
    """
    points.check(x)
    eps = torch.as_tensor(jitter, dtype=torch.float64, device=next(iter(params.values())).device)
    value = evaluate(
        f, params, x, eps, method=method, metric=metric, probes=probes, generator=generator, chunk=chunk
    )
    if not bool(torch.isfinite(value.value)):
        message = (
            f"J(theta; p_X) + {float(eps):.3g} I is not positive definite ({method=}): the geometry is singular here (Theorems 1, 2) or "
            "the metric has negative eigenvalues. Raise jitter, use method='pseudo', or ask fsmap.doctor where it comes from."
        )
        raise SingularGeometryError(message)
    return value if return_estimate else value.value


def evaluate(
    f: ModelFn,
    params: Params,
    x: Inputs,
    jitter: Tensor,
    *,
    method: str = "auto",
    metric: Metric | Tensor | None = None,
    probes: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    chunk: int | None = None,
) -> Estimate:
    """:func:`log_det` without the checks that look at values, so that it can be vmapped; nan where it is not defined."""
    S, K, P = shape(f, params, x)
    chosen = choose(method, S * K, P, jitter.device)
    if chosen != "pseudo":
        check_jitter(jitter, S, K, P)
    if chosen == "slq":
        return slq(
            f, params, x, jitter, metric=metric, probes=probes, generator=generator, chunk=chunk
        )
    if chosen == "first_order":
        value = P * jitter.log() + exact(f, params, x, metric=metric, chunk=chunk) / jitter
        return Estimate(value, torch.zeros_like(value))
    _check_memory(S * K, P, chosen, jitter.device)
    rows, signs = whitened_rows(f, params, x, metric=metric, chunk=chunk)
    value = FROM_ROWS[chosen](rows, signs, jitter)
    return Estimate(value, torch.zeros_like(value))


def whitened_rows(
    f: ModelFn,
    params: Params,
    x: Inputs,
    *,
    metric: Metric | Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A = LᵀJ/√S in float64, ``[Q, P]``, and the metric's signs: 𝒥 = Aᵀ diag(signs) A."""
    jac = jacobian(f, params, x, chunk=chunk)
    out = jac[..., 0] if metric is None else outputs(f, params, x)
    whiten = resolve(metric, x, out)
    return whiten.rows(jac.double()), whiten.signs


def dense(rows: Tensor, signs: Tensor | None, jitter: Tensor) -> Tensor:
    """Cholesky of AᵀA + εI."""
    weighted = rows if signs is None else signs[:, None] * rows
    return _cholesky_log_det(rows.mT @ weighted + _identity(rows.shape[1], jitter))


def dual(rows: Tensor, signs: Tensor | None, jitter: Tensor) -> Tensor:
    """(P−Q) log ε + log det(AAᵀ + εI); with signs D, det(ε D + AAᵀ) stands for the same."""
    Q, P = rows.shape
    gram = rows @ rows.mT
    if signs is None:
        inner = _cholesky_log_det(gram + _identity(Q, jitter))
    else:
        sign, inner = torch.linalg.slogdet(signs[:, None] * gram + _identity(Q, jitter))
        inner = torch.where(sign > 0, inner, torch.nan)
    return (P - Q) * jitter.log() + inner if P != Q else inner


def svd_clip(rows: Tensor, signs: Tensor | None, jitter: Tensor) -> Tensor:
    """Σ log max(σ², ε) over all P singular values."""
    squares = _squared_singular_values(rows, signs, "svd_clip")
    missing = rows.shape[1] - len(squares)
    return torch.maximum(squares, jitter).log().sum() + missing * jitter.log()


def pseudo(rows: Tensor, signs: Tensor | None, jitter: Tensor) -> Tensor:
    """Σ log σ² over the singular values with σ² > ε and above rounding."""
    squares = _squared_singular_values(rows, signs, "pseudo")
    rounding = max(rows.shape) * torch.finfo(rows.dtype).eps * squares.max().sqrt()
    kept = squares > torch.maximum(rounding.square(), jitter)
    return torch.where(kept, squares, torch.ones_like(squares)).log().sum()


FROM_ROWS = {"dense": dense, "dual": dual, "svd_clip": svd_clip, "pseudo": pseudo}


def shape(f: ModelFn, params: Params, x: Inputs) -> tuple[int, int, int]:
    """S, K, P, from one point."""
    with torch.no_grad():
        first = x if not getattr(f, "pointwise", True) else points.take(x, slice(0, 1))
        K = outputs(f, params, first).shape[1]
    return points.count(x), K, count(params)


def choose(method: str, rows: int, P: int, device: torch.device) -> str:
    """The method that ``auto`` stands for: by shape and memory, never by values.

    Raises:
        InputError: If ``method`` is unknown.
    """
    if method not in METHODS:
        message = f"unknown log_det method {method!r}; known: {', '.join(METHODS)}"
        raise InputError(message)
    if method != "auto":
        return method
    fits = 3 * 8 * rows * P < memory.SHARE * memory.free_bytes(device)
    if min(rows, P) > LARGEST_MATRIX or not fits:
        return "slq"
    return "dense" if P <= rows else "dual"


def check_jitter(jitter: Tensor, S: int, K: int, P: int) -> None:
    """Refuse a jitter that leaves the matrix singular whatever θ is.

    Raises:
        InputError: If ε < 0, or ε = 0 with S·K < P.
    """
    if _is_batched(jitter):
        return
    if not float(jitter) >= 0:
        message = f"jitter must be >= 0, got {float(jitter):g}"
        raise InputError(message)
    if float(jitter) == 0 and S * K < P:
        message = (
            f"jitter must be > 0 when S*K < P, got jitter=0 with S*K={S * K}, {P=}: J has at least {P - S * K} zero eigenvalues. "
            "Raise num_points or jitter; see docs/guide/pathologies.md."
        )
        raise InputError(message)


def _is_batched(t: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(t)


def _check_memory(rows: int, P: int, method: str, device: torch.device) -> None:
    side = P if method == "dense" else min(rows, P)
    needed = 8 * (2 * rows * P + 2 * side * side)
    instead = "Use method='slq', which needs products only, or fewer evaluation points."
    if method == "dense" and 8 * (2 * rows * P + 2 * rows * rows) < needed / 4:
        instead = "Use method='dual', whose matrix is [S*K, S*K], or method='slq'."
    memory.check_fits(
        needed, device, what=f"the Jacobian [{rows}, {P}] with method={method!r}", instead=instead
    )


def _identity(n: int, jitter: Tensor) -> Tensor:
    return jitter * torch.eye(n, dtype=torch.float64, device=jitter.device)


def _cholesky_log_det(matrix: Tensor) -> Tensor:
    """2 Σ log diag(chol); nan where the matrix is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    value = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.where(info == 0, value, torch.nan)


def _squared_singular_values(rows: Tensor, signs: Tensor | None, method: str) -> Tensor:
    if signs is not None:
        message = f"{method} needs a metric without negative eigenvalues; use method='dense'"
        raise InputError(message)
    return torch.linalg.svdvals(rows).square()
