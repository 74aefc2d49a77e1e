r"""``frozen``: BatchNorm by running statistics that follow the weights.

R is that of the function that will be deployed, with the running statistics s as they are. But they
are those of the weights: when these move, s moves along, so that training changes R by

$\frac{d}{d\theta} R(\theta, s(\theta)) = \partial_\theta R + s'(\theta)^\top \partial_s R.$

With the first term alone R falls as the weights before a BatchNorm shrink, which means nothing to
the function and brings R up as soon as the statistics have followed: ResNet-18 ended 50 epochs of
CIFAR-10 with R ten times that of plain training. How s moves is read off the evaluation points.
With mean m and deviation d of a layer's input over them in the unperturbed pass, which were m₀ and
d₀, the running mean and deviation μ and σ become

$r\mu + (m - r m_0)$ and $r\sigma$ with $r = d / d_0$:

where the input is scaled they are scaled, where it is shifted the mean is shifted. Their values
stay what they are (r = 1), so R does not change, only its gradient. In J they stand still.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsmap.functional import NoiseReplay
from fsmap.linalg.values import accumulate
from fsmap.types import Inputs, ModelFn, Params

OWN_FIRST_PASS = ("vjp", "exact")
"""Estimators that differentiate the unperturbed pass backwards, and J would follow with it."""


class Following:
    """Stands for the forward method of a BatchNorm layer.

    The first pass with gradients says how the statistics follow, the others use what it said; one
    in forward mode says it for itself.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer = layer
        self.change: tuple[Tensor, Tensor] | None = None  # r and m − r m₀, both [C]

    def __call__(self, x: Tensor) -> Tensor:
        """The layer's output."""
        mean, var = self.layer.running_mean, self.layer.running_var
        assert mean is not None
        assert var is not None
        deviation = (var + self.layer.eps).sqrt()
        change = self._look(x)
        if change is not None:
            ratio, shift = change
            mean, deviation = ratio * mean + shift, ratio * deviation
        weight, bias = self.layer.weight, self.layer.bias
        scale = 1 / deviation if weight is None else weight / deviation
        offset = -mean * scale if bias is None else bias - mean * scale
        wide, shape = accumulate(x), (1, -1, *[1] * (x.ndim - 2))
        return torch.addcmul(offset.reshape(shape), wide, scale.reshape(shape)).to(x.dtype)

    def _look(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """How the statistics follow: a pass in forward mode is an unperturbed one itself."""
        primal, tangent = forward_ad.unpack_dual(x)
        if not torch.is_grad_enabled():
            return self.change
        if tangent is not None:
            return _change(primal, self.layer.eps)
        if self.change is None:
            self.change = _change(x, self.layer.eps)
        return self.change

    def hold(self) -> tuple[Tensor, Tensor]:
        """No change, as leaves that collect what R asks of the statistics."""
        like = self.layer.running_mean
        assert like is not None
        self.change = torch.ones_like(like), torch.zeros_like(like)
        for leaf in self.change:
            leaf.requires_grad_()
        return self.change


def _change(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """R and m − r m₀: one and zero, with derivatives."""
    dims = [d for d in range(x.ndim) if d != 1]
    wide = accumulate(x)
    mean = wide.mean(dims)
    deviation = (wide.var(dims, correction=0) + eps).sqrt()
    ratio = deviation / deviation.detach()
    return ratio, mean - ratio * mean.detach()


@contextmanager
def following(module: nn.Module, wanted: bool = True) -> Iterator[Sequence[Following]]:
    """BatchNorm layers use running statistics that follow; everything else stays in its mode.

    Layers in ``eval()`` mode are left alone: their statistics do not follow anything.

    Args:
        module: The model.
        wanted: Whether to do anything.

    Yields:
        The layers' stand-ins.
    """
    active = [m for m in module.modules() if wanted and isinstance(m, _BatchNorm) and m.training]
    made = [Following(m) for m in active]
    for layer, forward in zip(active, made, strict=True):
        layer.training = False
        layer.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield made
    finally:
        for layer in active:
            layer.training = True
            del layer.forward


def first_pass(
    layers: Sequence[Following], f: ModelFn, params: Params, x: Inputs, estimator: str
) -> None:
    """See how the statistics follow, where the estimator's own pass cannot say it.

    Args:
        layers: What :func:`following` yields.
        f: Model function.
        params: Parameters.
        x: Evaluation points.
        estimator: What R is estimated by.
    """
    if layers and estimator in OWN_FIRST_PASS and torch.is_grad_enabled():
        replay = NoiseReplay(f, params)
        f(params, x)
        replay()
