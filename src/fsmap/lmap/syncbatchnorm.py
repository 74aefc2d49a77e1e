"""SyncBatchNorm by arithmetic that has all derivatives, on any device.

torch's own has neither a forward mode nor a second derivative, and runs on a GPU only. Where R is
taken the layer is replaced by this one: the same mean, variance and running statistics over the
points of all ranks, from an all-reduce that can be differentiated in every way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from fsmap.functional import accumulate


def synchronizes(layer: nn.SyncBatchNorm) -> bool:
    """Whether a pass through it now would talk to other ranks."""
    return layer.training and dist.is_available() and dist.is_initialized()


def sync_batch_norm(layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """The layer's output in training mode, [n, C, ...]; its running statistics are updated.

    Args:
        layer: The layer, with the parameters and buffers that it has now.
        x: Input.

    Returns:
        (x − mean)/√(variance + ε)·weight + bias, mean and variance over all ranks.
    """
    if has_torch_function_unary(x):  # a mode may replace it, like torch's own functions
        replaced: Tensor = handle_torch_function(sync_batch_norm, (x,), layer, x)
        return replaced
    wide = accumulate(x)
    dims = [d for d in range(x.ndim) if d != 1]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    here = torch.full((), x.numel() / x.shape[1], dtype=wide.dtype, device=x.device)
    count = total(here, layer.process_group)  # points of all ranks
    mean = total(wide.sum(dims), layer.process_group) / count  # [C]
    centered = wide - mean.reshape(shape)
    variance = total(centered.square().sum(dims), layer.process_group) / count
    _update(layer, mean.detach(), variance.detach(), count)
    out = centered * (variance + layer.eps).rsqrt().reshape(shape)
    if layer.affine:
        out = out * layer.weight.reshape(shape) + layer.bias.reshape(shape)
    return out.to(x.dtype)


def _update(layer: nn.SyncBatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    if layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None
    with torch.no_grad():
        layer.num_batches_tracked.add_(1)
        share: Any = layer.momentum
        if share is None:  # cumulative average
            share = 1 / layer.num_batches_tracked.to(mean.dtype)
        unbiased = variance * (count / (count - 1))
        layer.running_mean.mul_(1 - share).add_(share * mean)
        layer.running_var.mul_(1 - share).add_(share * unbiased)


def total(x: Tensor, group: Any = None) -> Tensor:
    """Sum over ranks, differentiable in forward and reverse mode, any number of times."""
    summed: Tensor = _AllReduce.apply(x, group)  # type: ignore[no-untyped-call]
    return summed


class _AllReduce(torch.autograd.Function):
    """Σ over ranks. Linear and symmetric: its derivative in either mode is itself."""

    @staticmethod
    def forward(x: Tensor, group: Any) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return total(grad, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Any:
        return total(tangent, ctx.group)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, group: Any) -> Any:
        return total(x, group), in_dims[0]
