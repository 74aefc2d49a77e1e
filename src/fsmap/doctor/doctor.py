r"""``fsmap.doctor``: whether and why $\mathcal J(\theta; p_X)$ is singular, and which ε to use.

ε for exact FS-MAP is a tenth of the eigenvalue below which a tenth of the non-zero ones lie, so
that log(λ + ε) is within 0.1 nats of log λ for nine in ten, and at least ten times rounding. ε for
L-MAP is 10 λ_max: log(1 + λ/ε) ≈ λ/ε then overstates by at most 5 %.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsmap.doctor import spectrum as spectra
from fsmap.doctor import symmetry
from fsmap.doctor.spectrum import NullVector, Spectrum
from fsmap.doctor.symmetry import Finding
from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import (
    DROP_RATES,
    Forward,
    Functional,
    check_points,
    count,
    detached,
    finite,
    functional,
    move_points,
    num_points,
    outputs,
    take_points,
)
from fsmap.types import Inputs, Params

VERSION = 4  # of the JSON; grows when a key changes its meaning or disappears
WIDE_GAP = 1e4  # between eigenvalues kept and dropped, for the rank to be sure
FEW_POINTS = 20  # below that a unit may be zero, or constant, on all of them by chance
VALID = 0.1  # relative error up to which the first-order form of L-MAP is said to hold


class Rank(NamedTuple):
    """Theorem 1: is 𝒥 singular on these points?"""

    method: str  # "svd", "values" or "power"
    rank: int | None  # None: too large to be computed
    deficit: int | None  # P − rank
    missing_rows: int  # max(0, P − S·K): zero eigenvalues because there are too few points
    points_needed: int  # least number of points that could show the full rank
    known: int  # null directions of known symmetries; if P is large, they may overlap
    unexplained: int | None  # null directions that no known symmetry explains; None: unknown
    nearby: int | None  # deficit at parameters 1 % away, if some null directions are unexplained
    tolerance: float  # σ/σ_max up to which a singular value counts as zero
    gap: float | None  # smallest eigenvalue kept over largest dropped
    sure: bool | None  # whether the gap is wide
    grows: bool | None  # whether the second half of the points added to the rank


class Eigenvalues(NamedTuple):
    """Eigenvalues of 𝒥; None: not known."""

    largest: float  # a lower bound if the method is "power"
    largest_upper: float
    smallest: float | None  # the P-th
    smallest_nonzero: float | None
    condition: float | None  # largest over smallest nonzero
    trace: float
    trace_stderr: float
    decades: tuple[tuple[int, int], ...]  # (n, how many lie in [10ⁿ, 10ⁿ⁺¹)), largest first


class JitterRow(NamedTuple):
    """The effect of one ε."""

    name: str  # "given", "fs-map" or "l-map"
    jitter: float
    ratio: float  # λ_max/ε
    effective: float | None  # Σ λ/(λ+ε), the effective rank
    log_det: float | None  # log det(I + 𝒥/ε), nats
    first_order: float | None  # Tr 𝒥/ε, nats
    error: float | None  # of the latter, relative
    error_bound: float  # from λ_max alone
    lam: float | None  # λ = 1/(2εN), if N was given


class Diagnosis(NamedTuple):
    """The result of :func:`fsmap.doctor`. ``print`` shows a page, :meth:`to_json` all of it."""

    module: str
    mode: str  # "train" or "eval"
    precision: str
    parameters: int  # P
    frozen: int
    points: int  # S
    points_used: int
    outputs: int  # K
    verdict: str  # docs/guide/doctor.md has all of them
    summary: str
    rank: Rank
    eigenvalues: Eigenvalues
    symmetries: tuple[Finding, ...]
    null_vectors: tuple[NullVector, ...]
    jitters: tuple[JitterRow, ...]
    notes: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        """The page."""
        from fsmap.doctor.page import page

        return page(self)

    def to_json(self) -> str:
        """Everything as JSON; the keys are the names of the fields."""
        return json.dumps({"version": VERSION, **_plain(self)}, indent=2, allow_nan=False)


def doctor(
    module: nn.Module,
    x: Inputs,
    *,
    jitter: float | None = None,
    num_data: int | None = None,
    forward: Forward | None = None,
) -> Diagnosis:
    r"""Examine $\mathcal J(\theta; p_X)$ of a module at its present parameters.

    Theorem 1: rank and null vectors, by name of the parameters. Theorem 2: equal and dead units, at
    which the unjittered objective is infinite; and the symmetries that make 𝒥 singular for every θ
    (scale, BatchNorm). Every finding is checked against the Jacobian in float64. It also
    gives the eigenvalues and a recommended ε.

    The module is copied; it, its buffers and torch's random state do not change. It is examined in
    the mode it is in, with dropout switched off.

    Args:
        module: Any module.
        x: Evaluation points, a sample of p_X ``[S, ...]``; a tensor, or a dict or tuple of tensors.
        jitter: An ε to evaluate, besides the recommended ones.
        num_data: N, to translate ε into λ = 1/(2εN).
        forward: How to call the module, ``forward(module, x)``.

    Example:
        >>> import torch, fsmap
        >>> net = torch.nn.Sequential(
        ...     torch.nn.Linear(1, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)
        ... )
        >>> for p in net.parameters():
        ...     _ = torch.nn.init.constant_(p, 0.5)
        >>> d = fsmap.doctor(net, torch.linspace(-1, 1, 50)[:, None])
        >>> d.verdict, d.rank.rank, d.parameters
        ('pathological', 4, 7)
        >>> d.symmetries[0].kind, d.symmetries[0].units
        ('twin_units', (0, 1))
    """
    begin = time.perf_counter()
    own = next(iter(functional(module)[1].values()))
    check_points(x)
    for name, value in (("jitter", jitter), ("num_data", num_data)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{name} must be positive and finite, got {value}")
    notes: list[str] = []
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        f, params, wide = _prepare(_without_dropout(module, notes), x, forward, notes)
        spaces = symmetry.record(f, params, wide)
        params = detached(params)
        found = spectra.spectrum(f, params, wide)
        frozen = {n: p.detach() for n, p in f.module.named_parameters() if n not in params}
        candidates = symmetry.families(spaces, params, frozen, found)
        symmetries, known = symmetry.check(candidates, params, found)
        K = outputs(f, params, take_points(wide, slice(0, 4))).shape[1]
        ranked = _rank(found, symmetries, num_points(x), K)
        unnamed = ranked.unexplained or any(s.kind == "no_effect" for s in symmetries)
        if unnamed and found.null is not None and ranked.sure is not False:
            ranked = ranked._replace(nearby=_deficit_nearby(f, params, wide))
    if found.points < num_points(x):
        notes.append(f"eigenvalues were taken on {found.points} of {num_points(x)} points")
    verdict, summary = _verdict(ranked, symmetries, found.points)
    epsilons = {} if jitter is None else {"given": float(jitter)}
    epsilons |= recommended(found, own.dtype)
    return Diagnosis(
        module=type(module).__name__,
        mode="train" if any(m.training for m in module.modules()) else "eval",
        precision=str(next(iter(params.values())).dtype).removeprefix("torch."),
        parameters=found.parameters,
        frozen=count(frozen),
        points=num_points(x),
        points_used=found.points,
        outputs=K,
        verdict=verdict,
        summary=summary,
        rank=ranked,
        eigenvalues=_eigenvalues(found),
        symmetries=symmetries,
        null_vectors=_null_vectors(found, known, params),
        jitters=tuple(jitter_row(found, name, eps, num_data) for name, eps in epsilons.items()),
        notes=tuple(notes),
        seconds=time.perf_counter() - begin,
    )


def _without_dropout(module: nn.Module, notes: list[str]) -> nn.Module:
    try:
        twin = copy.deepcopy(module)
    except Exception as error:
        raise UnsupportedModuleError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}), and "
            "doctor works on a copy. Build the module again, load its state_dict, and pass that."
        ) from error
    for m in twin.modules():
        for name in DROP_RATES:
            rate = getattr(m, name, None)
            if m.training and isinstance(rate, int | float) and 0 < rate <= 1:
                setattr(m, name, 0.0)
                notes[:] = ["dropout is active in this module; it was switched off here"]
    return twin


def _prepare(
    module: nn.Module, x: Inputs, forward: Forward | None, notes: list[str]
) -> tuple[Functional, Params, Inputs]:
    """The module as a function in float64, or in its own precision if it does not run in that."""
    first = next(p for p in module.parameters() if p.requires_grad)
    device = first.device if first.device.type in ("cpu", "cuda") else torch.device("cpu")

    def ready(dtype: torch.dtype) -> tuple[Functional, Params, Inputs]:
        f, params = functional(copy.deepcopy(module).to(device, dtype), forward=forward)
        cast = move_points(x, device=device, dtype=dtype)
        with torch.no_grad():
            finite(outputs(f, params, take_points(cast, slice(0, 4))))
        return f, params, cast

    try:
        return ready(torch.float64)
    except InputError as error:
        own = ready(first.dtype)  # raises again if the precision is not the reason
        why = str(error.__cause__ or error).splitlines()[0]
        notes.append(
            f"the module does not run in float64 ({why[:80]}); it was examined in "
            f"{str(first.dtype).removeprefix('torch.')}, in which null directions are less certain"
        )
        return own


def _rank(found: Spectrum, symmetries: tuple[Finding, ...], num_points: int, K: int) -> Rank:
    counted = all(f.adds is not None for f in symmetries)
    known = sum(f.adds or 0 for f in symmetries)
    if not counted:
        known = sum(f.directions for f in symmetries if f.kind != "no_effect")
    P, rank, gap = found.parameters, found.rank, found.gap
    missing, unexplained = max(0, P - K * num_points), None
    if rank is not None and missing == 0 and counted:
        unexplained = max(0, P - rank - known)
    return Rank(
        method=found.method,
        rank=rank,
        deficit=None if rank is None else P - rank,
        missing_rows=missing,
        points_needed=math.ceil((P - known * counted) / max(K, 1)),
        known=known,
        unexplained=unexplained,
        nearby=None,
        tolerance=found.tolerance,
        gap=None if gap is None or math.isinf(gap) else gap,
        sure=None if gap is None else gap >= WIDE_GAP,
        grows=found.grows() if unexplained else None,
    )


def _deficit_nearby(f: Functional, params: Params, x: Inputs) -> int:
    """The smaller of the deficits at two random parameters, 1 % away."""
    generator = torch.Generator().manual_seed(0)
    deficits = []
    for _ in range(2):
        moved = {}
        for name, p in params.items():
            size = 0.01 * (p.square().mean().sqrt() + 0.01)
            moved[name] = p + size * torch.randn(p.shape, generator=generator).to(p)
        s = spectra.spectrum(f, moved, x)
        assert s.eigenvalues is not None
        kept = s.eigenvalues > WIDE_GAP * s.floor  # surely not zero
        deficits.append(s.parameters - int(kept.sum()))
    return min(deficits)


def _null_vectors(found: Spectrum, known: Tensor | None, params: Params) -> tuple[NullVector, ...]:
    """The sparsest null vectors that no symmetry explains, or the sparsest of all."""
    if found.null is None or not len(found.null):
        return ()
    basis = spectra.sparse_basis(found.null)
    rest = basis if known is None else spectra.outside(basis, known)
    if len(rest) and found.gap is not None and found.gap < WIDE_GAP:
        return ()  # without a gap any direction of little effect would be listed
    basis = rest[:5] if len(rest) else basis[:3]
    largest = found.largest.value.sqrt().clamp_min(1e-300)
    residuals = (basis @ found.probes.mT).norm(dim=1) / basis.norm(dim=1) / largest
    pairs = zip(basis, residuals.tolist(), strict=True)
    return tuple(NullVector(spectra.describe(v, params), r) for v, r in pairs)


def _verdict(rank: Rank, symmetries: tuple[Finding, ...], used: int) -> tuple[str, str]:
    def kinds(found: list[Finding]) -> str:
        return ", ".join(dict.fromkeys(f.kind.replace("_", " ") for f in found))

    by_chance = symmetry.ON_POINTS if used < FEW_POINTS else ()
    bad = [f for f in symmetries if f.pathological and f.kind not in by_chance]
    if bad:
        return "pathological", (
            f"𝒥 is singular at these parameters ({kinds(bad)}). Exact FS-MAP needs a jitter: "
            "without one its density is infinite here, whatever the data are."
        )
    chance = [f for f in symmetries if f.kind in by_chance]
    if chance:
        return "undecided", (
            f"there are {kinds(chance)} on the {used} points that were used, which may be chance: "
            f"at least {FEW_POINTS} are needed."
        )
    if rank.deficit == 0:
        return "regular", "𝒥 has full rank on these points: no singularity here."
    if rank.unexplained is None:
        why = "there are too few points" if rank.missing_rows else "the model is too large"
        return "undecided", f"{why}; {rank.known:,} null directions are known."
    if rank.nearby is not None and not rank.grows and rank.nearby < (rank.deficit or 0):
        return "pathological", (
            f"𝒥 has {rank.deficit} null directions at these parameters and {rank.nearby} at nearby "
            "ones. Exact FS-MAP needs a jitter: without one its density is infinite here."
        )
    unused = sum(f.adds or 0 for f in symmetries if f.kind == "no_effect")
    if rank.unexplained == 0 and unused:
        return "unused", (
            f"{unused} parameters have no effect on any of the points: they are not used, or p_X "
            "does not reach them."
        )
    if rank.unexplained == 0:
        return "harmless", (
            "𝒥 is singular for all values of the parameters, by continuous symmetries: no "
            "pathological optimum; with a jitter the log-determinant is a pseudo-determinant."
        )
    if rank.sure is False:
        return "ill-conditioned", (
            "the eigenvalues of 𝒥 fall below rounding without a gap: it is numerically singular, "
            "and only the jitter decides where the log-determinant ends."
        )
    if rank.grows:
        return "undecided", (
            f"the rank of 𝒥 still grows with the number of points; {rank.unexplained} null "
            "directions on these belong to no known symmetry."
        )
    return "unexplained", (
        f"𝒥 is singular at these and at nearby parameters; {rank.unexplained} null directions "
        "belong to no symmetry that doctor knows."
    )


def _eigenvalues(found: Spectrum) -> Eigenvalues:
    kept = [] if found.eigenvalues is None else found.kept.tolist()  # descending
    largest, nonzero = float(found.largest.value), kept[-1] if kept else None
    decades = Counter(math.floor(math.log10(value)) for value in kept)
    smallest = nonzero if len(kept) == found.parameters else 0.0
    smallest = None if found.eigenvalues is None else smallest
    condition = None if nonzero is None else largest / nonzero
    upper = float(found.largest.value + found.largest.stderr)
    trace, error = map(float, found.trace)
    counts = tuple(decades.items())
    return Eigenvalues(largest, upper, smallest, nonzero, condition, trace, error, counts)


def recommended(found: Spectrum, dtype: torch.dtype) -> dict[str, float]:
    """ε by method, for a model evaluated in ``dtype``; FS-MAP only if all eigenvalues are known."""
    upper = float(found.largest.value + found.largest.stderr)
    if not upper > 0:
        return {}
    advice = {}
    if found.eigenvalues is not None:
        low = float(found.kept.quantile(0.1))
        double = found.parameters * torch.finfo(torch.float64).eps
        single = found.rows * torch.finfo(dtype).eps ** 2
        rounding = max(double, single) * float(found.largest.value)  # of an eigenvalue that is zero
        advice["fs-map"] = _digit(max(10 * rounding, 0.1 * low), math.floor)
    return advice | {"l-map": _digit(10 * upper, math.ceil)}


def _digit(value: float, towards: Callable[[float], int]) -> float:
    """One significant digit, rounded up or down."""
    power = 10.0 ** math.floor(math.log10(value))
    slack = 1e-9 if towards is math.floor else -1e-9
    return float(f"{max(1, towards(value / power + slack)) * power:.0e}")


def jitter_row(found: Spectrum, name: str, jitter: float, num_data: int | None) -> JitterRow:
    """The effect of one ε on the eigenvalues."""
    ratio = float(found.largest.value + found.largest.stderr) / jitter
    effective = log_det = first = error = None
    if found.eigenvalues is not None:
        scaled = found.eigenvalues / jitter
        effective, first = float((scaled / (1 + scaled)).sum()), float(scaled.sum())
        log_det = float(scaled.log1p().sum())
        error = (first - log_det) / log_det if log_det != 0 else None
    bound = ratio / math.log1p(ratio) - 1 if ratio > 1e-8 else ratio / 2
    lam = None if num_data is None else 1 / (2 * jitter * num_data)
    return JitterRow(name, jitter, ratio, effective, log_det, first, error, bound, lam)


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
