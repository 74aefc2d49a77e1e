"""Elementwise functions: what they leave of a unit's scale, and of its order."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsmap.assess.wiring.layers import gain
from fsmap.assess.wiring.tracer import Tracer, Units, View, function_name
from fsmap.assess.wiring.units import Member


def same(tracer: Tracer, func: Any, out: Any, *args: Any, **kwargs: Any) -> None:
    """Linear in each unit."""
    _pass(tracer, func, out, args[0], linear=True)


def homogeneous(tracer: Tracer, func: Any, out: Any, *args: Any, **kwargs: Any) -> None:
    """f(cx) = c f(x) for c > 0."""
    _pass(tracer, func, out, args[0], linear=False)


def prelu(tracer: Tracer, func: Any, out: Tensor, input: Tensor, weight: Tensor) -> None:
    """Homogeneous, with a slope that belongs to the unit."""
    _pass(tracer, func, out, input, linear=False)
    units, view = tracer.units(out), tracer.view(weight)
    if units is None:
        tracer.close("prelu", weight, "prelu on something that carries no units")
    elif view is not None and weight.numel() > 1:
        tracer.member(units.node, Member(view.name, 0, "own", weight.numel()))


def smooth(tracer: Tracer, func: Any, out: Any, *args: Any, **kwargs: Any) -> None:
    """Elementwise: the order survives, the scale does not."""
    units = tracer.units(args[0])
    if tracer.view(args[0]) is not None:
        tracer.close(function_name(func), args[0])
    if units is None:
        return
    tracer.facts.unscalable.add(units.node)
    node = tracer.make(out, units.dims, tracer.facts.units[units.node])
    tracer.tracked[out] = units._replace(node=node)
    tracer.facts.unscalable.add(node)
    tracer.facts.same_order(units.node, node)
    tracer.facts.through.append((node, function_name(func), False))


def _pass(tracer: Tracer, func: Any, out: Any, x: Any, *, linear: bool) -> None:
    units = tracer.units(x)
    if tracer.view(x) is not None and out is not x:
        tracer.close(function_name(func), x)
    if units is None:
        return
    tracer.tracked[out[0] if isinstance(out, tuple) else out] = units
    tracer.facts.through.append((units.node, function_name(func), linear))


def add(tracer: Tracer, func: Any, out: Tensor, a: Any, b: Any, **kwargs: Any) -> None:
    """Sums tie scales: of two sets of units, of units and a bias; a constant ends them."""
    if _is_number(a) or _is_number(b):
        _with_number(tracer, func, out, b if _is_number(a) else a, keeps_scale=False)
    elif tracer.units(a) and tracer.units(b):
        _meet(tracer, func, out, a, b, scale=True)
    elif tracer.units(a) or tracer.units(b):
        x, other = (a, b) if tracer.units(a) else (b, a)
        view, units = tracer.view(other), tracer.tracked[x]
        dim = _aligned(units, x, other, out)
        plain = function_name(func) == "add" and not kwargs
        if view is not None and dim is not None:
            flat = other.numel() == other.shape[dim]
            member = _member(tracer, units, view, dim)
            tracer.member(units.node, member._replace(additive=flat and plain))
            tracer.tracked[out] = _shifted(units, x, out)
        else:
            _constant(tracer, func, out, x, other, keeps_scale=False)
    else:
        tracer.close(function_name(func), [t for t in (a, b) if tracer.view(t) is not None])


def multiply(tracer: Tracer, func: Any, out: Tensor, a: Any, b: Any, **kwargs: Any) -> None:
    """A number keeps all, a parameter per unit is a gain, other units share the order only."""
    if _is_number(b) or (_is_number(a) and function_name(func) == "mul"):
        _with_number(tracer, func, out, b if _is_number(a) else a, keeps_scale=True)
    elif tracer.units(a) and tracer.units(b):
        _meet(tracer, func, out, a, b, scale=False)
    elif tracer.units(a) or (tracer.units(b) and function_name(func) == "mul"):
        x, other = (a, b) if tracer.units(a) else (b, a)
        view, units = tracer.view(other), tracer.tracked[x]
        dim = _aligned(units, x, other, out)
        single = len(units.dims) == 1 and units.block == 1
        product = function_name(func) == "mul"
        if view is not None and dim is not None and single and product and x.ndim == out.ndim:
            gain(tracer, out, x, units.dims[0], _member(tracer, units, view, dim))
        else:
            _constant(tracer, func, out, x, other, keeps_scale=True)
    else:
        tracer.close(function_name(func), (a, b))


def _is_number(x: Any) -> bool:
    return not isinstance(x, Tensor)


def _with_number(tracer: Tracer, func: Any, out: Tensor, x: Any, *, keeps_scale: bool) -> None:
    units = tracer.units(x)
    if tracer.view(x) is not None:
        tracer.close(function_name(func), x)
    if units is not None:
        tracer.tracked[out] = units
        if not keeps_scale:
            tracer.facts.unscalable.add(units.node)


def _meet(tracer: Tracer, func: Any, out: Tensor, a: Tensor, b: Tensor, *, scale: bool) -> None:
    """Two tensors with units, entry by entry."""
    left, right = (_shifted(tracer.tracked[t], t, out) for t in (a, b))
    count = [tracer.facts.units[u.node] for u in (left, right)]
    if left[1:] != right[1:] or count[0] != count[1]:
        tracer.close(function_name(func), (a, b), f"{function_name(func)}: of different units")
    elif scale:
        tracer.facts.same_scale(left.node, right.node)
        tracer.tracked[out] = left
    else:
        _product(tracer, out, left, right)


def _product(tracer: Tracer, out: Tensor, left: Units, right: Units) -> None:
    """A gate: where the scale of one factor is fixed, that of the other is the product's."""
    facts = tracer.facts
    facts.same_order(left.node, right.node)
    for fixed, free in ((left, right), (right, left)):
        if fixed.node in facts.unscalable and free.node not in facts.unscalable:
            tracer.tracked[out] = free
            facts.through.append((free.node, "mul", False))
            return
    node = tracer.make(out, left.dims, facts.units[left.node])
    tracer.tracked[out] = left._replace(node=node)
    facts.same_order(left.node, node)
    facts.unscalable |= {left.node, right.node, node}


