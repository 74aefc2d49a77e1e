"""Shared by ``fit`` and ``fit_population``: optimizers, batches, one step, and the loop.

The loop keeps the history, validates, writes checkpoints and moves the progress bar. Adam and SGD
act entry by entry, so one optimizer updates a whole stack of models; only clipping depends on the
member.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from fsmap import px
from fsmap.errors import CheckpointError, InputError, UnsupportedModuleError, did_you_mean
from fsmap.files import beside, exclusive, remove_partial
from fsmap.functional import (
    Functional,
    check_derivatives,
    check_points,
    detached,
    is_pointwise,
    move_points,
    num_points,
    seeded,
    take_points,
)
from fsmap.objective.objective import Objective, Parts
from fsmap.progress import progress as progress_bar
from fsmap.px import Stream
from fsmap.train import checkpoint as files
from fsmap.types import Batch, Draws, Inputs, ModelFn, Params

CLASSES: dict[str, Callable[..., Optimizer]] = {"adam": Adam, "sgd": SGD}
CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_, which this agrees with

Metric = Callable[[Tensor, Tensor], Any]
"""``(outputs, y)`` to a number, such as ``fsmap.metrics.rmse``."""
NO_METRIC = "by must be a function of outputs and y, such as fsmap.metrics.rmse"
Callback = Callable[[int, Params], bool | None]

PARTS = ("likelihood", "prior", "geometry")
COLUMNS = ("loss", *PARTS, "grad_norm")
"""Values recorded before each update; the three terms are in nats for the whole data set."""
FLUSH_STEPS = 100  # steps whose numbers stay on the device before they are fetched together
BAR_SECONDS = 0.2  # time before the bar is shown, and between two of its movements


# --- optimizers and learning rates


class OptimizerSpec(NamedTuple):
    """An optimizer that has no parameters yet; made by :func:`adam` or :func:`sgd`."""

    name: str
    lr: float
    options: tuple[tuple[str, object], ...] = ()

    def build(
        self, tensors: Iterable[Tensor], *, capturable: bool = False, moving_lr: bool = True
    ) -> Optimizer:
        """Make the ``torch.optim`` optimizer, fused; ``capturable``: a CUDA graph can hold it."""
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
        """Factor on the learning rate of a step, counted from 0; in [0, 1]."""
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
    return OptimizerSpec("sgd", _positive_lr(lr), (("momentum", momentum), ("nesterov", nesterov)))


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
    norms = torch.stack([torch.linalg.vector_norm(g, dim=-1) for g in flat])
    total: Tensor = torch.linalg.vector_norm(norms, dim=0)
    return total


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


ADAM = adam(1e-3)  # the default optimizer


# --- options


class Options(TypedDict, total=False):
    """Options of :func:`fsmap.fit` and :func:`fsmap.fit_population`, as ``fit`` describes them."""

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
        if not isinstance(given, OptimizerSpec):
            raise InputError(
                f"optimizer must be a description without parameters, got {type(given).__name__}. "
                "Use fsmap.adam(lr) or fsmap.sgd(lr, momentum=...)."
            )
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip must be > 0, or None, got {self.clip}")
        if (self.on is None) != (self.by is None):
            raise InputError("validation needs both: on, the held-out data, and by, a metric")
        if self.resume and self.checkpoint is None:
            raise InputError("resume=True needs checkpoint=PATH, the file to resume from")
        if self.by is not None and not callable(self.by):
            raise InputError(f"{NO_METRIC}, got {self.by!r}")

    def describe(self) -> dict[str, Any]:
        """The settings that must agree for a resumed run to equal an uninterrupted one."""
        optimizer, schedule = self.optimizer, self.schedule
        return {
            "optimizer": {"name": optimizer.name, "lr": optimizer.lr, **dict(optimizer.options)},
            "schedule": schedule._asdict(),
            "steps": "any" if schedule.decay == "none" else self.steps,  # "any": it can go on
            "batch_size": self.batch_size,
            "replace": self.replace,
            "clip": self.clip,
            "validate_every": self.validate_every if self.by else None,
            "log_every": self.log_every,
        }


def settings_of(f: object, steps: int, options: Mapping[str, Any]) -> Settings:
    """The settings of ``fit``; InputError for a module as ``f`` and for unknown options."""
    check_derivatives("training")
    if isinstance(f, nn.Module):
        raise InputError("f is a module; it has to be: f, params = fsmap.functional(module)")
    if unknown := sorted(options.keys() - Options.__annotations__):
        hint = did_you_mean(unknown[0], Options.__annotations__)
        raise InputError(f"there is no option {unknown[0]!r}.{hint}")
    return Settings(steps, **options)


def check_integer(name: str, value: Any) -> None:
    """Raise InputError unless a value is an integer (of numpy, too) and not a bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"{name} must be an integer, got {value!r}")


# --- data


