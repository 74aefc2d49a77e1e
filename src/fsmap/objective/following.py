r"""``frozen``: BatchNorm by running statistics that follow the weights.

R is that of the function that will be deployed, with the running statistics s as they are. But they
are those of the weights: when these move, s moves along, so that training changes R by

$\frac{d}{d\theta} R(\theta, s(\theta)) = \partial_\theta R + s'(\theta)^\top \partial_s R.$

With the first term alone R falls as the weights before a BatchNorm shrink, which means nothing to
the function and brings R up as soon as the statistics have followed: ResNet-18 ended 50 epochs of
CIFAR-10 with R ten times that of plain training. How s moves is read off the pass of the training
points (:class:`fsmap.LMAP`), or, for a term that does not see them, that of the evaluation points
at θ. With mean m and deviation d of a layer's input over them, which were m₀ and d₀, the running
mean and deviation μ and σ become

$r\mu + (m - r m_0)$ and $r\sigma$ with $r = d / d_0$:

where the input is scaled they are scaled, where it is shifted the mean is shifted. Their values
stay what they are (r = 1), so R does not change, only its gradient. In J they stand still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsmap.functional import NoiseReplay
from fsmap.linalg.values import accumulate
from fsmap.objective.batchnorm import frozen
from fsmap.types import Inputs, ModelFn, Params

OWN_FIRST_PASS = ("vjp", "exact")
"""Estimators that differentiate the unperturbed pass backwards, and J would follow with it."""

Change = tuple[Tensor, Tensor]  # r and m − r m₀, [C]


class Following:
    """Stands for the forward method of a BatchNorm layer.

    A layer that one pass calls twice follows as one of the calls says (in forward mode each its
    own): R is the same, its gradient is then not quite that of any statistics.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer, self.plain = layer, layer.forward
        self.change: Change | None = None

    def training(self, input: Tensor) -> Tensor:
        """An ordinary pass of training points, which says how the statistics follow."""
        self.change = _change(input, self.layer.eps)
        return self.plain(input)

    def deployed(self, input: Tensor) -> Tensor:
        """By running statistics that follow as a training pass, or else the first pass, says."""
        # (x − rμ − τ)/rσ·w + b, τ = m − r m₀, is torch's own function with another weight and bias:
        # (x − μ)/σ·w' + b' with w' = w/r and b' = b + (μ − rμ − τ)·w'/σ.
        layer, change = self.layer, self._look(input)
        mean, var = layer.running_mean, layer.running_var
        assert mean is not None
        assert var is not None
        weight: Tensor | None = layer.weight
        bias: Tensor | None = layer.bias
        if change is not None:
            ratio, tau = change
            scale = 1 / ratio if weight is None else weight / ratio
            moved = (mean - ratio * mean - tau) * scale * (var + layer.eps).rsqrt()
            weight, bias = scale.to(mean.dtype), moved if bias is None else bias + moved
            bias = bias.to(mean.dtype)
        # Under autocast a CPU would give a half-precision input a tangent in full precision.
        out = F.batch_norm(input.to(mean.dtype), mean, var, weight, bias, eps=layer.eps)
        return out.to(input.dtype)

    def _look(self, x: Tensor) -> Change | None:
        """How the statistics follow: a pass in forward mode is an unperturbed one itself."""
        if self.change is not None or not torch.is_grad_enabled():
            return self.change
        primal, tangent = forward_ad.unpack_dual(x)
        if tangent is not None:
            return _change(primal, self.layer.eps)
        self.change = _change(x, self.layer.eps)
        return self.change


def _change(x: Tensor, eps: float) -> Change:
    """One and zero, with the derivatives of r and m − r m₀."""
    dims = [d for d in range(x.ndim) if d != 1]
    # As inductor writes a batch norm: in a compiled training pass these are the batch's own.
    var, mean = torch.var_mean(accumulate(x), dims, correction=0, keepdim=True)
    mean, deviation = mean.flatten(), (var.flatten() + eps).sqrt()
    ratio = deviation / deviation.detach()
    return ratio, mean - ratio * mean.detach()


@contextmanager
def watched(module: nn.Module, wanted: bool = True) -> Iterator[Sequence[Following]]:
    """In it BatchNorm layers in training mode say how their statistics follow the weights."""
    made = _stand_ins(module) if wanted else []
    with _replaced({one.layer: one.training for one in made}):
        yield made


@contextmanager
def following(
    module: nn.Module, wanted: bool = True, seen: Sequence[Following] = ()
) -> Iterator[Sequence[Following]]:
    """BatchNorm layers use running statistics that follow; everything else stays in its mode.

    In layers with a forward method of their own statistics stand still, as in :func:`frozen`, and
    those in ``eval()`` mode are left alone.

    Args:
        module: The model.
        wanted: Whether to do anything.
        seen: What :func:`watched` has seen in a pass of training points; where it is empty, the
            evaluation points stand for them.

    Yields:
        The layers' stand-ins.
    """
    made = (list(seen) or _stand_ins(module)) if wanted else []
    with frozen(module, wanted), _replaced({one.layer: one.deployed for one in made}):
        yield made


def _stand_ins(module: nn.Module) -> list[Following]:
    """For BatchNorm layers in training mode that do what torch's do, and nothing else."""
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training]
    plain = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return [Following(m) for m in layers if type(m).forward in plain and "forward" not in vars(m)]


@contextmanager
def _replaced(forwards: dict[_BatchNorm, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    for layer, forward in forwards.items():
        layer.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for layer in forwards:
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
    known = all(layer.change is not None for layer in layers)
    if not known and estimator in OWN_FIRST_PASS and torch.is_grad_enabled():
        replay = NoiseReplay(f, params)
        f(params, x)
        replay()
