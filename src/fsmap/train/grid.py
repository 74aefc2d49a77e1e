"""Populations: a grid of members, where each of them ended, and which is the best."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.errors import DivergedError, EdgeOfGridWarning, InputError
from fsmap.train.fit import TrainState, as_batch, measure
from fsmap.train.loop import Best, Metric
from fsmap.types import Batch, ModelFn, Params

Value = float | int | str
SEED, SPLIT = "seed", "split"
RESERVED = (SEED, SPLIT)  # axes that say which random numbers and which data, not which objective


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
        self.members = tuple(dict(member) for member in members)
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
        raise InputError(
            f"axis {name!r} needs a list of values, got {axis!r}. Write {name}=[{axis!r}]."
        )
    values = axis.tolist() if isinstance(axis, Tensor) else list(axis)
    if not values or len(set(values)) < len(values):
        raise InputError(f"axis {name!r} needs at least one value and none twice, got {values}")
    return values


def _check(members: tuple[dict[str, Value], ...]) -> None:
    if not members:
        raise InputError("the list of members is empty: a grid needs at least one")
    for index, member in enumerate(members):
        if set(member) != set(members[0]):
            raise InputError(
                f"members must have the same names: {list(members[0])}, but member {index} has "
                f"{list(member)}"
            )
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
            raise DivergedError(
                f"member {index} ({self.grid[index]}) diverged at step "
                f"{int(self.diverged[index])}; its parameters mean nothing. "
                f"history.member({index}) shows how it went."
            )
        best = None
        if self.best is not None and self.best.step[index] > 0:
            kept = {n: p[index] for n, p in self.best.params.items()}
            best = Best(kept, int(self.best.step[index]), float(self.best.value[index]))
        return TrainState({n: p[index] for n, p in self.params.items()}, self.step, best)

    def __repr__(self) -> str:
        diverged = int((self.diverged >= 0).sum())
        return f"PopulationState({self.grid!r} after {self.step} steps, {diverged} diverged)"


def by_split(sets: Any, names: tuple[Value, ...]) -> list[Any]:
    """What a dict or list has for each value of the ``split`` axis."""
    if not isinstance(sets, Mapping | list):
        raise InputError(
            "the grid has a 'split' axis, so data must be a dict or list of sets, got "
            f"{type(sets).__name__}"
        )
    known = dict(enumerate(sets)) if isinstance(sets, list) else sets
    missing = [name for name in names if name not in known]
    if missing:
        raise InputError(f"the grid has the splits {missing}, and data has only {list(known)}")
    return [known[name] for name in names]


def held_out_sets(on: Any, grid: Grid, params: Params) -> list[Batch]:
    """The held-out data of every member: one set for all, or one per split."""
    if SPLIT not in grid.names or not isinstance(on, Mapping | list):
        return [as_batch(on, params)] * len(grid)
    names = grid.axes[SPLIT]
    sets = {n: as_batch(one, params) for n, one in zip(names, by_split(on, names), strict=True)}
    return [sets[member[SPLIT]] for member in grid]


def measure_each(f: ModelFn, params: Params, data: list[Batch], by: Metric) -> Tensor:
    """A metric of every member on its own data, [M]."""
    each = ({n: p[k] for n, p in params.items()} for k in range(len(data)))
    return torch.stack([measure(f, p, batch, by) for p, batch in zip(each, data, strict=True)])


def measure_members(states: PopulationState, *, on: Any, by: Metric) -> Tensor:
    """A metric of every member, [M], on held-out data: one set, or one per split.

    It is nan for members whose outputs are not finite.
    """
    data = held_out_sets(on, states.grid, states.params)
    return measure_each(states.f, states.params, data, by)


class Choice(NamedTuple):
    """The best configuration, for one seed, one split, or all of them."""

    where: dict[str, Value]  # the axes it was chosen for, such as {"seed": 3}
    config: dict[str, Value]  # the hyper-parameters that won
    members: tuple[int, ...]  # the members that have both; several if the metric was averaged
    value: float  # their mean metric


class Selection(NamedTuple):
    """What :func:`select` found."""

    choices: tuple[Choice, ...]
    values: Tensor  # [M]  the metric of every member; inf for those that diverged
    states: PopulationState

    def __getitem__(self, index: int) -> TrainState:  # type: ignore[override]
        """The state of the (first) member of a choice."""
        return self.states.member(self.choices[index].members[0])

    def __len__(self) -> int:
        return len(self.choices)


def select(
    states: PopulationState,
    /,
    *,
    on: Any,
    by: Metric,
    per: Sequence[str] = RESERVED,
    largest: bool = False,
) -> Selection:
    """Choose hyper-parameters by a metric on held-out data.

    A warning tells if the winner lies at an end of an axis, so that a better value may lie outside.
    (Zero is no such end for a strength: there is nothing below.)

    Args:
        states: A trained population.
        on: Held-out data, one set or one per split.
        by: ``(outputs, y)`` to a number, such as ``fsmap.metrics.rmse``.
        per: Axes of which every value gets a choice of its own; over the others of ``seed`` and
            ``split`` the metric is averaged. ``per=()`` makes one choice for all.
        largest: The largest value wins, as for an accuracy.

    Returns:
        The choices, and the metric of every member.

    Raises:
        DivergedError: If no member is left to choose from.

    Example:
        >>> import torch, fsmap
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> f, _ = fsmap.functional(torch.nn.Linear(1, 1))
        >>> def build(prior_std):
        ...     return fsmap.ps_map(fsmap.Gaussian(0.1), fsmap.Normal(prior_std), num_data=20)
        >>> grid = fsmap.Grid(prior_std=[0.1, 1.0], seed=range(3))
        >>> run = {"steps": 2, "progress": False}
        >>> states, _ = fsmap.fit_population(build, grid, f, (x, 2 * x), **run)
        >>> len(fsmap.select(states, on=(x, 2 * x), by=fsmap.metrics.rmse))  # one choice a seed
        3
    """
    grid = states.grid
    unknown = [name for name in per if name not in RESERVED]
    if unknown:
        raise InputError(
            f"per may hold {list(RESERVED)}, got {unknown}: hyper-parameters are chosen"
        )
    measured = measure_members(states, on=on, by=by)
    broken = (states.diverged >= 0) | ~torch.isfinite(measured)
    cost = torch.where(broken, torch.inf, -measured if largest else measured)
    axes = tuple(name for name in per if name in grid.names)
    groups = grid.groups(*axes, *grid.hyper_names)
    means = {key: float(cost[members].mean()) for key, members in groups.items()}
    choices = []
    for place in grid.groups(*axes):
        where = dict(zip(axes, place, strict=True))
        best = min((k for k in means if k[: len(axes)] == place), key=means.__getitem__)
        if not math.isfinite(means[best]):
            raise DivergedError(
                f"no configuration to choose{f' for {where}' if where else ''}: all diverged"
            )
        config = dict(zip(grid.hyper_names, best[len(axes) :], strict=True))
        value = float(measured[groups[best]].mean())
        choices.append(Choice(where, config, tuple(groups[best]), value))
    _warn_at_edges(grid, choices)
    return Selection(tuple(choices), torch.where(broken, torch.inf, measured), states)


def _warn_at_edges(grid: Grid, choices: Sequence[Choice]) -> None:
    edges = []
    for name in grid.hyper_names:
        values = sorted(float(v) for v in grid.axes[name])
        if len(values) < 3:
            continue
        chosen = dict.fromkeys(float(choice.config[name]) for choice in choices)
        found = ", ".join(f"{v:g}" for v in chosen if v in (values[0], values[-1]) and v)
        if found:
            edges.append(f"{name}={found} (grid from {values[0]:g} to {values[-1]:g})")
    if edges:
        message = (
            f"the best value lies at the edge of the grid: {'; '.join(edges)}. A better one may "
            "lie outside: widen the grid."
        )
        warnings.warn(message, EdgeOfGridWarning, stacklevel=3)
