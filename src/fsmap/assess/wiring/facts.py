"""What one traced pass says about a module's units, and its summary as segments and spaces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.assess.wiring.units import Attention, Level, Member, NormRead, Segment, Space


class Wiring(NamedTuple):
    """A module's units."""

    segments: list[Segment]
    spaces: list[Space]
    attentions: list[Attention]
    unfollowed: list[str]  # what could not be analyzed, by name
    activation_bytes: int  # of all intermediate results of the traced pass


class Forest:
    """Disjoint sets of integers."""

    def __init__(self) -> None:
        self.parent: list[int] = []

    def add(self) -> int:
        """A new set with one element."""
        self.parent.append(len(self.parent))
        return self.parent[-1]

    def find(self, node: int) -> int:
        """The representative of a node's set."""
        while self.parent[node] != node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def union(self, a: int, b: int) -> None:
        """Join two sets."""
        self.parent[self.find(b)] = self.find(a)


class Facts:
    """Collects statements about nodes (units of one tensor); :meth:`summary` joins them."""

    def __init__(self) -> None:
        self.scale, self.permutation = Forest(), Forest()
        self.units: list[int] = []
        self.members: list[tuple[int, Member]] = []
        self.norms: list[tuple[int, NormRead]] = []
        self.normed: list[tuple[int, NormRead]] = []
        self.levels: list[tuple[int, Level]] = []
        self.through: list[tuple[int, str, bool]] = []  # node, activation, keeps linearity
        self.heads: dict[int, int] = {}
        self.attentions: list[tuple[int, int, int, int]] = []  # query, key, value nodes, heads
        self.unscalable: set[int] = set()
        self.pinned: set[int] = set()
        self.opaque: set[str] = set()  # parameters used where they could not be followed
        self.unfollowed: dict[str, None] = {}
        self.applied: dict[str, dict[str, None]] = {}  # unknown function -> parameters it was given
        self.bytes = 0

    def node(self, units: int) -> int:
        """New units."""
        self.units.append(units)
        self.scale.add()
        return self.permutation.add()

    def pin(self, node: int, reason: str | None = None) -> None:
        """Neither scale nor order of these units is free."""
        self.pinned.add(node)
        self.unscalable.add(node)
        if reason:
            self.unfollowed[reason] = None

    def same_order(self, a: int, b: int) -> None:
        """A permutation of one moves the other."""
        self.permutation.union(a, b)

    def same_scale(self, a: int, b: int) -> None:
        """Scaling one scales the other."""
        self.scale.union(a, b)
        self.permutation.union(a, b)

    def split(self, node: int, start: int, units: int) -> int:
        """Some of the units as a node of their own; their makers go with them."""
        child = self.node(units)
        for owner, m in list(self.members):
            if owner == node and m.role == "out":
                self.members.append((child, m._replace(start=m.start + start, units=units)))
        return child

    def summary(self) -> Wiring:
        """Join what belongs together, and close what cannot be free."""
        self._tie_shared_parameters()
        spaces, segments = [], []
        index = {root: i for i, root in enumerate(_roots(self.permutation))}
        for root in _roots(self.scale):
            segments.append(self._segment(root, index[self.permutation.find(root)]))
        for root, i in index.items():
            own = [s for s in segments if s.space == i]
            held = self.permutation
            norms = [n for s in own for n in s.norms if not n.training]
            statistics = [t for n in norms for t in (n.mean, n.std) if t is not None]
            pinned = any(held.find(n) == root for n in self.pinned)
            spaces.append(Space(self.units[root], tuple(own), pinned, tuple(statistics)))
        attentions = [self._attention(*record) for record in self.attentions]
        unfollowed = [*self.unfollowed, *(_applied(*item) for item in self.applied.items())]
        return Wiring(segments, spaces, attentions, unfollowed, self.bytes)

    def _tie_shared_parameters(self) -> None:
        """A parameter used twice has one order and one scale along each dimension."""
        first: dict[tuple[str, int, int, int], dict[str, tuple[int, Member]]] = {}
        for node, m in self.members:
            if m.name in self.opaque:
                self.pin(node)
            seen = first.setdefault((m.name, m.dim, m.start, m.units), {})
            for role, (other, before) in seen.items():
                self.permutation.union(other, node)
                if before.block != m.block:
                    self.pin(node)
                elif role == m.role:
                    self.scale.union(other, node)
                elif not (before.gain and m.gain):
                    self.unscalable |= {other, node}
            seen.setdefault(m.role, (node, m))

    def _segment(self, root: int, space: int) -> Segment:
        def here(node: int) -> bool:
            return self.scale.find(node) == root

        members = tuple(dict.fromkeys(m for node, m in self.members if here(node)))
        levels = [level for node, level in self.levels if here(node)]
        through = [(name, linear) for node, name, linear in self.through if here(node)]
        return Segment(
            units=self.units[root],
            space=space,
            members=members,
            norms=tuple(norm for node, norm in self.norms if here(node)),
            level=_join(levels),
            scalable=not any(here(node) for node in self.unscalable),
            linear=all(linear for _, linear in through),
            through=tuple(dict.fromkeys(name for name, linear in through if not linear)),
            normed=tuple(norm for node, norm in self.normed if here(node)),
            heads=max([h for node, h in self.heads.items() if here(node)], default=1),
        )

    def _attention(self, query: int, key: int, value: int, heads: int) -> Attention:
        def makers(node: int) -> tuple[Member, ...]:
            root = self.scale.find(node)
            owned = (m for n, m in self.members if self.scale.find(n) == root)
            return tuple(dict.fromkeys(owned))

        return Attention(makers(query), makers(key), makers(value), heads)


def level(x: Tensor, dims: tuple[int, ...], units: int) -> Level:
    """Lowest and highest value of every unit, and on how many points it is not zero."""
    front = x.detach().movedim(dims, tuple(range(len(dims))))
    each = front.reshape(units, x.shape[0] if 0 not in dims else 1, -1)  # [n, S, ...]
    flat = each.flatten(1)
    return Level(flat.amin(1), flat.amax(1), (each != 0).any(2).sum(1))


def _applied(function: str, parameters: dict[str, None]) -> str:
    names = list(parameters)
    shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return f"{function}: applied to {', '.join(shown)}"


def _join(levels: list[Level]) -> Level | None:
    if not levels:
        return None
    low, high, active = (torch.stack(tensors) for tensors in zip(*levels, strict=True))
    return Level(low.amin(0), high.amax(0), active.amax(0))


def _roots(forest: Forest) -> Iterable[int]:
    return [i for i in range(len(forest.parent)) if forest.find(i) == i]
