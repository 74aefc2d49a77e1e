"""``fit_population``: a grid of one architecture trained as one computation.

Random numbers belong to a seed, not to a member: all configurations of a seed see the same batches,
evaluation points and ψ, and they are those that ``fit`` makes for that seed. So a member does not
depend on its neighbors.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from fsmap.errors import DivergedError, DivergedWarning, InputError, UnsupportedModuleError
from fsmap.functional import (
    Functional,
    count,
    detached,
    differentiable_attention,
    functional,
    is_pointwise,
    seeded,
    take_points,
)
from fsmap.objective.geometry import Laplacian, TraceBound
from fsmap.objective.objective import NoGeometry, Objective, Parts
from fsmap.px import Stream, integer
from fsmap.train import loop
from fsmap.train.capture import Graphed
from fsmap.train.checkpoint import describe, describe_model
from fsmap.train.fit import TrainState, measure
from fsmap.types import Batch, Draws, ModelFn, Params

Value = float | int | str
SEED, SPLIT = "seed", "split"
RESERVED = (SEED, SPLIT)  # axes of random numbers and data, not of the objective
Init = Callable[[int], Params | nn.Module] | Params

CPU_WORK = 3e7
"""P·(B + S·K) above which more members at once save no time on a CPU (benchmarks.population)."""

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


class Grid:
    """Members of a population: every combination of the axes, or an explicit list.

    ``seed`` and ``split`` are axes with a meaning of their own; every other axis is a
    hyper-parameter of the objective and holds numbers. The last axis runs fastest. The members of
    an explicit list all have the same names.

    Example:
        >>> grid = Grid(prior_std=[0.1, 1.0], jitter=[1e-2, 1.0, 100.0], seed=range(6))
        >>> len(grid), grid[7]
        (36, {'prior_std': 0.1, 'jitter': 1.0, 'seed': 1})
        >>> len(Grid([{"jitter": 0.1}, {"jitter": 0.5}]))
        2
    """

    def __init__(
        self, members: Sequence[Mapping[str, Value]] | None = None, /, **axes: Iterable[Value]
    ) -> None:
        if (members is None) == (not axes):
            raise InputError(
                "a Grid is made of axes, Grid(jitter=[...], seed=range(3)), or of a list of members"
            )
        if members is None:
            values = {name: _values(name, axis) for name, axis in axes.items()}
            combined = itertools.product(*values.values())
            members = [dict(zip(values, row, strict=True)) for row in combined]
        self.members = tuple(
            {n: v.item() if hasattr(v, "item") else v for n, v in member.items()}
            for member in members
        )
        _check(self.members)
        self.names = tuple(self.members[0])

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The axes that the objective is built from."""
        return tuple(name for name in self.names if name not in RESERVED)

    @property
    def axes(self) -> dict[str, tuple[Value, ...]]:
        """The distinct values of every axis, in the order of their appearance."""
        return {n: tuple(dict.fromkeys(member[n] for member in self.members)) for n in self.names}

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[dict[str, Value]]:
        return (dict(member) for member in self.members)

    def __getitem__(self, index: int) -> dict[str, Value]:
        return dict(self.members[index])

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(values)} {name}" for name, values in self.axes.items())
        return f"Grid({len(self)} members: {sizes})"

    def hypers(self, like: Tensor) -> dict[str, Tensor]:
        """Every hyper-parameter as a tensor [M], with the dtype and on the device of ``like``."""
        names, members = self.hyper_names, self.members
        return {n: like.new_tensor([float(member[n]) for member in members]) for n in names}

    def groups(self, *names: str) -> dict[tuple[Value, ...], list[int]]:
        """Members with equal values on these axes; an axis that the grid lacks has the value 0."""
        found: dict[tuple[Value, ...], list[int]] = {}
        for index, member in enumerate(self.members):
            found.setdefault(tuple(member.get(name, 0) for name in names), []).append(index)
        return found


