"""``fit``: train one model. Batches, random layers and the gradient of a step are defined here."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsmap import px
from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import (
    Functional,
    check_params,
    check_points,
    detached,
    evaluation_mode,
    is_pointwise,
    move_points,
    num_points,
    take_points,
)
from fsmap.objective.objective import Objective, Parts
from fsmap.px import Stream
from fsmap.train.checkpoint import describe, describe_model
from fsmap.train.loop import (
    PARTS,
    Best,
    History,
    Loop,
    Metric,
    Options,
    Settings,
    check_integer,
    stop_if_diverged,
)
from fsmap.train.optim import clip_by_norm, expand, global_norm
from fsmap.types import Batch, Draws, Inputs, ModelFn, Params


class TrainState(NamedTuple):
    """Where training ended."""

    params: Params
    step: int  # steps taken
    best: Best | None = None  # if there was a validation


def fit(
    objective: Objective,
    f: ModelFn,
    params: Params,
    data: Any,
    /,
    *,
    steps: int,
    seed: int = 0,
    **options: Unpack[Options],
) -> tuple[TrainState, History]:
    """Minimize ``objective.loss``: minus the log-posterior of parameters or functions, over N.

    Batches, evaluation points, ψ and dropout masks are functions of (seed, step), so a run can be
    repeated, and a resumed run takes the same steps as one that was never interrupted. The model is
    a pure function of its parameters: its buffers do not change.

    Args:
        objective: From ``ps_map``, ``fs_map``, ``l_map``.
        f: Model function, from ``functional``.
        params: Where to start; never modified.
        data: Training points: ``Batch(x, y)``, a pair, or anything with ``x`` and ``y``.
        steps: Length of the whole run.
        seed: Seed of everything random.
        **options: All optional:

            - ``optimizer``: ``fsmap.adam(lr)`` (1e-3) or ``fsmap.sgd(lr)``.
            - ``schedule``: ``fsmap.cosine()``; by default the learning rate is constant.
            - ``batch_size``: B; None is all data on every step.
            - ``replace``: draw batches with replacement.
            - ``clip``: largest norm of the gradient; None leaves it alone.
            - ``on``, ``by``: held-out data and a metric ``(outputs, y) -> number``, smaller is
              better, such as ``fsmap.metrics.nll``. ``state.best`` keeps the best parameters.
            - ``validate_every`` (100): steps between validations; the last step is always one.
            - ``callback``: called as ``callback(steps_taken, params)`` after every step; copy what
              you keep. A true answer ends training.
            - ``checkpoint``: a file to write every ``checkpoint_every`` (1,000) steps and at the
              end.
            - ``resume``: go on from ``checkpoint`` if it exists.
            - ``log_every`` (1): record every so many steps in the history, and the last one.
            - ``progress`` (True): show a progress bar.

    Returns:
        The state (``state.params``, ``state.best``) and the history of each term in nats.

    Example:
        >>> import torch, fsmap
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> f, params = fsmap.functional(torch.nn.Linear(1, 1))
        >>> objective = fsmap.ps_map(fsmap.Gaussian(0.1), fsmap.Normal(1.0), num_data=20)
        >>> state, history = fsmap.fit(objective, f, params, (x, 2 * x), steps=3, progress=False)
        >>> sorted(history.parts[-1])
        ['geometry', 'likelihood', 'prior']
    """
    settings = Settings(steps, **options)
    check_params(params)
    train = as_batch(data, params)
    given: object = objective
    if not isinstance(given, Objective):
        raise InputError(
            f"the objective must be one of fsmap.fs_map(...) and its kin, got {objective!r}"
        )
    rows, size = len(train.y), settings.batch_size
    if objective.num_data != rows:
        message = (
            f"the objective was made for num_data={objective.num_data}, the data have {rows} rows: "
            f"prior and geometry weigh as for {objective.num_data}. Give num_data={rows}, unless "
            "that is meant."
        )
        warnings.warn(message, UserWarning, stacklevel=2)
    batches = Batches(rows, size, seed=seed, replace=settings.replace)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    device = train.y.device
    sample = sample_batch(train, size)
    check_pure(f, leaves, sample.x)
    with layer_noise(f, Stream(seed, 0), device):
        objective.check(f, leaves, sample)
        started = objective.started(f, leaves, Stream(seed, 0))
    config: dict[str, Any] = {}
    if settings.checkpoint is not None:
        about = {"objective": objective, "data": train, "seed": seed}
        config = {"kind": "fit", "model": describe_model(f, leaves)}
        config |= describe(about) | settings.describe()
    validation = None
    if settings.by is not None:
        held_out, by = as_batch(settings.on, params), settings.by
        validation = lambda params: measure(f, params, held_out, by)  # noqa: E731
    optimizer = settings.optimizer.build(leaves.values())
    extra = {} if started is objective else {"r0": started.geometry.r0}  # type: ignore[attr-defined]
    loop = Loop(settings, leaves, optimizer, stop_if_diverged, config, validation, extra)
    noisy = not is_pointwise(f)  # asked once: it walks through the module

    def take_step(step: int) -> Tensor:
        stream = Stream(seed, step)
        draws = objective.draw(f, leaves, stream)
        batch = take(train, batches.rows(step))
        with layer_noise(f, stream, device) if noisy else nullcontext():
            grads, row = gradient(started, f, leaves, batch, draws)
        return update(leaves, grads, row, optimizer, settings.clip)

    loop.run(take_step, "fit")
    best = loop.best
    kept = Best(best.params, int(best.step), float(best.value)) if best and best.step > 0 else None
    final = {n: p.detach().clone() for n, p in leaves.items()}
    return TrainState(final, loop.step, kept), loop.recorder.history()


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
            return torch.randint(self.num_data, (self.size,), generator=generator)
        epoch, place = divmod(step, self.num_data // self.size)
        if epoch != self._epoch:
            generator = px.generator(self.seed, epoch, "epoch")
            self._epoch, self._order = epoch, torch.randperm(self.num_data, generator=generator)
        return self._order[place * self.size : (place + 1) * self.size]


def take(data: Batch, rows: Tensor | None) -> Batch:
    """Some of the points, or all of them."""
    if rows is None:
        return data
    rows = rows.to(data.y.device, non_blocking=True)
    return Batch(take_points(data.x, rows), data.y[rows])


def as_batch(data: object, params: Params) -> Batch:
    """Data on the device of the parameters, floating-point tensors in their dtype.

    Raises InputError if they are no pair of points and targets, are empty or not finite.
    """
    pair = (data.x, data.y) if hasattr(data, "x") and hasattr(data, "y") else data
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise InputError(
            f"data must be Batch(x, y), a pair, or have .x and .y, got {type(data).__name__}"
        )
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
    x, y = (move_points(t, device=like.device, dtype=like.dtype) for t in (x, y))
    return Batch(x, y)


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
    """Clip the gradient and move the parameters in place.

    For a stack of members, ``finite`` [M] loses the members whose loss or gradient is not finite;
    they get no gradient any more. Returns the numbers of ``COLUMNS``, [5] or [5, M].
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
    """Random layers (dropout) drawn from (seed, step)."""
    return nullcontext() if is_pointwise(f) else seeded(stream.noise(), device)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's own generators of the CPU and of a device, seeded, and put back afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def check_pure(f: ModelFn, params: Params, x: Inputs) -> None:
    """Raise UnsupportedModuleError if a pass changes a buffer, as BatchNorm in training does."""
    if not isinstance(f, Functional):
        return
    device = next(iter(params.values())).device
    with torch.no_grad(), layer_noise(f, Stream(0, 0), device):
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


# --- validation


def measure(f: ModelFn, params: Params, data: Batch, by: Metric) -> Tensor:
    """A metric on held-out data, random layers off: [], float64 on the CPU.

    It is nan if an output is not finite.
    """
    quiet: AbstractContextManager[None] = nullcontext()
    if isinstance(f, Functional) and not f.pointwise:
        quiet = evaluation_mode(f.module)
    with torch.no_grad(), quiet:
        out = f(detached(params), data.x)
        found = torch.as_tensor(by(out, data.y) if torch.isfinite(out).all() else torch.nan)
    if found.numel() != 1:
        raise InputError(f"by must return one number, got a tensor of shape {list(found.shape)}")
    return found.detach().cpu().double().reshape(())