def _constant(
    tracer: Tracer, func: Any, out: Tensor, x: Tensor, other: Tensor, *, keeps_scale: bool
) -> None:
    """Units meet a tensor that has none: data, a mask, a buffer, one number."""
    units = tracer.tracked[x]
    if tracer.view(other) is not None:
        tracer.close(function_name(func), other, f"{function_name(func)}: with a parameter")
    varies = _aligned(units, x, other, out) is not None
    if varies or not keeps_scale:
        tracer.facts.unscalable.add(units.node)
    if varies:
        tracer.facts.pinned.add(units.node)
    tracer.tracked[out] = _shifted(units, x, out)


def _aligned(units: Units, x: Tensor, other: Tensor, out: Tensor) -> int | None:
    """The dimension of ``other`` that meets the units, if it has more than one entry there."""
    last = units.dims[-1] + out.ndim - x.ndim - (out.ndim - other.ndim)
    first = units.dims[0] + out.ndim - x.ndim - (out.ndim - other.ndim)
    sizes = [other.shape[d] for d in range(max(first, 0), last + 1)]
    return last if any(size > 1 for size in sizes) else None


def _shifted(units: Units, x: Tensor, out: Tensor) -> Units:
    return units._replace(dims=tuple(d + out.ndim - x.ndim for d in units.dims))


def _member(tracer: Tracer, units: Units, view: View, dim: int) -> Member:
    count = tracer.facts.units[units.node]
    return Member(view.name, view.order[dim], "out", count, block=units.block)
