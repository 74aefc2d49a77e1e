r"""Theorem 1: eigenvalues, rank and null vectors of $\mathcal J(\theta; p_X)$.

𝒥 = AᵀA with rows A = J/√S ``[Q, P]``, so 𝒥v = 0 exactly if Av = 0. Rank and null vectors come
from the singular values of A, not from 𝒥: a relative singular value of 1e-9 is 1e-18 in 𝒥, below
rounding. If A is too large, the largest eigenvalue is bounded by power iteration.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.functional import (
    clock,
    count,
    detached,
    fits,
    is_pointwise,
    num_points,
    outputs,
    ravel,
    take_points,
    unravel,
)
from fsmap.linalg import slq
from fsmap.linalg.jacobian import Site, jacobian, vjp
from fsmap.types import Estimate, Inputs, ModelFn, Params

NULL = 1e-12  # ‖Jv‖/(‖v‖σ_max) up to which v counts as a null vector in float64
LARGEST_SVD = 1500  # parameters up to which null vectors are computed: about five seconds
LARGEST_ROWS = 512 * 2**20  # bytes of A
SECONDS = 4.0  # for passes, if A does not fit
LARGEST_FACTOR = 3e10  # operations of a QR decomposition: a few seconds
PROBES = 8  # random combinations of rows, if A is too large
STEPS = (4, 40)  # of the power iteration: least, most
SMALL = 1e-6  # entries of a null vector below this fraction of its largest are not named


class Spectrum(NamedTuple):
    """Eigenvalues of 𝒥: all of them, or bounds if ``method`` is ``power``."""

    method: str  # "svd" (with null vectors), "values" or "power"
    parameters: int  # P
    rows: int  # Q = S·K
    points: int  # S that were used
    largest: Estimate  # "power": value is a lower bound, value + stderr an upper bound
    trace: Estimate
    floor: float  # eigenvalues up to this one count as zero
    resolution: float  # ‖Jv‖/(‖v‖σ_max) up to which v is null
    probes: Tensor  # [R, P]  A itself, or random combinations uᵀA with u ~ N(0, I)
    eigenvalues: Tensor | None = None  # [min(Q, P)], descending; the other P − Q are zero
    null: Tensor | None = None  # [P − rank, P]  orthonormal null vectors

    @property
    def exact(self) -> bool:
        """Whether ``probes`` is A."""
        return self.method != "power"

    @property
    def kept(self) -> Tensor:
        """The eigenvalues above the floor, if they are known."""
        assert self.eigenvalues is not None
        return self.eigenvalues[self.eigenvalues > self.floor]

    @property
    def rank(self) -> int | None:
        """Number of eigenvalues above the floor."""
        return None if self.eigenvalues is None else len(self.kept)

    @property
    def gap(self) -> float | None:
        """Smallest eigenvalue above the floor over the largest below it; None without either."""
        rank = self.rank
        if rank is None or self.eigenvalues is None or rank in (0, len(self.eigenvalues)):
            return None
        kept, dropped = self.eigenvalues[rank - 1 : rank + 1].tolist()
        return float(kept / dropped) if dropped > 0 else math.inf

    @property
    def tolerance(self) -> float:
        """σ/σ_max up to which a singular value counts as zero."""
        largest = float(self.largest.value)
        return math.sqrt(self.floor / largest) if largest > 0 else 0.0

    def grows(self) -> bool | None:
        """Whether the second half of the rows adds to the rank; None if that cannot be known."""
        half, rank = self.probes[: len(self.probes) // 2], self.rank
        if not self.exact or rank is None or len(half) < rank:
            return None
        sigma = torch.linalg.svdvals(half)
        return int((sigma > self.tolerance * sigma.max()).sum()) < rank


def spectrum(f: ModelFn, params: Params, x: Inputs) -> Spectrum:
    """Eigenvalues of 𝒥 at ``params``, by SVD if A fits, else by passes for ``SECONDS``."""
    params = detached(params)
    like, P = next(iter(params.values())), count(params)
    K = outputs(f, params, take_points(x, slice(0, 4))).shape[1]
    enough = min(LARGEST_FACTOR / (2.0 * P**2), LARGEST_ROWS / (8 * P))  # rows
    if enough >= P and is_pointwise(f):
        x = take_points(x, slice(0, max(1, int(enough / K))))
    Q, rounding = num_points(x) * K, torch.finfo(like.dtype).eps
    tolerance = max(Q, P) * rounding
    resolution = max(NULL, 4 * math.sqrt(max(Q, P)) * rounding)
    large = 8 * Q * P > LARGEST_ROWS or 2.0 * max(Q, P) * min(Q, P) ** 2 > LARGEST_FACTOR
    if large or not fits(24 * Q * P, like.device):
        return _by_passes(f, params, x, tolerance, resolution)
    with torch.no_grad():
        J = jacobian(f, params, x).double()  # [S, K, P]
    return from_rows((J / math.sqrt(len(J))).flatten(0, 1), num_points(x), tolerance, resolution)


def from_rows(A: Tensor, num_points: int, tolerance: float, resolution: float = NULL) -> Spectrum:
    """The spectrum of AᵀA for rows A ``[Q, P]``."""
    Q, P = A.shape
    R = torch.linalg.qr(A if Q >= P else A.mT, mode="r")[1]  # [min, min]  same singular values
    null, method = None, "values"
    if Q >= P and P <= LARGEST_SVD:
        _, sigma, V = torch.linalg.svd(R)
        null, method = V[sigma <= tolerance * sigma.max()], "svd"
    else:
        sigma = torch.linalg.svdvals(R)
    values = sigma.square()
    zero = values.new_zeros(())
    return Spectrum(
        method=method,
        parameters=P,
        rows=Q,
        points=num_points,
        largest=Estimate(values.max(), zero),
        trace=Estimate(values.sum(), zero),
        floor=float((tolerance * sigma.max()).square()),
        resolution=resolution,
        probes=A,
        eigenvalues=values,
        null=null,
    )


def _by_passes(
    f: ModelFn, params: Params, x: Inputs, tolerance: float, resolution: float
) -> Spectrum:
    """Bounds of the largest eigenvalue by power iteration; the trace from random combinations."""
    like = next(iter(params.values()))
    used = num_points(x)
    if is_pointwise(f):
        few = take_points(x, slice(0, 2))
        for _ in range(2):  # the first pass imports and allocates
            begin = clock(like.device)
            trial = slq.by_passes(Site(f, params, few))
            trial.matvec(torch.ones(1, trial.size).to(like))
        each = (clock(like.device) - begin) / num_points(few)
        used = max(1, min(used, int(SECONDS / (2 * STEPS[0] + PROBES) / each)))
    x = take_points(x, slice(0, used))
    generator = torch.Generator(like.device).manual_seed(0)
    draw: dict[str, Any] = {"generator": generator, "dtype": like.dtype, "device": like.device}
    operator = slq.by_passes(Site(f, params, x))
    u, until = torch.randn(1, operator.size, **draw).double(), time.perf_counter() + SECONDS
    for step in range(STEPS[1]):
        u = u / u.norm().clamp_min(1e-300)
        w = operator.matvec(u).detach()
        value = (u * w).sum()
        rest = (w - value * u).norm()
        if rest <= 1e-9 * value or (step >= STEPS[0] and time.perf_counter() > until):
            break
        u = w
    out, pull, _ = vjp(f, params, x)
    combinations = torch.randn(PROBES, out.numel(), **draw) / math.sqrt(used)
    probes = torch.stack([ravel(pull(u)).detach() for u in combinations])
    traces = probes.square().sum(1)
    trace = Estimate(traces.mean(), traces.std() / math.sqrt(PROBES))
    upper = torch.minimum(value + rest, trace.value + 2 * trace.stderr)
    return Spectrum(
        method="power",
        parameters=count(params),
        rows=out.numel(),
        points=used,
        largest=Estimate(value, (upper - value).clamp_min(0)),
        trace=trace,
        floor=tolerance**2 * float(value),
        resolution=resolution,
        probes=probes,
    )


class NullVector(NamedTuple):
    """A direction in parameter space that does not change the function on the points."""

    text: str
    residual: float  # ‖Jv‖/(‖v‖σ_max)


def sparse_basis(null: Tensor) -> Tensor:
    """A basis of the same space ``[d, P]`` with few entries per vector, the sparsest first."""
    # Gauss–Jordan elimination with complete pivoting: each vector is 1 at its own pivot and 0 at
    # the pivots of the others, so that directions with disjoint supports come out separately.
    rows = null.clone()
    for i in range(len(rows)):
        r, p = divmod(int(rows[i:].abs().argmax()), rows.shape[1])
        rows[[i, i + r]] = rows[[i + r, i]]
        rows[i] = rows[i] / rows[i, p]
        factors = rows[:, p].clone()
        factors[i] = 0
        rows = rows - torch.outer(factors, rows[i])
    rows = torch.where(rows.abs() < SMALL * rows.abs().amax(1, keepdim=True), 0.0, rows)
    return rows[(rows != 0).sum(1).argsort(stable=True)]


def span(V: Tensor) -> Tensor:
    """Orthonormal basis of the rows, which have a norm of at most about one."""
    _, sigma, rows = torch.linalg.svd(V, full_matrices=False)
    kept: Tensor = rows[sigma > 1e-7]
    return kept


def outside(basis: Tensor, known: Tensor) -> Tensor:
    """The vectors of ``basis`` outside the span of the known unit vectors ``[m, P]``."""
    inside = span(known)
    rest = basis - (basis @ inside.mT) @ inside
    return basis[rest.norm(dim=1) > 1e-5 * basis.norm(dim=1)]


def describe(vector: Tensor, params: Params) -> str:
    """The entries of a null vector ``[P]``: up to three in a parameter one by one, else a slice."""
    threshold = SMALL * vector.abs().max()
    parts = []  # size, sign (0: mixed), name
    for name, piece in unravel(vector, params).items():
        found = (piece.abs() > threshold).nonzero()  # [entries, dimensions]
        for group in found.split(1 if len(found) <= 3 else len(found)) if len(found) else ():
            values = piece[tuple(group.mT)]
            same = [str(int(d[0])) if bool((d == d[0]).all()) else ":" for d in group.mT]
            sign = int(values[0].sign()) if len(values.sign().unique()) == 1 else 0
            label = f"[{', '.join(same)}]" if same else ""
            parts.append((float(values.norm() / vector.norm()), sign, name + label))
    parts.sort(key=lambda part: -round(part[0], 4))
    named = [name for _, _, name in parts[:6]]
    if len(parts) > 6:
        return f"{', '.join(named)} and {len(parts) - 6} more"
    text = " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
    opposite = sorted(sign for _, sign, _ in parts) == [-1, 1]
    return text + ", with opposite signs" * opposite
