"""Descriptions of ``torch.optim`` optimizers and learning-rate schedules, and gradient clipping.

A description is immutable and can be compared; ``build`` makes the real thing for one model or for
a stack of models. Adam and SGD act entry by entry, so one optimizer updates a whole stack; only
clipping looks at a member as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fsmap.errors import InputError
from fsmap.types import Params

CLASSES: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "adamw": AdamW, "sgd": SGD}
CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_, which this agrees with


class OptimizerSpec(NamedTuple):
    """An optimizer that has no parameters yet; made by :func:`adam`, :func:`adamw`, :func:`sgd`."""

    name: str
    lr: float
    options: tuple[tuple[str, object], ...] = ()

    def build(
        self, tensors: Iterable[Tensor], *, capturable: bool = False, moving_lr: bool = True
    ) -> Optimizer:
        """Make the ``torch.optim`` optimizer.

        Args:
            tensors: What it updates in place.
            capturable: Keep the step count on the device, so that a CUDA graph can hold the update.
            moving_lr: With ``capturable``: keep the learning rate there too, as a schedule will
                change it. Torch's fused kernels read it in float32.

        Returns:
            The optimizer, in its fused form.
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
    """A factor on the learning rate; made by :func:`constant`, :func:`warmup`, :func:`cosine`."""

    warmup: int = 0
    decay: str = "none"

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by.

        Args:
            step: The step about to be taken, from 0.
            steps: Of how many.

        Returns:
            A number in [0, 1].
        """
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.decay == "none":
            return rise
        share = max(0, step - self.warmup) / max(1, steps - self.warmup)
        return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

    def build(self, optimizer: Optimizer, steps: int, start: int = 0) -> LambdaLR:
        """Make the ``torch.optim`` scheduler.

        Args:
            optimizer: The optimizer whose learning rate it sets.
            steps: Length of the whole run.
            start: The step about to be taken; more than 0 after a resume.

        Returns:
            The scheduler, with the learning rate of ``start`` already set.
        """
        for group in optimizer.param_groups:
            lr = group["lr"]
            group["initial_lr"] = lr.clone() if isinstance(lr, Tensor) else lr
        return LambdaLR(optimizer, lambda step: self.factor(step, steps), last_epoch=start - 1)


def adam(
    lr: float, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> OptimizerSpec:
    """Adam. Weight decay is the prior's business, so there is none here.

    Args:
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.

    Returns:
        The description.
    """
    return OptimizerSpec("adam", _positive_lr(lr), (("betas", tuple(betas)), ("eps", eps)))


def adamw(
    lr: float,
    *,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> OptimizerSpec:
    """Adam with decoupled weight decay, on top of what the prior does.

    Args:
        lr: Learning rate.
        weight_decay: Each step multiplies the parameters by ``1 - lr * weight_decay``.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.

    Returns:
        The description.
    """
    options = (("betas", tuple(betas)), ("eps", eps), ("weight_decay", weight_decay))
    return OptimizerSpec("adamw", _positive_lr(lr), options)


def sgd(lr: float, *, momentum: float = 0.0, nesterov: bool = False) -> OptimizerSpec:
    """Stochastic gradient descent.

    Args:
        lr: Learning rate.
        momentum: Heavy-ball momentum.
        nesterov: Nesterov's form of it.

    Returns:
        The description.
    """
    options = (("momentum", momentum), ("nesterov", nesterov))
    return OptimizerSpec("sgd", _positive_lr(lr), options)


def constant() -> Schedule:
    """The same learning rate throughout."""
    return Schedule()


def warmup(steps: int) -> Schedule:
    """A linear rise over the first ``steps`` steps, then constant."""
    return Schedule(warmup=_count("warmup steps", steps))


def cosine(*, warmup: int = 0) -> Schedule:
    """Half a cosine down to 0 at the end, after an optional linear rise."""
    return Schedule(warmup=_count("warmup steps", warmup), decay="cosine")


def global_norm(grads: Params, *, stacked: bool = False) -> Tensor:
    """Euclidean norm of a gradient over all its tensors.

    Args:
        grads: Gradients; with ``stacked``, the first dimension of each is the member.
        stacked: Whether these are the gradients of many members.

    Returns:
        ``[]``, or ``[M]`` with one norm per member.
    """
    lead = 1 if stacked else 0
    flat = [g.reshape(*g.shape[:lead], -1) for g in grads.values()]  # [M, p] or [p]
    norms: Tensor = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g, dim=-1) for g in flat]), dim=0
    )
    return norms


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by, so that no norm exceeds ``max_norm``: ``[]`` or ``[M]``."""
    return (max_norm / (norm + CLIP_EPS)).clamp(max=1.0)


def scale(grads: Params, factor: Tensor) -> Params:
    """Gradients times a factor, ``[]`` for one model or ``[M]`` for a stack."""
    return {
        n: g * factor.reshape(factor.shape + (1,) * (g.ndim - factor.ndim))
        for n, g in grads.items()
    }


def _positive_lr(lr: float) -> float:
    if not 0 < lr < math.inf:
        message = f"lr must be positive and finite, got {lr:g}"
        raise InputError(message)
    return float(lr)


def _count(name: str, value: int) -> int:
    if value < 0:
        message = f"{name} must be at least 0, got {value}"
        raise InputError(message)
    return value
