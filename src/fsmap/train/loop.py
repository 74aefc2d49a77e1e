"""What surrounds the steps of one model or a population: history, validation, checkpoints, bar."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsmap.errors import CheckpointError, InputError
from fsmap.train import checkpoint as files
from fsmap.train.batches import check_integer
from fsmap.train.files import beside, remove_partial
from fsmap.train.history import History, Recorder
from fsmap.train.lock import exclusive
from fsmap.train.optim import OptimizerSpec, Schedule
from fsmap.train.progress import progress as progress_bar
from fsmap.types import Params

Validation = Callable[[Params], Tensor | float]
Callback = Callable[[int, Params], bool | None]

BAR_SECONDS = 0.2  # least time between two movements of the bar


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


class Tracked(NamedTuple):
    """The lowest validation value so far: [] for one model, [M] for a population."""

    params: Params
    step: Tensor  # steps taken when it was measured; 0 while there is none
    value: Tensor
    stale: Tensor  # validations since


@dataclass
class Loop:
    """Takes the steps of one run and does everything around them.

    Attributes:
        settings: The knobs.
        params: Leaves that ``moving`` updates in place.
        moving: The optimizer.
        judge: Looks at freshly fetched numbers ``[T, C]`` or ``[T, C, M]``; raises, or marks
            members as diverged.
        config: What run this is, for the checkpoint.
        members: M for a population, None for one model.
        extra: Further state that a checkpoint must hold; restored in place.
        step: Steps taken.
        tracked: The best validation so far, where there is one.
    """

    settings: Settings
    params: Params
    moving: Optimizer
    judge: Callable[[Recorder, Tensor], None]
    config: dict[str, Any]
    members: int | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0
    tracked: Tracked | None = None

    def __post_init__(self) -> None:
        self.recorder = Recorder(every=self.settings.log_every)
        self.lock = ExitStack()  # held until run() ends
        path = self.settings.checkpoint
        if path is not None:
            lock = beside(path, "lock")
            self.lock.enter_context(exclusive(lock, path))
            self.lock.callback(lock.unlink, missing_ok=True)
        try:
            if path is not None:
                remove_partial(path)
            if path is not None and path.exists():
                self._restore(path)
        except BaseException:
            self.lock.close()
            raise
        self.schedule = self.settings.schedule.build(self.moving, self.settings.steps, self.step)

    def run(self, take_step: Callable[[int], Tensor], label: str) -> None:
        """Take all remaining steps.

        Args:
            take_step: Takes the step of the given number and returns its numbers, ``[C]`` or
                ``[C, M]``.
            label: What the bar says.
        """
        settings = self.settings
        stopped = self._out_of_patience()
        with self.lock, progress_bar(settings.steps, label, silent=not settings.progress) as bar:
            said = 0.0
            while self.step < settings.steps and not stopped:
                lr = settings.optimizer.lr * settings.schedule.factor(self.step, settings.steps)
                self.recorder.add(self.step, lr, take_step(self.step))
                self.step += 1
                self.schedule.step()
                stopped = self._after_step()
                last = stopped or self.step == settings.steps
                if last or self.recorder.full():
                    text = self._flush(last)
                    bar.update(self.step, text)
                elif time.perf_counter() - said > BAR_SECONDS:
                    said = time.perf_counter()
                    bar.update(self.step)
                self._save_if_due(last)

    def _after_step(self) -> bool:
        """Validate and call back; whether to stop."""
        settings = self.settings
        due = self.step % settings.validate_every == 0 or self.step == settings.steps
        if settings.validation is not None and due:
            with torch.no_grad():
                self._track(torch.as_tensor(settings.validation(self._detached())))
        stop = False
        if settings.callback is not None:
            stop = bool(settings.callback(self.step, self._detached()))
        return stop or self._out_of_patience()

    def _track(self, value: Tensor) -> None:
        shape = [] if self.members is None else [self.members]
        if list(value.shape) != shape:
            message = (
                f"validation must return one number, got a tensor of shape {list(value.shape)}"
            )
            raise InputError(message)
        self.recorder.validated(self.step, value)
        if self.tracked is None:
            zero = torch.zeros(shape, dtype=torch.long, device=value.device)
            worst = torch.full_like(value, torch.inf)
            self.tracked = Tracked(
                {n: p.clone() for n, p in self._detached().items()}, zero, worst, zero
            )
        old, limit = self.tracked, self.settings.patience
        better = value < old.value
        if limit is not None:
            better &= (
                old.stale < limit
            )  # a member whose patience is over keeps its best, as it would alone
        self.tracked = Tracked(
            {
                n: torch.where(_spread(better, p), p, old.params[n])
                for n, p in self._detached().items()
            },
            torch.where(better, self.step, old.step),
            torch.where(better, value, old.value),
            torch.where(better, 0, old.stale + 1),
        )

    def _out_of_patience(self) -> bool:
        if self.settings.patience is None or self.tracked is None:
            return False
        return bool((self.tracked.stale >= self.settings.patience).all())

    def _flush(self, last: bool) -> str:
        values = self.recorder.flush(last)
        if not len(values):
            return ""
        self.judge(self.recorder, values)
        loss = values[-1, 0]
        return f"loss {float(loss[torch.isfinite(loss)].mean()) if loss.ndim else float(loss):.4g}"

    def _save_if_due(self, last: bool) -> None:
        settings = self.settings
        if settings.checkpoint is None or not (last or self.step % settings.checkpoint_every == 0):
            return
        self._flush(last)
        files.save(settings.checkpoint, self._checkpoint())

    def _checkpoint(self) -> files.Checkpoint:
        history = self.recorder.history()
        groups: dict[str, dict[str, Tensor]] = {
            "params": self._detached(),
            "history": history.columns,
            "validation": history.validation,
            "extra": self.extra,
        }
        for name, p in self.params.items():
            groups[f"optimizer/{name}"] = {
                k: v for k, v in self.moving.state[p].items() if isinstance(v, Tensor)
            }
        if self.tracked is not None:
            best = self.tracked
            groups["best"] = {"step": best.step, "value": best.value, "stale": best.stale}
            groups["best_params"] = best.params
        tensors = {f"{g}/{n}": t for g, group in groups.items() for n, t in group.items()}
        return files.Checkpoint(tensors, self.config, {"step": self.step})

    def _restore(self, path: Path) -> None:
        if not self.settings.resume:
            message = (
                f"the checkpoint {path} exists already. Pass resume=True to go on from it, choose "
                "another path, or delete it."
            )
            raise CheckpointError(message)
        saved = files.load(path)
        files.check_same_run(path, saved.config, self.config)
        with files.readable(path):
            self._take(path, saved)

    def _take(self, path: Path, saved: files.Checkpoint) -> None:
        self.step = operator.index(saved.progress["step"])
        if self.step < 0:
            message = f"step is {self.step}"
            raise ValueError(message)
        if self.step > self.settings.steps:
            message = (
                f"the checkpoint {path} has taken {self.step} steps already, more than "
                f"steps={self.settings.steps}. Ask for more steps, or use another path."
            )
            raise CheckpointError(message)
        with torch.no_grad():
            for name, p in self.params.items():
                _fill(p, saved.tensors[f"params/{name}"])
                state = saved.group(f"optimizer/{name}")
                self.moving.state[p] = {k: v.to(p.device) for k, v in state.items()}
            for name, t in self.extra.items():
                _fill(t, saved.tensors[f"extra/{name}"])
        device = next(iter(self.params.values())).device
        best = {n: t.to(device) for n, t in saved.group("best").items()}
        if best:
            kept = {n: t.to(device) for n, t in saved.group("best_params").items()}
            if kept.keys() != self.params.keys():
                message = "best_params are not those of this model"
                raise ValueError(message)
            self.tracked = Tracked(kept, best["step"], best["value"], best["stale"])
        history = History(saved.group("history"), saved.group("validation"))
        self.recorder = Recorder(every=self.settings.log_every, saved=history)

    def _detached(self) -> Params:
        return {n: p.detach() for n, p in self.params.items()}


def _fill(live: Tensor, saved: Tensor) -> None:
    """Copy a tensor of the same shape; ``copy_`` alone would also repeat a smaller one."""
    if live.shape != saved.shape:
        message = f"shape {tuple(saved.shape)}, expected {tuple(live.shape)}"
        raise ValueError(message)
    live.copy_(saved)


def _spread(flags: Tensor, like: Tensor) -> Tensor:
    """[] or [M] with as many dimensions as ``like``."""
    return flags.reshape(flags.shape + (1,) * (like.ndim - flags.ndim)).to(like.device)
