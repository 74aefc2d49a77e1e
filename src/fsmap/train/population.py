"""``fit_population``: a grid of one architecture trained as one computation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from fsmap.errors import InputError
from fsmap.objective.compose import Objective
from fsmap.train.batches import Batches
from fsmap.train.ensemble import Ensemble
from fsmap.train.feed import Feed, Feeder
from fsmap.train.fused.fit import fit_fused
from fsmap.train.graph import Graphed, wanted
from fsmap.train.grid import Grid
from fsmap.train.history import History
from fsmap.train.loop import Loop
from fsmap.train.members import Members
from fsmap.train.optim import OptimizerSpec, Schedule, adam, constant
from fsmap.train.settings import Callback, Settings, Validation
from fsmap.train.start import Init
from fsmap.train.state import Metric, PopulationBest, PopulationState, held_out, measure
from fsmap.train.step import make_loss
from fsmap.train.verdict import Verdict
from fsmap.types import ModelFn, Params

ENGINES = ("vmap", "fused")


def fit_population(
    build: Callable[..., Objective],
    grid: Grid,
    f: ModelFn,
    data: Any,
    /,
    *,
    steps: int,
    init: Init | None = None,
    optimizer: OptimizerSpec | None = None,
    schedule: Schedule | None = None,
    batch_size: int | None = None,
    replace: bool = False,
    clip: float | None = None,
    on: Any = None,
    by: Metric | None = None,
    validate_every: int = 100,
    patience: int | None = None,
    callback: Callback | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 1_000,
    resume: bool = False,
    log_every: int = 1,
    progress: bool = True,
    chunk: int | str = "auto",
    graph: bool | str = "auto",
    engine: str = "vmap",
) -> tuple[PopulationState, History]:
    """Train every member of a grid at once: stacked parameters, one vectorized loss, one optimizer.

    Member k equals ``fit`` alone with the same objective, start, data and seed: batches, evaluation
    points and ψ belong to the seed, not to the member. A member whose loss or gradient
    stops being finite does not touch the others; ``history.diverged`` says when it happened.

    Args:
        build: Makes the objective from the hyper-parameters of the grid, given as 0-dim tensors.
            What all members share (p_X, noise) comes by closure.
        grid: The members.
        f: Model function, from ``functional``.
        data: Training points, as for ``fit``; where the grid has a ``split`` axis, a dict or list
            of them, or ``(data, rows)`` with a dict or list of row indices.
        steps: Length of the whole run.
        init: Where a seed starts: a function from seed to parameters or to a module, or parameters
            for all. None lets the layers of ``f``'s module initialize themselves.
        optimizer: One for all members; None is ``adam(1e-3)``.
        schedule: One for all members; None is a constant learning rate.
        batch_size: B; None is all data on every step.
        replace: Draw batches with replacement.
        clip: Largest norm of each member's gradient.
        on: Held-out data, one set or one per split; with ``by``, the best parameters of every
            member are kept in ``states.best``.
        by: A metric ``(outputs, y) -> number``, smaller is better.
        validate_every: Steps between validations.
        patience: A member's best is final after so many validations without a new one; training
            ends when all are.
        callback: Called as ``callback(steps_taken, params)`` with stacked parameters. A true answer
            ends training.
        checkpoint: A file to write every ``checkpoint_every`` steps and at the end.
        checkpoint_every: Steps between checkpoints.
        resume: Go on from ``checkpoint`` where it exists.
        log_every: Record every so many steps in the history.
        progress: Show a progress bar.
        chunk: Members vectorized at a time; ``"auto"`` goes by memory and, on a CPU, by speed.
        graph: Capture the step as a CUDA graph: ``"auto"`` (where it can be), True or False. Matrix
            decompositions (``fs_map``) and random layers cannot be captured. A learning rate that
            moves is then rounded to float32, as torch's fused kernels read it.
        engine: ``"vmap"`` vectorizes the loss of any model. ``"fused"`` is for ReLU perceptrons
            with Gaussian noise, a Normal prior and ``estimator="fd"``: the same objective with its
            gradient written out, several times faster on a GPU. Its random numbers come in blocks,
            so a member equals itself in any population of this engine, but not ``fit``.

    Returns:
        The states (stacked parameters; ``states.member(k)`` is what ``fit`` returns) and the
        history, [T, M].

    Raises:
        InputError: If grid, build and data do not fit each other.

    Example:
        >>> import torch, fsmap
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> f, _ = fsmap.functional(torch.nn.Linear(1, 1))
        >>> def build(prior_std):
        ...     return fsmap.ps_map(fsmap.Gaussian(0.1), fsmap.Normal(prior_std), num_data=20)
        >>> grid = fsmap.Grid(prior_std=[0.1, 1.0], seed=range(3))
        >>> states, history = fsmap.fit_population(
        ...     build, grid, f, (x, 2 * x), steps=2, progress=False
        ... )
        >>> history.loss.shape
        torch.Size([2, 6])
    """
    if engine not in ENGINES:
        message = f"engine must be one of {', '.join(ENGINES)}, got {engine!r}"
        raise InputError(message)
    members = Members(build, grid, f, init, data)
    settings = Settings(
        steps=steps,
        optimizer=optimizer or adam(1e-3),
        schedule=schedule or constant(),
        clip=clip,
        validation=_validation(f, grid, members.params, on, by),
        validate_every=validate_every,
        patience=patience,
        callback=callback,
        checkpoint=Path(checkpoint) if checkpoint is not None else None,
        checkpoint_every=checkpoint_every,
        resume=resume,
        log_every=log_every,
        progress=progress,
    )
    if engine == "fused":
        unknown = {"clip": clip, "on": on, "patience": patience, "callback": callback}
        return fit_fused(members, settings, batch_size, replace, graph, **unknown)
    size = members.splits.rows.shape[1]

    def batches(seed: int) -> Batches:
        return Batches(size, batch_size, seed=seed, replace=replace)

    members.check(batch_size)
    members.start()
    feeder = Feeder(f, grid, members.objective, members.first, members.splits, batches)
    capture = wanted(graph, members.like.device, f, members.objective(0).geometry)
    moving = settings.optimizer.build(
        members.params.values(), capturable=capture, moving_lr=settings.schedule != constant()
    )
    ensemble = Ensemble(
        make_loss(f, members.build),
        members.params,
        members.hypers,
        feeder,
        moving,
        clip=clip,
        chunk=members.chunk(chunk, feeder),
    )
    verdict = Verdict(grid)
    config = {}
    if settings.checkpoint is not None:
        config = members.describe(batch_size=batch_size, replace=replace) | settings.describe()
    extra = {"diverged": verdict.diverged, "chunk": ensemble.chunk_size, **members.extra}
    loop = Loop(settings, members.params, moving, verdict.judge, config, len(grid), extra)
    ensemble.alive.copy_(verdict.diverged < 0)
    step: Callable[[Feed], Tensor] = ensemble.step
    if capture:
        step = Graphed(step, members.params, moving, ensemble.alive, required=graph is True)

    def present(member: int) -> Params:
        return {name: p.detach()[member] for name, p in members.params.items()}

    loop.run(lambda number: step(feeder.make(number, present)), f"fit {len(grid)} members")
    verdict.report()
    return _state(loop, grid, f, verdict.diverged), loop.recorder.history(verdict.diverged)


def _validation(
    f: ModelFn, grid: Grid, params: Params, on: Any, by: Metric | None
) -> Validation | None:
    if (on is None) != (by is None):
        message = "validation needs both: on, the held-out data, and by, a metric"
        raise InputError(message)
    if on is None or by is None:
        return None
    data = held_out(on, grid, params)
    return lambda stacked: measure(f, stacked, data, by)


def _state(loop: Loop, grid: Grid, f: ModelFn, diverged: Tensor) -> PopulationState:
    params = {n: p.detach().clone() for n, p in loop.params.items()}
    kept = loop.tracked
    best = None if kept is None else PopulationBest(kept.params, kept.step, kept.value)
    return PopulationState(params, loop.step, grid, f, diverged.clone(), best)
