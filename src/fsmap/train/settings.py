"""The knobs that both loops share, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fsmap.errors import InputError
from fsmap.train.optim import OptimizerSpec, Schedule
from fsmap.types import Params

Validation = Callable[[Params], Tensor | float]
Callback = Callable[[int, Params], bool | None]


def check_integer(name: str, value: Any) -> None:
    """Refuse what is no integer.

    Args:
        name: Of the argument, for the message.
        value: What came; integers of numpy are ones, booleans are not.

    Raises:
        InputError: If it is no integer.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        message = f"{name} must be an integer, got {value!r}"
        raise InputError(message)


@dataclass(frozen=True)
class Settings:
    """The knobs that both loops share; :func:`fsmap.fit` describes them."""

    steps: int
    optimizer: OptimizerSpec
    schedule: Schedule
    clip: float | None = None
    validation: Validation | None = None
    validate_every: int = 100
    patience: int | None = None
    callback: Callback | None = None
    checkpoint: Path | None = None
    checkpoint_every: int = 1_000
    resume: bool = False
    log_every: int = 1
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "validate_every", "checkpoint_every", "log_every", "patience"):
            value = getattr(self, name)
            if value is not None:
                check_integer(name, value)
            if value is not None and value < 1:
                message = f"{name} must be at least 1, got {value}"
                raise InputError(message)
        given: object = self.optimizer
        if not isinstance(given, OptimizerSpec):
            kind = type(given).__name__
            message = (
                f"optimizer must be a description without parameters, got {kind}. Use "
                "fsmap.train.optim.adam(lr), adamw(lr) or sgd(lr, momentum=...)."
            )
            raise InputError(message)
        if self.clip is not None and not self.clip > 0:
            message = f"clip must be > 0, or None for no clipping, got {self.clip:g}"
            raise InputError(message)
        if self.patience is not None and self.validation is None:
            message = (
                "patience counts validations, and there is no validation. Give one, or leave "
                "patience out."
            )
            raise InputError(message)
        if self.resume and self.checkpoint is None:
            message = "resume=True needs checkpoint=PATH, the file to resume from"
            raise InputError(message)

    def describe(self) -> dict[str, Any]:
        """What must agree for a resumed run to equal an uninterrupted one.

        Returns:
            Plain values. The number of steps counts only where the learning rate depends on it:
            a run with a constant one can be extended.
        """
        return {
            "optimizer": {
                "name": self.optimizer.name,
                "lr": self.optimizer.lr,
                **dict(self.optimizer.options),
            },
            "schedule": self.schedule._asdict(),
            "steps": "any" if self.schedule.decay == "none" else self.steps,
            "clip": self.clip,
            "validate_every": self.validate_every if self.validation else None,
            "patience": self.patience,
            "log_every": self.log_every,
        }
