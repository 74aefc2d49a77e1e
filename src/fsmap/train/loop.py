"""The loop of one model and of a population: history, validation, checkpoints, progress bar."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsmap.errors import CheckpointError, DivergedError, InputError
from fsmap.files import beside, exclusive, remove_partial
from fsmap.functional import detached
from fsmap.progress import progress as progress_bar
from fsmap.train import checkpoint as files
from fsmap.train.optim import OptimizerSpec, Schedule, adam, expand, set_lr
from fsmap.types import Params

Metric = Callable[[Tensor, Tensor], Any]
"""``(outputs, y)`` to a number, such as ``fsmap.metrics.rmse``."""
Callback = Callable[[int, Params], bool | None]

PARTS = ("likelihood", "prior", "geometry")
COLUMNS = ("loss", *PARTS, "grad_norm")
"""What a step measures before its update; the three terms are in nats for the whole data set."""
FLUSH_STEPS = 100  # steps whose numbers stay on the device before they are fetched together
BAR_SECONDS = 0.2  # time before the bar is shown, and between two of its movements
ADAM = adam(1e-3)  # the default optimizer


class Options(TypedDict, total=False):
    """Options that :func:`fsmap.fit` and :func:`fsmap.fit_population` share.

    :class:`Settings` has the defaults, ``fit`` the descriptions.
    """

    optimizer: OptimizerSpec
    schedule: Schedule
    batch_size: int | None
    replace: bool
    clip: float | None
    on: Any
    by: Metric | None
    validate_every: int
    callback: Callback | None
    checkpoint: str | Path | None
    checkpoint_every: int
    resume: bool
    log_every: int
    progress: bool


@dataclass(frozen=True)
class Settings:
    """The options of a run, checked."""

    steps: int
    optimizer: OptimizerSpec = ADAM
    schedule: Schedule = Schedule()
    batch_size: int | None = None
    replace: bool = False
    clip: float | None = None
    on: Any = None
    by: Metric | None = None
    validate_every: int = 100
    callback: Callback | None = None
    checkpoint: str | Path | None = None
    checkpoint_every: int = 1_000
    resume: bool = False
    log_every: int = 1
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "validate_every", "checkpoint_every", "log_every"):
            value = getattr(self, name)
            check_integer(name, value)
            if value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        given: object = self.optimizer
        checks = {
            f"optimizer must be a description without parameters, got {type(given).__name__}. Use "
            "fsmap.adam(lr) or fsmap.sgd(lr, momentum=...).": isinstance(given, OptimizerSpec),
            f"clip must be > 0, or None, got {self.clip}": self.clip is None or self.clip > 0,
            "validation needs both: on, the held-out data, and by, a metric": (
                (self.on is None) == (self.by is None)
            ),
            "resume=True needs checkpoint=PATH, the file to resume from": (
                not self.resume or self.checkpoint is not None
            ),
        }
        for message, holds in checks.items():
            if not holds:
                raise InputError(message)

    def describe(self) -> dict[str, Any]:
        """What must agree for a resumed run to equal an uninterrupted one, in plain values.

        The number of steps counts only if the learning rate depends on it: a run with a constant
        learning rate can be extended.
        """
        optimizer, schedule = self.optimizer, self.schedule
        return {
            "optimizer": {"name": optimizer.name, "lr": optimizer.lr, **dict(optimizer.options)},
            "schedule": schedule._asdict(),
            "steps": "any" if schedule.decay == "none" else self.steps,
            "batch_size": self.batch_size,
            "replace": self.replace,
            "clip": self.clip,
            "validate_every": self.validate_every if self.by else None,
            "log_every": self.log_every,
        }


def check_integer(name: str, value: Any) -> None:
    """Raise InputError if a value is no integer; integers of numpy are, booleans are not."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"{name} must be an integer, got {value!r}")