class Batches:
    """Rows of the training data for every step, a function of (seed, step).

    Without replacement every pass over the data is a new permutation, of which the last rows, if
    they do not fill a batch, are left out. With replacement every step draws independently.
    """

    def __init__(
        self, num_data: int, size: int | None, *, seed: int, replace: bool = False
    ) -> None:
        check_integer("seed", seed)
        if size is not None:
            check_integer("batch_size", size)
        if size is not None and size < 1:
            raise InputError(f"batch_size must be at least 1, or None for all data, got {size}")
        if size is not None and size > num_data and not replace:
            raise InputError(
                f"batch_size={size} is larger than the data, N={num_data}. Use a smaller one, "
                "batch_size=None for all data on every step, or replace=True."
            )
        self.num_data, self.size, self.seed, self.replace = num_data, size, seed, replace
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def rows(self, step: int) -> Tensor | None:
        """Indices ``[B]`` of the points of one step; None means all points in their order."""
        if self.size is None:
            return None
        if self.replace:
            generator = px.generator(self.seed, step, "batch")
            return torch.randint(self.num_data, (self.size,), generator=generator, device="cpu")
        epoch, place = divmod(step, self.num_data // self.size)
        if epoch != self._epoch:
            generator = px.generator(self.seed, epoch, "epoch")
            self._epoch, self._order = epoch, px.choose(self.num_data, self.num_data, generator)
        return self._order[place * self.size : (place + 1) * self.size]


def take(data: Batch, rows: Tensor | None) -> Batch:
    """Some of the points, or all of them."""
    if rows is None:
        return data
    rows = rows.to(data.y.device, non_blocking=True)
    return Batch(take_points(data.x, rows), data.y[rows])


def as_batch(data: object, params: Params) -> Batch:
    """Data on the device and in the dtype of the parameters; raises InputError if they are bad."""
    pair = (data.x, data.y) if hasattr(data, "x") and hasattr(data, "y") else data
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        kind = type(data).__name__
        raise InputError(f"data must be Batch(x, y), a pair, or have .x and .y, got {kind}")
    x, y = pair
    check_points(x)
    if not isinstance(y, Tensor) or y.ndim == 0:
        raise InputError(f"y must be a tensor with one entry per point, got {type(y).__name__}")
    if len(y) != num_points(x):
        raise InputError(f"x has {num_points(x)} points and y has {len(y)}")
    if y.is_floating_point() and not torch.isfinite(y).all():
        bad = int((~torch.isfinite(y)).reshape(len(y), -1).any(1).sum())
        raise InputError(f"y has NaN or inf in {bad} of {len(y)} points. Remove or impute them.")
    like = next(iter(params.values()))
    return Batch(*(move_points(t, device=like.device, dtype=like.dtype) for t in (x, y)))


def sample_batch(data: Batch, size: int | None) -> Batch:
    """A batch to check an objective on: the first points, and those with the extreme targets."""
    if size is None or size >= len(data.y):
        return data
    flat = data.y.reshape(len(data.y), -1)[:, 0]
    extremes = torch.stack([flat.argmin(), flat.argmax()])
    return take(data, torch.cat([torch.arange(size, device=extremes.device), extremes]))


# --- one step


def gradient(
    objective: Objective, f: ModelFn, params: Params, batch: Batch, draws: Draws
) -> tuple[Params, Tensor]:
    """The gradient of the loss, and the loss with its terms, [4]."""
    with torch.enable_grad():  # as fit_population, also for a caller inside no_grad
        value, parts = objective.loss(f, params, batch, draws)
        found = torch.autograd.grad(value, list(params.values()), materialize_grads=True)
    return dict(zip(params, found, strict=True)), measured(value, parts).detach()


def measured(value: Tensor, parts: Parts) -> Tensor:
    """The loss and its terms, [4] or [4, M]."""
    return torch.stack([value, *(parts[name].to(value.dtype) for name in PARTS)])


def update(
    params: Params,
    grads: Params,
    row: Tensor,
    optimizer: Optimizer,
    clip: float | None,
    finite: Tensor | None = None,
) -> Tensor:
    """Clip the gradient and move the parameters in place; returns the ``COLUMNS``, [5] or [5, M].

    ``finite`` [M] of a stack becomes False for members that diverge; their gradients are then zero.
    """
    norm = global_norm(grads, stacked=finite is not None)
    if clip is not None:
        grads = clip_by_norm(grads, norm, clip)
    if finite is not None:
        finite &= torch.isfinite(row[0]) & torch.isfinite(norm)
        if finite.device.type != "cpu" or not finite.all():
            grads = {n: torch.where(expand(finite, g), g, 0) for n, g in grads.items()}
    for name, p in params.items():
        grad = grads[name]
        # torch's fused optimizers read memory in order, whatever the strides (torch 2.13)
        p.grad = grad if grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)
    optimizer.step()
    return torch.cat([row, norm[None].to(row.dtype)])


