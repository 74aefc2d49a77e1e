r"""BatchNorm in the evaluation pass: three named modes.

``joint``: training and evaluation points are one batch, which also normalizes the loss and updates
running statistics once. ``batch``: the evaluation points are normalized by themselves. ``frozen``:
they are normalized by running statistics, as in the deployed function. In ``batch`` and ``frozen``
the evaluation pass does not change running statistics.

The gradient of R in ``frozen``
-------------------------------
The running statistics s(θ) follow the weights, so the gradient of R is

$\frac{d}{d\theta} R(\theta, s(\theta)) = \partial_\theta R + s'(\theta)^\top \partial_s R.$

The first term alone shrinks the weights before a BatchNorm: R falls, and rises again when the
statistics have followed. s' is computed from the pass of the training points (:class:`fsmap.LMAP`)
or, for a penalty, of the evaluation points. If the mean and deviation of a layer's input over these
points change from m₀ and d₀ to m and d, the running ones, μ and σ, become $r\mu + (m - r m_0)$ and
$r\sigma$ with $r = d / d_0$. Here r = 1 and m = m₀: only the gradient of R changes, not its value.
In J the statistics are constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import handle_torch_function, has_torch_function_unary

from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import Functional, Replacing, State, Wrapped, accumulate, replaced_forward
from fsmap.linalg.estimators import Estimator
from fsmap.linalg.second_order import BatchNorm, add, mul
from fsmap.types import Inputs, Params

Change = tuple[Tensor, Tensor]  # r and m − r m₀, [C]


def unfrozen(module: nn.Module) -> list[_BatchNorm]:
    """BatchNorm layers in training mode; all of them if the model itself is in ``eval()``."""
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    return [m for m in layers if m.training or not module.training]


def recording(changes: list[Change]) -> Replacing:
    """Context manager: BatchNorm layers in training mode record how statistics follow."""

    def batch_norm(*args: Any, **options: Any) -> Tensor:
        call = BatchNorm(*args, **options)
        if call.training and call.running_mean is not None:
            changes.append(_change(call.input, call.eps))
        return F.batch_norm(*call)

    def sync(layer: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        changes.append(_change(input, layer.eps))
        return sync_batch_norm(layer, input)

    return Replacing({F.batch_norm: batch_norm, sync_batch_norm: sync})


class FrozenStatistics(Wrapped):
    """A model function whose BatchNorm layers use running statistics that follow the weights.

    ``changes``, in the order of calls, are from :func:`recording`, or the first unperturbed pass.
    """

    def __init__(self, f: Functional, changes: list[Change] | None) -> None:
        super().__init__(f)
        self._changes = changes

    def with_state(
        self, params: Params, x: Inputs, buffers: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, State]:
        """As :meth:`Functional.with_state`."""
        found: list[Change] = []
        given, place = self._changes, [0]

        def batch_norm(*args: Any, **options: Any) -> Tensor:
            call = BatchNorm(*args, **options)
            if call.running_mean is None:  # no layer of batches, but a standardized weight
                return F.batch_norm(*call)
            if not (call.training and torch.is_grad_enabled()):
                return call.fixed()
            if given is None:
                found.append(_change(forward_ad.unpack_dual(call.input).primal, call.eps))
                change = found[-1]
            else:
                if place[0] == len(given):
                    text = "the model calls BatchNorm {} times at training points, and more often "
                    raise UnsupportedModuleError(text.format(len(given)) + "at evaluation points")
                change = given[place[0]]
                place[0] += 1
            weight, bias = _adjusted(change, call)
            return call._replace(weight=weight, bias=bias).fixed()

        def sync(m: Any, x: Tensor) -> Tensor:
            return batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias, True, 0, m.eps)

        with Replacing({F.batch_norm: batch_norm, sync_batch_norm: sync}):
            out = self.inner.with_state(params, x, buffers)
        if given is None and found and forward_ad.unpack_dual(out[0]).tangent is None:
            self._changes = found
        return out

    def prepare(self, params: Params, x: Inputs, buffers: dict[str, Tensor] | None) -> None:
        """Make an unperturbed pass if no changes have been recorded yet."""
        if self._changes is None and torch.is_grad_enabled():
            self.with_state(params, x, buffers)


def _change(x: Tensor, eps: float) -> Change:
    """One and zero, with the gradients of r and m − r m₀."""
    ratio, tau = _Follow.apply(accumulate(x), eps)  # type: ignore[no-untyped-call]
    return ratio, tau


class _Follow(torch.autograd.Function):
    """r = d/d₀ and τ = m − r m₀: the values are 1 and 0, only the gradients matter."""

    @staticmethod
    def forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x.new_ones(x.shape[1]), x.new_zeros(x.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.eps = inputs[1]

    @staticmethod
    def backward(ctx: Any, dr: Tensor, dtau: Tensor) -> tuple[Tensor, None]:
        # ∂r/∂xᵢ = (xᵢ − m)/(n d²) and ∂τ/∂xᵢ = 1/n − m ∂r/∂xᵢ.
        (x,) = ctx.saved_tensors
        dims = [d for d in range(x.ndim) if d != 1]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        dr, dtau = dr.reshape(shape), dtau.reshape(shape)
        scale = (dr - mean * dtau) / (var + ctx.eps)
        return (scale * (x - mean) + dtau) * (x.shape[1] / x.numel()), None


def _adjusted(change: Change, call: BatchNorm) -> tuple[Tensor, Tensor]:
    """Weight and bias that make fixed statistics act like statistics that follow the weights."""
    # (x − rμ − τ)/rσ·w + b, τ = m − r m₀, is torch's own function with another weight and bias:
    # (x − μ)/σ·w' + b' with w' = w/r and b' = b + (μ − rμ − τ)/rσ·w. One product of w, which may
    # have a tangent, with constants, because such products are slow in eager forward mode.
    ratio, tau = change
    mean, var, weight, bias = call[1:5]
    assert mean is not None
    assert var is not None
    inverse = 1 / ratio
    both = torch.stack([inverse, (mean - ratio * mean - tau) * inverse * (var + call.eps).rsqrt()])
    scale, shift = (both if weight is None else mul(both, weight)).unbind()
    bias = shift if bias is None else add(bias, shift)
    return scale.to(mean.dtype), bias.to(mean.dtype)


@contextmanager
def fresh_statistics(module: nn.Module, batches: Iterable[Any]) -> Iterator[None]:
    """Context manager: a module in ``eval()`` mode with the BatchNorm statistics of some batches.

    A batch is a tensor, a dict, or a list ``[x, y]`` of a DataLoader, of which x is taken.

    Running statistics are averages over the last dozen steps. At a high learning rate the weights
    have changed by then: held-out accuracy in ``eval()`` mode jumps by tens of percent from one
    epoch to the next. A few batches give the statistics that belong to the weights. At the
    end modes and running statistics are restored.

    Example:
        >>> import torch
        >>> model = torch.nn.BatchNorm1d(1)
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> with fresh_statistics(model, [x]):
        ...     model(torch.tensor([[2.0]])).item()
        0.0
        >>> model.running_mean, model.training
        (tensor([0.]), True)
    """
    if isinstance(batches, Tensor):
        raise InputError("batches must be a list of batches or a DataLoader; one batch is [x]")
    norms = [m for m in unfrozen(module) if m.track_running_stats]
    with unchanged(module):
        module.eval()
        if norms:
            _measure(module, norms, batches)
        yield


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Context manager: modes and buffers of a module are restored at the end."""
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(b, b.clone()) for b in module.buffers()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        with torch.no_grad():
            for b, before in buffers:
                b.copy_(before)


