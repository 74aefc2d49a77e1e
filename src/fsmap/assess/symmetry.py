r"""Parameter changes that leave the function alone for every θ, from the module's structure.

Every symmetry is a *family* of directions v in parameter space, a linear map from coefficients to
parameters, with the claim J v = 0. Nothing here looks at the Jacobian; :mod:`fsmap.assess.verify`
does, and drops what does not hold.

Continuous families (appendix B.6: singular for every θ, no pathological optimum; the
log-determinant becomes a pseudo-determinant):

* scale: makers of a unit times (1 + c), readers times (1 − c), where everything in between is
  positively homogeneous; through a BatchNorm that uses running statistics its weight takes the
  factor and its bias the rest, −cγμ/σ. In training mode the factor cancels, and the weight takes
  what eps leaves of it.
* bias shift: a bias moves by c, the next bias by −Wc, where everything in between is linear;
  through a BatchNorm in training mode nothing else moves.
* linear maps: makers times (I + C), readers times (I − C) between two linear maps with nothing in
  between, heads of attention among them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fsmap.assess import rotations, shifts
from fsmap.assess.families import SWITCHES, Family, trainable, unique
from fsmap.assess.wiring.facts import Wiring
from fsmap.assess.wiring.units import Attention, Member, NormRead, Segment, along, total, where
from fsmap.types import Params


def continuous(wiring: Wiring, params: Params, frozen: Params) -> Iterator[Family]:
    """The families that hold for every θ.

    Args:
        wiring: The module's units.
        params: Trainable parameters; a family that needs a frozen one is left out.
        frozen: The others.

    Yields:
        Families, unverified.
    """
    for segment in wiring.segments:
        if _can_mix(segment, params):
            yield _linear_maps(segment, params)
        else:
            yield from rotations.narrow_readers(segment, params, params | frozen)
            if _can_scale(segment, params):
                yield _scale(segment, params)
                yield from _always_active(segment, params)
        yield from shifts.of_biases(segment, params)
        yield from shifts.before_layernorm(segment, params)
    for attention in wiring.attentions:
        yield from _attention(attention, params)
    yield from rotations.under_layernorm(wiring, params)


def _can_scale(segment: Segment, params: Params) -> bool:
    makers, readers = segment.role("out"), segment.role("in")
    if not segment.scalable or not makers or not (readers or segment.norms):
        return False
    norms = all(n.training or (n.weight in params and n.bias in params) for n in segment.norms)
    return norms and trainable(makers + readers, params)


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
    gamma = params.get(norm.weight or "")
    if gamma is None or norm.weight is None or norm.std is None:
        return []
    if norm.mean is None:  # statistics of the points: only eps keeps the scale from cancelling
        return [(norm.weight, -c * gamma * norm.eps / norm.std.square())]
    assert norm.bias is not None
    return [(norm.weight, -c * gamma), (norm.bias, -c * gamma * norm.mean / norm.std)]


def _can_mix(segment: Segment, params: Params) -> bool:
    makers, readers = segment.role("out"), segment.role("in")
    matrices = all(
        not m.gain and (m.additive or params[m.name].ndim > 1) for m in makers if m.name in params
    )
    free = segment.scalable and segment.linear and not segment.norms and segment.units > 1
    both = bool(makers and readers) and trainable(makers + readers, params)
    return free and both and matrices and not any(m.gain for m in readers)


def _linear_maps(segment: Segment, params: Params) -> Family:
    heads, size = segment.heads, segment.units // segment.heads
    makers, readers = unique(segment.role("out")), unique(segment.role("in"))

    def build(c: Tensor) -> Params:  # [heads, size, size]
        parts = [(m.name, _mix(c, m, params[m.name])) for m in makers]
        return total(parts + [(m.name, -_mix(c.mT, m, params[m.name])) for m in readers])

    return Family("linear_maps", where([*segment.members]), (heads, size, size), build)


def _always_active(segment: Segment, params: Params) -> Iterator[Family]:
    """ReLU units that never switch off on these points mix among themselves, and shift."""
    if segment.level is None or segment.norms or not set(segment.through) <= SWITCHES:
        return
    units = (segment.level.low > 0).nonzero().flatten()
    makers, readers = unique(segment.role("out")), unique(segment.role("in"))
    if not len(units) or any(m.gain for m in makers + readers):
        return
    label, pick = where([*segment.members]), tuple(units.tolist())
    spread = torch.eye(segment.units).to(segment.level.low)[:, units]  # [n, active]
    if all(m.additive or params[m.name].ndim > 1 for m in makers):

        def mixed(c: Tensor) -> Params:  # [active, active]
            full = (spread @ c @ spread.mT)[None]
            parts = [(m.name, _mix(full, m, params[m.name])) for m in makers]
            return total(parts + [(m.name, -_mix(full.mT, m, params[m.name])) for m in readers])

        yield Family("linear_units", label, (len(units), len(units)), mixed, pick)
    for m in makers:
        if m.additive and all(r.bias in params for r in readers):

            def shifted(c: Tensor, m: Member = m) -> Params:
                full = spread @ c
                behind = [(r.bias or "", -shifts.through(full, r, params[r.name])) for r in readers]
                return total([(m.name, along(full, m, params[m.name])), *behind])

            yield Family("linear_units", label, (len(units),), shifted, pick)


def _mix(c: Tensor, member: Member, p: Tensor) -> Tensor:
    """Units of one head replaced by combinations of them: c ``[heads, size, size]``."""
    heads, size, _ = c.shape
    blocks = member.blocks(p)
    return member.place((c @ blocks.reshape(heads, size, -1)).reshape(blocks.shape), p)


def _attention(attention: Attention, params: Params) -> Iterator[Family]:
    query = unique([m for m in attention.query if m.role == "out"])
    key = unique([m for m in attention.key if m.role == "out"])
    if not query or not key:
        return
    label, heads = where(key), attention.heads
    size = key[0].units // heads
    if trainable(query + key, params):

        def build(c: Tensor) -> Params:  # [heads, size, size]
            parts = [(m.name, _mix(c, m, params[m.name])) for m in query]
            return total(parts + [(m.name, -_mix(c.mT, m, params[m.name])) for m in key])

        yield Family("attention_query_key", label, (heads, size, size), build)
    for m in key:
        if m.additive and m.name in params:

            def shift(c: Tensor, m: Member = m) -> Params:
                return {m.name: along(c, m, params[m.name])}

            yield Family("attention_key_bias", label, (m.units,), shift)