def layer_noise(f: ModelFn, stream: Stream, device: torch.device) -> AbstractContextManager[None]:
    """Context manager: dropout masks are a function of (seed, step)."""
    return nullcontext() if is_pointwise(f) else seeded(stream.noise(), device)


def check_pure(f: ModelFn, params: Params, x: Inputs) -> None:
    """Raise UnsupportedModuleError if a pass changes a buffer, as BatchNorm in training does."""
    if not isinstance(f, Functional):
        return
    with torch.no_grad(), layer_noise(f, Stream(0, 0), next(iter(params.values())).device):
        after = f.with_state(params, x)[1].buffers
    before = dict(f.module.named_buffers())
    changed = [n for n in after if not torch.equal(after[n].to(before[n]), before[n])]
    if changed:
        names = list(dict.fromkeys(name.rpartition(".")[0] for name in changed))
        owners = [f"{n!r} ({type(f.module.get_submodule(n)).__name__})" for n in names[:3]]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UnsupportedModuleError(
            f"{', '.join(owners)}{more} would update buffers while training "
            f"({', '.join(changed[:3])}), but fit treats the model as a pure function of its "
            "parameters and would lose them. Call .eval() on the module to train with fixed "
            "statistics, or use fsmap.LMAP in your own loop."
        )


# --- the loop


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
        self.block_start = 0  # the step of the first row of the last flush
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
        """Fetch all rows, [T, C] or [T, C, M]; keep every so many of them, and the ``last``."""
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
        self.block_start = int(steps[0])
        self._rows = []
        return values

    def validated(self, step: int, value: Tensor) -> None:
        """Keep a validation value, [] or [M]."""
        steps = torch.tensor([float(step)], dtype=torch.float64)
        self._validation.append({"step": steps, "value": value.detach().cpu().double()[None]})

    def history(self, diverged: Tensor | None = None) -> History:
        """Everything flushed so far."""
        columns = _joined(self._blocks, ("step", "lr", "seconds", *COLUMNS))
        return History(columns, _joined(self._validation, ("step", "value")), diverged)


def _joined(blocks: list[dict[str, Tensor]], names: tuple[str, ...]) -> dict[str, Tensor]:
    if not blocks:
        return {name: torch.empty(0, dtype=torch.float64) for name in names}
    return {name: torch.cat([block[name] for block in blocks]) for name in names}


class Best(NamedTuple):
    """The parameters with the lowest validation value; of each member, [M], of a population."""

    params: Params
    step: Any  # steps taken when it was measured; 0 while there is none
    value: Any


@dataclass
class Loop:
    """The training loop: steps, history, validation, checkpoints and progress bar."""

    settings: Settings
    params: Params  # leaves that the optimizer updates in place
    optimizer: Optimizer
    check: Callable[[Recorder, Tensor], None]  # raises on divergence; [T, C] or [T, C, M]
    config: dict[str, Any]  # settings of the run, for its checkpoint
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
        """Take all remaining steps; ``take_step`` returns the numbers of a step, [C] or [C, M]."""
        settings, bar, shown = self.settings, None, time.perf_counter()
        stopped = False
        with self.lock as stack:
            while self.step < settings.steps and not stopped:
                lr = settings.optimizer.lr * settings.schedule.factor(self.step, settings.steps)
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
        """Run the callback and validate; returns whether the callback stops training."""
        settings, params = self.settings, detached(self.params)
        stopped = bool(settings.callback and settings.callback(self.step, params))
        last = stopped or self.step == settings.steps
        if self.validation is not None and (last or self.step % settings.validate_every == 0):
            self._validate(self.validation(params), params)
        return stopped

    def _validate(self, value: Tensor, params: Params) -> None:
        self.recorder.validated(self.step, value)
        none = torch.zeros(value.shape, dtype=torch.long), torch.full_like(value, torch.inf)
        old = self.best or Best(params, *none)
        better = value < old.value
        kept = {n: torch.where(expand(better, p), p, old.params[n]) for n, p in params.items()}
        step = torch.where(better, self.step, old.step)
        self.best = Best(kept, step, torch.where(better, value, old.value))

    def _flush(self, last: bool) -> str:
        values = self.recorder.flush(last)
        if not len(values):
            return ""
        self.check(self.recorder, values)
        loss = values[-1, 0]
        return f"loss {float(loss[torch.isfinite(loss)].mean()):.4g}"

    def _checkpoint(self) -> files.Checkpoint:
        history = self.recorder.history()
        groups = {"params": detached(self.params), "extra": self.extra}
        groups |= {"history": history.columns, "validation": history.validation}
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
            how = "Pass resume=True to go on from it, choose another path, or delete it."
            raise CheckpointError(f"the checkpoint {path} exists already. {how}")
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