def _values(name: str, axis: Iterable[Value]) -> list[Value]:
    if isinstance(axis, str | bytes) or not isinstance(axis, Iterable):
        how = f"Write {name}=[{axis!r}]."
        raise InputError(f"axis {name!r} needs a list of values, got {axis!r}. {how}")
    values = axis.tolist() if isinstance(axis, Tensor) else list(axis)
    if not values or len(set(values)) < len(values):
        raise InputError(f"axis {name!r} needs at least one value and none twice, got {values}")
    return values


def _check(members: tuple[dict[str, Value], ...]) -> None:
    if not members:
        raise InputError("the list of members is empty: a grid needs at least one")
    for index, member in enumerate(members):
        if set(member) != set(members[0]):
            here = f"member {index} has {list(member)}"
            raise InputError(f"members must have the same names: {list(members[0])}, but {here}")
        seed = member.get(SEED, 0)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InputError(f"seed must be an integer, got {seed!r} in member {index}")
        for name, value in member.items():
            if name in RESERVED:
                continue
            if isinstance(value, bool | str) or not math.isfinite(value):
                raise InputError(
                    f"axis {name!r} holds {value!r}: members of one population may differ in "
                    "finite numbers only. Train one population for every choice of the kind."
                )


class PopulationState(NamedTuple):
    """The result of training a population."""

    params: Params  # [M, ...]
    step: int  # steps taken
    grid: Grid
    f: ModelFn  # all members share it
    diverged: Tensor  # [M]  the step at which a member stopped being finite, -1 for the others
    best: loop.Best | None = None  # if there was a validation

    def member(self, index: int) -> TrainState:
        """One member, as ``fit`` returns it; a DivergedError if it diverged."""
        if self.diverged[index] >= 0:
            raise DivergedError(
                f"member {index} ({self.grid[index]}) diverged at step "
                f"{int(self.diverged[index])}; its parameters are not usable. "
                f"See history.member({index})."
            )
        best = None
        if self.best is not None and self.best.step[index] > 0:
            kept = {n: p[index] for n, p in self.best.params.items()}
            best = loop.Best(kept, int(self.best.step[index]), float(self.best.value[index]))
        return TrainState({n: p[index] for n, p in self.params.items()}, self.step, best)

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
    graph: bool = True,
    compile: bool = False,
    **options: Unpack[loop.Options],
) -> tuple[PopulationState, loop.History]:
    """Train every member of a grid at once: stacked parameters, one vectorized loss, one optimizer.

    Member k equals ``fit`` alone with the same objective, start, data and seed: batches, evaluation
    points and ψ belong to the seed, not to the member. A member whose loss or gradient
    stops being finite does not affect the others; ``history.diverged`` has the step.

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
        chunk: Members vectorized at a time. ``"auto"``: on a CPU as many as keep it busy; on a GPU
            all, and half as many whenever its memory runs out.
        graph: Capture the step as a CUDA graph if possible: matrix decompositions (``fs_map``) and
            random layers cannot be captured. A learning rate that moves is then rounded to float32,
            as torch's fused kernels read it.
        compile: Compile the vectorized gradient with ``torch.compile``, which takes half a minute;
            equal to rounding. Random layers cannot be compiled.
        **options: As for :func:`fsmap.fit`, one value for all members. ``on`` may have one set per
            split; ``callback`` gets stacked parameters.

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
        >>> states, history = fsmap.fit_population(build, grid, f, (x, 2 * x), steps=2)
        >>> history.loss.shape
        torch.Size([2, 6])
    """
    if compile and not is_pointwise(f):
        raise InputError("compile=True needs a model without random layers, and this one has some")
    settings = loop.settings_of(f, steps, options)
    _check_names(build, grid)
    starts = {seed: start(init, f, int(seed)) for seed in grid.axes.get(SEED, (0,))}
    members = Members(build, grid, f, starts, data)
    config = _describe(members, settings) if settings.checkpoint is not None else {}
    members.check(settings.batch_size)
    members.start()
    feeder = Feeder(members, settings)
    capture = graph and _can_capture(members)
    moves, leaves = settings.schedule != loop.Schedule(), members.params.values()
    optimizer = settings.optimizer.build(leaves, capturable=capture, moving_lr=moves)
    size = choose_chunk(chunk, members, feeder)
    ensemble = Ensemble(members, feeder, optimizer, settings.clip, size, compile)
    divergence = Divergence(grid)
    validation = None
    if settings.by is not None:
        held_out = held_out_sets(settings.on, grid, members.params)
        validation = partial(measure_each, f, data=held_out, by=settings.by)
    extra = {"diverged": divergence.steps, "chunk": ensemble.chunk_size, **members.extra}
    training = loop.Loop(
        settings, members.params, optimizer, divergence.update, config, validation, extra
    )
    ensemble.finite.copy_(divergence.steps < 0)
    take_step = Graphed(ensemble.step, ensemble.state) if capture else ensemble.step
    training.run(lambda step: take_step(feeder.make(step)), f"fit {len(grid)} members")
    divergence.warn()
    params = {n: p.detach().clone() for n, p in training.params.items()}
    diverged = divergence.steps.clone()
    states = PopulationState(params, training.step, grid, f, diverged, training.best)
    return states, training.recorder.history(diverged)


