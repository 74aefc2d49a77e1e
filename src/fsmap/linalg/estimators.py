"""One probe of one estimator of Tr 𝒥 (the table is in :mod:`fsmap.linalg.trace`); the exact one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.functional import Functional, NoiseReplay, State
from fsmap.linalg import points
from fsmap.linalg.jacobian import add, jvp, vjp
from fsmap.linalg.linearize import CHUNK_BYTES, linearize, look
from fsmap.linalg.metric import Metric, Whitening, resolve
from fsmap.linalg.passes import flat, is_pointwise, run
from fsmap.linalg.values import accumulate, wide
from fsmap.types import Inputs, ModelFn, Params


class Pass(NamedTuple):
    """One probe: the estimate, and the unperturbed pass that it shares with the loss, if any."""

    value: Tensor  # []
    out: Tensor | None
    state: State | None


def estimate(
    f: ModelFn,
    params: Params,
    x: Inputs,
    probe: Params | Tensor,
    *,
    method: str,
    beta: float = 1e-3,
    metric: Metric | Tensor | None = None,
) -> Pass:
    """One probe of one estimator, with the unperturbed pass that it made on the way."""
    if method == "exact":
        return Pass(exact(f, params, x, metric=metric), None, None)
    if method == "vjp":
        assert isinstance(probe, Tensor)
        out, transpose, state = vjp(f, params, x)
        return Pass(_vjp_value(transpose, resolve(metric, x, out), probe), out, state)
    assert isinstance(probe, dict)
    if method == "jvp":
        out, tangent, state = jvp(f, params, x, probe)
        return Pass(resolve(metric, x, out).quadratic(accumulate(tangent)), out, state)
    with _full_precision(params):
        replay = NoiseReplay(f, params)
        out, state = run(f, params, x)
        base, high = (out, beta) if method == "fd" else (None, beta / 2)
        if base is None:
            replay()
            base = f(add(params, -beta / 2, probe), x)
        replay()
        difference = flat(f(add(params, high, probe), x) - base, x) / beta
        return Pass(resolve(metric, x, out).quadratic(difference), out, state)


def exact(
    f: ModelFn,
    params: Params,
    x: Inputs,
    *,
    metric: Metric | Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Σ over rows of the whitened Jacobian of ‖row‖², a chunk of points at a time when g allows."""
    S = points.count(x)
    if metric is not None or not is_pointwise(f):
        factors = linearize(f, params, x, chunk=chunk)
        whiten = resolve(metric, x, factors.out)
        if not whiten.local:
            squares = whiten.gram(factors.gram(), S).diagonal()  # [Q]
        else:
            mixed = factors.mixed(lambda u: whiten.rows(u).reshape(S, -1, *u.shape[2:]))
            squares = mixed.to(wide(factors.out.dtype)).squares().flatten()  # [Q]
        return squares.sum() if whiten.signs is None else (whiten.signs * squares).sum()
    if chunk is None:
        width = look(f, params, x).numbers_per_point(params)
        chunk = max(1, CHUNK_BYTES // (8 * width))
    parts = []
    for i in range(0, S, chunk):
        factors = linearize(f, params, points.take(x, slice(i, i + chunk)))
        parts.append(factors.to(wide(factors.out.dtype)).squares().sum())
    return torch.stack(parts).sum() / S


def last_layer_trace(f: Functional, out: Tensor, features: Tensor) -> Tensor:
    """Trace of the last linear layer's block, meaned over points.

    Args:
        f: Model function that knows its last layer.
        out: Its output, [S, ..., K].
        features: Input h of the layer, [S, ..., i].

    Returns:
        Per application of the layer K·‖h‖² for the weight and K for the bias.
    """
    names = f.last_layer_names()
    S, K = out.shape[0], out.shape[-1]
    value = out.new_zeros((), dtype=wide(out.dtype))
    if any(n.endswith("weight") for n in names):
        value = value + K * accumulate(features).square().sum() / S
    if any(n.endswith("bias") for n in names):
        value = value + out[0].numel()
    return value


def _vjp_value(transpose: Callable[[Tensor], Params], whiten: Whitening, v: Tensor) -> Tensor:
    grads = transpose(whiten.adjoint(v))
    if whiten.signs is None:
        return torch.stack([accumulate(g).square().sum() for g in grads.values()]).sum()
    signed = transpose(whiten.adjoint(whiten.signs * v))
    return torch.stack([(accumulate(g) * signed[n]).sum() for n, g in grads.items()]).sum()


def _full_precision(params: Params) -> torch.autocast:
    """Differences of size β drown in half precision: leave autocast."""
    return torch.autocast(next(iter(params.values())).device.type, enabled=False)
