r"""Theorem 1: eigenvalues, rank and null vectors of $\mathcal J(\theta; p_X)$.

𝒥 = AᵀA with whitened rows A ``[Q, P]``, so 𝒥v = 0 exactly if Av = 0: the partial derivatives, as functions on the points, are then linearly dependent. Rank and
null vectors come from the singular values of A, never from those of 𝒥, whose small eigenvalues rounding would swallow (σ/σ_max = 1e-9 is 1e-18 in 𝒥).

Where A does not fit, Lanczos on AAᵀ bounds the largest eigenvalue from below and a deflated Hutchinson estimate gives the trace.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.assess import matrix_free
from fsmap.errors import InputError
from fsmap.functional import count
from fsmap.linalg import memory, points
from fsmap.linalg.jacobian import is_pointwise, outputs
from fsmap.linalg.logdet import whitened_rows
from fsmap.linalg.metric import Metric
from fsmap.linalg.trace import resolve
from fsmap.types import Estimate, Inputs, ModelFn, Params

LARGEST_SVD = 1500  # parameters up to which null vectors are computed: about five seconds
LARGEST_ROWS = 512 * 2**20  # bytes of A
LARGEST_FACTOR = 3e10  # operations of a QR decomposition: a few seconds


class Spectrum(NamedTuple):
    """What is known of the eigenvalues of 𝒥; they are complete unless ``method`` is ``lanczos``."""

    method: str  # "svd" (with null vectors), "values", "eigh" (indefinite metric) or "lanczos"
    parameters: int  # P
    rows: int  # Q: S·K unless a metric says otherwise
    points: int  # S that were used
    eigenvalues: Tensor | None  # [min(Q, P)], descending; the other P − Q are zero
    null: Tensor | None  # [P − rank, P]  orthonormal null vectors
    largest: Estimate  # value: lower bound for "lanczos"; stderr: its distance to the upper bound
    trace: Estimate
    floor: float  # eigenvalues up to this one are rounding
    probes: Tensor  # [R, P]  A itself, or random combinations uᵀA with u ~ N(0, I)
    exact: bool  # whether ``probes`` is A

    @property
    def rank(self) -> int | None:
        """Eigenvalues above the floor."""
        if self.eigenvalues is None:
            return None
        return int((self.eigenvalues.abs() > self.floor).sum())

    @property
    def gap(self) -> float | None:
        """Smallest eigenvalue above the floor over the largest one below: large where the rank is sure."""
        rank = self.rank
        if rank is None or self.eigenvalues is None or rank in (0, len(self.eigenvalues)):
            return None
        kept, dropped = self.eigenvalues.abs()[rank - 1 : rank + 1].tolist()
        return float(kept / dropped) if dropped > 0 else float("inf")


def spectrum(
    f: ModelFn,
    params: Params,
    x: Inputs,
    *,
    metric: Metric | Tensor | None = None,
    tolerance: float | None = None,
    seconds: float = 6.0,
) -> Spectrum:
    """Eigenvalues of 𝒥 at ``params``, by the best method that fits.

    Args:
        f: Model function.
        params: Parameters, in the precision to work in.
        x: Evaluation points.
        metric: g.
        tolerance: Singular values of A up to this fraction of the largest count as zero; by default
            max(Q, P) times the rounding of the parameters' dtype.
        seconds: What Lanczos may take; it uses fewer points where a product takes too long.

    Returns:
        The spectrum.

    Raises:
        InputError: For an indefinite metric on more parameters than can be factorised.
    """
    params = {name: p.detach() for name, p in params.items()}
    P, first = count(params), next(iter(params.values()))
    with torch.no_grad():
        whiten = resolve(metric, x, outputs(f, params, x))
    Q = whiten.size
    if whiten.signs is not None and P > LARGEST_SVD:
        message = (
            f"the metric has negative eigenvalues; the spectrum is then taken of the P×P matrix, for "
            f"at most {LARGEST_SVD} parameters, and there are {P}."
        )
        raise InputError(message)
    bytes_needed = 3 * 8 * Q * P
    fits = bytes_needed < min(3 * LARGEST_ROWS, memory.SHARE * memory.free_bytes(first.device))
    if not fits or 2.0 * max(Q, P) * min(Q, P) ** 2 > LARGEST_FACTOR:
        return _bounds(f, params, x, metric, tolerance, seconds)
    with torch.no_grad():
        A, signs = _rows(f, params, x, metric)
    return from_rows(A, signs, points.count(x), _tolerance(tolerance, Q, P, first.dtype))


def from_rows(A: Tensor, signs: Tensor | None, num_points: int, tolerance: float) -> Spectrum:
    """The spectrum from whitened rows ``[Q, P]``, or Aᵀ diag(signs) A."""
    Q, P = A.shape
    null = None
    if signs is not None:
        values, vectors = torch.linalg.eigh(A.mT @ (signs[:, None] * A))
        order = values.abs().argsort(descending=True)
        values, vectors = values[order], vectors[:, order]
        floor = max(P * torch.finfo(A.dtype).eps, tolerance**2) * float(values.abs().max())
        null = vectors.mT[values.abs() <= floor]
        method = "eigh"
    else:
        R = torch.linalg.qr(A if Q >= P else A.mT, mode="r")[1]  # [min, min]  same singular values
        if Q >= P and P <= LARGEST_SVD:
            _, sigma, V = torch.linalg.svd(R)
            null = V[sigma <= tolerance * sigma.max()]
            method = "svd"
        else:
            sigma, method = torch.linalg.svdvals(R), "values"
        values, floor = sigma.square(), float((tolerance * sigma.max()).square())
    zero = values.new_zeros(())
    largest = Estimate(values.abs().max(), zero)
    return Spectrum(
        method, P, Q, num_points, values, null, largest, Estimate(values.sum(), zero), floor, A, True
    )


def grows_with_points(A: Tensor, tolerance: float, rank: int) -> bool | None:
    """Whether the second half of the points adds to the rank; None where half of them cannot tell."""
    half = A[: len(A) // 2]
    if len(half) < rank:
        return None
    side = half if half.shape[0] >= half.shape[1] else half.mT
    sigma = torch.linalg.svdvals(torch.linalg.qr(side, mode="r")[1])
    return int((sigma > tolerance * sigma.max()).sum()) < rank


def _tolerance(given: float | None, Q: int, P: int, dtype: torch.dtype) -> float:
    return max(Q, P) * torch.finfo(dtype).eps if given is None else given


class _WholeBatch:
    """A function whose points may not be taken one by one (control flow that looks at data)."""

    pointwise = False

    def __init__(self, f: ModelFn) -> None:
        self.f = f

    def __call__(self, params: Params, x: Inputs) -> Tensor:
        return self.f(params, x)


def _rows(
    f: ModelFn, params: Params, x: Inputs, metric: Metric | Tensor | None
) -> tuple[Tensor, Tensor | None]:
    try:
        return whitened_rows(f, params, x, metric=metric)
    except RuntimeError:
        if not is_pointwise(f):
            raise
        return whitened_rows(_WholeBatch(f), params, x, metric=metric)


def _bounds(
    f: ModelFn,
    params: Params,
    x: Inputs,
    metric: Metric | Tensor | None,
    tolerance: float | None,
    seconds: float,
) -> Spectrum:
    found = matrix_free.bounds(f, params, x, metric, seconds)
    P, dtype = count(params), next(iter(params.values())).dtype
    floor = _tolerance(tolerance, found.rows, P, dtype) ** 2 * float(found.largest.value)
    return Spectrum(
        *("lanczos", P, found.rows, found.points, None, None),
        *(found.largest, found.trace, floor, found.probes, False),
    )
