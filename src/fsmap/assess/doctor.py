"""``fsmap.doctor``: is 𝒥(θ; p_X) singular here, why, and what would the objectives cost?"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsmap.assess import fixed_points, idle, symmetry
from fsmap.assess import jitter as jitters
from fsmap.assess.clock import now
from fsmap.assess.copies import own_randomness, prepare, quiet
from fsmap.assess.cost import Cost, costs
from fsmap.assess.diagnosis import Diagnosis, Eigenvalues, Pair
from fsmap.assess.judgement import Evidence, findings, gather, judge, null_vectors, rank
from fsmap.assess.spectrum import LARGEST_SVD, Spectrum, spectrum
from fsmap.assess.verify import check
from fsmap.assess.wiring.facts import Wiring
from fsmap.assess.wiring.tracer import trace
from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import Forward, Functional, count, functional
from fsmap.linalg import points
from fsmap.linalg.logdet import shape
from fsmap.linalg.metric import Metric
from fsmap.types import Inputs, Params

TRACED = 1024  # points of the pass that follows units, at most
RARE = 5  # units with few active points that are named
BATCH_SECONDS = 0.2  # of one pass, where points see each other: some forty are needed
TRACE_SECONDS = 1.0  # that it may take


def doctor(
    module: nn.Module,
    x: Inputs,
    *,
    jitter: float | None = None,
    metric: Metric | Tensor | None = None,
    num_data: int | None = None,
    forward: Forward | None = None,
    tolerance: float | None = None,
) -> Diagnosis:
    r"""Examine $\mathcal J(\theta; p_X)$ of a module at its present parameters.

    Theorem 1: rank and null vectors, named by parameter. Theorem 2: units on or near a fixed point
    of a permutation; dead units; and the continuous symmetries (scale, BatchNorm, attention …) that
    make 𝒥 singular everywhere. Each claim is held against the Jacobian in float64. Then
    eigenvalues, what ε does, a recommended ε, and what every method would cost.

    The module is copied; neither it, nor its buffers, nor torch's random state is touched. It is
    examined in the mode it is in, with dropout switched off.

    Args:
        module: Any module.
        x: Evaluation points, a sample of p_X ``[S, ...]``; a tensor, or a dict or tuple of tensors.
        jitter: An ε to judge, besides the recommended ones.
        metric: g; see :mod:`fsmap.metric`.
        num_data: N, to translate ε into λ = 1/(2εN).
        forward: How to call the module, ``forward(module, x)``.
        tolerance: Singular values of J up to this fraction of the largest count as zero; by default
            max(S·K, P) times the rounding of float64.

    Returns:
        The diagnosis: ``print`` it, or ask for ``to_json()``.

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
    _check_arguments(module, x, jitter, num_data, tolerance)
    notes: list[str] = []
    with own_randomness(module), quiet(module, notes) as calm:
        e = _examine(calm, x, forward, metric, tolerance, notes)
    symmetries = findings(e.evidence)
    ranked = rank(e.evidence, points.count(x))
    verdict, summary = judge(ranked, symmetries, points.count(x))
    if ranked.unexplained:
        told = idle.rare(e.wiring, e.evidence.params, e.traced)
        notes += told[:RARE] + [f"and {len(told) - RARE} more such units"] * (len(told) > RARE)
    own = next(p for p in module.parameters() if p.requires_grad).dtype
    epsilons = {} if jitter is None else {"given": float(jitter)}
    epsilons |= jitters.recommended(e.found, own)
    return Diagnosis(
        module=_title(module),
        mode="train" if any(m.training for m in module.modules()) else "eval",
        precision=e.precision,
        parameters=e.found.parameters,
        frozen=sum(p.numel() for p in e.evidence.frozen.values()),
        points=points.count(x),
        points_used=e.found.points,
        outputs=e.evidence.outputs,
        verdict=verdict,
        summary=summary,
        rank=ranked,
        eigenvalues=_eigenvalues(e.found),
        symmetries=symmetries,
        null_vectors=null_vectors(e.evidence),
        closest=_closest(e.wiring, e.evidence),
        jitters=tuple(jitters.row(e.found, n, value, num_data) for n, value in epsilons.items()),
        costs=tuple(e.costs),
        auto=e.auto,
        unfollowed=tuple(e.wiring.unfollowed),
        notes=tuple(notes),
        seconds=time.perf_counter() - begin,
    )


class _Examination(NamedTuple):
    """Everything that needs passes through the module."""

    wiring: Wiring
    traced: int  # points of the pass that followed units
    found: Spectrum
    evidence: Evidence
    costs: list[Cost]
    auto: str
    precision: str


