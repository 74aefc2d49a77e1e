"""Second derivatives: every gradient of a Jacobian is one, and torch's fused layers get some of them wrong.

The fused normalizations hand their mean and deviation to the derivative as constants. A first derivative is right, but a
gradient taken through ``torch.func.jvp``, or through a ``vjp`` inside ``vmap``, misses the terms in which they depend on the
input: no error, and wrong by tens of percent (pytorch issues 196699 and 196700 for the forward mode, functorch 534 for
``vmap``). :class:`SecondOrder` replaces these functions, wherever a model calls them, while a Jacobian is being taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsmap.functional import differentiable_attention


class SecondOrder(TorchFunctionMode):
    """Within it, functions whose second derivatives are wrong or missing are replaced by ones that have them."""

    def __enter__(self) -> SecondOrder:
        """Also choose attention kernels that have all derivatives."""
        self._attention = differentiable_attention()
        self._attention.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Put everything back."""
        super().__exit__(*error)
        self._attention.__exit__(*error)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, or what stands for it."""
        return REPLACED.get(func, func)(*args, **(kwargs or {}))


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """``F.layer_norm``, right to second order."""
    dims = list(range(-len(normalized_shape), 0))
    single = torch.is_autocast_enabled(input.device.type)  # then torch computes and returns float32
    out = normalized(input.float() if single and input.dtype != torch.float64 else input, dims, eps)
    return _affine(out, weight, bias)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """``F.batch_norm``, right to second order where statistics are those of the batch."""
    momentum = 0.0 if momentum is None else momentum
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if (
        running_mean is not None
    ):  # the fused kernel updates them, to the last bit as in a plain pass
        with torch.no_grad():
            F.batch_norm(
                _primal(input).detach(), running_mean, running_var, training=True, momentum=momentum
            )
    dims = [d for d in range(input.ndim) if d != 1]
    shape = [1, -1] + [1] * (input.ndim - 2)
    out = normalized(input, dims, eps)
    return _affine(
        out,
        None if weight is None else weight.reshape(shape),
        None if bias is None else bias.reshape(shape),
    )


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """``F.instance_norm``, right to second order where statistics are those of the input."""
    if not use_input_stats or running_mean is not None:
        return F.instance_norm(
            input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
    shape = [1, -1] + [1] * (input.ndim - 2)
    return _affine(
        normalized(input, list(range(2, input.ndim)), eps),
        None if weight is None else weight.reshape(shape),
        None if bias is None else bias.reshape(shape),
    )


def normalized(x: Tensor, dims: list[int], eps: float) -> Tensor:
    """(x − mean)/√(variance + ε) over ``dims`` from functions that torch differentiates to any order."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    centered = wide - wide.mean(dims, keepdim=True)
    deviation = (centered.square().mean(dims, keepdim=True) + eps).rsqrt()
    return (centered * deviation).to(x.dtype)


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """``F.glu``; torch's has no derivative of its forward-mode derivative."""
    value, gate = input.chunk(2, dim)
    return value * gate.sigmoid()


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v/‖v‖, the norm over all dimensions but ``dim``; torch's has no forward mode and a wrong second derivative."""
    dims = [d for d in range(v.ndim) if d != dim % v.ndim] if dim != -1 else list(range(v.ndim))
    return v * (g / v.square().sum(dims, keepdim=True).sqrt())


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """A⁻¹B by the inverse, whose forward-mode derivative can be differentiated."""
    if B.ndim == 1 or not left:
        return torch.linalg.solve(A, B, left=left)
    return torch.linalg.inv(A) @ B


REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.glu: glu,
    torch._weight_norm: weight_norm,
    torch.linalg.solve: solve,
}


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    out = x if weight is None else x * weight
    return out if bias is None else out + bias


def _primal(x: Tensor) -> Tensor:
    return forward_ad.unpack_dual(x).primal
