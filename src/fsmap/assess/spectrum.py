r"""Theorem 1: eigenvalues, rank and null vectors of $\mathcal J(\theta; p_X)$.

𝒥 = AᵀA with whitened rows A ``[Q, P]``, so 𝒥v = 0 exactly if Av = 0: the partial derivatives, as
functions on the points, are then linearly dependent. Rank and null vectors come from the singular
values of A, never from those of 𝒥, whose small eigenvalues rounding would swallow (σ/σ_max = 1e-9
is 1e-18 in 𝒥).

Where A does not fit, :mod:`fsmap.assess.matrix_free` does without it.
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
from fsmap.linalg.logdet import shape, whitened_rows
from fsmap.linalg.metric import Metric, resolve
from fsmap.types import Estimate, Inputs, ModelFn, Params

NULL = 1e-12  # ‖Jv‖/(‖v‖σ_max) of a null direction in float64, at least
LARGEST_SVD = 1500  # parameters up to which null vectors are computed: about five seconds
LARGEST_ROWS = 512 * 2**20  # bytes of A
LARGEST_FACTOR = 3e10  # operations of a QR decomposition: a few seconds


class Spectrum(NamedTuple):
    """What is known of the eigenvalues of 𝒥; they are complete unless ``method`` is ``lanczos``."""

    method: (
        str  # "svd" (with null vectors), "values", "eigh" (indefinite metric), "gram" or "lanczos"
    )
    parameters: int  # P
    rows: int  # Q: S·K unless a metric says otherwise
    points: int  # S that were used
    eigenvalues: Tensor | None  # [min(Q, P)], descending; the other P − Q are zero
    null: Tensor | None  # [P − rank, P]  orthonormal null vectors
    largest: Estimate  # value: lower bound for "lanczos"; stderr: its distance to the upper bound
    trace: Estimate
    floor: float  # eigenvalues up to this one are rounding
    resolution: float  # ‖Jv‖/(‖v‖σ_max) up to which v is null
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
        """Smallest eigenvalue above the floor over the largest below: wide if the rank is sure."""
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
    seconds: float = 4.0,
) -> Spectrum:
    """Eigenvalues of 𝒥 at ``params``, by the best method that fits.

    Args:
        f: Model function.
        params: Parameters, in the precision to work in.
        x: Evaluation points.
        metric: g.
        tolerance: Singular values of A up to this fraction of the largest count as zero; by default
            max(Q, P) times the rounding of the parameters' dtype.
        seconds: What may be spent where A does not fit; fewer points are used where all take
        longer.

    Returns:
        The spectrum.

    Raises:
        InputError: For an indefinite metric on more parameters than can be factorised.
    """
    params = {name: p.detach() for name, p in params.items()}
    P, first = count(params), next(iter(params.values()))
    if metric is None and P <= LARGEST_SVD and is_pointwise(f):
        x = points.take(x, slice(0, _enough(f, params, x)))
    Q, signed = _size(f, params, x, metric)
    if signed and P > LARGEST_SVD:
        message = (
            "the metric has negative eigenvalues; the spectrum is then that of the P×P matrix, for "
            f"at most {LARGEST_SVD} parameters, and there are {P}."
        )
        raise InputError(message)
    relative = max(Q, P) * torch.finfo(first.dtype).eps if tolerance is None else tolerance
    resolution = max(NULL, 4 * max(Q, P) ** 0.5 * torch.finfo(first.dtype).eps)
    room = min(3 * LARGEST_ROWS, memory.SHARE * memory.free_bytes(first.device))
    if 3 * 8 * Q * P > room or 2.0 * max(Q, P) * min(Q, P) ** 2 > LARGEST_FACTOR:
        bounds = matrix_free.bounds(f, params, x, metric, seconds)
        return _from_bounds(bounds, P, relative, resolution)
    A, signs = whitened_rows(f, params, x, metric=metric)
    return from_rows(A.detach(), signs, points.count(x), relative, resolution)


def from_rows(
    A: Tensor, signs: Tensor | None, num_points: int, tolerance: float, resolution: float = NULL
) -> Spectrum:
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
    return Spectrum(
        method=method,
        parameters=P,
        rows=Q,
        points=num_points,
        eigenvalues=values,
        null=null,
        largest=Estimate(values.abs().max(), zero),
        trace=Estimate(values.sum(), zero),
        floor=floor,
        resolution=resolution,
        probes=A,
        exact=True,
    )


def _from_bounds(
    found: matrix_free.Bounds, P: int, tolerance: float, resolution: float
) -> Spectrum:
    method = "lanczos" if found.eigenvalues is None else "gram"
    largest = float(found.largest.value)
    rounding = found.rows * torch.finfo(torch.float64).eps if method == "gram" else 0.0
    return Spectrum(
        method=method,
        parameters=P,
        rows=found.rows,
        points=found.points,
        eigenvalues=found.eigenvalues,
        null=None,
        largest=found.largest,
        trace=found.trace,
        floor=max(tolerance**2, rounding) * largest,
        resolution=resolution,
        probes=found.probes,
        exact=False,
    )


def _enough(f: ModelFn, params: Params, x: Inputs) -> int:
    """Points of which all rows can be factorized: several times as many rows as parameters."""
    _, K, P = shape(f, params, x)
    return max(1, int(min(LARGEST_FACTOR / (2.0 * P**2), LARGEST_ROWS / (8 * P)) / K))


def _size(
    f: ModelFn, params: Params, x: Inputs, metric: Metric | Tensor | None
) -> tuple[int, bool]:
    """Q, and whether the metric has negative eigenvalues."""
    if metric is None:
        S, K, _ = shape(f, params, x)
        return S * K, False
    with torch.no_grad():
        whiten = resolve(metric, x, outputs(f, params, x))
    return whiten.size, whiten.signs is not None


def grows_with_points(A: Tensor, tolerance: float, rank: int) -> bool | None:
    """Whether the second half of the points adds to the rank; None where they cannot tell."""
    half = A[: len(A) // 2]
    if len(half) < rank:
        return None
    side = half if half.shape[0] >= half.shape[1] else half.mT
    sigma = torch.linalg.svdvals(torch.linalg.qr(side, mode="r")[1])
    return int((sigma > tolerance * sigma.max()).sum()) < rank