def _describe(members: Members, settings: loop.Settings) -> dict[str, Any]:
    """The settings of the run, for its checkpoint."""
    return {
        "kind": "fit_population",
        "members": describe(list(members.grid)),
        "objective of member 0": describe(members.objective(0)),
        "model": describe_model(members.f, members.initial(0)),
        "starts": describe(list(members.starts.values())),
        "data": describe({"points": members.data, "splits": members.splits}),
        **describe(settings.describe()),
    }


def _can_capture(members: Members) -> bool:
    """Whether a CUDA graph can hold a step: no decomposition, no layer that is seeded by step."""
    geometry = members.objective(0).geometry
    traced = isinstance(geometry, Laplacian | TraceBound) and geometry.metric is None
    plain = traced or isinstance(geometry, NoGeometry)
    return plain and members.like.device.type == "cuda" and is_pointwise(members.f)


def _check_names(build: Callable[..., Objective], grid: Grid) -> None:
    """Raise an InputError for axes that ``build`` does not know."""
    if not callable(build):
        raise InputError(f"build must be a function that makes the objective, got {build!r}")
    signature = inspect.signature(build)
    try:
        signature.bind(**dict.fromkeys(grid.hyper_names))
    except TypeError as error:
        raise InputError(
            f"the grid varies {list(grid.hyper_names)}, and build takes {signature}: {error}. "
            "Every axis but seed and split must be an argument of build, and vice versa. Options "
            "of the optimizer are the same for all members: train one population for each value."
        ) from error


def initialize(module: nn.Module, seed: int) -> Params:
    """Fresh parameters as an architecture's own layers initialize themselves; it is not changed."""
    places = {n: p.device for n, p in module.named_parameters()}
    fresh = copy.deepcopy(module).cpu()  # so that a seed means the same on every device
    with seeded(integer(seed, "init"), _device()):
        for name, part in fresh.named_modules():
            if not any(p.requires_grad for p in part.parameters(recurse=False)):
                continue
            names = ("reset_parameters", "_reset_parameters")  # the second is attention's
            reset = next((getattr(part, n) for n in names if hasattr(part, n)), None)
            if reset is None:
                raise UnsupportedModuleError(
                    f"cannot initialize {name or 'the module'!r} ({type(part).__name__}) from a "
                    "seed: it has parameters but no reset_parameters(). Give init=, a function "
                    "from seed to parameters or to a module."
                )
            reset()
    return {n: p.detach().clone().to(places[n]) for n, p in functional(fresh)[1].items()}


def start(init: Init | None, f: ModelFn, seed: int) -> Params:
    """The parameters that one seed starts from."""
    if init is None:
        if not isinstance(f, Functional):
            raise InputError(
                "f is a plain function, so give init=: parameters, or a function from seed to them"
            )
        return initialize(f.module, seed)
    made: object = init
    if callable(init):
        with seeded(integer(seed, "init"), _device()):
            made = init(seed)
    if isinstance(made, nn.Module):
        made = functional(made)[1]
    if not isinstance(made, dict) or not made:
        kind = type(made).__name__
        raise InputError(f"init must give a dict of parameters or a module, got {kind}")
    return {n: p.detach().clone() for n, p in made.items()}


