"""Shifts that leave the function alone: of biases, and of all units at once before a LayerNorm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fsmap.assess.families import Family, unique
from fsmap.assess.wiring.units import Member, NormRead, Segment, along, total, where
from fsmap.types import Params


def of_biases(segment: Segment, params: Params) -> Iterator[Family]:
    """A bias that others can make up for: those behind it, or another one beside it."""
    additive = [m for m in unique(segment.role("out")) if m.additive and m.name in params]
    readers = unique(segment.role("in"))
    free = segment.linear and bool(readers or segment.norms)
    free &= all(m.bias in params and not m.gain for m in readers)
    batch = [n for n in segment.norms if n.kind == "batch"]
    free &= all(n.training or n.bias in params for n in batch)
    label = where([*segment.members])
    kind = "batchnorm_bias" if batch else "bias_shift"
    for i, m in enumerate(additive):
        if free:

            def build(c: Tensor, m: Member = m) -> Params:
                behind = [(r.bias or "", -through(c, r, params[r.name])) for r in readers]
                behind += [part for n in batch for part in _shifted(n, c, params)]
                return total([(m.name, along(c, m, params[m.name])), *behind])

            yield Family(kind, label, (segment.units,), build)
        if i > 0 and not (free and segment.scalable):
            between = [r for r in readers if r.bias in params and not r.gain]
            for chosen in [[], between] if between else [[]]:
                yield _trade(segment, additive[0], m, chosen, params)


def _trade(
    segment: Segment, early: Member, late: Member, readers: list[Member], params: Params
) -> Family:
    """Two biases of one residual sum; readers that come between them make up for the difference."""

    def build(c: Tensor) -> Params:  # [n]
        pair = [(early.name, along(c, early, params[early.name]))]
        pair.append((late.name, -along(c, late, params[late.name])))
        return total([*pair, *((r.bias or "", -through(c, r, params[r.name])) for r in readers)])

    return Family("bias_shift", where([*segment.members]), (segment.units,), build)


def through(c: Tensor, reader: Member, weight: Tensor) -> Tensor:
    """W c: what a shift c ``[n]`` of the units adds to what a layer makes of them."""
    spread = along(c, reader, weight) * weight
    keep = 1 - reader.dim  # dimensions 0 and 1 of a weight are its outputs and inputs
    return spread.movedim(keep, 0).flatten(1).sum(1)


def _shifted(norm: NormRead, c: Tensor, params: Params) -> list[tuple[str, Tensor]]:
    if norm.training or norm.bias is None:
        return []
    assert norm.std is not None
    gamma = params.get(norm.weight or "", torch.ones_like(c)) if norm.weight else 1.0
    return [(norm.bias, -gamma * c / norm.std)]


def before_layernorm(segment: Segment, params: Params) -> Iterator[Family]:
    """LayerNorm takes off the mean over units and, up to its eps, their common scale."""
    kinds = {norm.kind for norm in segment.norms}
    groups = max([norm.groups for norm in segment.norms], default=1)
    makers = [m for m in unique(segment.role("out")) if m.name in params]
    label = where([*segment.members])
    for m in makers if kinds & {"layer", "group"} else ():
        beside = [r for r in unique(segment.role("in")) if r.bias in params and m.additive]
        for readers in [[], beside] if beside else [[]]:
            yield _common_shift(segment, m, readers, groups, params)
    if kinds & {"layer", "rms"} and makers:

        def scaled(c: Tensor) -> Params:
            ones = c.expand(segment.units)
            return total(
                [(m.name, along(ones, m, params[m.name]) * params[m.name]) for m in makers]
            )

        yield Family("layernorm_scale", label, (1,), scaled)
    for norm in segment.normed:
        for m in unique(segment.role("in")):
            yield from _zero_sum(segment, norm, m, params)


def _common_shift(
    segment: Segment, m: Member, readers: list[Member], groups: int, params: Params
) -> Family:
    """The same change of all units, taken off by LayerNorm; readers before it make up for it."""

    def build(c: Tensor) -> Params:  # [groups, entries per unit]
        rows = c.repeat_interleave(m.units // groups, dim=0)
        moved = m.place(rows, params[m.name])
        back = [(r.bias or "", -through(rows[:, 0], r, params[r.name])) for r in readers]
        return total([(m.name, moved), *back])

    width = m.blocks(params[m.name]).shape[1]
    return Family("layernorm_shift", where([*segment.members]), (groups, width), build)


def _zero_sum(segment: Segment, norm: NormRead, m: Member, params: Params) -> Iterator[Family]:
    """LayerNorm's result sums up to zero before γ and β: a reader's weights can move by u/γ."""
    if m.name not in params or m.bias not in params or m.block > 1 or params[m.name].ndim != 2:
        return
    ones = torch.ones_like(params[m.name].select(1 - m.dim, 0))
    gamma = ones if norm.weight is None else params.get(norm.weight)
    beta = 0 * ones if norm.bias is None else params.get(norm.bias)
    if gamma is None or beta is None or not bool((gamma != 0).all()):
        return

    def build(u: Tensor) -> Params:  # [outputs of the reader]
        moved = u[:, None] / gamma
        return {m.name: moved if m.dim == 1 else moved.mT, m.bias or "": -moved @ beta}

    yield Family("layernorm_readers", where([m]), (params[m.name].shape[1 - m.dim],), build)
