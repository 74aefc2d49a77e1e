"""From a model and points to its Jacobian in factored form."""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fsmap.functional import NoiseReplay
from fsmap.linalg import points
from fsmap.linalg.factors import Block, Dense, Factors, Outer, joined
from fsmap.linalg.passes import FAILURES, detached, explain, flat, is_pointwise
from fsmap.linalg.second_order import SecondOrder, check_replaceable
from fsmap.linalg.uses import ChangedError, Survey, Watch, survey
from fsmap.types import Inputs, ModelFn, Params

CHUNK_BYTES = 2**28  # cotangents of the points that are differentiated together

_surveys: WeakKeyDictionary[Any, dict[Any, Survey]] = WeakKeyDictionary()


def linearize(f: ModelFn, params: Params, x: Inputs, *, chunk: int | None = None) -> Factors:
    """J in factored form, differentiable in ``params``.

    Args:
        f: Model function. Where points do not see each other (all but active BatchNorm and dropout)
            one forward and K reverse passes over the batch are made, otherwise S·K of them.
        params: Parameters.
        x: Points.
        chunk: Points (or, where points see each other, rows) differentiated at a time.

    Returns:
        The factors, and the outputs of the same pass.
    """
    check_replaceable(f, "reverse")
    if not torch.is_grad_enabled():  # some kernels then keep nothing for a derivative, such as LSTM
        chunk = chunk or _affordable(f, params, x)
        with torch.enable_grad():
            return linearize(f, detached(params), x, chunk=chunk)
    try:
        if not is_pointwise(f):
            return coupled(f, params, x, chunk=chunk)
        if chunk is None:
            return _alone(f, params, x)
        starts = range(0, points.count(x), chunk)
        parts = [points.take(x, slice(i, i + chunk)) for i in starts]
        return joined([_alone(f, params, part).compact() for part in parts])
    except FAILURES as error:
        explain(error, f, x, params, "reverse-mode differentiation failed{where}")


def look(f: ModelFn, params: Params, x: Inputs) -> Survey:
    """How the parameters enter f, from a pass at one point; remembered for points of this shape."""
    known = _surveys_of(f)
    key = (tuple(params), _signature(f, x))
    if key not in known:
        replay = NoiseReplay(f, params)
        first = points.take(x, slice(0, 1)) if is_pointwise(f) else x
        try:
            known[key] = survey(lambda: flat(f(params, first), first), params)
        except FAILURES as error:
            explain(error, f, x)
        replay()
    return known[key]


def coupled(f: ModelFn, params: Params, x: Inputs, *, chunk: int | None = None) -> Factors:
    """Where points see each other: one reverse pass over the whole batch per output and point."""

    def whole(p: Params) -> Tensor:
        with SecondOrder():
            return flat(f(p, x), x)

    out, pull = torch.func.vjp(whole, params)[:2]
    each = torch.eye(out.numel(), dtype=out.dtype, device=out.device).reshape(-1, *out.shape)
    (grads,) = vmap(pull, chunk_size=chunk)(each)  # [SK, ...] each
    blocks: list[Block] = [Dense((n,), g.reshape(*out.shape, -1)) for n, g in grads.items()]
    return Factors(tuple(params), blocks, out)


def factor(f: ModelFn, params: Params, x: Inputs, seen: Survey, *, batch: bool) -> Factors:
    """Where points do not see each other: all outputs at all points, layer by layer.

    Args:
        f: Model function.
        params: Parameters.
        x: Points.
        seen: How the parameters enter f.
        batch: Whether all points go through f together, which is quicker; only where the first
            dimension of every layer is the point.

    Returns:
        The Jacobian in factored form.
    """
    S = points.count(x)
    watched = {name: p for name, p in params.items() if name not in seen.others}

    def one(taps: list[Tensor], own: Params, point: Inputs) -> tuple[Tensor, list[Tensor]]:
        with Watch(watched, taps) as watch:
            out = f({**params, **own}, tree_map(lambda t: t[None], point))
        return out.reshape(-1), watch.finish()

    def whole(taps: list[Tensor], own: Params) -> tuple[Tensor, list[Tensor]]:
        if not batch:
            return vmap(one)(taps, own, x)
        with Watch(watched, [tap[:, 0] for tap in taps]) as watch:
            out = f(params, x)
        return flat(out, x), [h[:, None] for h in watch.finish()]

    like = next(iter(params.values()))
    taps = [like.new_zeros(S, *use.shape) for use in seen.uses]
    own = {n: params[n].expand(S, *params[n].shape) for n in seen.others}
    out, pull, inputs = torch.func.vjp(whole, taps, own, has_aux=True)  # type: ignore[misc]
    K = out.shape[1]
    each = torch.eye(K, dtype=out.dtype, device=out.device)[:, None].expand(K, S, K)
    deltas, dense = vmap(pull)(each)  # [K, S, ...] each
    return Factors(tuple(params), _blocks(seen, inputs, deltas, dense), out)


def _affordable(f: ModelFn, params: Params, x: Inputs) -> int | None:
    """Points at a time where nothing is kept for a gradient; None for all of them."""
    if not is_pointwise(f):
        return None
    size = CHUNK_BYTES // (8 * look(f, params, x).numbers_per_point(params))
    return None if size >= points.count(x) else max(1, size)


def _alone(f: ModelFn, params: Params, x: Inputs) -> Factors:
    seen = look(f, params, x)
    try:
        return factor(f, params, x, seen, batch=seen.leads)
    except ChangedError:  # not what was surveyed before: look again, and take no layout for granted
        _surveys_of(f).clear()
        seen = look(f, params, x)
    except FAILURES:  # not possible one by one: control flow on values, random numbers, ...
        return coupled(f, params, x)
    try:
        return factor(f, params, x, seen, batch=False)
    except FAILURES:
        return coupled(f, params, x)


def _blocks(seen: Survey, inputs: list[Tensor], deltas: list[Tensor], dense: Params) -> list[Block]:
    """A block per layer; layers that share a parameter are joined, their biases stand alone."""
    blocks: list[Block] = [Dense((n,), d.transpose(0, 1).flatten(2)) for n, d in dense.items()]
    layers = [
        (use, use.inputs(h) if use.weight else h, use.grads(d.transpose(0, 1)))
        for use, h, d in zip(seen.uses, inputs, deltas, strict=True)
    ]
    times = Counter(name for use in seen.uses for name in (use.weight, use.bias) if name)
    for use, h, d in layers:
        if use.weight and use.bias and times[use.weight] == times[use.bias] == 1:
            blocks.append(Outer((use.weight, use.bias), h, d))
    done = {name for block in blocks for name in block.names}
    for name in times.keys() - done:
        mine = [(h, d) for use, h, d in layers if use.weight == name]
        if mine:
            joint = torch.cat([h for h, _ in mine], dim=1), torch.cat([d for _, d in mine], dim=2)
            blocks.append(Outer((name,), *joint))
        else:
            biases = [d.sum(2) for use, _, d in layers if use.bias == name]
            blocks.append(Dense((name,), torch.stack(biases).sum(0)))
    return blocks


def _surveys_of(f: ModelFn) -> dict[Any, Survey]:
    try:
        return _surveys.setdefault(f, {})
    except TypeError:  # cannot be referred to weakly
        return {}


def _signature(f: ModelFn, x: Inputs) -> tuple[Any, ...]:
    """What may change the calls that f makes: shapes of a point, modes of the module's parts."""
    leaves = [x] if isinstance(x, Tensor) else tree_leaves(x)
    return getattr(f, "modes", ()), tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
