r"""Null directions of known kinds: equal units, dead units, scale, BatchNorm (Theorem 2, B.6).

One forward pass with hooks records the order in which Linear, Conv and normalization layers are
called. The layer that is called next is taken to read the units of the layer before. Candidates
for null directions v follow from that, and each is checked against the Jacobian, J v = 0: a
candidate from a wrong guess (residual sums, branches) is dropped.

* Equal units: if exchanging units i and j (S) leaves f unchanged and Sθ = θ, then J(S − I) = 0.
* Scale: incoming weights times (1 + c), outgoing weights times (1 − c) for a homogeneous
  activation.
* BatchNorm with running statistics: incoming weights times (1 + c), its weight times (1 − c), its
  bias minus cγμ/σ. In training mode the factor cancels up to eps, and its weight takes the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fsmap.doctor.spectrum import LARGEST_SVD, Spectrum, span
from fsmap.functional import Functional, count, ravel, unravel
from fsmap.types import Inputs, Params

KINDS = {
    "twin_units": "equal incoming and outgoing weights: a fixed point of their exchange",
    "twin_inputs": "equal incoming weights: outgoing weights can be traded",
    "silent_units": "zero on all points: incoming and outgoing weights have no effect",
    "constant_units": "constant on all points: outgoing weights can be traded with a bias",
    "unread_units": "zero outgoing weights: incoming weights have no effect",
    "scale": "homogeneous activation: a factor can move from a layer to the next",
    "batchnorm_scale": "scale of weights before a BatchNorm",
    "batchnorm_bias": "bias before a BatchNorm",
    "no_effect": "parameters without effect on any point",
}
# Kinds that hold at special parameters only, where FS-MAP without jitter has infinite density.
PATHOLOGICAL = ("twin_units", "twin_inputs", "silent_units", "constant_units", "unread_units")
ON_POINTS = ("silent_units", "constant_units")  # kinds that a few points show by chance
CONTINUOUS = ("scale", "batchnorm_scale", "batchnorm_bias")  # kinds that hold for every θ

EQUAL = 1e-12  # relative distance up to which two units are equal
QUIET = 1e-13  # range of a unit, relative to its layer, up to which it is constant


class Slot(NamedTuple):
    """A parameter cut into slices, one for each unit along an axis."""

    name: str
    axis: int
    block: int = 1  # consecutive entries per unit, for flattened feature maps

    def rows(self, p: Tensor) -> Tensor:
        """``[units, entries]``."""
        front = p.movedim(self.axis, 0)
        return front.reshape(len(front) // self.block, -1)

    def full(self, rows: Tensor, p: Tensor) -> Tensor:
        """The inverse of :meth:`rows`."""
        return rows.reshape(p.movedim(self.axis, 0).shape).movedim(0, self.axis)


class Layer(NamedTuple):
    """A Linear, Conv or normalization layer, and its input on the points."""

    name: str
    module: nn.Module
    weight: str | None  # name of the parameter, if it is one
    bias: str | None
    out_axis: int  # of the weight
    in_axis: int | None  # of the weight; None for a normalization
    units: int  # outputs
    low: Tensor  # [inputs]
    high: Tensor  # [inputs]
    variance: Tensor  # [inputs]

    def slots(self) -> list[Slot]:
        """Weight and bias by output."""
        named = ((self.weight, self.out_axis), (self.bias, 0))
        return [Slot(name, axis) for name, axis in named if name is not None]


class Space(NamedTuple):
    """The units between two layers."""

    where: str  # "layer → reader", by name
    layer: Layer
    norms: list[Layer]
    reader: Layer | None
    makers: list[Slot]  # what computes the units
    readers: list[Slot]  # the weight that reads them


class Family(NamedTuple):
    """Directions v, linear in coefficients, with the claim J v = 0."""

    kind: str
    where: str
    shape: tuple[int, ...]  # of the coefficients
    build: Callable[[Tensor], Params]  # missing names are zero
    units: tuple[int, ...] = ()


class Finding(NamedTuple):
    """A family that holds: null directions of one kind at one place."""

    kind: str
    where: str
    units: tuple[int, ...]
    directions: int  # null directions it implies
    adds: int | None  # those that no finding above it explains; None: not computed
    residual: float  # largest ‖Jv‖/(‖v‖σ_max)
    pathological: bool  # at special parameters only: unjittered FS-MAP has infinite density there
    text: str


def record(f: Functional, params: Params, x: Inputs) -> list[Space]:
    """The units of a module, from the order in which a pass over ``x`` calls its layers."""
    names = {id(p): name for name, p in f.module.named_parameters()}
    paths = {module: path for path, module in f.module.named_modules()}
    kinds = nn.Linear, _ConvNd, _NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm
    layers = [m for m in paths if isinstance(m, kinds) and getattr(m, "groups", 1) == 1]
    # a functional pass replaces the parameters that hooks see
    original: dict[nn.Module, dict[str, Any]] = {m: dict(m._parameters) for m in layers}
    calls: list[Layer] = []

    def hook(module: nn.Module, args: Any) -> None:
        if not args or not isinstance(args[0], Tensor) or args[0].ndim < 2:
            return
        axis = -1 if isinstance(module, nn.Linear | nn.LayerNorm | nn.RMSNorm) else 1
        out_axis, in_axis = (1, 0) if isinstance(module, _ConvTransposeNd) else (0, 1)
        each = args[0].movedim(axis, 0).flatten(1)  # [inputs, everything else]
        norm, weight = not isinstance(module, nn.Linear | _ConvNd), module._parameters.get("weight")
        calls.append(
            Layer(
                name=paths[module],
                module=module,
                weight=names.get(id(original[module].get("weight"))),
                bias=names.get(id(original[module].get("bias"))),
                out_axis=out_axis,
                in_axis=None if norm else in_axis,
                units=len(each) if norm or weight is None else weight.shape[out_axis],
                low=each.amin(1),
                high=each.amax(1),
                variance=each.var(1, correction=0),
            )
        )

    with ExitStack() as hooks, torch.no_grad():
        for m in layers:
            hooks.enter_context(m.register_forward_pre_hook(hook))
        f(params, x)
    return list(_spaces(calls))


def _spaces(calls: list[Layer]) -> Iterator[Space]:
    """A layer, the normalizations after it, and the next Linear or Conv layer if it fits."""
    after = 0
    for i, layer in enumerate(calls):
        if i < after:
            continue  # a normalization of the layer before
        after = i + 1
        while after < len(calls) and calls[after].in_axis is None:
            if calls[after].units != layer.units:
                break
            after += 1
        where, readers, reader = layer.name, [], calls[after] if after < len(calls) else None
        if reader is not None and reader.in_axis is not None and reader.weight is not None:
            block, rest = divmod(len(reader.low), layer.units)
            if rest == 0 and (block == 1 or isinstance(reader.module, nn.Linear)):
                readers = [Slot(reader.weight, reader.in_axis, block)]
                where += f" → {reader.name}"
        makers = [slot for part in calls[i:after] for slot in part.slots()]
        norms, fits = calls[i + 1 : after], reader if readers else None
        yield Space(where, layer, norms, fits, makers, readers)


def families(
    spaces: list[Space], params: Params, frozen: Params, found: Spectrum
) -> Iterator[Family]:
    """All candidates, unchecked."""
    everything = params | frozen
    for space in spaces:
        yield from _twins(space, params, everything)
        yield from _idle(space, params, everything)
        yield from _scale(space, everything)
        yield from _batchnorm(space, everything)
    size = found.probes.abs().amax(0)
    for name, zero in unravel(size <= QUIET * size.max(), params).items():
        if bool(zero.all()) or (found.exact and bool(zero.any())):
            entries, p = zero.flatten().nonzero().flatten(), params[name]

            def build(c: Tensor, entries: Tensor = entries, p: Tensor = p, n: str = name) -> Params:
                return {n: torch.zeros_like(p).flatten().scatter(0, entries, c).reshape(p.shape)}

            yield Family("no_effect", name, (len(entries),), build)


def _mixed(
    kind: str, space: Space, units: tuple[int, ...], mix: Tensor, slots: list[Slot], params: Params
) -> Iterator[Family]:
    """Every entry of the units changes, in the proportions of a column of ``mix``."""
    slots = [slot for slot in slots if slot.name in params]
    widths = [slot.rows(params[slot.name]).shape[1] for slot in slots]
    index = torch.tensor(units, device=mix.device)

    def build(c: Tensor) -> Params:  # [columns of mix, entries of a unit]
        out: Params = {}
        for slot, piece in zip(slots, (mix @ c).split(widths, dim=1), strict=True):
            p = params[slot.name]
            rows = torch.zeros_like(slot.rows(p)).index_add(0, index, piece)
            out[slot.name] = slot.full(rows, p) + out.get(slot.name, 0.0)
        return out

    if units and slots:
        yield Family(kind, space.where, (mix.shape[1], sum(widths)), build, units)


def _twins(space: Space, params: Params, everything: Params) -> Iterator[Family]:
    slots = space.makers + space.readers
    if not space.makers or space.layer.units < 2:
        return
    norms = [n.module for n in space.norms if isinstance(n.module, _BatchNorm)]
    held = [t[:, None] for n in norms for t in (n.running_mean, n.running_var) if t is not None]
    full = torch.cat([_features(slots, everything), *held], dim=1)  # [units, entries]
    incoming = torch.cat([_features(space.makers, everything), *held], dim=1)
    groups: dict[int, list[int]] = {}
    taken = set()
    for i, j in _equal(full):
        if j not in taken:
            groups.setdefault(i, [i]).append(j)
            taken.add(j)
    for group in groups.values():
        mix = torch.cat([-full.new_ones(1, len(group) - 1), torch.eye(len(group) - 1).to(full)])
        yield from _mixed("twin_units", space, tuple(group), mix, slots, params)
    if not space.readers:
        return
    outgoing = _features(space.readers, everything)
    for sign in (1.0, -1.0):
        for i, j in _equal(incoming, sign):
            if sign > 0 and _distance(full[i], full[j]) <= EQUAL:
                continue  # twin units
            trade = full.new_tensor([[1.0], [-sign]])
            yield from _mixed("twin_inputs", space, (i, j), trade, space.readers, params)
            a, b = outgoing[i], outgoing[j]
            same = (a @ b).sign()
            if _distance(a * b.norm(), same * b * a.norm()) <= EQUAL:  # collinear outgoing weights
                balance = torch.stack([same * b.norm(), -a.norm()])[:, None]
                yield from _mixed("twin_inputs", space, (i, j), balance, space.makers, params)


def _idle(space: Space, params: Params, everything: Params) -> Iterator[Family]:
    """Units that are zero or constant on the points, and units with zero outgoing weights."""
    reader, readers, makers = space.reader, space.readers, space.makers
    if reader is None:
        return
    size = torch.maximum(reader.low.abs(), reader.high.abs())
    quiet, n = QUIET * size.max(), space.layer.units
    silent = (size <= quiet).reshape(n, -1).all(1)
    constant = (reader.high - reader.low <= quiet).reshape(n, -1).all(1) & ~silent
    unread = (_features(readers, everything) == 0).all(1) & ~silent & ~constant
    for kind, which, slots in (
        ("silent_units", silent, makers + readers),
        ("constant_units", constant, makers),
        ("unread_units", unread, makers),
    ):
        units = tuple(which.nonzero().flatten().tolist())
        yield from _mixed(kind, space, units, torch.eye(len(units)).to(size), slots, params)
    units, axis = tuple(constant.nonzero().flatten().tolist()), reader.in_axis or 0
    each = torch.eye(len(units)).to(size)
    for family in _mixed("constant_units", space, units, each, readers, params):

        def build(c: Tensor, moved: Callable[[Tensor], Params] = family.build) -> Params:
            ((name, change),) = moved(c).items()  # the next bias changes by −value·change
            effect = (change.movedim(axis, -1) * reader.high).movedim(-1, axis)
            total = effect.transpose(0, reader.out_axis).flatten(1).sum(1)
            return {name: change, reader.bias or "": -total}

        yield family._replace(build=build)


def _scale(space: Space, everything: Params) -> Iterator[Family]:
    makers, readers = (space.norms or [space.layer])[-1].slots(), space.readers

    def build(c: Tensor) -> Params:  # [units]
        return _scaled([(s, c) for s in makers] + [(s, -c) for s in readers], everything)

    if makers and readers:
        yield Family("scale", space.where, (space.layer.units,), build)


def _scaled(slots: list[tuple[Slot, Tensor]], everything: Params) -> Params:
    """The change if each unit of a slot is multiplied by one plus its coefficient."""
    out: Params = {}
    for slot, c in slots:
        p = everything[slot.name]
        out[slot.name] = slot.full(c[:, None] * slot.rows(p), p) + out.get(slot.name, 0.0)
    return out


def _batchnorm(space: Space, everything: Params) -> Iterator[Family]:
    """Scale and bias of a layer before a BatchNorm."""
    norm, layer = space.norms[0] if space.norms else space.layer, space.layer
    module, makers = norm.module, layer.slots()
    if norm is layer or not isinstance(module, _BatchNorm) or not makers:
        return
    mean, var = module.running_mean, module.running_var
    if module.training or mean is None or var is None:  # the statistics are those of the points
        of_weight = module.eps / (norm.variance + module.eps)
        of_bias = of_shift = torch.zeros_like(of_weight)
    else:
        of_shift = (var + module.eps).rsqrt()
        of_weight, of_bias = torch.ones_like(of_shift), mean * of_shift
    gamma = everything.get(norm.weight or "", torch.ones_like(norm.low))
    weight, bias, own = norm.weight or "", norm.bias or "", layer.bias

    def scaled(c: Tensor) -> Params:
        out = _scaled([(slot, c) for slot in makers], everything)
        return out | {weight: -of_weight * c * gamma, bias: -of_bias * c * gamma}

    def shifted(c: Tensor) -> Params:
        return {own or "": c, bias: -of_shift * c * gamma}

    yield Family("batchnorm_scale", space.where, (layer.units,), scaled)
    if own is not None:
        yield Family("batchnorm_bias", space.where, (layer.units,), shifted)


def check(
    candidates: Iterator[Family], params: Params, found: Spectrum
) -> tuple[tuple[Finding, ...], Tensor | None]:
    """Findings in the order of ``KINDS``, and their null directions ``[m, P]`` if P is small."""
    kept = [_check(family, params, found) for family in candidates]
    kept = [(f, V) for f, V in kept if f.directions]
    kept.sort(key=lambda pair: list(KINDS).index(pair[0].kind))
    if count(params) > LARGEST_SVD:
        return tuple(f for f, _ in kept), None
    findings, null = [], found.null
    basis = torch.zeros(0, count(params)).to(found.probes)
    known = torch.cat([basis, *(V for _, V in kept)])
    basis = basis if null is None else basis @ null.mT
    for finding, V in kept:
        new = V if null is None else V @ null.mT
        for _ in range(2):
            new = new - (new @ basis.mT) @ basis
        basis = torch.cat([basis, span(new)])
        findings.append(finding._replace(adds=len(span(new))))
    return tuple(f for f in findings if f.kind != "no_effect" or f.adds), known


def _check(family: Family, params: Params, found: Spectrum) -> tuple[Finding, Tensor]:
    """The finding and its null directions; for many parameters by two random combinations."""
    complete, size = count(params) <= LARGEST_SVD, math.prod(family.shape)
    like = next(iter(params.values()))
    generator = torch.Generator().manual_seed(0)
    c = torch.eye(size) if complete else torch.randn(2, size, generator=generator)

    def one(row: Tensor) -> Tensor:
        given = family.build(row.reshape(family.shape))
        return ravel({n: given.get(n, torch.zeros_like(p)) for n, p in params.items()})

    V = vmap(one)(c.to(like)).double()  # [m, P]
    norms = V.norm(dim=1, keepdim=True)
    V = (V / norms.clamp_min(1e-300))[norms[:, 0] > 0]  # the scale of a zero unit is no direction
    weight = 1.0 if found.exact else 1 / len(found.probes)
    squares = weight * (V @ found.probes.mT).square().sum(1)
    residual = (squares / found.largest.value.clamp_min(1e-300)).sqrt()
    null = residual <= found.resolution
    if not complete or family.kind in CONTINUOUS:  # as a whole or not at all
        null = null & bool(null.all())
    number = int(null.sum()) if complete else size * bool(null.any())
    worst, special = float(residual[null].max()) if number else 0.0, family.kind in PATHOLOGICAL
    about = family.kind, family.where, family.units
    return Finding(*about, number, None, worst, special, KINDS[family.kind]), V[null]


def _features(slots: list[Slot], everything: Params) -> Tensor:
    """All entries that belong to a unit: ``[units, entries]``."""
    return torch.cat([slot.rows(everything[slot.name].detach()) for slot in slots], dim=1)


def _distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖/(‖a‖ + ‖b‖)."""
    return float((a - b).norm() / (a.norm() + b.norm()).clamp_min(1e-300))


def _equal(features: Tensor, sign: float = 1.0) -> list[tuple[int, int]]:
    """Pairs i < j of units that are not zero and equal, or opposite if ``sign`` is −1."""
    squares = features.square().sum(1)
    apart = squares[:, None] + squares - 2 * sign * features @ features.mT  # accurate to 1e-7
    near = apart.clamp_min(0).sqrt() <= 1e-6 * (squares.sqrt()[:, None] + squares.sqrt())
    near = near.triu(1) & (squares > 0) & (squares > 0)[:, None]
    pairs = near.nonzero().tolist()
    return [(i, j) for i, j in pairs if _distance(features[i], sign * features[j]) <= EQUAL]
