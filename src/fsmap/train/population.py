"""``fit_population``: a grid of one architecture trained as one computation."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsmap.errors import DivergedError, DivergedWarning, InputError, UnsupportedModuleError
from fsmap.functional import Functional, functional
from fsmap.linalg.probes import Stream, integer
from fsmap.objective.compose import Objective
from fsmap.objective.geometry import TraceBound
from fsmap.train.batches import Batches, sample_batch
from fsmap.train.capture import Graphed, wanted
from fsmap.train.checkpoint import describe, describe_model
from fsmap.train.ensemble import Ensemble, choose_chunk
from fsmap.train.feed import Feed, Feeder, as_splits
from fsmap.train.grid import SEED, SPLIT, Grid
from fsmap.train.history import History, Recorder
from fsmap.train.loop import Callback, Loop, Settings, Validation
from fsmap.train.optim import OptimizerSpec, Schedule, adam, constant
from fsmap.train.state import Metric, PopulationBest, PopulationState, held_out, measure
from fsmap.train.step import check_pure, layer_noise, make_loss
from fsmap.types import ModelFn, Params

Init = Callable[[int], Params | nn.Module] | Params

ONE_FOR_ALL = ("lr", "learning_rate", "betas", "eps", "momentum", "weight_decay", "clip")
"""What torch.optim, or the loop, takes as one number for all members."""


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
    compile: bool = False,
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
        compile: Compile the vectorized gradient with ``torch.compile``, which takes half a minute;
            equal to rounding. Random layers cannot be compiled.

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
    if compile and not getattr(f, "pointwise", True):
        message = "compile=True needs a model without random layers, and this one has some"
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
        compile=compile,
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


class Members:
    """Stacked starts, hyper-parameters, objectives and data of a grid."""

    def __init__(
        self, build: Callable[..., Objective], grid: Grid, f: ModelFn, init: Init | None, data: Any
    ) -> None:
        check_names(build, grid)
        self.build, self.grid, self.f = build, grid, f
        self._starts = {seed: start(init, f, int(seed)) for seed in grid.axes.get(SEED, (0,))}
        _check_shapes(self._starts)
        names = self.first(0)
        self.params: Params = {
            n: torch.stack([self.first(k)[n] for k in range(len(grid))]).requires_grad_()
            for n in names
        }
        self.like = next(iter(names.values()))
        self.hypers = grid.hypers(self.like)
        self.splits = as_splits(data, grid.axes.get(SPLIT), names)
        self.extra: dict[str, Tensor] = {}  # what a checkpoint holds besides
        self._objectives: dict[tuple[Any, ...], Objective] = {}

    def first(self, member: int) -> Params:
        """The parameters that a member starts from."""
        return self._starts[self.grid[member].get(SEED, 0)]

    def objective(self, member: int) -> Objective:
        """What ``build`` makes for a member, on plain numbers; once for equal hyper-parameters."""
        key = tuple(self.grid[member][n] for n in self.grid.hyper_names)
        if key not in self._objectives:
            made: object = self.build(**{n: h[member] for n, h in self.hypers.items()})
            if not isinstance(made, Objective):
                kind = type(made).__name__
                message = f"build must return an objective (ps_map, fs_map, l_map), got {kind}"
                raise InputError(message)
            self._objectives[key] = made
        return self._objectives[key]

    def check(self, batch_size: int | None) -> None:
        """Look once at every configuration on every split, on plain numbers."""
        splits = [
            sample_batch(self.splits.batch(g), batch_size) for g in range(len(self.splits.rows))
        ]
        check_pure(self.f, self.first(0), splits[0].x)
        for members in self.grid.groups(SPLIT, *self.grid.hyper_names).values():
            k = members[0]
            sample = splits[self.splits.index(self.grid[k].get(SPLIT, 0))]
            with layer_noise(self.f, Stream(0, 0), self.like.device):
                self.objective(k).check(self.f, self.first(k), sample)

    def start(self) -> None:
        """Make R₀ of ``reg_nats`` a hyper-parameter, from the start of each member."""
        geometry = self.objective(0).geometry
        if not isinstance(geometry, TraceBound) or geometry.r0 is not None:
            return
        found = []
        for k, member in enumerate(self.grid):
            first, stream = self.first(k), Stream(int(member.get(SEED, 0)), 0)
            term = self.objective(k).geometry
            assert isinstance(term, TraceBound)
            with layer_noise(self.f, stream, self.like.device):
                term = term.started(self.f, first, stream)
            found.append(term.r0)
        r0 = torch.stack([r0.to(self.like) for r0 in found if r0 is not None])
        self.hypers["r0"] = self.extra["r0"] = r0
        build = self.build

        def with_r0(r0: Tensor, **hypers: Tensor) -> Objective:
            made = build(**hypers)
            assert isinstance(made.geometry, TraceBound)
            return made._replace(geometry=made.geometry._replace(r0=r0))

        self.build = with_r0
        self._objectives.clear()

    def chunk(self, wanted: int | str, feeder: Feeder) -> int:
        """How many members are vectorized at a time."""
        batch, draws = feeder.single(feeder.make(0), 0)
        first, objective = self.first(0), self.objective(0)
        return choose_chunk(wanted, len(self.grid), self.f, first, batch, objective, draws)

    def describe(self, **knobs: Any) -> dict[str, Any]:
        """What run this is, in plain values."""
        first = self.objective(0)
        if self.extra and isinstance(first.geometry, TraceBound):  # R₀ is in the checkpoint
            first = first._replace(geometry=first.geometry._replace(r0=None))
        return {
            "kind": "fit_population",
            "members": describe(list(self.grid)),
            "objective of member 0": describe(first),
            "model": describe_model(self.f, self.first(0)),
            "starts": describe(list(self._starts.values())),
            "data": describe(self.splits._asdict()),
            **describe(knobs),
        }


def check_names(build: Callable[..., Objective], grid: Grid) -> None:
    """Raise an InputError for axes that ``build`` does not know."""
    try:
        signature = inspect.signature(build)
        signature.bind(**dict.fromkeys(grid.hyper_names))
    except TypeError as error:
        scalar = [n for n in grid.hyper_names if n in ONE_FOR_ALL]
        if scalar:
            message = (
                f"{', '.join(scalar)} cannot vary within a population: the optimizer takes one "
                "value for all members. Train one population for each value: "
                "fit_population(..., optimizer=adam(lr))."
            )
        else:
            message = (
                f"the grid varies {list(grid.hyper_names)}, and build takes {signature}: {error}. "
                "Every axis but seed and split must be an argument of build, and vice versa."
            )
        raise InputError(message) from error


def _check_shapes(starts: dict[Any, Params]) -> None:
    shapes = [{n: tuple(p.shape) for n, p in params.items()} for params in starts.values()]
    for seed, found in zip(starts, shapes, strict=True):
        if found != shapes[0]:
            message = (
                f"all members share one architecture, but seed {seed} starts with parameters "
                f"{found}, and the first seed with {shapes[0]}"
            )
            raise InputError(message)


def initialize(module: nn.Module, seed: int) -> Params:
    """Fresh parameters for an architecture, as its own layers initialize themselves.

    Args:
        module: The architecture; not changed.
        seed: Decides the parameters; torch's own generator is left as it was.

    Returns:
        Parameters, named as in ``functional(module)``.

    Raises:
        UnsupportedModuleError: If a submodule has parameters but no ``reset_parameters``.
    """
    places = {n: p.device for n, p in module.named_parameters()}
    fresh = copy.deepcopy(module).cpu()  # so that a seed means the same on every device
    with _seeded(seed):
        for name, part in fresh.named_modules():
            if not any(p.requires_grad for p in part.parameters(recurse=False)):
                continue
            reset = getattr(part, "reset_parameters", None) or getattr(
                part, "_reset_parameters", None
            )
            if reset is None:
                message = (
                    f"cannot initialize {name or 'the module'!r} ({type(part).__name__}) from a "
                    "seed: it has parameters but no reset_parameters(). Give init=, a function "
                    "from seed to parameters or to a module."
                )
                raise UnsupportedModuleError(message)
            reset()
    return {n: p.to(places[n]) for n, p in _detached(functional(fresh)[1]).items()}


def start(init: Init | None, f: ModelFn, seed: int) -> Params:
    """The parameters that one seed starts from."""
    if init is None:
        if not isinstance(f, Functional):
            message = (
                "f is a plain function, so give init=: parameters, or a function from seed to them"
            )
            raise InputError(message)
        return initialize(f.module, seed)
    made: object = init
    if callable(init):
        with _seeded(seed):
            made = init(seed)
    if isinstance(made, nn.Module):
        made = functional(made)[1]
    if not isinstance(made, dict) or not made:
        message = f"init must give a dict of parameters or a module, got {type(made).__name__}"
        raise InputError(message)
    return _detached(made)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Torch's own generators, seeded, and put back afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(integer(seed, "init"))
        if devices:
            torch.cuda.manual_seed(integer(seed, "init"))
        yield


def _detached(params: Params) -> Params:
    return {n: p.detach().clone() for n, p in params.items()}


class Verdict:
    """Which members have stopped being finite, and at which step."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.diverged = torch.full((len(grid),), -1, dtype=torch.long)  # [M]

    def judge(self, recorder: Recorder, values: Tensor) -> None:
        """Look at freshly fetched numbers, [T, C, M]; raise if no member is left."""
        bad = ~torch.isfinite(values).all(1)  # [T, M]
        new = bad.any(0) & (self.diverged < 0)
        self.diverged[new] = recorder.first + bad.int().argmax(0)[new]
        if (self.diverged >= 0).all():
            when = self.diverged
            message = (
                f"all {len(when)} members diverged, between step {int(when.min())} and "
                f"{int(when.max())}. Lower the learning rate, clip the gradient (clip=1.0), or "
                "change the grid."
            )
            raise DivergedError(message)

    def report(self) -> None:
        """Warn once, with names, if some diverged."""
        gone = (self.diverged >= 0).nonzero().flatten().tolist()
        if not gone:
            return
        shown = "; ".join(f"{self.grid[k]} at step {int(self.diverged[k])}" for k in gone[:3])
        more = f"; and {len(gone) - 3} more" if len(gone) > 3 else ""
        message = f"{len(gone)} of {len(self.diverged)} members diverged: {shown}{more}"
        warnings.warn(message, DivergedWarning, stacklevel=3)