class History(NamedTuple):
    """Numbers of the recorded steps, measured before each step's update; float64 on the CPU.

    ``columns`` are ``step``, ``lr``, ``seconds`` [T]; ``loss`` per point, ``likelihood``, ``prior``
    and ``geometry`` in nats for the whole data set, ``grad_norm``: [T], for a population [T, M].
    """

    columns: dict[str, Tensor]
    validation: dict[str, Tensor]  # step [V] (steps taken so far) and value [V] or [V, M]
    diverged: Tensor | None = None  # [M]  step at which a member stopped being finite, or -1

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The terms by step: ``history.parts[-1]["geometry"]``."""
        columns = [self.columns[name] for name in PARTS]
        rows = zip(*(c.tolist() if c.ndim == 1 else c.unbind() for c in columns), strict=True)
        return [dict(zip(PARTS, row, strict=True)) for row in rows]

    @property
    def loss(self) -> Tensor:
        """Loss per training point."""
        return self.columns["loss"]

    def member(self, index: int) -> History:
        """The history of one member of a population."""
        columns = {n: c[:, index] if c.ndim == 2 else c for n, c in self.columns.items()}
        validation = {n: c[:, index] if c.ndim == 2 else c for n, c in self.validation.items()}
        return History(columns, validation)

    def __repr__(self) -> str:
        steps, validations = len(self.columns["step"]), len(self.validation["step"])
        return f"History({steps} steps, {validations} validations)"


class Recorder:
    """Collects rows while training runs; fetches and thins them in blocks."""

    def __init__(self, *, every: int, saved: History | None = None) -> None:
        self.every = every
        self.first = 0  # the step of the first row of the last flush
        self._blocks = [saved.columns] if saved else []
        self._validation = [saved.validation] if saved else []
        self._rows: list[tuple[int, float, float, Tensor]] = []
        elapsed = saved.columns["seconds"][-1:].sum() if saved else 0.0
        self._start = time.perf_counter() - float(elapsed)

    def add(self, step: int, lr: float, row: Tensor) -> None:
        """Keep the numbers of one step on the device."""
        self._rows.append((step, lr, time.perf_counter() - self._start, row))

    def __len__(self) -> int:
        """Rows that were not fetched yet."""
        return len(self._rows)

    def flush(self, last: bool = False) -> Tensor:
        """Fetch all rows since the last flush, [T, C] or [T, C, M]; keep those of the history.

        ``last`` keeps the last row whatever ``every`` is.
        """
        if not self._rows:
            return torch.empty(0, len(COLUMNS))
        values = torch.stack([row for *_, row in self._rows]).cpu().double()
        steps, lrs, seconds = zip(*(row[:3] for row in self._rows), strict=True)
        keep = [i for i, step in enumerate(steps) if step % self.every == 0]
        if last and len(steps) - 1 not in keep:
            keep.append(len(steps) - 1)
        block = {name: values[keep, c] for c, name in enumerate(COLUMNS)}
        for name, column in (("step", steps), ("lr", lrs), ("seconds", seconds)):
            block[name] = torch.tensor(column, dtype=torch.float64)[keep]
        self._blocks.append(block)
        self.first = int(steps[0])
        self._rows = []
        return values

    def validated(self, step: int, value: Tensor) -> None:
        """Keep a validation value, [] or [M]."""
        steps = torch.tensor([float(step)], dtype=torch.float64)
        self._validation.append({"step": steps, "value": value.detach().cpu().double()[None]})

    def history(self, diverged: Tensor | None = None) -> History:
        """Everything flushed so far."""
        return History(
            _joined(self._blocks, ("step", "lr", "seconds", *COLUMNS)),
            _joined(self._validation, ("step", "value")),
            diverged,
        )


def _joined(blocks: list[dict[str, Tensor]], names: tuple[str, ...]) -> dict[str, Tensor]:
    if not blocks:
        return {name: torch.empty(0, dtype=torch.float64) for name in names}
    return {name: torch.cat([block[name] for block in blocks]) for name in names}


ADVICE = {
    "geometry": "J(theta; p_X) + eps*I is singular or overflows here: raise jitter or num_points, "
    "lower the learning rate, or ask fsmap.doctor.",
    "grad_norm": "A term has no derivative here, or an infinite one: lower the learning rate, "
    "raise jitter, or move the starting point.",
}
GENERAL = "Lower the learning rate, clip the gradient (clip=1.0), or look for outliers in the data."


def stop_if_diverged(recorder: Recorder, values: Tensor) -> None:
    """Raise DivergedError if a number of the last flush, [T, C], is not finite.

    The message has the step, the terms that are not finite and the last finite values.
    """
    bad = ~torch.isfinite(values)
    if not bad.any():
        return
    at = int(bad.any(1).nonzero()[0])
    names = [name for name, is_bad in zip(COLUMNS, bad[at].tolist(), strict=True) if is_bad]
    terms = [name for name in names if name in PARTS]
    where = f"the {', '.join(terms)} term" if terms else f"{names[0]}, but no term,"
    columns = recorder.history().columns
    finite = torch.stack([torch.isfinite(columns[name]) for name in COLUMNS]).all(0)
    rows = (finite & (columns["step"] < recorder.first + at)).nonzero().flatten().tolist()
    last = ", ".join(f"{name} {columns[name][rows[-1]]:.6g}" for name in COLUMNS if rows)
    raise DivergedError(
        f"training diverged at step {recorder.first + at}: {where} is not finite; last finite "
        f"values: {last or 'none'}. {ADVICE.get((terms or names)[0], GENERAL)}"
    )


class Best(NamedTuple):
    """The parameters with the lowest validation value; of each member, [M], of a population."""

    params: Params
    step: Any  # steps taken when it was measured; 0 while there is none
    value: Any


@dataclass
class Loop:
    """Takes the steps of one run and does everything around them."""

    settings: Settings
    params: Params  # leaves that the optimizer updates in place
    optimizer: Optimizer
    judge: Callable[[Recorder, Tensor], None]  # checks fetched numbers, [T, C] or [T, C, M]
    config: dict[str, Any]  # what run this is, for the checkpoint
    validation: Callable[[Params], Tensor] | None  # held-out metric, [] or [M]; smaller is better
    extra: dict[str, Tensor]  # further state that a checkpoint must hold; restored in place
    step: int = 0  # steps taken
    best: Best | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        self.recorder = Recorder(every=settings.log_every)
        self.path = None if settings.checkpoint is None else Path(settings.checkpoint)
        with ExitStack() as stack:
            if self.path is not None:
                lock = beside(self.path, "lock")
                stack.enter_context(exclusive(lock, self.path))
                stack.callback(lock.unlink, missing_ok=True)
                remove_partial(self.path)
                if self.path.exists():
                    self._restore(self.path)
            self.lock = stack.pop_all()  # held until run() ends

    def run(self, take_step: Callable[[int], Tensor], label: str) -> None:
        """Take all remaining steps.

        ``take_step`` takes the step of the given number and returns its numbers, ``[C]`` or
        ``[C, M]``.
        """
        settings, bar, shown = self.settings, None, time.perf_counter()
        stopped = False
        with self.lock as stack:
            while self.step < settings.steps and not stopped:
                factor = settings.schedule.factor(self.step, settings.steps)
                lr = settings.optimizer.lr * factor
                set_lr(self.optimizer, lr)
                self.recorder.add(self.step, lr, take_step(self.step))
                self.step += 1
                stopped = self._after_step()
                last = stopped or self.step == settings.steps
                text = self._flush(last) if last or len(self.recorder) >= FLUSH_STEPS else None
                if settings.progress and time.perf_counter() - shown > BAR_SECONDS:
                    bar = bar or stack.enter_context(progress_bar(settings.steps, label))
                    bar.update(self.step, text)
                    shown = time.perf_counter()
                if self.path and (last or self.step % settings.checkpoint_every == 0):
                    self._flush(last)
                    files.save(self.path, self._checkpoint())

    def _after_step(self) -> bool:
        """Validate and call back; whether to stop."""
        settings, params = self.settings, detached(self.params)
        due = self.step % settings.validate_every == 0 or self.step == settings.steps
        if self.validation is not None and due:
            self._validate(self.validation(params), params)
        return bool(settings.callback and settings.callback(self.step, params))

    def _validate(self, value: Tensor, params: Params) -> None:
        self.recorder.validated(self.step, value)
        none = torch.zeros(value.shape, dtype=torch.long), torch.full_like(value, torch.inf)
        old = self.best or Best(params, *none)
        better = value < old.value
        self.best = Best(
            params={n: torch.where(expand(better, p), p, old.params[n]) for n, p in params.items()},
            step=torch.where(better, self.step, old.step),
            value=torch.where(better, value, old.value),
        )

    def _flush(self, last: bool) -> str:
        values = self.recorder.flush(last)
        if not len(values):
            return ""
        self.judge(self.recorder, values)
        loss = values[-1, 0]
        return f"loss {float(loss[torch.isfinite(loss)].mean()):.4g}"

    def _checkpoint(self) -> files.Checkpoint:
        history = self.recorder.history()
        groups: dict[str, dict[str, Tensor]] = {
            "params": detached(self.params),
            "history": history.columns,
            "validation": history.validation,
            "extra": self.extra,
        }
        for name, p in self.params.items():
            state = self.optimizer.state[p]
            groups[f"optimizer/{name}"] = {k: v for k, v in state.items() if isinstance(v, Tensor)}
        if self.best is not None:
            groups["best"] = {n: t for n, t in self.best._asdict().items() if n != "params"}
            groups["best_params"] = self.best.params
        tensors = {f"{g}/{n}": t for g, group in groups.items() for n, t in group.items()}
        return files.Checkpoint(tensors, self.config, {"step": self.step})

    def _restore(self, path: Path) -> None:
        if not self.settings.resume:
            raise CheckpointError(
                f"the checkpoint {path} exists already. Pass resume=True to go on from it, choose "
                "another path, or delete it."
            )
        saved = files.load(path)
        files.check_same_run(path, saved.config, self.config)
        with files.readable(path):
            self._fill(saved)
        if self.step > self.settings.steps:
            raise CheckpointError(
                f"the checkpoint {path} has taken {self.step} steps already, more than "
                f"steps={self.settings.steps}. Ask for more steps, or use another path."
            )

    @torch.no_grad()
    def _fill(self, saved: files.Checkpoint) -> None:
        self.step = operator.index(saved.progress["step"])
        if self.step < 0:
            raise ValueError(f"step is {self.step}")
        for name, p in self.params.items():
            _copy(p, saved.tensors[f"params/{name}"])
            state = saved.group(f"optimizer/{name}")
            self.optimizer.state[p] = {k: v.to(p.device) for k, v in state.items()}
        for name, t in self.extra.items():
            _copy(t, saved.tensors[f"extra/{name}"])
        best, kept = saved.group("best"), saved.group("best_params")
        if best:
            on_device = {n: kept.pop(n).to(p.device) for n, p in self.params.items()}
            self.best = Best(on_device, best["step"], best["value"])
        history = History(saved.group("history"), saved.group("validation"))
        self.recorder = Recorder(every=self.settings.log_every, saved=history)


def _copy(live: Tensor, saved: Tensor) -> None:
    """Copy a tensor of the same shape; ``copy_`` alone would also repeat a smaller one."""
    if live.shape != saved.shape:
        raise ValueError(f"shape {tuple(saved.shape)}, expected {tuple(live.shape)}")
    live.copy_(saved)
