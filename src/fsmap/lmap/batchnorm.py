r"""BatchNorm in the evaluation pass: three named modes.

``joint``: training and evaluation points go through the network as one batch, the loss is
normalized by it too, running statistics are updated from it once. ``batch``: the evaluation points
are normalized by themselves. ``frozen``: by the running statistics, the function that will be
deployed. In ``batch`` and ``frozen`` the evaluation pass never changes running statistics.

The gradient of R in ``frozen``
-------------------------------
The running statistics s are those of the weights: when these move, s follows, so that training
changes R by

$\frac{d}{d\theta} R(\theta, s(\theta)) = \partial_\theta R + s'(\theta)^\top \partial_s R.$

With the first term alone R falls as the weights before a BatchNorm shrink, which means nothing to
the function and brings R up as soon as the statistics have followed: ResNet-18 ended 50 epochs of
CIFAR-10 with R ten times that of plain training. How s moves is read off the pass of the training
points (:class:`fsmap.LMAP`), or, for a penalty that does not see them, that of the evaluation
points. With mean m and deviation d of a layer's input over them, which were m₀ and d₀, the running
mean and deviation μ and σ become

$r\mu + (m - r m_0)$ and $r\sigma$ with $r = d / d_0$:

if the input is scaled they are scaled, if it is shifted the mean is shifted. Their values stay what
they are (r = 1), so R does not change, only its gradient. In J they are constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import Functional, Replacing, State, Wrapped, accumulate
from fsmap.linalg.estimators import Estimator
from fsmap.linalg.second_order import BatchNorm
from fsmap.lmap.syncbatchnorm import sync_batch_norm, synchronizes
from fsmap.types import Inputs, Params

MODES = ("joint", "batch", "frozen")

Change = tuple[Tensor, Tensor]  # r and m − r m₀, [C]


def present(module: nn.Module) -> bool:
    """Whether there is any BatchNorm (SyncBatchNorm included)."""
    return any(isinstance(m, _BatchNorm) for m in module.modules())


def unfrozen(module: nn.Module) -> list[_BatchNorm]:
    """BatchNorm layers in training mode; all of them if the model itself is in ``eval()``."""
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    return [m for m in layers if m.training or not module.training]


def check_mode(mode: str, allowed: tuple[str, ...], instead: str = "") -> None:
    """Raise InputError if a mode is not among the allowed ones."""
    if mode not in allowed:
        message = f"batchnorm must be one of {', '.join(allowed)}, got {mode!r}. {instead}".strip()
        raise InputError(message)


def deployed(module: nn.Module) -> str:
    """The mode of the function that will be deployed."""
    return "batch" if _without_statistics(module) else "frozen"


def check_running(module: nn.Module) -> None:
    """Raise InputError if a BatchNorm keeps no running statistics."""
    bare = _without_statistics(module)
    if bare:
        message = (
            f"batchnorm='frozen' needs running statistics, and {bare} keep none "
            "(track_running_stats=False). Use 'batch' or 'joint'."
        )
        raise InputError(message)


def _without_statistics(module: nn.Module) -> list[str]:
    layers = [(n, m) for n, m in module.named_modules() if isinstance(m, _BatchNorm)]
    return [name for name, layer in layers if layer.running_mean is None]


@contextmanager
def frozen(module: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Put BatchNorm layers into ``eval()`` mode; everything else stays in its mode."""
    active = [m for m in module.modules() if wanted and isinstance(m, _BatchNorm) and m.training]
    for m in active:
        m.training = False
    try:
        yield
    finally:
        for m in active:
            m.training = True


