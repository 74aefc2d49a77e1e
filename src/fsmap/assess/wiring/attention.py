"""Attention: queries meet keys in scalar products, values pass through linearly, head by head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsmap.assess.wiring.layers import parameter_name
from fsmap.assess.wiring.tracer import Tracer
from fsmap.assess.wiring.units import Member


def scaled_dot_product(
    tracer: Tracer,
    func: Any,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    **more: Any,
) -> None:
    """softmax(qkᵀ)v on tensors ``[..., heads, tokens, size]`` or ``[..., tokens, size]``."""
    found = [tracer.units(t) for t in (query, key, value)]
    q, k, v = found
    name = "scaled_dot_product_attention"
    if q is None or k is None or v is None:
        tracer.close(name, (query, key, value))
        return
    heads = value.shape[v.dims[0]] if len(v.dims) == 2 else 1
    sizes = {tracer.facts.units[u.node] for u in found if u is not None}
    layout = {u.dims for u in found if u is not None}
    wanted = (value.ndim - 3, value.ndim - 1) if heads > 1 else (value.ndim - 1,)
    if layout != {wanted} or len(sizes) > 1:
        tracer.close(name, (query, key, value), f"{name}: heads are laid out in an unknown way")
        return
    _record(tracer, q.node, k.node, v.node, heads)
    tracer.tracked[out] = v


def multi_head(
    tracer: Tracer,
    func: Any,
    out: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    size: int,
    heads: int,
    in_weight: Any,
    in_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_weight: Tensor,
    out_bias: Any,
    **more: Any,
) -> None:
    """``nn.MultiheadAttention``: projections packed into one parameter, or three."""
    name = "multi_head_attention_forward"
    weights = [more.get(f"{kind}_proj_weight") for kind in "qkv"]
    packed = in_weight is not None
    one_input = query is key is value or (
        tracer.units(query) == tracer.units(key) == tracer.units(value)
        and (tracer.units(query) is not None)
    )
    inputs = (query, key, value)
    if packed and not one_input:
        tracer.close(name, inputs, f"{name}: queries, keys and values from different units")
    if bias_k is not None or bias_v is not None:
        tracer.close(name, (inputs, bias_k, bias_v))
    nodes = []
    for i, x in enumerate(inputs):
        weight = parameter_name(tracer, in_weight if packed else weights[i])
        bias = parameter_name(tracer, in_bias)
        node = tracer.facts.node(size)
        nodes.append(node)
        if weight is None:
            tracer.close(name, inputs, f"{name}: a weight that is not a parameter")
            continue
        start = i * size if packed else 0
        tracer.member(node, Member(weight, 0, "out", size, start=start))
        if bias is not None:
            tracer.member(node, Member(bias, 0, "out", size, start=i * size, additive=True))
        if not packed or i == 0:
            reader = Member(weight, 1, "in", x.shape[-1], bias=bias if packed else None)
            tracer.read(name, x, -1, reader)
    _record(tracer, nodes[0], nodes[1], nodes[2], heads)
    _project(tracer, nodes[2], out[0] if isinstance(out, tuple) else out, out_weight, out_bias)


def _project(tracer: Tracer, node: int, out: Tensor, weight: Tensor, bias: Any) -> None:
    name, size = parameter_name(tracer, weight), weight.shape[0]
    made = tracer.make(out, (-1,), size)
    if name is None:
        tracer.facts.pin(node, "attention: an output weight that is not a parameter")
        tracer.facts.pin(made)
        return
    tracer.member(node, Member(name, 1, "in", weight.shape[1], bias=parameter_name(tracer, bias)))
    tracer.member(made, Member(name, 0, "out", size))
    if bias is not None:
        tracer.member(
            made, Member(parameter_name(tracer, bias) or "", 0, "out", size, additive=True)
        )


def _record(tracer: Tracer, query: int, key: int, value: int, heads: int) -> None:
    """Units of a head move with their head: none of the three sets can be permuted at will."""
    for node in (query, key):
        tracer.facts.pin(node)
    if heads > 1:
        tracer.facts.pinned.add(value)
    tracer.facts.heads[value] = heads
    tracer.facts.attentions.append((query, key, value, heads))
