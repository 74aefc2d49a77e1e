"""``fit``, the loop for one model: a seed becomes batches and draws, and the loss becomes steps."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from fsmap.functional import check_params
from fsmap.linalg.probes import Stream
from fsmap.objective.objective import Objective
from fsmap.train.batches import Batches, as_batch, sample_batch, take
from fsmap.train.checkpoint import describe, describe_model
from fsmap.train.history import History, stop_if_diverged
from fsmap.train.loop import Callback, Loop, Settings, Validation
from fsmap.train.optim import OptimizerSpec, Schedule, adam, constant
from fsmap.train.state import Best, TrainState
from fsmap.train.step import check_pure, layer_noise, make_loss, update
from fsmap.types import ModelFn, Params


def fit(
    objective: Objective,
    f: ModelFn,
    params: Params,
    data: Any,
    /,
    *,
    steps: int,
    optimizer: OptimizerSpec | None = None,
    schedule: Schedule | None = None,
    batch_size: int | None = None,
    replace: bool = False,
    clip: float | None = None,
    seed: int = 0,
    validation: Validation | None = None,
    validate_every: int = 100,
    patience: int | None = None,
    callback: Callback | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 1_000,
    resume: bool = False,
    log_every: int = 1,
    progress: bool = True,
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
        optimizer: From ``fsmap.train.optim``; None is ``adam(1e-3)``.
        schedule: From ``fsmap.train.optim``; None is a constant learning rate.
        batch_size: B; None is all data on every step.
        replace: Draw batches with replacement.
        clip: Largest norm of the gradient; None leaves it alone.
        seed: Seed of everything random.
        validation: A function of the parameters, smaller is better; the best parameters are kept in
            ``state.best``.
        validate_every: Steps between validations; the last step is always one.
        patience: Stop after so many validations without a new best.
        callback: Called as ``callback(steps_taken, params)`` after every step; copy what you keep.
            A true answer ends training.
        checkpoint: A file to write every ``checkpoint_every`` steps and at the end.
        checkpoint_every: Steps between checkpoints.
        resume: Go on from ``checkpoint`` where it exists.
        log_every: Record every so many steps in the history (and the last one).
        progress: Show a progress bar.

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
    settings = Settings(
        steps,
        optimizer or adam(1e-3),
        schedule or constant(),
        clip,
        validation,
        validate_every,
        patience,
        callback,
        Path(checkpoint) if checkpoint is not None else None,
        checkpoint_every,
        resume,
        log_every,
        progress,
    )
    check_params(params)
    train = as_batch(data, params)
    _compare(objective.num_data, len(train.y))
    batches = Batches(len(train.y), batch_size, seed=seed, replace=replace)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    device = next(iter(leaves.values())).device
    sample = sample_batch(train, batch_size)
    check_pure(f, leaves, sample.x)
    pointwise = getattr(f, "pointwise", True)  # no random layers: asked once, it costs a walk
    with layer_noise(f, Stream(seed, 0), device):
        objective.check(f, leaves, sample)
        started = objective.started(f, leaves, Stream(seed, 0))

    about = {
        "objective": objective,
        "data": train,
        "batch_size": batch_size,
        "replace": replace,
        "seed": seed,
    }
    config = settings.checkpoint and {
        "kind": "fit",
        "model": describe_model(f, leaves),
        **describe(about),
        **settings.describe(),
    }
    loss = make_loss(f, lambda: started)
    moving = settings.optimizer.build(leaves.values())
    extra = {} if started is objective else {"r0": started.geometry.r0}  # type: ignore[attr-defined]
    loop = Loop(settings, leaves, moving, stop_if_diverged, config or {}, extra=extra)

    def take_step(step: int) -> Tensor:
        stream = Stream(seed, step)
        draws = objective.draw(f, leaves, stream)
        batch = take(train, batches.rows(step))
        with nullcontext() if pointwise else layer_noise(f, stream, device):
            return update(loss, leaves, {}, batch, draws, optimizer=moving, clip=clip)

    loop.run(take_step, "fit")
    return _state(loop), loop.recorder.history()


def _compare(num_data: int, rows: int) -> None:
    """N stands before the prior and the geometry: the wrong one makes them too strong or weak."""
    if num_data != rows:
        message = (
            f"the objective was made for num_data={num_data}, the data have {rows} rows: prior and "
            f"geometry weigh as for {num_data}. Give num_data={rows}, unless that is meant."
        )
        warnings.warn(message, UserWarning, stacklevel=3)


def _state(loop: Loop) -> TrainState:
    """The end of the loop, out of the optimizer's reach."""
    params = {n: p.detach().clone() for n, p in loop.params.items()}
    kept = loop.tracked
    best = Best(kept.params, int(kept.step), float(kept.value)) if kept and kept.step > 0 else None
    return TrainState(params, loop.step, best)