def _device() -> torch.device:
    """The current CUDA device, or the CPU if CUDA is not in use."""
    initialized = torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if initialized else torch.device("cpu")


class Members:
    """Stacked parameters, hyper-parameters, objectives and training data of a grid."""

    def __init__(
        self,
        build: Callable[..., Objective],
        grid: Grid,
        f: ModelFn,
        starts: Mapping[Any, Params],
        data: Any,
    ) -> None:
        self.build, self.grid, self.f, self.starts = build, grid, f, starts
        self.seeds = [int(member.get(SEED, 0)) for member in grid]
        shapes = [{n: tuple(p.shape) for n, p in params.items()} for params in starts.values()]
        if any(found != shapes[0] for found in shapes):
            raise InputError(f"members share one architecture, but init gives shapes {shapes}")
        names = self.initial(0)
        initials = [self.initial(k) for k in range(len(grid))]
        stacked = {n: torch.stack([p[n] for p in initials]) for n in names}
        self.params: Params = {n: p.requires_grad_() for n, p in stacked.items()}
        self.like = next(iter(names.values()))
        self.hypers = grid.hypers(self.like)
        self.splits: tuple[Value, ...] = grid.axes.get(SPLIT, (0,))
        given = by_split(data, self.splits) if SPLIT in grid.names else {0: data}
        self.sets = [loop.as_batch(one, names) for one in given.values()]
        sizes = [len(one.y) for one in self.sets]
        if len(set(sizes)) > 1:
            raise InputError(
                f"training sets of one population must have the same size, got {sizes}: N is a "
                "constant of the objective. Train one population per size, or cut the sets to the "
                "smallest."
            )
        self.num_data = sizes[0]  # N
        first, *others = self.sets
        self.data = tree_map(lambda *t: torch.cat(t), *self.sets) if others else first  # [splits·N]
        self.extra: dict[str, Tensor] = {}  # further state of a checkpoint
        self._objectives: dict[tuple[Value, ...], Objective] = {}

    def initial(self, member: int) -> Params:
        """The parameters that a member starts from."""
        return self.starts[self.seeds[member]]

    def current(self, member: int) -> Params:
        """The parameters that a member has now."""
        return {name: p.detach()[member] for name, p in self.params.items()}

    def objective(self, member: int) -> Objective:
        """The objective of a member, built from plain numbers once per set of hyper-parameters."""
        values = self.grid.members[member]
        key = tuple(values[name] for name in self.grid.hyper_names)
        if key not in self._objectives:
            made: object = self.build(**{n: h[member] for n, h in self.hypers.items()})
            if not isinstance(made, Objective):
                kind = type(made).__name__
                message = f"build must return an objective (ps_map, fs_map, l_map), got {kind}"
                raise InputError(message)
            self._objectives[key] = made
        return self._objectives[key]

    def check(self, batch_size: int | None) -> None:
        """Check every configuration on every split, on plain numbers."""
        samples = [loop.sample_batch(one, batch_size) for one in self.sets]
        loop.check_pure(self.f, self.initial(0), samples[0].x)
        for (split, *_), members in self.grid.groups(SPLIT, *self.grid.hyper_names).items():
            k, place = members[0], self.splits.index(split)
            with loop.layer_noise(self.f, Stream(0, 0), self.like.device):
                self.objective(k).check(self.f, self.initial(k), samples[place])

    def start(self) -> None:
        """Make R₀ of ``reg_nats`` a hyper-parameter, from the start of each member."""
        geometry = self.objective(0).geometry
        if not isinstance(geometry, TraceBound) or geometry.r0 is not None:
            return
        found = []
        for k, seed in enumerate(self.seeds):
            with loop.layer_noise(self.f, Stream(seed, 0), self.like.device):
                term = self.objective(k).started(self.f, self.initial(k), Stream(seed, 0)).geometry
            found.append(term.r0.to(self.like))  # type: ignore[attr-defined]
        self.hypers["r0"] = self.extra["r0"] = torch.stack(found)
        build = self.build

        def with_r0(r0: Tensor, **hypers: Tensor) -> Objective:
            made = build(**hypers)
            return made._replace(geometry=made.geometry._replace(r0=r0))  # type: ignore[attr-defined]

        self.build = with_r0
        self._objectives.clear()


