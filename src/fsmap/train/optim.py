"""Descriptions of ``torch.optim`` optimizers and learning-rate schedules, and gradient clipping.

A description is immutable and can be compared; ``build`` makes the real thing for one model or for
a stack of models. Adam and SGD act entry by entry, so one optimizer updates a whole stack; only
clipping depends on the member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from fsmap.errors import InputError
from fsmap.types import Params

CLASSES: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "sgd": SGD}
CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_, which this agrees with


class OptimizerSpec(NamedTuple):
    """An optimizer that has no parameters yet; made by :func:`adam` or :func:`sgd`."""

    name: str
    lr: float
    options: tuple[tuple[str, object], ...] = ()

    def build(
        self, tensors: Iterable[Tensor], *, capturable: bool = False, moving_lr: bool = True
    ) -> Optimizer:
        """Make the ``torch.optim`` optimizer, in its fused form.

        ``capturable`` keeps the step count on the device, so that a CUDA graph can hold the update,
        and the learning rate too if it moves. Torch's fused kernels read it in float32.
        """
        tensors = list(tensors)
        options = dict(self.options)
        lr: float | Tensor = self.lr
        if capturable and moving_lr:
            lr = torch.tensor(self.lr, dtype=torch.float32, device=tensors[0].device)
        if capturable and self.name != "sgd":
            options["capturable"] = True
        return CLASSES[self.name](tensors, lr=lr, fused=True, **options)


class Schedule(NamedTuple):
    """A factor on the learning rate: a linear rise over ``warmup`` steps, then the decay."""

    warmup: int = 0
    decay: str = "none"  # or "cosine"

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate of a step, counted from 0, is multiplied by; in [0, 1]."""
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.decay == "none":
            return rise
        share = max(0, step - self.warmup) / max(1, steps - self.warmup)
        return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate, in place if it is kept on the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def adam(
    lr: float, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> OptimizerSpec:
    """Adam, as in ``torch.optim.Adam``. It has no weight decay: that is the prior's part.

    Example:
        >>> adam(0.01).lr
        0.01
    """
    return OptimizerSpec("adam", _positive_lr(lr), (("betas", tuple(betas)), ("eps", eps)))


def sgd(lr: float, *, momentum: float = 0.0, nesterov: bool = False) -> OptimizerSpec:
    """Stochastic gradient descent, as in ``torch.optim.SGD``.

    Example:
        >>> dict(sgd(0.1, momentum=0.9).options)
        {'momentum': 0.9, 'nesterov': False}
    """
    options = (("momentum", momentum), ("nesterov", nesterov))
    return OptimizerSpec("sgd", _positive_lr(lr), options)


def cosine(*, warmup: int = 0) -> Schedule:
    """Half a cosine from 1 to 0 at the end, after a linear rise over ``warmup`` steps.

    Example:
        >>> [round(cosine().factor(step, 4), 2) for step in range(5)]
        [1.0, 0.85, 0.5, 0.15, 0.0]
    """
    if warmup < 0:
        raise InputError(f"warmup must be at least 0 steps, got {warmup}")
    return Schedule(warmup=warmup, decay="cosine")


def global_norm(grads: Params, *, stacked: bool = False) -> Tensor:
    """Euclidean norm over all tensors of a gradient, ``[]``; ``[M]`` if they are stacked."""
    lead = 1 if stacked else 0
    flat = [g.reshape(*g.shape[:lead], -1) for g in grads.values()]  # [M, p] or [p]
    norms: Tensor = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g, dim=-1) for g in flat]), dim=0
    )
    return norms


def clip_by_norm(grads: Params, norm: Tensor, max_norm: float) -> Params:
    """Gradients, shortened so that no norm (``[]``, or ``[M]`` of a stack) exceeds ``max_norm``."""
    factor = (max_norm / (norm + CLIP_EPS)).clamp(max=1.0)
    return {n: g * expand(factor, g) for n, g in grads.items()}


def expand(values: Tensor, like: Tensor) -> Tensor:
    """``[]`` or ``[M]`` with as many dimensions as ``like``, on its device."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim)).to(like.device)


def _positive_lr(lr: float) -> float:
    if not 0 < lr < math.inf:
        raise InputError(f"lr must be positive and finite, got {lr:g}")
    return float(lr)
