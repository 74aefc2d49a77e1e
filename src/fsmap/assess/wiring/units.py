"""Hidden units as parameters see them: which slices make a unit, and which read it.

A *segment* is a set of units whose scale is one freedom: everything between the layers that make
them and the layers that read them, as long as only homogeneous things happen on the way (ReLU,
pooling, residual sums). A *space* is a set of segments that a permutation of units moves together:
smooth activations and normalizations separate segments but not spaces.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.types import Params


class Member(NamedTuple):
    """A dimension of a parameter along which units are laid out."""

    name: str
    dim: int
    role: str  # "out": makes the units, "in": reads them, "own": belongs to them without scaling
    units: int
    start: int = 0  # first entry, for packed parameters
    block: int = 1  # consecutive entries per unit, for flattened feature maps
    bias: str | None = None  # of the layer that reads
    additive: bool = False  # a bias: added to the unit as it is
    gain: bool = False  # multiplies the unit: one entry is "out" and "in" at once

    def rows(self, unit: int) -> slice:
        """Where one unit lies along the dimension."""
        return slice(self.start + unit * self.block, self.start + (unit + 1) * self.block)

    def blocks(self, p: Tensor) -> Tensor:
        """The member's part of a parameter, units first: ``[units, entries per unit]``."""
        part = p.narrow(self.dim, self.start, self.units * self.block).movedim(self.dim, 0)
        return part.reshape(self.units, -1)

    def place(self, blocks: Tensor, p: Tensor) -> Tensor:
        """The inverse of :meth:`blocks`, with zeros elsewhere: shaped like ``p``."""
        length = self.units * self.block
        rest = p.movedim(self.dim, 0).shape[1:]
        part = blocks.reshape(length, *rest)
        after = p.shape[self.dim] - self.start - length
        padded = torch.cat([part.new_zeros(self.start, *rest), part, part.new_zeros(after, *rest)])
        return padded.movedim(0, self.dim)


class NormRead(NamedTuple):
    """A normalization that reads a segment."""

    kind: str  # "batch" over points, "layer" or "rms" over units, "group" over some of them
    training: bool = False
    weight: str | None = None
    bias: str | None = None
    mean: Tensor | None = None  # [n]  running
    std: Tensor | None = None  # [n]  √(variance + eps), of the points in training mode
    eps: float = 0.0
    groups: int = 1  # of units


class Level(NamedTuple):
    """The lowest and highest value of every unit on the points, where a layer reads it."""

    low: Tensor  # [n]
    high: Tensor  # [n]
    active: Tensor  # [n]  points on which it is not zero


class Segment(NamedTuple):
    """Units with one scale each."""

    units: int
    space: int  # index of the space it belongs to
    members: tuple[Member, ...]
    norms: tuple[NormRead, ...]
    level: Level | None
    scalable: bool  # nothing on the way pins the scale
    linear: bool  # nothing on the way is nonlinear
    through: tuple[str, ...]  # activations on the way
    heads: int = 1  # units mix within a head only
    normed: tuple[NormRead, ...] = ()  # LayerNorms that make the units

    def role(self, role: str) -> list[Member]:
        """The members with a role."""
        return [m for m in self.members if m.role == role]


class Space(NamedTuple):
    """Units that a permutation moves together."""

    units: int
    segments: tuple[Segment, ...]
    pinned: bool  # touches the input, the output, or something that was not followed
    statistics: tuple[Tensor, ...]  # running statistics, which a permutation moves too: [n] each

    def members(self) -> list[Member]:
        """Members of all segments, a gain once."""
        found = {(m.name, m.dim, m.start): m for s in self.segments for m in s.members}
        return list(found.values())

    def label(self) -> str:
        """Names of the layers that make and read the units, for people."""
        return where(self.members())


class Attention(NamedTuple):
    """Queries meet keys: they share units only through the scalar products of each head."""

    query: tuple[Member, ...]
    key: tuple[Member, ...]
    value: tuple[Member, ...]  # makers and readers
    heads: int


def where(members: list[Member]) -> str:
    """``makers → readers``, by the names of the layers."""
    makers = _layers([m for m in members if m.role == "out"])
    readers = _layers([m for m in members if m.role == "in" and not m.gain])
    return " → ".join(", ".join(names) for names in (makers, readers) if names)


def _layers(members: list[Member]) -> list[str]:
    names = list(dict.fromkeys(m.name.rpartition(".")[0] or m.name for m in members))
    return names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"]


def along(c: Tensor, member: Member, p: Tensor) -> Tensor:
    """Coefficients ``[n]`` spread over the parameter: each entry gets its unit's, others zero."""
    entries = p.numel() // p.shape[member.dim] * member.block
    return member.place(c[:, None].expand(member.units, entries), p)


def total(parts: list[tuple[str, Tensor]]) -> Params:
    """Contributions added up by name."""
    out: Params = {}
    for name, value in parts:
        out[name] = out[name] + value if name in out else value
    return out
