r"""Theorem 2 and its continuous relatives: parameter changes that leave the function alone, from the module's structure.

Every symmetry is a *family* of directions v in parameter space, a linear map from coefficients to parameters, with the claim J v = 0. Nothing here looks at the
Jacobian; :mod:`fsmap.assess.verify` does, and drops what does not hold.

Continuous families (appendix B.6: singular for every θ, no pathological optimum; the log-determinant becomes a pseudo-determinant):

* scale: makers of a unit times (1 + c), readers times (1 − c), where everything in between is positively homogeneous; through a BatchNorm that uses running
  statistics its weight takes the factor and its bias the rest, −cγμ/σ.
* bias shift: a bias moves by c, the next bias by −Wc, where everything in between is linear; through a BatchNorm in training mode nothing else moves.
* linear maps: makers times (I + C), readers times (I − C) between two linear maps with nothing in between, heads of attention among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.assess.wiring.facts import Wiring
from fsmap.assess.wiring.units import Attention, Member, NormRead, Segment, along, total, where
from fsmap.types import Params

KINDS = {
    "twin_units": "equal units: a fixed point of the permutation that exchanges them (Theorem 2)",
    "twin_inputs": "units with equal incoming weights: what leaves them can be traded",
    "twin_heads": "equal attention heads: a fixed point of their permutation (Theorem 2)",
    "silent_units": "units that are zero on all points: nothing that enters or leaves them has an effect",
    "constant_units": "units that are constant on all points: what leaves them trades with a bias",
    "unread_units": "units with zero outgoing weights: nothing that enters them has an effect",
    "no_effect": "parameters whose change has no effect on any point",
    "scale": "positively homogeneous activation: scale moves freely between layers",
    "batchnorm_scale": "scale of weights before a BatchNorm",
    "batchnorm_bias": "bias before a BatchNorm",
    "layernorm_shift": "common shift of all units before a LayerNorm",
    "layernorm_scale": "common scale of all units before a normalization",
    "bias_shift": "biases that can be traded, with only linear maps in between",
    "linear_maps": "two linear maps in a row: any linear map fits in between",
    "attention_query_key": "queries and keys of a head: any linear map and its inverse fit in between",
    "attention_key_bias": "bias of the keys: softmax does not see it",
}
PATHOLOGICAL = (
    *("twin_units", "twin_inputs", "twin_heads"),
    *("silent_units", "constant_units", "unread_units", "no_effect"),
)
"""Kinds that hold at special parameters only: there FS-MAP without jitter has an infinite density."""


class Family(NamedTuple):
    """Directions with the claim J v = 0."""

    kind: str
    where: str
    shape: tuple[int, ...]  # of the coefficients
    build: Callable[[Tensor], Params]  # linear; names that are missing are zero
    units: tuple[int, ...] = ()
    distance: float = 0.0  # to the fixed point, relative

    @property
    def count(self) -> int:
        """How many directions."""
        return math.prod(self.shape)

    def direction(self, coefficients: Tensor, params: Params) -> Params:
        """The direction for coefficients ``[count]``, complete."""
        given = self.build(coefficients.reshape(self.shape))
        return {n: given[n] if n in given else torch.zeros_like(p) for n, p in params.items()}


def continuous(wiring: Wiring, params: Params) -> Iterator[Family]:
    """The families that hold for every θ.

    Args:
        wiring: The module's units.
        params: Trainable parameters; a family that needs a frozen one is left out.

    Yields:
        Families, unverified.
    """
    for segment in wiring.segments:
        if _can_mix(segment, params):
            yield _linear_maps(segment, params)
        elif _can_scale(segment, params):
            yield _scale(segment, params)
        yield from _shifts(segment, params)
        yield from _normalized(segment, params)
    for attention in wiring.attentions:
        yield from _attention(attention, params)


def unique(members: list[Member]) -> list[Member]:
    """Members without repetitions (a layer that is called twice reads with one weight)."""
    return list({(m.name, m.dim, m.start): m for m in members}.values())


def _trainable(members: list[Member], params: Params) -> bool:
    return all(m.name in params for m in members)


def _can_scale(segment: Segment, params: Params) -> bool:
    makers, readers = segment.role("out"), segment.role("in")
    if not segment.scalable or not makers or not (readers or segment.norms):
        return False
    norms = all(n.training or (n.weight in params and n.bias in params) for n in segment.norms)
    return norms and _trainable(makers + readers, params)


def _scale(segment: Segment, params: Params) -> Family:
    makers, readers = unique(segment.role("out")), unique(segment.role("in"))

    def build(c: Tensor) -> Params:  # [n]
        parts = [(m.name, along(c, m, params[m.name]) * params[m.name]) for m in makers]
        parts += [(m.name, -along(c, m, params[m.name]) * params[m.name]) for m in readers]
        for norm in segment.norms:
            parts += _absorbed(norm, c, params)
        return total(parts)

    kind = "batchnorm_scale" if segment.norms else "scale"
    return Family(kind, where([*segment.members]), (segment.units,), build)


def _absorbed(norm: NormRead, c: Tensor, params: Params) -> list[tuple[str, Tensor]]:
    """What weight and bias of a BatchNorm do against a factor 1 + c of what enters it."""
    if norm.training or norm.weight is None or norm.bias is None:
        return []
    assert norm.mean is not None
    assert norm.std is not None
    gamma = params[norm.weight]
    return [(norm.weight, -c * gamma), (norm.bias, -c * gamma * norm.mean / norm.std)]


def _shifts(segment: Segment, params: Params) -> Iterator[Family]:
    """A bias that others can make up for: those behind it, or another one beside it."""
    additive = [m for m in unique(segment.role("out")) if m.additive and m.name in params]
    readers = unique(segment.role("in"))
    free = segment.scalable and segment.linear and bool(readers or segment.norms)
    free &= all(m.bias in params and not m.gain for m in readers)
    free &= all(n.training or n.bias in params for n in segment.norms)
    label = where([*segment.members])
    kind = "batchnorm_bias" if segment.norms else "bias_shift"
    for i, m in enumerate(additive):
        if free:

            def build(c: Tensor, m: Member = m) -> Params:
                behind = [(r.bias or "", -_through(c, r, params[r.name])) for r in readers]
                behind += [part for n in segment.norms for part in _shifted(n, c, params)]
                return total([(m.name, along(c, m, params[m.name])), *behind])

            yield Family(kind, label, (segment.units,), build)
        elif i > 0:

            def trade(c: Tensor, m: Member = m, first: Member = additive[0]) -> Params:
                one, other = params[m.name], params[first.name]
                return total([(m.name, along(c, m, one)), (first.name, -along(c, first, other))])

            yield Family("bias_shift", label, (segment.units,), trade)


def _through(c: Tensor, reader: Member, weight: Tensor) -> Tensor:
    """W c: the effect of a shift c ``[n]`` of the units on what a layer makes of them, kernels summed up."""
    spread = along(c, reader, weight) * weight
    keep = 1 - reader.dim  # dimensions 0 and 1 of a weight are its outputs and inputs
    return spread.movedim(keep, 0).flatten(1).sum(1)


def _shifted(norm: NormRead, c: Tensor, params: Params) -> list[tuple[str, Tensor]]:
    if norm.training or norm.bias is None:
        return []
    assert norm.std is not None
    gamma = params.get(norm.weight or "", torch.ones_like(c)) if norm.weight else 1.0
    return [(norm.bias, -gamma * c / norm.std)]


def _can_mix(segment: Segment, params: Params) -> bool:
    makers, readers = segment.role("out"), segment.role("in")
    matrices = all(not m.gain and (m.additive or params[m.name].ndim > 1) for m in makers
                   if m.name in params)
    free = segment.scalable and segment.linear and not segment.norms and segment.units > 1
    both = bool(makers and readers) and _trainable(makers + readers, params)
    return free and both and matrices and not any(m.gain for m in readers)


def _linear_maps(segment: Segment, params: Params) -> Family:
    heads, size = segment.heads, segment.units // segment.heads
    makers, readers = unique(segment.role("out")), unique(segment.role("in"))

    def build(c: Tensor) -> Params:  # [heads, size, size]
        parts = [(m.name, _mix(c, m, params[m.name])) for m in makers]
        return total(parts + [(m.name, -_mix(c.mT, m, params[m.name])) for m in readers])

    return Family("linear_maps", where([*segment.members]), (heads, size, size), build)


def _mix(c: Tensor, member: Member, p: Tensor) -> Tensor:
    """Units of one head replaced by combinations of them: c ``[heads, size, size]``."""
    heads, size, _ = c.shape
    blocks = member.blocks(p)
    return member.place((c @ blocks.reshape(heads, size, -1)).reshape(blocks.shape), p)


def _normalized(segment: Segment, params: Params) -> Iterator[Family]:
    """LayerNorm takes off the mean over units and, up to its eps, their common scale."""
    kinds = {norm.kind for norm in segment.norms}
    makers = [m for m in unique(segment.role("out")) if m.name in params]
    label = where([*segment.members])
    for m in makers if "layer" in kinds else ():

        def build(c: Tensor, m: Member = m) -> Params:
            return {m.name: m.place(c.expand(m.units, len(c)), params[m.name])}

        yield Family("layernorm_shift", label, (m.blocks(params[m.name]).shape[1],), build)
    if kinds & {"layer", "rms"} and makers:

        def scaled(c: Tensor) -> Params:
            ones = torch.ones_like(params[makers[0].name].flatten()[:1]).expand(segment.units)
            return total([(m.name, c * along(ones, m, params[m.name]) * params[m.name]) for m in makers])

        yield Family("layernorm_scale", label, (1,), scaled)


def _attention(attention: Attention, params: Params) -> Iterator[Family]:
    query = unique([m for m in attention.query if m.role == "out"])
    key = unique([m for m in attention.key if m.role == "out"])
    if not query or not key:
        return
    label, heads = where(key), attention.heads
    size = key[0].units // heads
    if _trainable(query + key, params):

        def build(c: Tensor) -> Params:  # [heads, size, size]
            parts = [(m.name, _mix(c, m, params[m.name])) for m in query]
            return total(parts + [(m.name, -_mix(c.mT, m, params[m.name])) for m in key])

        yield Family("attention_query_key", label, (heads, size, size), build)
    for m in key:
        if m.additive and m.name in params:

            def shift(c: Tensor, m: Member = m) -> Params:
                return {m.name: along(c, m, params[m.name])}

            yield Family("attention_key_bias", label, (m.units,), shift)
