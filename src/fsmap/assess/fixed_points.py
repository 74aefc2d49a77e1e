r"""Theorem 2: units and heads that sit on, or near, a fixed point of a permutation.

If exchanging units i and j leaves f alone (S) and they are equal (Sθ = θ), then J(S − I) = 0: every
pair of their parameters with opposite signs is a null vector. These are the singularities that make
pathological optima: they appear at special parameters, and there the density of FS-MAP without
jitter is infinite.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fsmap.assess import idle
from fsmap.assess.families import Family, unique
from fsmap.assess.idle import features_of, put
from fsmap.assess.wiring.facts import Wiring
from fsmap.assess.wiring.units import Attention, Member, Space, total, where
from fsmap.types import Params

EQUAL = 1e-12  # relative distance up to which two units count as equal
NEAR = 1e-2  # and up to which they are worth mentioning


def special(wiring: Wiring, params: Params, frozen: Params) -> Iterator[Family]:
    """The families that hold at these parameters only.

    Args:
        wiring: The module's units.
        params: Trainable parameters.
        frozen: The other ones; a fixed point needs them too.

    Yields:
        Families, unverified.
    """
    everything = params | frozen
    for space in wiring.spaces:
        if not space.pinned and space.units > 1:
            yield from _twins(space, params, everything)
            yield from _twin_inputs(space, params, everything)
    for segment in wiring.segments:
        yield from idle.units(segment, wiring.spaces[segment.space], params, everything)
    for attention in wiring.attentions:
        yield from _twin_heads(attention, params, everything)


def closest(space: Space, everything: Params) -> tuple[float, int, int] | None:
    """Relative distance and indices of the two most similar units."""
    members = space.members()
    if space.pinned or space.units < 2 or not members:
        return None
    features = features_of(members, space.statistics, everything)
    distances = _distances(features)
    index = int(distances.argmin())
    i, j = divmod(index, space.units)
    return _distance(features[i], features[j]), min(i, j), max(i, j)


def _twins(space: Space, params: Params, everything: Params) -> Iterator[Family]:
    members = [m for m in space.members() if m.name in params]
    features = features_of(space.members(), space.statistics, everything)
    for group in _groups(features, EQUAL):
        yield _exchange("twin_units", space.label(), group, members, params, 0.0)
    for i, j, distance in _near_pairs(features):
        yield _exchange("twin_units", space.label(), (i, j), members, params, distance)


def _exchange(
    kind: str,
    label: str,
    group: tuple[int, ...],
    members: list[Member],
    params: Params,
    distance: float,
) -> Family:
    """Image of S − I: entries of the first unit against those of each other one."""
    widths = [m.blocks(params[m.name]).shape[1] for m in members]

    def build(c: Tensor) -> Params:  # [units - 1, entries]
        pairs = torch.cat([-c.sum(0, keepdim=True), c])
        pieces = zip(members, pairs.split(widths, dim=1), strict=True)
        return total([(m.name, put(m, group, piece, params)) for m, piece in pieces])

    return Family(kind, label, (len(group) - 1, sum(widths)), build, group, distance)


def _twin_inputs(space: Space, params: Params, everything: Params) -> Iterator[Family]:
    """Units that compute the same, up to a sign, and are read differently."""
    members = space.members()
    makers = [m for m in members if m.role != "in"]
    readers = [m for m in members if m.role == "in" and not m.gain and m.name in params]
    if not makers or not readers:
        return
    incoming = features_of(makers, space.statistics, everything)
    full = features_of(members, space.statistics, everything)
    for sign in (1.0, -1.0):
        for i, j in _equal_pairs(incoming, sign):
            if sign < 0 and space.statistics:
                continue  # running statistics do not change sign
            if sign > 0 and _distance(full[i], full[j]) <= EQUAL:
                continue  # twins
            yield _trade(space, (i, j), sign, readers, params)
            yield from _balance(space, (i, j), makers, readers, params)


def _trade(
    space: Space, pair: tuple[int, int], sign: float, readers: list[Member], params: Params
) -> Family:
    widths = [m.blocks(params[m.name]).shape[1] for m in readers]

    def build(c: Tensor) -> Params:
        rows = torch.stack([c, -sign * c])
        pieces = zip(readers, rows.split(widths, dim=1), strict=True)
        return total([(m.name, put(m, pair, piece, params)) for m, piece in pieces])

    return Family("twin_inputs", space.label(), (sum(widths),), build, pair)


def _balance(
    space: Space, pair: tuple[int, int], makers: list[Member], readers: list[Member], params: Params
) -> Iterator[Family]:
    """Where outgoing weights are collinear, incoming ones can be traded as well."""
    out = features_of(readers, (), params)[list(pair)]  # [2, entries]
    a, b = out.norm(dim=1)
    aligned = (out[0] * b - out[1] * a).norm() <= EQUAL * a * b
    opposed = (out[0] * b + out[1] * a).norm() <= EQUAL * a * b
    trainable = [m for m in makers if m.name in params]
    if not trainable or not (aligned or opposed):
        return
    weights = torch.stack([b if aligned else -b, -a])
    widths = [m.blocks(params[m.name]).shape[1] for m in trainable]

    def build(c: Tensor) -> Params:
        rows = weights[:, None] * c
        pieces = zip(trainable, rows.split(widths, dim=1), strict=True)
        return total([(m.name, put(m, pair, piece, params)) for m, piece in pieces])

    yield Family("twin_inputs", space.label(), (sum(widths),), build, pair)


def _twin_heads(attention: Attention, params: Params, everything: Params) -> Iterator[Family]:
    heads = attention.heads
    if heads < 2:
        return
    together = unique([*attention.query, *attention.key, *attention.value])
    members = [m._replace(units=heads, block=m.units * m.block // heads) for m in together]
    features = features_of(members, (), everything)
    trainable = [m for m in members if m.name in params]
    for group in _groups(features, EQUAL):
        yield _exchange("twin_heads", where(together), group, trainable, params, 0.0)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / (a.norm() + b.norm()).clamp_min(1e-300))


def _distances(features: Tensor, sign: float = 1.0) -> Tensor:
    """‖a − b‖/(‖a‖ + ‖b‖) for all pairs, accurate to 1e-7; infinite on the diagonal."""
    squares = features.square().sum(1)
    inner = features @ features.mT
    apart = (squares[:, None] + squares - 2 * sign * inner).clamp_min(0).sqrt()
    norms = squares.sqrt()
    distances = apart / (norms[:, None] + norms).clamp_min(1e-300)
    return distances.fill_diagonal_(torch.inf)


def _equal_pairs(features: Tensor, sign: float = 1.0) -> list[tuple[int, int]]:
    """Pairs of equal, not vanishing, units."""
    candidates = (_distances(features, sign).triu() + _mask(features)) < 1e-6
    pairs = [(int(i), int(j)) for i, j in candidates.nonzero()]
    alive = features.abs().amax(1) > 0
    return [
        (i, j)
        for i, j in pairs
        if alive[i] and alive[j] and _distance(features[i], sign * features[j]) <= EQUAL
    ]


def _groups(features: Tensor, tolerance: float) -> list[tuple[int, ...]]:
    """Sets of equal units."""
    groups: dict[int, list[int]] = {}
    home: dict[int, int] = {}
    for i, j in _equal_pairs(features):
        root = home.setdefault(i, i)
        if j not in home:
            home[j] = root
            groups.setdefault(root, [root]).append(j)
    return [tuple(group) for group in groups.values()]


def _near_pairs(features: Tensor) -> list[tuple[int, int, float]]:
    """Mutual nearest neighbors that are not equal but nearly so."""
    distances = _distances(features)
    nearest = distances.argmin(1)
    found = []
    for i, j in enumerate(nearest.tolist()):
        if i < j and int(nearest[j]) == i:
            distance = _distance(features[i], features[j])
            if EQUAL < distance <= NEAR:
                found.append((i, j, distance))
    return sorted(found, key=lambda pair: pair[2])


def _mask(like: Tensor) -> Tensor:
    """Infinity on and below the diagonal."""
    return like.new_full((len(like), len(like)), torch.inf).tril()
