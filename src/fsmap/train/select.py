"""``select``: the best configuration of a trained population by a held-out metric."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.errors import DivergedError, EdgeOfGridWarning, InputError
from fsmap.train.grid import RESERVED, Grid, Value
from fsmap.train.state import Metric, PopulationState, TrainState, held_out, measure


class Choice(NamedTuple):
    """The best configuration, for one seed, one split, or all of them."""

    where: dict[str, Value]  # the axes it was chosen for, such as {"seed": 3}
    config: dict[str, Value]  # the hyper-parameters that won
    members: tuple[int, ...]  # the members that have both; several where the metric was averaged
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

    A warning tells where the winner lies at an end of an axis, so that a better value may lie
    outside. (Zero is no such end for a strength: there is nothing below.)

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
        InputError: If ``per`` names no such axis, or there are no best parameters.
        DivergedError: If no member is left to choose from.
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
    sign = -1.0 if largest else 1.0
    measured = measure(states.f, params, held_out(on, grid, params), by)  # [M]
    broken = (states.diverged >= 0) | ~torch.isfinite(measured)
    cost = torch.where(broken, torch.inf, sign * measured)
    axes = tuple(name for name in per if name in grid.names)
    choices = tuple(
        _choose(grid, dict(zip(axes, key, strict=True)), members, cost, sign)
        for key, members in grid.groups(*axes).items()
    )
    _warn_at_edges(grid, choices)
    return Selection(choices, torch.where(broken, torch.inf, measured), states)


def _choose(
    grid: Grid, where: dict[str, Any], members: list[int], cost: Tensor, sign: float
) -> Choice:
    configs = grid.groups(*grid.hyper_names)
    best: Choice | None = None
    for key, all_members in configs.items():
        mine = tuple(k for k in all_members if k in set(members))
        if not mine:
            continue
        value = float(cost[list(mine)].mean())
        if math.isfinite(value) and (best is None or value < sign * best.value):
            config = dict(zip(grid.hyper_names, key, strict=True))
            best = Choice(where, config, mine, sign * value)  # type: ignore[arg-type]
    if best is None:
        message = f"no configuration to choose{f' for {where}' if where else ''}: all diverged"
        raise DivergedError(message)
    return best


def _warn_at_edges(grid: Grid, choices: tuple[Choice, ...]) -> None:
    told = []
    for name in grid.hyper_names:
        values = sorted(float(v) for v in grid.axes[name])
        ends = {values[0], values[-1]} - {0.0}
        if len(values) < 3:
            continue
        hits = [float(c.config[name]) for c in choices if float(c.config[name]) in ends]
        if hits:
            found = ", ".join(f"{v:g}" for v in dict.fromkeys(hits))
            told.append(f"{name}={found} (grid from {values[0]:g} to {values[-1]:g})")
    if told:
        message = (
            f"the best value lies at the edge of the grid: {'; '.join(told)}. A better one may lie "
            "outside: widen the grid."
        )
        warnings.warn(message, EdgeOfGridWarning, stacklevel=3)
