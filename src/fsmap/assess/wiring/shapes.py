"""Reshapes, transposes, reductions, selections: where units are afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsmap.assess.wiring.tracer import Tracer, Units, View, function_name, reshaped


def reshape(tracer: Tracer, func: Any, out: Tensor, *args: Any, **kwargs: Any) -> None:
    """Units keep together, or they are lost."""
    units = tracer.units(args[0])
    _reshape_parameter(tracer, function_name(func), out, args[0])
    if units is None:
        return
    after = reshaped(units, tracer.facts.units[units.node], args[0].shape, out.shape)
    if after is None:
        name = function_name(func)
        tracer.close(name, args[0], f"{name}: mixes units with other dimensions")
    else:
        tracer.tracked[out] = after


def _reshape_parameter(tracer: Tracer, name: str, out: Tensor, p: Tensor) -> None:
    """A vector may be made ready to be broadcast; other parameters are not followed."""
    view = tracer.view(p)
    if view is None:
        return
    long = [i for i, size in enumerate(out.shape) if size > 1]
    if p.ndim == 1 and len(long) <= 1 and out.numel() == p.numel():
        tracer.views[out] = View(view.name, tuple(0 if i in long else -1 for i in range(out.ndim)))
    else:
        tracer.close(name, p)


def transpose(tracer: Tracer, func: Any, out: Tensor, *args: Any, **kwargs: Any) -> None:
    """Dimensions change places: seen on a small tensor all of whose sizes differ."""
    x = args[0]
    units, view = tracer.units(x), tracer.view(x)
    if units is None and view is None:
        return
    order = [
        size - 2 for size in func(torch.empty(*range(2, 2 + x.ndim)), *args[1:], **kwargs).shape
    ]
    if view is not None:
        tracer.views[out] = View(view.name, tuple(view.order[i] for i in order))
    if units is not None:
        tracer.tracked[out] = units._replace(dims=tuple(order.index(d) for d in units.dims))


def reduce(tracer: Tracer, func: Any, out: Any, *args: Any, **kwargs: Any) -> None:
    """Means and maxima: over other dimensions units stay, over units they end."""
    x, name = args[0], function_name(func)
    units = tracer.units(x)
    if tracer.view(x) is not None:
        tracer.close(name, x)
    if units is None:
        return
    given = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(given, Tensor) or (name in ("max", "min") and given is None and len(args) > 1):
        tracer.close(name, (args, kwargs))
        return
    gone = {d % x.ndim for d in _dims(given, x.ndim)}
    if gone & set(units.dims):
        tracer.facts.unscalable.add(units.node)
        if not set(units.dims) <= gone:
            tracer.facts.pin(units.node)
        return
    kept = [d for d in range(x.ndim) if d not in gone]
    value = out[0] if isinstance(out, tuple) else out
    dims = units.dims if value.ndim == x.ndim else tuple(kept.index(d) for d in units.dims)
    tracer.tracked[value] = units._replace(dims=dims)
    linear = name in ("mean", "sum")
    tracer.facts.through.append((units.node, name, linear))


def _dims(given: Any, ndim: int) -> list[int]:
    if given is None:
        return list(range(ndim))
    return [given] if isinstance(given, int) else list(given)


def split(tracer: Tracer, func: Any, out: Any, *args: Any, **kwargs: Any) -> None:
    """Parts of a tensor: along other dimensions units stay, along theirs they become several."""
    x, name = args[0], function_name(func)
    units = tracer.units(x)
    if tracer.view(x) is not None:
        tracer.close(name, x)
    if units is None:
        return
    place = 1 if name == "unbind" else 2
    dim = kwargs.get("dim", args[place] if len(args) > place else 0) % x.ndim
    if dim not in units.dims:
        shift = int(name == "unbind")
        dims = tuple(d - shift * (d > dim) for d in units.dims)
        for part in out:
            tracer.tracked[part] = units._replace(dims=dims)
    elif units.dims == (dim,) and units.block == 1 and name != "unbind":
        start = 0
        for part in out:
            child = tracer.facts.split(units.node, start, part.shape[dim])
            tracer.tracked[part] = Units(child, (dim,))
            start += part.shape[dim]
        tracer.facts.pin(units.node)
    else:
        tracer.close(name, x)


def join(tracer: Tracer, func: Any, out: Tensor, tensors: Any, dim: int = 0, **kwargs: Any) -> None:
    """Concatenation along another dimension than the units'."""
    found = [tracer.units(t) for t in tensors]
    first = found[0] if found else None
    if not any(found) and not any(tracer.view(t) for t in tensors):
        return
    alike = first and all(u and (u.dims, u.block) == (first.dims, first.block) for u in found)
    if not alike or first is None or dim % out.ndim in first.dims:
        tracer.close(function_name(func), tensors)
        return
    for units in found:
        if units is not None:
            tracer.facts.same_scale(first.node, units.node)
    tracer.tracked[out] = first


def select(tracer: Tracer, func: Any, out: Tensor, x: Tensor, index: Any) -> None:
    """Indexing that leaves the units alone."""
    units = tracer.units(x)
    _reshape_parameter(tracer, "indexing", out, x)
    if units is None:
        return
    index = index if isinstance(index, tuple) else (index,)
    plain = all(i is None or i is Ellipsis or isinstance(i, int | slice) for i in index)
    used = sum(i is not None and i is not Ellipsis for i in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    where: dict[int, int] = {}  # old dimension -> new one
    old = new = 0
    for i in index if plain else ():
        if i is Ellipsis:
            for _ in range(x.ndim - used):
                where[old] = new
                old, new = old + 1, new + 1
        elif i is None:
            new += 1
        else:
            whole = isinstance(i, slice) and i == slice(None)
            if isinstance(i, slice) and (whole or old not in units.dims):
                where[old] = new
            old, new = old + 1, new + isinstance(i, slice)
    if all(d in where for d in units.dims):
        tracer.tracked[out] = units._replace(dims=tuple(where[d] for d in units.dims))
    else:
        tracer.close("indexing", x, "indexing picks some of the units")


def expand(tracer: Tracer, func: Any, out: Tensor, *args: Any, **kwargs: Any) -> None:
    """Broadcasting: dimensions are counted from the right."""
    x = args[0]
    units = tracer.units(x)
    if tracer.view(x) is not None:
        tracer.close(function_name(func), x)
    if units is not None:
        shift = out.ndim - x.ndim
        tracer.tracked[out] = units._replace(dims=tuple(d + shift for d in units.dims))
