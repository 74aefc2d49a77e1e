"""``select``: the best hyper-parameters of a population, by a metric on held-out data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.errors import DivergedError, EdgeOfGridWarning, InputError
from fsmap.train.fit import TrainState
from fsmap.train.loop import NO_METRIC, Metric
from fsmap.train.population import (
    RESERVED,
    Grid,
    PopulationState,
    Value,
    held_out_sets,
    measure_each,
)


def measure_members(states: PopulationState, *, on: Any, by: Metric) -> Tensor:
    """A metric of every member, [M], on one set or one per split; nan if outputs are not finite."""
    if not callable(by):
        raise InputError(f"{NO_METRIC}, got {by!r}")
    return measure_each(states.f, states.params, held_out_sets(on, states.grid, states.params), by)


class Choice(NamedTuple):
    """The best configuration, for one seed, one split, or all of them."""

    where: dict[str, Value]  # the axes it was chosen for, such as {"seed": 3}
    config: dict[str, Value]  # the chosen hyper-parameters
    members: tuple[int, ...]  # the members that have both; several if the metric was averaged
    value: float  # their mean metric


class Selection(NamedTuple):
    """The result of :func:`select`."""

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

    Warns if a chosen value is the smallest or largest of its axis: a better one may lie outside.
    (There is no warning for 0, below which no strength lies.)

    Args:
        states: A trained population.
        on: Held-out data, one set or one per split.
        by: ``(outputs, y)`` to a number, such as ``fsmap.metrics.rmse``.
        per: Axes of which every value gets a choice of its own; over the others of ``seed`` and
            ``split`` the metric is averaged. ``per=()`` makes one choice for all.
        largest: Choose the largest value, as for an accuracy.

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
        >>> states, _ = fsmap.fit_population(build, grid, f, (x, 2 * x), steps=2)
        >>> len(fsmap.select(states, on=(x, 2 * x), by=fsmap.metrics.rmse))  # one choice a seed
        3
    """
    grid = states.grid
    unknown = [name for name in per if name not in RESERVED]
    if unknown:
        allowed = list(RESERVED)
        raise InputError(f"per may hold {allowed}, got {unknown}: hyper-parameters are chosen")
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
            which = f" for {where}" if where else ""
            raise DivergedError(f"no configuration to choose{which}: all diverged")
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
