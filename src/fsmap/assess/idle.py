"""Units that do nothing on the points, or that nobody reads, and parameters without effect."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fsmap.assess.families import SWITCHES, Family, unique
from fsmap.assess.wiring.facts import Wiring
from fsmap.assess.wiring.units import Member, Segment, Space, total, where
from fsmap.functional import unravel
from fsmap.types import Params

QUIET = 1e-13  # range of a unit over the largest of its layer, up to which it is constant


def units(segment: Segment, space: Space, params: Params, everything: Params) -> Iterator[Family]:
    """Units that are zero or constant where they are read, and units that nobody listens to."""
    readers = unique(segment.role("in"))
    if segment.level is None or not readers:
        return
    makers = [m for m in space.members() if m.role != "in" and m.name in params]
    low, high, _ = segment.level
    size = torch.maximum(low.abs(), high.abs())
    quiet = QUIET * size.max()
    silent = size <= quiet
    constant = (high - low <= quiet) & ~silent
    deaf = (
        features_of(readers, (), everything).abs().amax(1) == 0
        if not segment.norms
        else constant & silent
    )
    label = space.label()
    trainable = [m for m in readers if m.name in params and not m.gain]
    yield from _entries("silent_units", label, silent, trainable + makers, params)
    yield from _entries("constant_units", label, constant, makers, params)
    for m in trainable:
        if m.bias in params and bool(constant.any()):
            yield _against_bias(label, constant, high, m, params)
    if not space.pinned:
        yield from _entries("unread_units", label, deaf & ~silent & ~constant, makers, params)


def without_effect(probes: Tensor, params: Params, *, whole: bool) -> Iterator[Family]:
    """Entries whose column of the Jacobian is zero: unused ones, and those of idle units.

    Args:
        probes: Rows of the Jacobian, or random combinations of them ``[R, P]``.
        params: Parameters.
        whole: Leave out parameters of which some entries have an effect.

    Yields:
        A family for each parameter that has such entries.
    """
    size = probes.abs().amax(0)
    for name, idle in unravel(size <= QUIET * size.max(), params).items():
        entries = idle.flatten().nonzero().flatten()
        p = params[name]

        def build(c: Tensor, entries: Tensor = entries, p: Tensor = p, name: str = name) -> Params:
            return {name: torch.zeros_like(p).flatten().scatter(0, entries, c).reshape(p.shape)}

        if len(entries) and not (whole and len(entries) < p.numel()):
            yield Family("no_effect", name, (len(entries),), build)


def rare(wiring: Wiring, params: Params, num_points: int) -> list[str]:
    """Units that are active on fewer points than their incoming weights would need, in words."""
    told = []
    for segment in wiring.segments:
        makers = [m for m in segment.role("out") if m.name in params]
        if segment.level is None or not makers or not set(segment.through) & SWITCHES:
            continue
        needed = sum(m.blocks(params[m.name]).shape[1] for m in makers)
        active = segment.level.active
        for i in ((active > 0) & (active < min(needed, num_points))).nonzero().flatten().tolist():
            points = f"{int(active[i])} of {num_points} points"
            told.append(f"unit {i} of {where([*segment.members])} is active on {points} only")
    return told


def _entries(
    kind: str, label: str, which: Tensor, members: list[Member], params: Params
) -> Iterator[Family]:
    """Every entry of these units by itself, parameter by parameter."""
    units = tuple(which.nonzero().flatten().tolist())
    for m in members if units else ():

        def build(c: Tensor, m: Member = m) -> Params:
            return {m.name: put(m, units, c, params)}

        width = m.blocks(params[m.name]).shape[1]
        yield Family(kind, label, (len(units), width), build, units)


def _against_bias(label: str, which: Tensor, value: Tensor, m: Member, params: Params) -> Family:
    """An outgoing weight of a constant unit moves by c, the bias behind it by −value·c."""
    units = tuple(which.nonzero().flatten().tolist())
    width = m.blocks(params[m.name]).shape[1]
    keep = 1 - m.dim

    def build(c: Tensor) -> Params:
        moved = put(m, units, c, params)
        effect = put(m, units, c * value[list(units), None], params)
        return total([(m.name, moved), (m.bias or "", -effect.movedim(keep, 0).flatten(1).sum(1))])

    return Family("constant_units", label, (len(units), width), build, units)


def put(member: Member, units: tuple[int, ...], rows: Tensor, params: Params) -> Tensor:
    """Rows ``[len(units), entries]`` at their units, zeros at the others."""
    p = params[member.name]
    pick = torch.eye(member.units, dtype=p.dtype, device=p.device)[:, list(units)]
    return member.place(pick @ rows, p)


def features_of(members: list[Member], extra: tuple[Tensor, ...], everything: Params) -> Tensor:
    """All that belongs to each unit: ``[units, entries]``."""
    parts = [m.blocks(everything[m.name].detach()) for m in members]
    return torch.cat([*parts, *(t[:, None] for t in extra)], dim=1)
