"""Layers with parameters: they end the units they read and make new ones.

A handler gets the tracer, the torch function, its result and its arguments.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsmap.assess.wiring.tracer import Tracer, View, function_name
from fsmap.assess.wiring.units import Member, NormRead


def linear(
    tracer: Tracer, func: Any, out: Tensor, input: Tensor, weight: Tensor, bias: Any = None
) -> None:
    """The map y = xWᵀ + b."""
    view = tracer.view(weight)
    if view is None or weight.ndim != 2:
        tracer.close("linear", (input, weight, bias), _computed("linear", view))
        return
    affine(tracer, "linear", out, input, view, weight, bias, dims=(-1, -1), axes=(0, 1))


def matmul(tracer: Tracer, func: Any, out: Tensor, a: Tensor, b: Tensor) -> None:
    """The map y = xW with a parameter on the right."""
    view = tracer.view(b)
    if view is None or b.ndim != 2 or tracer.view(a) is not None:
        tracer.close("matmul", (a, b))
        return
    affine(tracer, "matmul", out, a, view, b, None, dims=(-1, -1), axes=(1, 0))


def addmm(
    tracer: Tracer, func: Any, out: Tensor, bias: Any, a: Tensor, b: Tensor, **scale: Any
) -> None:
    """The map y = b + xW."""
    view = tracer.view(b)
    if view is None or scale:
        tracer.close("addmm", (bias, a, b))
        return
    affine(tracer, "addmm", out, a, view, b, bias, dims=(-1, -1), axes=(1, 0))


def convolution(
    tracer: Tracer,
    func: Any,
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Any = None,
    *rest: Any,
    **more: Any,
) -> None:
    """Channels are units; a depthwise kernel is a gain."""
    name = function_name(func)
    transposed = "transpose" in name
    groups = more.get("groups", rest[3] if len(rest) > 3 else 1)
    view = tracer.view(weight)
    channel = input.ndim - weight.ndim + 1
    if view is None:
        tracer.close(name, (input, weight, bias), _computed(name, view))
    elif groups == 1:
        axes = (1, 0) if transposed else (0, 1)
        affine(tracer, name, out, input, view, weight, bias, dims=(channel, channel), axes=axes)
    elif groups == input.shape[channel] == out.shape[channel] and not transposed:
        gain(tracer, out, input, channel, Member(view.name, view.order[0], "out", groups))
        add_bias(tracer, tracer.tracked[out].node, bias, groups)
    else:
        tracer.close(name, (input, weight, bias), f"{name} in {groups} groups is not followed")


def batch_norm(
    tracer: Tracer,
    func: Any,
    out: Tensor,
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> None:
    """Ends the scale of what enters; weight and bias make new units in the same order."""
    mean = None
    if training:
        others = [d for d in range(input.ndim) if d != 1]
        variance = input.detach().var(dim=others, unbiased=False)
    else:
        mean, variance = running_mean.detach().clone(), running_var.detach()
    names = [parameter_name(tracer, p) for p in (weight, bias)]
    std = (variance + eps).sqrt()
    norm = NormRead("batch", training, names[0], names[1], mean, std, eps)
    _normalize(tracer, out, input, 1, norm, weight, bias)


def layer_norm(
    tracer: Tracer,
    func: Any,
    out: Tensor,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> None:
    """LayerNorm and RMSNorm over the units themselves."""
    if len(normalized_shape) != 1:
        tracer.close("layer_norm", (input, weight, bias))
        return
    kind = "layer" if function_name(func) == "layer_norm" else "rms"
    names = [parameter_name(tracer, p) for p in (weight, bias)]
    norm = NormRead(kind, weight=names[0], bias=names[1])
    _normalize(tracer, out, input, -1, norm, weight, bias)


def group_norm(
    tracer: Tracer,
    func: Any,
    out: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> None:
    """Permutations survive one group and groups of one."""
    units = tracer.units(input)
    if units is not None and num_groups not in (1, input.shape[1]):
        tracer.facts.pin(units.node)
    _normalize(tracer, out, input, 1, NormRead("group", groups=num_groups), weight, bias)


def embedding(
    tracer: Tracer, func: Any, out: Tensor, input: Tensor, weight: Tensor, *rest: Any, **more: Any
) -> None:
    """Rows are chosen by data; their entries are units."""
    view = tracer.view(weight)
    if view is None:
        tracer.close("embedding", weight, _computed("embedding", view))
        return
    node = tracer.make(out, (-1,), weight.shape[1])
    tracer.member(node, Member(view.name, view.order[1], "out", weight.shape[1]))


def affine(
    tracer: Tracer,
    name: str,
    out: Tensor,
    x: Tensor,
    view: View,
    weight: Tensor,
    bias: Any,
    *,
    dims: tuple[int, int],
    axes: tuple[int, int],
) -> None:
    """Units of ``x`` along dims[0] are read, of ``out`` along dims[1] made; axes: (out, in)."""
    made, read = axes
    size = weight.shape[made]
    node = tracer.make(out, (dims[1],), size)
    tracer.member(node, Member(view.name, view.order[made], "out", size))
    add_bias(tracer, node, bias, size)
    member = Member(
        view.name, view.order[read], "in", weight.shape[read], bias=parameter_name(tracer, bias)
    )
    tracer.read(name, x, dims[0], member)


def add_bias(tracer: Tracer, node: int, bias: Any, size: int) -> None:
    """A parameter that is added to units, or something else that is."""
    name = parameter_name(tracer, bias)
    if name is not None:
        tracer.member(node, Member(name, 0, "out", size, additive=True))
    elif bias is not None:
        tracer.facts.pin(node, "a bias that is not a parameter")


def gain(tracer: Tracer, out: Tensor, x: Tensor, dim: int, member: Member) -> None:
    """Units of ``x`` along ``dim`` are multiplied by a parameter of their own."""
    units = tracer.units(x)
    node = tracer.make(out, (dim,), member.units)
    tracer.member(node, member._replace(role="out", gain=True))
    tracer.read("gain", x, dim, member._replace(role="in", gain=True))
    if units is None:
        tracer.facts.pinned.add(node)
    else:
        tracer.facts.same_order(units.node, node)


def _normalize(
    tracer: Tracer, out: Tensor, x: Tensor, dim: int, norm: NormRead, weight: Any, bias: Any
) -> None:
    units = tracer.units(x)
    size = out.shape[dim]
    node = tracer.make(out, (dim,), size)
    if norm.kind == "layer":
        tracer.facts.normed.append((node, norm))
    for p, additive in ((weight, False), (bias, True)):
        name = parameter_name(tracer, p)
        if name is not None:
            tracer.member(node, Member(name, 0, "out", size, additive=additive))
        elif p is not None:
            tracer.facts.pin(node, "a normalization whose weight is not a parameter")
    if units is None:
        tracer.facts.pinned.add(node)  # data keeps its order; the new units have a scale
    elif units.dims == (dim % x.ndim,) and units.block == 1:
        tracer.facts.norms.append((units.node, norm))
        tracer.facts.same_order(units.node, node)
        if norm.kind != "batch":
            tracer.facts.unscalable.add(units.node)
    else:
        tracer.close("normalization", x, "normalization over other dimensions than the units'")


def parameter_name(tracer: Tracer, p: Any) -> str | None:
    """The name of a tensor that is a parameter."""
    view = tracer.view(p)
    return None if view is None else view.name


def _computed(name: str, view: View | None) -> str | None:
    return f"{name}: its weight is computed, not a parameter" if view is None else None
