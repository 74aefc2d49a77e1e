"""``select``: the best configuration of a trained population by a held-out metric."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.errors import DivergedError, EdgeOfGridWarning, InputError
from fsmap.train.fit import TrainState
from fsmap.train.grid import RESERVED, Grid, Value
from fsmap.train.loop import Metric
from fsmap.train.population import PopulationState, measure_members


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

    @property
    def mean(self) -> float:
        """Mean of the chosen values."""
        return float(torch.tensor([c.value for c in self.choices]).mean())

    @property
    def stderr(self) -> float:
        """Its standard error over seeds and splits; nan for one choice."""
        values = torch.tensor([c.value for c in self.choices], dtype=torch.float64)
        return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan

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
    use_best: bool = False,
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
        use_best: Measure the parameters with the best validation during training, not the last.

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
        message = f"per may hold {list(RESERVED)}, got {unknown}: hyper-parameters are chosen"
        raise InputError(message)
    params = states.params
    if use_best:
        if states.best is None:
            message = "use_best=True needs a population trained with on= and by="
            raise InputError(message)
        params = states.best.params
    measured = measure_members(states._replace(params=params), on=on, by=by)
    broken = (states.diverged >= 0) | ~torch.isfinite(measured)
    cost = torch.where(broken, torch.inf, -measured if largest else measured)
    axes = tuple(name for name in per if name in grid.names)
    choices = []
    for key, members in grid.groups(*axes).items():
        where = dict(zip(axes, key, strict=True))
        config, winners = _choose(grid, where, set(members), cost)
        value = float(measured[list(winners)].mean())
        choices.append(Choice(where=where, config=config, members=winners, value=value))  # type: ignore[arg-type]
    _warn_at_edges(grid, choices)
    return Selection(tuple(choices), torch.where(broken, torch.inf, measured), states)


def _choose(
    grid: Grid, where: dict[str, Any], members: set[int], cost: Tensor
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The configuration with the lowest mean cost, and its members."""
    configs = {
        key: tuple(k for k in group if k in members)
        for key, group in grid.groups(*grid.hyper_names).items()
    }
    means = {key: float(cost[list(group)].mean()) for key, group in configs.items() if group}
    key = min(means, key=means.__getitem__)
    if not math.isfinite(means[key]):
        message = f"no configuration to choose{f' for {where}' if where else ''}: all diverged"
        raise DivergedError(message)
    return dict(zip(grid.hyper_names, key, strict=True)), configs[key]


def _warn_at_edges(grid: Grid, choices: Sequence[Choice]) -> None:
    edges = []
    for name in grid.hyper_names:
        values = sorted(float(v) for v in grid.axes[name])
        if len(values) < 3:
            continue
        ends = {values[0], values[-1]} - {0.0}
        hits = [float(c.config[name]) for c in choices if float(c.config[name]) in ends]
        if hits:
            found = ", ".join(f"{v:g}" for v in dict.fromkeys(hits))
            edges.append(f"{name}={found} (grid from {values[0]:g} to {values[-1]:g})")
    if edges:
        message = (
            f"the best value lies at the edge of the grid: {'; '.join(edges)}. A better one may "
            "lie outside: widen the grid."
        )
        warnings.warn(message, EdgeOfGridWarning, stacklevel=3)
