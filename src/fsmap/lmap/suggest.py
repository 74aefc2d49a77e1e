"""Which λ? R measured beside the loss, and values of λ to try.

R(θ) is the squared norm of a Jacobian. Its size differs by orders of magnitude between
architectures, evaluation distributions and BatchNorm modes, and so does the right λ.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsmap.errors import InputError, UnseenStatisticsWarning
from fsmap.lmap.core import Regularizer
from fsmap.lmap.module import LMAP, LaplacianPenalty
from fsmap.types import Inputs

SHARES = (0.01, 0.1, 1.0)
"""Shares λR / loss that are offered."""


class Strength(NamedTuple):
    """R beside the loss, and the λ that follows from it; ``print`` it.

    Attributes:
        R: Mean of R(θ) over the draws.
        stderr: Its standard error.
        loss: The loss that was given.
        share: The share of the loss that was asked for.
        reg_strength: λ with λR = share · loss.
        current: λ as it is now, if it was given.
        jitter: ε = 1/(2λN) of ``reg_strength``, if N was given.
    """

    R: float
    stderr: float
    loss: float
    share: float
    reg_strength: float
    current: float | None = None
    jitter: float | None = None

    @property
    def choices(self) -> dict[float, float]:
        """λ at which λR is 1, 10 and 100 percent of the loss, by share."""
        return {share: share * self.loss / self.R for share in SHARES}

    @property
    def current_share(self) -> float | None:
        """λR / loss as it is now."""
        return None if self.current is None else self.current * self.R / self.loss

    def __str__(self) -> str:
        lines = [f"R = {self.R:.4g} ± {self.stderr:.2g}, loss = {self.loss:.4g}"]
        for share, strength in self.choices.items():
            line = f"λ = {strength:.2g}: λR is {share:.0%} of the loss"
            if self.jitter is not None:
                line += f" (ε = {self.jitter * self.reg_strength / strength:.2g})"
            lines.append(line)
        if self.current is not None:
            lines.append(f"now λ = {self.current:.2g}: λR is {self.current_share:.2g} of the loss")
        return "\n".join(lines)


def suggest_strength(
    model: nn.Module | LaplacianPenalty,
    px: Any = None,
    /,
    *,
    loss: float | Tensor,
    share: float = 0.01,
    current: float | None = None,
    num_data: int | None = None,
    x: Inputs = None,
    num_points: int = 128,
    draws: int = 16,
    seed: int = 0,
    **options: Any,
) -> Strength:
    r"""Measure R beside the loss, and return the λ at which λR is 1, 10 and 100 percent of it.

    R is averaged over draws of evaluation points and ψ, without gradients. The model, its buffers
    and the state of a wrapper do not change. Before training this gives values of λ to try: the
    best one on held-out data can lie anywhere between 1 and 100 percent, and R grows while a
    network is trained. On a trained model it says what the λ in use amounts to.

    With ``batchnorm="frozen"`` R is measured with running statistics. If a BatchNorm layer has not
    seen data yet (mean 0, variance 1), R can be wrong by orders of magnitude, and
    :class:`fsmap.errors.UnseenStatisticsWarning` is given.

    Args:
        model: An ``nn.Module``, or the ``LMAP`` or ``LaplacianPenalty`` that trains it, whose
            settings are then used.
        px: Evaluation distribution, for a bare module.
        loss: Your training loss now, without λR: a mean over points, greater than zero.
        share: λR / loss at ``reg_strength`` of the result.
        current: λ as it is now.
        num_data: N, to translate λ to ε = 1/(2λN).
        x: A training batch. Only ``LMAP(batchnorm="joint")`` needs it: its R averages over both.
        num_points: S, for a bare module.
        draws: How often R is estimated.
        seed: Seed of the draws, for a bare module.
        **options: More for a bare module: ``estimator``, ``batchnorm``, ``metric``, ``forward``.

    Returns:
        The numbers; ``print`` shows them in words.

    Raises:
        InputError: If the loss is not positive, R is zero, or an argument is missing.

    Example:
        >>> import torch, fsmap
        >>> model = torch.nn.Linear(3, 1)  # R = E‖x‖² + 1 = 4 whatever the parameters
        >>> found = fsmap.suggest_strength(
        ...     model, fsmap.px.Normal(shape=(3,)), loss=0.5, num_points=4096, estimator="exact"
        ... )
        >>> round(found.R), round(found.reg_strength, 5)
        (4, 0.00125)
    """
    value = float(loss.detach() if isinstance(loss, Tensor) else loss)
    if not 0 < value < math.inf:
        message = (
            f"loss must be positive and finite, got {value:g}. If your loss is a log-density that "
            "can be negative, give it without its constants, such as the squared error."
        )
        raise InputError(message)
    for name, number in (("share", share), ("draws", draws)):
        if not number > 0:
            message = f"{name} must be positive, got {number:g}"
            raise InputError(message)
    wrapped = _wrapped(model, px, num_points=num_points, seed=seed, **options)
    if wrapped.batchnorm == "frozen":
        _warn_if_unseen(wrapped.regularizer.module)
    found = _measured(wrapped, x, draws)
    R = float(found.mean())
    if not 0 < R < math.inf:
        message = (
            f"R is {R:g} at this p_X, so no λ can be suggested. A model whose output does not "
            "depend on its parameters has R = 0; points far outside the data can make it infinite."
        )
        raise InputError(message)
    stderr = float(found.std()) / math.sqrt(draws) if draws > 1 else math.nan
    strength = share * value / R
    jitter = None if num_data is None else 1 / (2 * strength * num_data)
    return Strength(R, stderr, value, share, strength, current, jitter)


def _wrapped(model: Any, px: Any, **options: Any) -> LMAP | LaplacianPenalty:
    if isinstance(model, LMAP | LaplacianPenalty):
        return model
    if not isinstance(model, nn.Module):
        message = (
            f"model must be an nn.Module, an LMAP or a LaplacianPenalty, got {type(model).__name__}"
        )
        raise InputError(message)
    if px is None:
        message = (
            "a bare module needs px, the evaluation distribution: "
            "suggest_strength(model, fsmap.px.Normal(shape=(3,)), loss=loss)"
        )
        raise InputError(message)
    return LaplacianPenalty(model, px, **options)


def _warn_if_unseen(module: nn.Module) -> None:
    """Warn if running statistics are still those of a new layer."""
    unseen = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm)
        and layer.running_mean is not None
        and layer.running_var is not None
        and not layer.running_mean.any()
        and bool((layer.running_var == 1).all())
    ]
    if unseen:
        message = (
            f"R is measured with running statistics, and {len(unseen)} BatchNorm layers (the first "
            f"is {unseen[0]!r}) have not seen data: mean 0, variance 1. R of the model in training "
            "can differ by orders of magnitude. Train for some steps first, or measure within "
            "fsmap.fresh_statistics(model, [x])."
        )
        warnings.warn(message, UnseenStatisticsWarning, stacklevel=3)


def _measured(wrapped: LMAP | LaplacianPenalty, x: Inputs, draws: int) -> Tensor:
    """R of several draws, ``[draws]``; steps and buffers are left as they were."""
    reg = wrapped.regularizer
    kept = reg.step
    try:
        with torch.no_grad():
            return torch.stack([_one(wrapped, reg, x, k) for k in range(draws)]).double().cpu()
    finally:
        reg.step = kept


def _one(wrapped: LMAP | LaplacianPenalty, reg: Regularizer, x: Inputs, draw: int) -> Tensor:
    reg.step = draw * reg.every
    if wrapped.batchnorm != "joint":
        return reg().R / reg.every
    if x is None:
        message = (
            'LMAP(batchnorm="joint") averages R over training and evaluation points: give x, a '
            "training batch"
        )
        raise InputError(message)
    with reg.own_noise():
        return reg(x).R / reg.every