def write_back(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Give the module the running statistics that a pass on cloned buffers made."""
    own = dict(module.named_buffers())
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for name, new in buffers.items():
        targets, sources = kinds.setdefault(own[name].dtype, ([], []))
        targets.append(own[name])
        sources.append(new)
    with torch.no_grad():
        for targets, sources in kinds.values():
            torch._foreach_copy_(targets, sources)


class Recorder:
    """Within :meth:`mode`, BatchNorm layers in training mode record how statistics follow."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def mode(self) -> Replacing:
        """Replaces batch normalization; outputs stay the same."""
        return Replacing({F.batch_norm: self._batch_norm, sync_batch_norm: self._sync})

    def _batch_norm(self, *args: Any, **options: Any) -> Tensor:
        call = BatchNorm(*args, **options)
        if call.training:
            self.changes.append(_change(call.input, call.eps))
        return F.batch_norm(*call)

    def _sync(self, layer: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        self.changes.append(_change(input, layer.eps))
        return sync_batch_norm(layer, input)


class Deployed(Wrapped):
    """A model function whose BatchNorm layers use running statistics that follow the weights.

    BatchNorm layers are matched by the order in which a pass calls them. Layers in ``eval()`` mode
    are left alone.

    Args:
        f: The model function.
        changes: How the statistics follow, from a :class:`Recorder`; None: from the first
            unperturbed pass.
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
            if not (call.training and torch.is_grad_enabled()):
                return call.fixed()
            if given is None:
                found.append(_change(_primal(call.input), call.eps))
                change = found[-1]
            else:
                change = given[place[0]]
                place[0] += 1
            weight, bias = _moved(change, call)
            return call._replace(weight=weight, bias=bias).fixed()

        def sync(layer: Any, input: Tensor) -> Tensor:
            m = layer
            return batch_norm(
                input, m.running_mean, m.running_var, m.weight, m.bias, True, 0, m.eps
            )

        with Replacing({F.batch_norm: batch_norm, sync_batch_norm: sync}):
            out = self.inner.with_state(params, x, buffers)
        if given is None and found and not _is_dual(out[0]):
            self._changes = found
        return out

    def settle(self, params: Params, x: Inputs, buffers: dict[str, Tensor] | None) -> None:
        """Make an unperturbed pass if it is not known yet how the statistics follow."""
        if self._changes is None and torch.is_grad_enabled():
            self.with_state(params, x, buffers)


def _change(x: Tensor, eps: float) -> Change:
    """One and zero, with the derivatives of r and m − r m₀."""
    ratio, tau = _Follow.apply(accumulate(x), eps)  # type: ignore[no-untyped-call]
    return ratio, tau


class _Follow(torch.autograd.Function):
    """r = d/d₀ and τ = m − r m₀ at their own values, 1 and 0; all the work is in their gradient."""

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


def _moved(change: Change, call: BatchNorm) -> tuple[Tensor, Tensor]:
    """Weight and bias with which fixed statistics act as statistics that follow."""
    # (x − rμ − τ)/rσ·w + b, τ = m − r m₀, is torch's own function with another weight and bias:
    # (x − μ)/σ·w' + b' with w' = w/r and b' = b + (μ − rμ − τ)/rσ·w. One product of w, which may
    # have a tangent, with constants, because such products are slow in eager forward mode.
    ratio, tau = change
    mean, var, weight, bias = call[1:5]
    assert mean is not None
    assert var is not None
    inverse = 1 / ratio
    both = torch.stack([inverse, (mean - ratio * mean - tau) * inverse * (var + call.eps).rsqrt()])
    scale, moved = (both if weight is None else both * weight).unbind()
    bias = moved if bias is None else bias + moved
    return scale.to(mean.dtype), bias.to(mean.dtype)


def _primal(x: Tensor) -> Tensor:
    return forward_ad.unpack_dual(x).primal if _is_dual(x) else x


def _is_dual(x: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


@contextmanager
def differentiable_sync(module: nn.Module, estimator: Estimator, mode: str) -> Iterator[None]:
    """Let SyncBatchNorm layers that synchronize use arithmetic that has all derivatives.

    Args:
        module: The model.
        estimator: What R is estimated by.
        mode: One of :data:`MODES`.

    Raises:
        UnsupportedModuleError: If the estimator goes backwards through the points of one rank: a
            backward pass through the layer adds up what the ranks ask for.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.SyncBatchNorm) and synchronizes(m)]
    if layers and estimator.reverse_mode and mode != "frozen":
        message = (
            f"the estimator {estimator.name!r} cannot go through SyncBatchNorm: a backward pass "
            "through it mixes the outputs of all ranks. Use 'jvp', 'fd' or 'fd_central', or "
            "batchnorm='frozen'."
        )
        raise UnsupportedModuleError(message)
    for m in layers:
        m.forward = partial(sync_batch_norm, m)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for m in layers:
            del m.forward