@torch.no_grad()
def _measure(module: nn.Module, norms: list[_BatchNorm], batches: Iterable[Any]) -> None:
    momenta = [m.momentum for m in norms]
    for m in norms:
        m.reset_running_stats()
        m.momentum = None  # the mean over batches
        m.training = True
    x = None
    try:
        for x in batches:
            x = x[0] if isinstance(x, list | tuple) else x
            module(**x) if isinstance(x, Mapping) else module(x)
    finally:
        for m, momentum in zip(norms, momenta, strict=True):
            m.momentum, m.training = momentum, False
    if x is None:
        raise InputError("fresh_statistics needs at least one batch; is the iterator exhausted?")


@contextmanager
def differentiable_sync(module: nn.Module, estimator: Estimator, mode: str) -> Iterator[None]:
    """Context manager: SyncBatchNorm layers that synchronize use :func:`sync_batch_norm`."""
    parts = module.modules() if dist.is_available() and dist.is_initialized() else ()
    layers = [m for m in parts if isinstance(m, nn.SyncBatchNorm) and m.training]
    if layers and estimator.reverse_mode and mode != "frozen":
        raise UnsupportedModuleError(
            f"the estimator {estimator.name!r} cannot go through SyncBatchNorm: a backward pass "
            "through it mixes the outputs of all ranks. Use 'jvp', 'fd' or 'fd_central', or "
            "batchnorm='frozen'."
        )
    with ExitStack() as stack:
        for m in layers:
            stack.enter_context(replaced_forward(m, partial(sync_batch_norm, m)))
        yield


def sync_batch_norm(layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """SyncBatchNorm in training mode by arithmetic that has all derivatives, on any device."""
    if has_torch_function_unary(x):  # a mode may replace it, like torch's own functions
        replaced: Tensor = handle_torch_function(sync_batch_norm, (x,), layer, x)
        return replaced
    wide = accumulate(x)
    dims = [d for d in range(x.ndim) if d != 1]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    here = torch.full((), x.numel() / x.shape[1], dtype=wide.dtype, device=x.device)
    count = _total(here, layer.process_group)  # points of all ranks
    mean = _total(wide.sum(dims), layer.process_group) / count  # [C]
    centered = wide - mean.reshape(shape)
    variance = _total(centered.square().sum(dims), layer.process_group) / count
    _update_running(layer, mean.detach(), variance.detach(), count)
    out = centered * (variance + layer.eps).rsqrt().reshape(shape)
    if layer.affine:
        out = out * layer.weight.reshape(shape) + layer.bias.reshape(shape)
    return out.to(x.dtype)


@torch.no_grad()
def _update_running(layer: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    if layer.running_mean is None or layer.running_var is None:
        return
    layer.num_batches_tracked.add_(1)
    share = layer.momentum
    if share is None:  # cumulative average
        share = 1 / layer.num_batches_tracked.to(mean.dtype)
    unbiased = variance * (count / (count - 1))
    layer.running_mean.mul_(1 - share).add_(share * mean)
    layer.running_var.mul_(1 - share).add_(share * unbiased)


def _total(x: Tensor, group: Any = None) -> Tensor:
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
        return _total(grad, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Any:
        return _total(tangent, ctx.group)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, group: Any) -> Any:
        return _total(x, group), in_dims[0]