class Feed(NamedTuple):
    """Rows and draws of one step, with an entry per group of members in the first dimension."""

    rows: Tensor | None  # [G, B]  None: all points of the only training set, in order
    draws: Draws  # leaves [D, ...]
    step: int = 0


class Feeder:
    """Makes the feed of every step, and indexes it by member."""

    def __init__(self, members: Members, settings: loop.Settings) -> None:
        self.members = members
        grid, N, device = members.grid, members.num_data, members.data.y.device
        size = settings.batch_size  # None: every step sees all data, then seeds do not matter
        streams = grid.groups(SPLIT) if size is None else grid.groups(SPLIT, SEED)
        places = torch.tensor([members.splits.index(key[0]) for key in streams])
        self._starts = N * places[:, None]  # [G, 1]  first row of the training set
        seeds = [members.seeds[group[0]] for group in streams.values()]
        self._orders = [loop.Batches(N, size, seed=s, replace=settings.replace) for s in seeds]
        self._all: Tensor | None = None
        if size is None and len(streams) > 1:
            self._all = (self._starts + torch.arange(N)).to(device)  # [G, N]
        self._stream_of = _group_of(streams, device)  # [M]
        drawing = grid.groups(SEED)
        if any(members.objective(k).adaptive for k in range(len(grid))):
            drawing = {(k,): [k] for k in range(len(grid))}  # each draws at its own parameters
        elif not self._same_draws(next(iter(drawing.values()))):
            drawing = grid.groups(SEED, *grid.hyper_names)  # p_X depends on a hyper-parameter
        self._drawing = [group[0] for group in drawing.values()]
        self._draw_of = _group_of(drawing, device)  # [M]

    def _same_draws(self, group: list[int]) -> bool:
        """Whether members of a seed draw the same numbers: not if p_X has a hyper-parameter."""
        draws = (tree_leaves(self._draw(k, 0)) for k in group)
        first, *others = ([*filter(torch.is_tensor, leaves)] for leaves in draws)
        return all(len(t) == len(first) and all(map(torch.equal, t, first)) for t in others)

    def _draw(self, member: int, step: int) -> Draws:
        members, objective = self.members, self.members.objective(member)
        stream = Stream(members.seeds[member], step)
        at = members.current if objective.adaptive else members.initial
        return objective.draw(members.f, at(member), stream)

    def make(self, step: int) -> Feed:
        """Rows and draws of one step."""
        drawn = [self._draw(k, step) for k in self._drawing]
        draws: Draws = tree_map(lambda *t: None if t[0] is None else torch.stack(t), *drawn)
        found = [rows for order in self._orders if (rows := order.rows(step)) is not None]
        if not found:
            return Feed(self._all, draws, step)
        rows = self._starts + torch.stack(found)  # [G, B]
        device = self._stream_of.device
        if device.type == "cuda":
            rows = rows.pin_memory()  # one transfer for all, without waiting
        return Feed(rows.to(device, non_blocking=True), draws, step)

    def inputs(self, feed: Feed, members: int | slice) -> tuple[Batch, Draws, tuple[Any, Any]]:
        """Batch and draws of one or all members, and ``in_dims``: None where all share them."""
        batch, batch_dim = self.members.data, None
        if feed.rows is not None:
            batch_dim = None if len(feed.rows) == 1 else 0
            rows = feed.rows[0 if batch_dim is None else self._stream_of[members]]  # [B] or [M, B]
            batch = Batch(take_points(batch.x, rows), batch.y[rows])
        draw_dim = None if len(self._drawing) == 1 else 0
        which: Any = 0 if draw_dim is None else self._draw_of[members]
        draws = tree_map_only(Tensor, lambda t: t[which], feed.draws)
        return batch, draws, (batch_dim, tree_map_only(Tensor, lambda _: draw_dim, feed.draws))


def _group_of(groups: dict[tuple[Value, ...], list[int]], device: torch.device) -> Tensor:
    """The group of every member, [M]."""
    places = {k: place for place, members in enumerate(groups.values()) for k in members}
    return torch.tensor([places[k] for k in sorted(places)], device=device)


