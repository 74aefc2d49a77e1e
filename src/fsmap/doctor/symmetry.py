r"""Null directions that have a name: equal units, dead units, scale, BatchNorm (Theorem 2, B.6).

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
PATHOLOGICAL = ("twin_units", "twin_inputs", "silent_units", "constant_units", "unread_units")
"""Kinds that hold at special parameters only, where FS-MAP without jitter has infinite density."""

ON_POINTS = ("silent_units", "constant_units")
"""Kinds that a few points show by chance."""

EQUAL = 1e-12  # relative distance up to which two units are equal
NEAR = 1e-2  # and up to which they are reported as nearly equal
QUIET = 1e-13  # range of a unit, relative to its layer, up to which it is constant
NEARLY = 0.02  # ‖Jv‖ over its value for random signs in v: 1 for a typical v, 0 for a null vector


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
    made: int  # axis of the weight that belongs to the output
    read: int | None  # axis that belongs to the input; None for a normalization
    units: int  # outputs
    low: Tensor  # [inputs]
    high: Tensor  # [inputs]
    variance: Tensor  # [inputs]

    def slots(self) -> list[Slot]:
        """Weight and bias by output."""
        named = ((self.weight, self.made), (self.bias, 0))
        return [Slot(name, axis) for name, axis in named if name is not None]


class Space(NamedTuple):
    """The units between two layers."""

    layer: Layer
    norms: list[Layer]
    reader: Layer | None

    @property
    def where(self) -> str:
        """``layer → reader``, by name."""
        return self.layer.name + (f" → {self.reader.name}" if self.reader else "")

    def makers(self) -> list[Slot]:
        """Parameters that compute the units."""
        return [slot for layer in (self.layer, *self.norms) for slot in layer.slots()]

    def readers(self) -> list[Slot]:
        """The weight that reads the units."""
        if self.reader is None or self.reader.weight is None or self.reader.read is None:
            return []
        block = len(self.reader.low) // self.layer.units
        return [Slot(self.reader.weight, self.reader.read, block)]

    def statistics(self) -> list[Tensor]:
        """Running statistics of the units, which an exchange of units moves too."""
        norms = [n.module for n in self.norms if isinstance(n.module, _BatchNorm)]
        held = [t for n in norms for t in (n.running_mean, n.running_var)]
        return [t[:, None] for t in held if t is not None]


class Family(NamedTuple):
    """Directions v, linear in coefficients, with the claim J v = 0."""

    kind: str
    where: str
    shape: tuple[int, ...]  # of the coefficients
    build: Callable[[Tensor], Params]  # missing names are zero
    units: tuple[int, ...] = ()
    distance: float = 0.0  # to the fixed point, relative


class Finding(NamedTuple):
    """A family that holds: null directions of one kind at one place."""

    kind: str
    where: str
    units: tuple[int, ...]
    directions: int  # null directions it implies
    adds: int | None  # those that no finding above it explains; None: not computed
    residual: float  # largest ‖Jv‖/(‖v‖σ_max)
    nearly: bool  # not null, but close
    pathological: bool  # at special parameters only: unjittered FS-MAP has infinite density there
    distance: float  # relative distance to the fixed point
    text: str


def record(f: Functional, params: Params, x: Inputs) -> list[Space]:
    """The units of a module, from the order in which a pass over ``x`` calls its layers."""
    names = {id(p): name for name, p in f.module.named_parameters()}
    calls: list[Layer] = []
    hooks = []
    for path, module in f.module.named_modules():
        held = [names.get(id(module._parameters.get(key))) for key in ("weight", "bias")]
        hook = _hook(path, module, held, calls)
        if hook is not None:
            hooks.append(module.register_forward_pre_hook(hook))
    try:
        with torch.no_grad():
            f(params, x)
    finally:
        for handle in hooks:
            handle.remove()
    return list(_spaces(calls))


def _hook(
    path: str, module: nn.Module, held: list[str | None], calls: list[Layer]
) -> Callable[[nn.Module, Any], None] | None:
    """A hook that appends the layer to the calls; None for modules of other kinds."""
    made, read, axis = 0, None, 1
    if isinstance(module, nn.Linear):
        read, axis = 1, -1
    elif isinstance(module, _ConvNd) and module.groups == 1:
        made, read = (1, 0) if isinstance(module, _ConvTransposeNd) else (0, 1)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        axis = -1
    elif not isinstance(module, _NormBase | nn.GroupNorm):
        return None

    def hook(_: nn.Module, args: Any) -> None:
        if args and isinstance(args[0], Tensor) and args[0].ndim > 1:
            each = args[0].movedim(axis, 0).flatten(1)  # [inputs, everything else]
            weight = module._parameters.get("weight")
            units = len(each) if read is None or weight is None else weight.shape[made]
            level = each.amin(1), each.amax(1), each.var(1, correction=0)
            calls.append(Layer(path, module, held[0], held[1], made, read, units, *level))

    return hook


def _spaces(calls: list[Layer]) -> Iterator[Space]:
    """A layer, the normalizations after it, and the next Linear or Conv layer if it fits."""
    after = 0
    for i, layer in enumerate(calls):
        if i < after:
            continue  # a normalization of the layer before
        after = i + 1
        while after < len(calls) and calls[after].read is None:
            if calls[after].units != layer.units:
                break
            after += 1
        reader = calls[after] if after < len(calls) else None
        if reader is not None:
            flattened = isinstance(reader.module, nn.Linear) and len(reader.low) % layer.units == 0
            if reader.read is None or not (flattened or len(reader.low) == layer.units):
                reader = None
        yield Space(layer, calls[i + 1 : after], reader)


def families(
    spaces: list[Space], params: Params, frozen: Params, found: Spectrum
) -> Iterator[Family]:
    """All candidates, unchecked.

    Args:
        spaces: From :func:`record`.
        params: Trainable parameters.
        frozen: The other ones.
        found: For the columns of the Jacobian that are zero.

    Yields:
        Families.
    """
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
        out = {}
        for slot, piece in zip(slots, (mix @ c).split(widths, dim=1), strict=True):
            p = params[slot.name]
            rows = torch.zeros_like(slot.rows(p)).index_add(0, index, piece)
            out[slot.name] = slot.full(rows, p)
        return out

    if units and slots:
        yield Family(kind, space.where, (mix.shape[1], sum(widths)), build, units)


def _twins(space: Space, params: Params, everything: Params) -> Iterator[Family]:
    makers, readers = space.makers(), space.readers()
    if not makers or space.layer.units < 2:
        return
    incoming = _features(makers, space.statistics(), everything)
    full = _features(makers + readers, space.statistics(), everything)
    for group in _groups(full):
        mix = torch.cat([-full.new_ones(1, len(group) - 1), torch.eye(len(group) - 1).to(full)])
        yield from _mixed("twin_units", space, group, mix, makers + readers, params)
    for i, j, distance in _near_pairs(full):
        mix = full.new_tensor([[-1.0], [1.0]])
        for near in _mixed("twin_units", space, (i, j), mix, makers + readers, params):
            yield near._replace(distance=distance)
    for sign in (1.0, -1.0) if readers else ():
        outgoing = _features(readers, [], everything)
        for i, j in _equal_pairs(incoming, sign):
            if sign > 0 and distance_of(full[i], full[j]) <= EQUAL:
                continue  # twin units, reported above
            trade = full.new_tensor([[1.0], [-sign]])
            yield from _mixed("twin_inputs", space, (i, j), trade, readers, params)
            a, b = outgoing[i], outgoing[j]
            same = (a @ b).sign()
            if distance_of(a * b.norm(), same * b * a.norm()) <= EQUAL:  # collinear
                balance = torch.stack([same * b.norm(), -a.norm()])[:, None]
                yield from _mixed("twin_inputs", space, (i, j), balance, makers, params)


def _idle(space: Space, params: Params, everything: Params) -> Iterator[Family]:
    """Units that are zero or constant on the points, and units with zero outgoing weights."""
    reader, readers, makers = space.reader, space.readers(), space.makers()
    if reader is None or not readers:
        return
    size = torch.maximum(reader.low.abs(), reader.high.abs())
    quiet, n = QUIET * size.max(), space.layer.units
    silent = (size <= quiet).reshape(n, -1).all(1)
    constant = (reader.high - reader.low <= quiet).reshape(n, -1).all(1) & ~silent
    unread = (_features(readers, [], everything) == 0).all(1) & ~silent & ~constant
    for kind, which, slots in (
        ("silent_units", silent, makers + readers),
        ("constant_units", constant, makers),
        ("unread_units", unread, makers),
    ):
        units = tuple(which.nonzero().flatten().tolist())
        yield from _mixed(kind, space, units, torch.eye(len(units)).to(size), slots, params)
    units, read = tuple(constant.nonzero().flatten().tolist()), reader.read or 0
    each = torch.eye(len(units)).to(size)
    for family in _mixed("constant_units", space, units, each, readers, params):

        def build(c: Tensor, moved: Callable[[Tensor], Params] = family.build) -> Params:
            ((name, change),) = moved(c).items()  # the next bias changes by −value·change
            effect = (change.movedim(read, -1) * reader.high).movedim(-1, read)
            return {
                name: change,
                reader.bias or "": -effect.transpose(0, reader.made).flatten(1).sum(1),
            }

        yield family._replace(build=build)


def _scale(space: Space, everything: Params) -> Iterator[Family]:
    makers, readers = (space.norms or [space.layer])[-1].slots(), space.readers()

    def build(c: Tensor) -> Params:  # [units]
        out: Params = {}
        for slot, sign in [(s, 1) for s in makers] + [(s, -1) for s in readers]:
            p = everything[slot.name]
            moved = slot.full(sign * c[:, None] * slot.rows(p), p)
            out[slot.name] = out[slot.name] + moved if slot.name in out else moved
        return out

    if makers and readers:
        yield Family("scale", space.where, (space.layer.units,), build)


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
        out = {}
        for slot in makers:
            p = everything[slot.name]
            out[slot.name] = slot.full(c[:, None] * slot.rows(p), p)
        return out | {weight: -of_weight * c * gamma, bias: -of_bias * c * gamma}

    def shifted(c: Tensor) -> Params:
        return {own or "": c, bias: -of_shift * c * gamma}

    yield Family("batchnorm_scale", space.where, (layer.units,), scaled)
    if own is not None:
        yield Family("batchnorm_bias", space.where, (layer.units,), shifted)


def check(
    candidates: Iterator[Family], params: Params, found: Spectrum
) -> tuple[tuple[Finding, ...], Tensor | None]:
    """Check all candidates against the Jacobian, and drop those that are not at least nearly null.

    Up to ``LARGEST_SVD`` parameters every direction is checked, above that two random combinations
    of each family. A continuous symmetry holds for all units or not at all.

    Args:
        candidates: Families.
        params: Trainable parameters.
        found: Holds the rows of A, or random combinations of them.

    Returns:
        Findings in the order of ``KINDS``, and the null directions of all of them as unit vectors
        ``[m, P]`` if every direction was checked.
    """
    order = list(KINDS)
    kept = [_check(family, params, found) for family in candidates]
    kept = [(f, V) for f, V in kept if f.directions or f.nearly]
    kept.sort(key=lambda pair: order.index(pair[0].kind))
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
    return tuple(findings), known


def _check(family: Family, params: Params, found: Spectrum) -> tuple[Finding, Tensor]:
    """The finding and its null directions."""
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
    typical = weight * V.square() @ found.probes.square().sum(0)  # with random signs in v
    residual = (squares / found.largest.value.abs().clamp_min(1e-300)).sqrt()
    null = residual <= found.resolution
    if not complete or family.kind.startswith(("scale", "batchnorm")):  # as a whole or not at all
        null = null & bool(null.all())
    number = int(null.sum()) if complete else size * bool(null.any())
    nearly = not number and len(V) > 0 and bool((squares <= NEARLY**2 * typical).all())
    shown = residual[null] if number else residual
    finding = Finding(
        *(family.kind, family.where, family.units, size if nearly else number, None),
        *(float(shown.max()) if len(shown) else 0.0, nearly, family.kind in PATHOLOGICAL),
        *(family.distance, KINDS[family.kind]),
    )
    return finding, V[null]


def distance_of(a: Tensor, b: Tensor) -> float:
    """‖a − b‖/(‖a‖ + ‖b‖)."""
    return float((a - b).norm() / (a.norm() + b.norm()).clamp_min(1e-300))


def _features(slots: list[Slot], extra: list[Tensor], everything: Params) -> Tensor:
    """All entries that belong to a unit: ``[units, entries]``."""
    return torch.cat([*(s.rows(everything[s.name].detach()) for s in slots), *extra], dim=1)


def _distances(features: Tensor, sign: float = 1.0) -> Tensor:
    """Relative distances of all pairs, accurate to 1e-7; infinite on the diagonal."""
    squares = features.square().sum(1)
    apart = squares[:, None] + squares - 2 * sign * features @ features.mT
    norms = squares.sqrt()
    distances = apart.clamp_min(0).sqrt() / (norms[:, None] + norms).clamp_min(1e-300)
    return distances.fill_diagonal_(torch.inf)


def _equal_pairs(features: Tensor, sign: float = 1.0) -> list[tuple[int, int]]:
    """Pairs i < j of equal units that are not zero."""
    alive = features.abs().amax(1) > 0
    near = (_distances(features, sign) < 1e-6).triu() & alive & alive[:, None]
    return [
        (i, j)
        for i, j in near.nonzero().tolist()
        if distance_of(features[i], sign * features[j]) <= EQUAL
    ]


def _groups(features: Tensor) -> list[tuple[int, ...]]:
    """Sets of equal units."""
    home: dict[int, int] = {}
    for i, j in _equal_pairs(features):
        home.setdefault(j, home.setdefault(i, i))
    roots = sorted(set(home.values()))
    return [tuple(sorted(i for i, root in home.items() if root == r)) for r in roots]


def _near_pairs(features: Tensor) -> list[tuple[int, int, float]]:
    """Mutual nearest neighbors that are nearly equal, but not equal."""
    nearest = _distances(features).argmin(1).tolist()
    pairs = [(i, j) for i, j in enumerate(nearest) if i < j and nearest[j] == i]
    found = [(i, j, distance_of(features[i], features[j])) for i, j in pairs]
    return [pair for pair in found if EQUAL < pair[2] <= NEAR]