def _examine(
    module: nn.Module,
    x: Inputs,
    forward: Forward | None,
    metric: Metric | Tensor | None,
    tolerance: float | None,
    notes: list[str],
) -> _Examination:
    f, params, wide = prepare(module, x, forward, notes)
    if not f.pointwise and metric is None:
        wide = points.take(wide, slice(0, _batch(f, params, wide)))
    traced = points.take(wide, slice(0, _traceable(f, params, wide)))
    wiring = trace(f, traced)
    found = spectrum(f, params, wide, metric=metric, tolerance=tolerance)
    if found.points < points.count(x):
        notes.append(
            f"for want of time or memory eigenvalues were taken on {found.points} of "
            f"{points.count(x)} points"
        )
    K = shape(f, params, wide)[1]
    evidence = _evidence(f, params, wiring, found, K)
    rows, auto = _costs(module, x, forward, K, wiring.activation_bytes / points.count(traced))
    precision = str(next(iter(params.values())).dtype).removeprefix("torch.")
    return _Examination(wiring, points.count(traced), found, evidence, rows, auto, precision)


def _check_arguments(
    module: Any, x: Inputs, jitter: float | None, num_data: int | None, tolerance: float | None
) -> None:
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        wrong = f"doctor examines an nn.Module, got {kind}. Call the factory first?"
        raise UnsupportedModuleError(wrong)
    points.check(x)
    message = None
    if jitter is not None and not (jitter > 0 and math.isfinite(jitter)):
        message = f"jitter must be > 0 and finite, got {jitter:g}"
    elif num_data is not None and num_data < 1:
        message = f"num_data must be at least 1, got {num_data}"
    elif tolerance is not None and not 0 < tolerance < 1:
        message = (
            "tolerance is relative to the largest singular value: 0 < tolerance < 1, "
            f"got {tolerance:g}"
        )
    if message:
        raise InputError(message)


def _batch(f: Functional, params: Params, x: Inputs) -> int:
    """Points of a large module whose points see each other: all passes have to use these."""
    if count(params) <= LARGEST_SVD:
        return points.count(x)
    few = points.take(x, slice(0, 4))
    with torch.no_grad():
        begin = now(params)
        f(params, few)
    each = (now(params) - begin) / points.count(few)
    return max(4, int(BATCH_SECONDS / each))


def _traceable(f: Functional, params: Params, x: Inputs) -> int:
    """Points that the pass which follows units has time for; all, where points see each other."""
    if not f.pointwise:
        return points.count(x)
    few = points.take(x, slice(0, 2))
    with torch.no_grad():
        begin = now(params)
        f(params, few)
    each = (now(params) - begin) / points.count(few)
    return max(8, min(TRACED, int(TRACE_SECONDS / each)))


def _evidence(
    f: Functional, params: Params, wiring: Wiring, found: Spectrum, outputs: int
) -> Evidence:
    detached = {name: p.detach() for name, p in params.items()}
    frozen = {name: p.detach() for name, p in f.module.named_parameters() if name not in detached}
    families = [
        *fixed_points.special(wiring, detached, frozen),
        *symmetry.continuous(wiring, detached, frozen),
        *idle.without_effect(found.probes, detached, whole=not found.exact),
    ]
    checked = check(families, detached, found)
    return gather(found, checked, detached, frozen, outputs)


def _costs(
    module: nn.Module, x: Inputs, forward: Forward | None, outputs: int, bytes_per_point: float
) -> tuple[list[Cost], str]:
    """In the module's own precision; the bytes were counted in float64."""
    f, params = functional(module, forward=forward)
    like = next(iter(params.values()))
    own = points.to(x, device=like.device, dtype=like.dtype)
    kept = bytes_per_point * points.count(x) * torch.finfo(like.dtype).bits / 64
    return costs(f, params, own, outputs, kept)


def _eigenvalues(found: Spectrum) -> Eigenvalues:
    low, up = float(found.largest.value), float(found.largest.value + found.largest.stderr)
    smallest = nonzero = condition = None
    decades: tuple[tuple[int, int], ...] = ()
    if found.eigenvalues is not None:
        values = found.eigenvalues
        alive = values[values.abs() > found.floor]
        full = len(alive) == found.parameters
        smallest = float(values[-1]) if full else 0.0
        if len(alive):
            nonzero = float(alive[alive.abs().argmin()])
            condition = abs(low / nonzero)
            exponents = alive.abs().log10().floor().int().tolist()
            counts = {n: exponents.count(n) for n in sorted(set(exponents), reverse=True)}
            decades = tuple(counts.items())
    trace_value, stderr = (float(t) for t in found.trace)
    return Eigenvalues(low, up, smallest, nonzero, condition, trace_value, stderr, decades)


def _closest(wiring: Wiring, evidence: Evidence) -> tuple[Pair, ...]:
    pairs = []
    for space in wiring.spaces:
        found = fixed_points.closest(space, evidence.params | evidence.frozen)
        if found is not None:
            pairs.append(Pair(space.label(), found[1:], found[0]))
    return tuple(sorted(pairs, key=lambda pair: pair.distance)[:5])


def _title(module: nn.Module) -> str:
    if isinstance(module, nn.Sequential):
        inner = [type(m).__name__ for m in module]
        shown = inner if len(inner) <= 6 else [*inner[:4], "…", inner[-1]]
        return f"Sequential({', '.join(shown)})"
    return type(module).__name__