class Ensemble:
    """Takes a step of all members, ``chunk`` at a time by ``vmap``; for 1 without ``vmap``."""

    def __init__(
        self,
        members: Members,
        feeder: Feeder,
        optimizer: Optimizer,
        clip: float | None,
        chunk: int,
        compile: bool,
    ) -> None:
        self.members, self.feeder, self.optimizer = members, feeder, optimizer
        self.clip, self.compile = clip, compile
        self._compiled: dict[object, Callable[..., Any]] = {}
        self._vectorizes = False  # whether a step under vmap has worked
        self.chunk_size = torch.tensor(chunk)  # a tensor, so that a checkpoint can keep it
        self.finite = torch.ones(len(members.grid), dtype=torch.bool, device=members.like.device)

    def step(self, feed: Feed) -> Tensor:
        """Differentiate and update; the measured columns, [C, M], on the device."""
        grads, row = self.gradients(feed)
        return loop.update(self.members.params, grads, row, self.optimizer, self.clip, self.finite)

    def state(self) -> list[Tensor]:
        """Every tensor that a step changes. Adam and SGD add theirs at the first step."""
        params = list(self.members.params.values())
        moments = [t for p in params for t in self.optimizer.state[p].values()]
        return [*(p.detach() for p in params), self.finite, *filter(torch.is_tensor, moments)]

    def gradients(self, feed: Feed) -> tuple[Params, Tensor]:
        """Gradients [M, ...] and the loss with its terms, [4, M]."""
        size = int(self.chunk_size)
        if size > 1 or self.compile:
            try:
                found = self._together(feed, size)
                self._vectorizes = True
                return found
            except LinAlgError:
                pass  # torch stops all members if one matrix has no decomposition
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                self.chunk_size.fill_((size + 1) // 2)  # nothing has been updated yet
                torch.cuda.empty_cache()
                return self.gradients(feed)
            except RuntimeError as error:
                if self._vectorizes:
                    raise
                self._alone(feed, 0)  # raises if vmap is not the reason
                reason = str(error).strip().splitlines()[0]
                raise InputError(
                    f"the objective works for one member, not for many at once: {reason} If build, "
                    "or a term it makes, decides something by the value of a hyper-parameter (if, "
                    "float(), .item()), train one population per decision, or give chunk=1."
                ) from error
        grads, rows = zip(*(self._alone(feed, k) for k in range(len(self.finite))), strict=True)
        return tree_map(lambda *g: torch.stack(g), *grads), torch.stack(rows, dim=1)

    def _together(self, feed: Feed, size: int) -> tuple[Params, Tensor]:
        batch, draws, dims = self.feeder.inputs(feed, slice(None))
        inputs = (detached(self.members.params), self.members.hypers, batch, draws)

        def loss(own: Params, hypers: Any, batch: Batch, draws: Draws) -> tuple[Tensor, Parts]:
            return self.members.build(**hypers).loss(self.members.f, own, batch, draws)

        differentiated = grad_and_value(loss, has_aux=True)
        vectorized = vmap(differentiated, in_dims=(0, 0, *dims), chunk_size=size)
        with differentiable_attention():  # the fused kernels cannot be vectorized
            if self.compile:
                vectorized = self._compile(vectorized, inputs)
            grads, (value, parts) = vectorized(*inputs)
        return grads, loop.measured(value, parts)

    def _compile(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """The operators that the gradient runs, recorded and compiled once for each shape."""
        # torch.compile cannot follow ``build``, which looks at numbers; a record has its constants
        key = tuple(None if t is None else t.shape for t in tree_leaves(inputs))
        if key not in self._compiled:
            from torch.fx.experimental.proxy_tensor import make_fx  # takes a second

            recorded = make_fx(function)(*inputs)
            self._compiled[key] = torch.compile(recorded, fullgraph=True, dynamic=False)
        return self._compiled[key]

    def _alone(self, feed: Feed, member: int) -> tuple[Params, Tensor]:
        """One member, without vmap; nan if a matrix has no decomposition."""
        members = self.members
        batch, draws, _ = self.feeder.inputs(feed, member)
        params = {n: p.requires_grad_() for n, p in members.current(member).items()}
        objective = members.build(**{n: h[member] for n, h in members.hypers.items()})
        stream = Stream(members.seeds[member], feed.step)
        try:
            with loop.layer_noise(members.f, stream, members.like.device):
                grads, row = loop.gradient(objective, members.f, params, batch, draws)
        except LinAlgError:
            grads = {n: torch.full_like(p.detach(), torch.nan) for n, p in params.items()}
            row = torch.full((1 + len(loop.PARTS),), torch.nan, device=members.like.device)
        return grads, row


def choose_chunk(chunk: int | str, members: Members, feeder: Feeder) -> int:
    """Members per ``vmap``; 1 (none) for random layers, which are seeded for each member."""
    if chunk != "auto" and (not isinstance(chunk, int) or chunk < 1):
        raise InputError(f"chunk must be a number of members >= 1, or 'auto', got {chunk!r}")
    M = len(members.grid)
    if not is_pointwise(members.f):
        return 1
    if isinstance(chunk, int):
        return min(chunk, M)
    if members.like.device.type != "cpu":
        return M
    f, params = members.f, members.initial(0)
    batch, draws, _ = feeder.inputs(feeder.make(0), 0)
    rows = len(batch.y)
    if draws.x is not None:
        with torch.no_grad():
            rows += f(params, draws.x).numel()  # S·K
    return min(M, max(1, int(CPU_WORK / (rows * count(params)))))


class Divergence:
    """The step at which each member stopped being finite, -1 for the others."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.steps = torch.full((len(grid),), -1, dtype=torch.long)  # [M]

    def update(self, recorder: loop.Recorder, values: Tensor) -> None:
        """Record the members that diverged in these steps, [T, C, M]; raise if none is left."""
        bad = ~torch.isfinite(values).all(1)  # [T, M]
        new = bad.any(0) & (self.steps < 0)
        self.steps[new] = recorder.block_start + bad.int().argmax(0)[new]
        if (self.steps >= 0).all():
            raise DivergedError(
                f"all {len(self.steps)} members diverged, between step {int(self.steps.min())} and "
                f"{int(self.steps.max())}. Lower the learning rate, clip the gradient (clip=1.0), "
                "or change the grid."
            )

    def warn(self) -> None:
        """Warn once, with names, if some members diverged."""
        diverged = (self.steps >= 0).nonzero().flatten().tolist()
        if not diverged:
            return
        shown = "; ".join(f"{self.grid[k]} at step {int(self.steps[k])}" for k in diverged[:3])
        more = f"; and {len(diverged) - 3} more" if len(diverged) > 3 else ""
        message = f"{len(diverged)} of {len(self.steps)} members diverged: {shown}{more}"
        warnings.warn(message, DivergedWarning, stacklevel=3)


# --- held-out data


def by_split(sets: Any, names: tuple[Value, ...]) -> dict[Value, Any]:
    """The data set of each value of the ``split`` axis, from a dict or list."""
    if not isinstance(sets, Mapping | list):
        kind = type(sets).__name__
        raise InputError(f"the grid has a 'split' axis: data must be a dict or list, got {kind}")
    known = dict(enumerate(sets)) if isinstance(sets, list) else sets
    missing = [name for name in names if name not in known]
    if missing:
        raise InputError(f"the grid has the splits {missing}, and data has only {list(known)}")
    return {name: known[name] for name in names}


def held_out_sets(on: Any, grid: Grid, params: Params) -> list[Batch]:
    """The held-out data of every member: one set for all, or one per split."""
    if SPLIT not in grid.names or not isinstance(on, Mapping | list):
        return [loop.as_batch(on, params)] * len(grid)
    given = by_split(on, grid.axes[SPLIT])
    sets = {name: loop.as_batch(one, params) for name, one in given.items()}
    return [sets[member[SPLIT]] for member in grid]


def measure_each(f: ModelFn, params: Params, data: list[Batch], by: loop.Metric) -> Tensor:
    """A metric of every member on its own data, [M]."""
    each = ({n: p[k] for n, p in params.items()} for k in range(len(data)))
    return torch.stack([measure(f, p, batch, by) for p, batch in zip(each, data, strict=True)])
