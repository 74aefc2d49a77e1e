"""``fit_population``: a grid of one architecture trained as one computation."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from fsmap.errors import DivergedError, DivergedWarning, InputError, UnsupportedModuleError
from fsmap.functional import Functional, functional, is_pointwise, move_points
from fsmap.objective.objective import Objective
from fsmap.px import integer
from fsmap.train.capture import Graphed, use_graph
from fsmap.train.checkpoint import describe, describe_model
from fsmap.train.ensemble import Ensemble, Feed, Feeder, Members, by_split, choose_chunk
from fsmap.train.fit import TrainState, as_batch, measure, random_layers_off
from fsmap.train.grid import SEED, SPLIT, Grid
from fsmap.train.loop import Best, History, Loop, Metric, Options, Recorder, Settings
from fsmap.train.optim import Schedule
from fsmap.types import Batch, Inputs, ModelFn, Params

Init = Callable[[int], Params | nn.Module] | Params


class PopulationState(NamedTuple):
    """Where a population ended."""

    params: Params  # [M, ...]
    step: int  # steps taken
    grid: Grid
    f: ModelFn  # all members share it
    diverged: Tensor  # [M]  the step at which a member stopped being finite, -1 for the others
    best: Best | None = None  # if there was a validation

    def member(self, index: int) -> TrainState:
        """One member, as ``fit`` returns it; a DivergedError if it diverged."""
        if self.diverged[index] >= 0:
            message = (
                f"member {index} ({self.grid[index]}) diverged at step "
                f"{int(self.diverged[index])}; its parameters mean nothing. "
                f"history.member({index}) shows how it went."
            )
            raise DivergedError(message)
        best = None
        if self.best is not None and self.best.step[index] > 0:
            kept = {n: p[index] for n, p in self.best.params.items()}
            best = Best(kept, int(self.best.step[index]), float(self.best.value[index]))
        return TrainState({n: p[index] for n, p in self.params.items()}, self.step, best)

    def outputs(self, x: Inputs) -> Tensor:
        """Outputs of every member at the same points, [M, n, ...]; nan for those that diverged."""
        first = next(iter(self.params.values()))
        x = move_points(x, device=first.device, dtype=first.dtype)
        found = []
        with torch.no_grad(), random_layers_off(self.f):
            for k, diverged in enumerate((self.diverged >= 0).tolist()):
                out = self.f({n: p[k] for n, p in self.params.items()}, x)
                found.append(torch.full_like(out, torch.nan) if diverged else out)
        return torch.stack(found)

    def __repr__(self) -> str:
        diverged = int((self.diverged >= 0).sum())
        return f"PopulationState({self.grid!r} after {self.step} steps, {diverged} diverged)"


def fit_population(
    build: Callable[..., Objective],
    grid: Grid,
    f: ModelFn,
    data: Any,
    /,
    *,
    steps: int,
    init: Init | None = None,
    chunk: int | str = "auto",
    graph: bool | str = "auto",
    compile: bool = False,
    **options: Unpack[Options],
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
        data: Training points, as for ``fit``; if the grid has a ``split`` axis, a dict or list
            of them.
        steps: Length of the whole run.
        init: Where a seed starts: a function from seed to parameters or to a module, or parameters
            for all. None lets the layers of ``f``'s module initialize themselves.
        chunk: Members vectorized at a time; ``"auto"`` goes by memory and, on a CPU, by speed.
        graph: Capture the step as a CUDA graph: ``"auto"`` (if it can be), True or False. Matrix
            decompositions (``fs_map``) and random layers cannot be captured. A learning rate that
            moves is then rounded to float32, as torch's fused kernels read it.
        compile: Compile the vectorized gradient with ``torch.compile``, which takes half a minute;
            equal to rounding. Random layers cannot be compiled.
        **options: As for :func:`fsmap.fit`, one value for all members. ``on`` may have one set per
            split; a member's best is final after ``patience`` validations without a new one, and
            training ends when all are; ``callback`` gets stacked parameters.

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
    if compile and not is_pointwise(f):
        message = "compile=True needs a model without random layers, and this one has some"
        raise InputError(message)
    settings = Settings(steps, **options)
    _check_names(build, grid)
    starts = {seed: start(init, f, int(seed)) for seed in grid.axes.get(SEED, (0,))}
    shapes = [{n: tuple(p.shape) for n, p in params.items()} for params in starts.values()]
    if any(found != shapes[0] for found in shapes):
        message = f"all members share one architecture, but init gives different shapes: {shapes}"
        raise InputError(message)
    members = Members(build, grid, f, starts, data)
    config = _describe(members, settings) if settings.checkpoint is not None else {}
    members.check(settings.batch_size)
    members.start()
    feeder = Feeder(members, settings)
    capture = use_graph(graph, members.like.device, f, members.objective(0).geometry)
    optimizer = settings.optimizer.build(
        members.params.values(), capturable=capture, moving_lr=settings.schedule != Schedule()
    )
    ensemble = Ensemble(
        members,
        feeder,
        optimizer,
        clip=settings.clip,
        chunk=choose_chunk(chunk, members, feeder),
        compile=compile,
    )
    divergence = Divergence(grid)
    validation = None
    if settings.by is not None:
        held_out, by = _held_out(settings.on, grid, members.params), settings.by
        validation = lambda params: _measure(f, params, held_out, by)  # noqa: E731
    extra = {"diverged": divergence.steps, "chunk": ensemble.chunk_size, **members.extra}
    loop = Loop(settings, members.params, optimizer, divergence.judge, config, validation, extra)
    ensemble.finite.copy_(divergence.steps < 0)
    take_step: Callable[[Feed], Tensor] = ensemble.step
    if capture:
        take_step = Graphed(ensemble.step, ensemble.state, required=graph is True)
    loop.run(lambda step: take_step(feeder.make(step)), f"fit {len(grid)} members")
    divergence.warn()
    params = {n: p.detach().clone() for n, p in loop.params.items()}
    states = PopulationState(params, loop.step, grid, f, divergence.steps.clone(), loop.best)
    return states, loop.recorder.history(divergence.steps)


def _describe(members: Members, settings: Settings) -> dict[str, Any]:
    """What run this is, in plain values."""
    return {
        "kind": "fit_population",
        "members": describe(list(members.grid)),
        "objective of member 0": describe(members.objective(0)),
        "model": describe_model(members.f, members.first(0)),
        "starts": describe(list(members.starts.values())),
        "data": describe({"points": members.data, "splits": members.splits}),
        **settings.describe(),
    }


def _held_out(on: Any, grid: Grid, params: Params) -> list[Batch]:
    """The held-out data of every member: one set for all, or one per split."""
    if SPLIT not in grid.names or not isinstance(on, Mapping | list):
        return [as_batch(on, params)] * len(grid)
    names = grid.axes[SPLIT]
    sets = dict(zip(names, (as_batch(batch, params) for batch in by_split(on, names)), strict=True))
    return [sets[member[SPLIT]] for member in grid]


def _measure(f: ModelFn, params: Params, data: list[Batch], by: Metric) -> Tensor:
    each = ({n: p[k] for n, p in params.items()} for k in range(len(data)))
    return torch.stack([measure(f, p, batch, by) for p, batch in zip(each, data, strict=True)])


def measure_members(states: PopulationState, *, on: Any, by: Metric) -> Tensor:
    """A metric of every member, [M], on held-out data: one set, or one per split.

    It is nan for members whose outputs are not finite.
    """
    return _measure(states.f, states.params, _held_out(on, states.grid, states.params), by)


def _check_names(build: Callable[..., Objective], grid: Grid) -> None:
    """Raise an InputError for axes that ``build`` does not know."""
    signature = inspect.signature(build)
    try:
        signature.bind(**dict.fromkeys(grid.hyper_names))
    except TypeError as error:
        message = (
            f"the grid varies {list(grid.hyper_names)}, and build takes {signature}: {error}. "
            "Every axis but seed and split must be an argument of build, and vice versa. Options "
            "of the optimizer are the same for all members: train one population for each value."
        )
        raise InputError(message) from error


def initialize(module: nn.Module, seed: int) -> Params:
    """Fresh parameters for an architecture, as its own layers initialize themselves.

    The module is not changed, and torch's own generator is left as it was. Raises
    UnsupportedModuleError if a submodule has parameters but no ``reset_parameters``.
    """
    places = {n: p.device for n, p in module.named_parameters()}
    fresh = copy.deepcopy(module).cpu()  # so that a seed means the same on every device
    with _seeded(seed):
        for name, part in fresh.named_modules():
            if not any(p.requires_grad for p in part.parameters(recurse=False)):
                continue
            names = ("reset_parameters", "_reset_parameters")  # the second is attention's
            reset = next((getattr(part, n) for n in names if hasattr(part, n)), None)
            if reset is None:
                message = (
                    f"cannot initialize {name or 'the module'!r} ({type(part).__name__}) from a "
                    "seed: it has parameters but no reset_parameters(). Give init=, a function "
                    "from seed to parameters or to a module."
                )
                raise UnsupportedModuleError(message)
            reset()
    return {n: p.detach().clone().to(places[n]) for n, p in functional(fresh)[1].items()}


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
    return {n: p.detach().clone() for n, p in made.items()}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Torch's own generators, seeded, and put back afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(integer(seed, "init"))
        if devices:
            torch.cuda.manual_seed(integer(seed, "init"))
        yield


class Divergence:
    """The step at which each member stopped being finite, -1 for the others."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.steps = torch.full((len(grid),), -1, dtype=torch.long)  # [M]

    def judge(self, recorder: Recorder, values: Tensor) -> None:
        """Look at freshly fetched numbers, [T, C, M]; raise if no member is left."""
        bad = ~torch.isfinite(values).all(1)  # [T, M]
        new = bad.any(0) & (self.steps < 0)
        self.steps[new] = recorder.first + bad.int().argmax(0)[new]
        if (self.steps >= 0).all():
            message = (
                f"all {len(self.steps)} members diverged, between step {int(self.steps.min())} and "
                f"{int(self.steps.max())}. Lower the learning rate, clip the gradient (clip=1.0), "
                "or change the grid."
            )
            raise DivergedError(message)

    def warn(self) -> None:
        """Warn once, with names, if some members diverged."""
        diverged = (self.steps >= 0).nonzero().flatten().tolist()
        if not diverged:
            return
        shown = "; ".join(f"{self.grid[k]} at step {int(self.steps[k])}" for k in diverged[:3])
        more = f"; and {len(diverged) - 3} more" if len(diverged) > 3 else ""
        message = f"{len(diverged)} of {len(self.steps)} members diverged: {shown}{more}"
        warnings.warn(message, DivergedWarning, stacklevel=3)
