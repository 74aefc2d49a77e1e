"""What training returns: the state of one model, and of a population."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsmap.errors import DivergedError, InputError
from fsmap.functional import Functional, move_points
from fsmap.train.batches import as_batch
from fsmap.train.grid import SPLIT, Grid
from fsmap.types import Batch, Inputs, ModelFn, Params

Metric = Callable[[Tensor, Tensor], Any]
"""``(outputs, y)`` to a number, such as ``fsmap.metrics.rmse``."""


class Best(NamedTuple):
    """The parameters with the lowest validation value."""

    params: Params
    step: int  # steps taken when it was measured
    value: float


class TrainState(NamedTuple):
    """Where training ended."""

    params: Params
    step: int  # steps taken
    best: Best | None = None  # where there was a validation


class PopulationBest(NamedTuple):
    """The parameters with the lowest validation value of every member."""

    params: Params  # [M, ...]
    step: Tensor  # [M]  steps taken when it was measured; 0 where nothing was measured
    value: Tensor  # [M]


class PopulationState(NamedTuple):
    """Where a population ended.

    Attributes:
        params: Stacked parameters, [M, ...].
        step: Steps taken.
        grid: Who is who.
        f: The model function that all share.
        diverged: The step at which a member stopped being finite, -1 for the others, [M].
        best: Where there was a validation.
    """

    params: Params
    step: int
    grid: Grid
    f: ModelFn
    diverged: Tensor
    best: PopulationBest | None = None

    def member(self, index: int) -> TrainState:
        """One member, as ``fit`` would return it.

        Args:
            index: Its place in the grid.

        Returns:
            Its state.

        Raises:
            DivergedError: If it diverged: its parameters mean nothing.
        """
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
        """What every member says at the same points, [M, n, ...]; nan for those that diverged."""
        first = next(iter(self.params.values()))
        x = move_points(x, device=first.device, dtype=first.dtype)
        with torch.no_grad(), deployed(self.f):
            found = [
                self.f({n: p[k] for n, p in self.params.items()}, x) for k in range(len(first))
            ]
        dead = (self.diverged >= 0).tolist()
        return torch.stack(
            [torch.full_like(o, torch.nan) if d else o for o, d in zip(found, dead, strict=True)]
        )

    def __repr__(self) -> str:
        gone = int((self.diverged >= 0).sum())
        return f"PopulationState({self.grid!r} after {self.step} steps, {gone} diverged)"


def held_out(on: Any, grid: Grid, params: Params) -> list[Batch]:
    """The held-out data of every member.

    Args:
        on: One set for all; or, where the grid has a ``split`` axis, a dict or list of them.
        grid: The members.
        params: Decide device and dtype.

    Returns:
        One entry per member.

    Raises:
        InputError: If a split is missing.
    """
    sets = on if isinstance(on, Mapping) else dict(enumerate(on)) if isinstance(on, list) else None
    if sets is None or SPLIT not in grid.names:
        return [as_batch(on, params)] * len(grid)
    missing = [s for s in grid.axes[SPLIT] if s not in sets]
    if missing:
        message = f"held-out data for the splits {missing} is missing; there is {list(sets)}"
        raise InputError(message)
    moved = {s: as_batch(sets[s], params) for s in grid.axes[SPLIT]}
    return [moved[member[SPLIT]] for member in grid]


def measure(f: ModelFn, params: Params, data: list[Batch], by: Metric) -> Tensor:
    """A metric of every member on its own data.

    Args:
        f: The model function; random layers are off.
        params: Stacked parameters, [M, ...].
        data: One set per member.
        by: The metric.

    Returns:
        [M], float64 on the CPU.
    """
    values = []
    with torch.no_grad(), deployed(f):
        for k, batch in enumerate(data):
            out = f({n: p.detach()[k] for n, p in params.items()}, batch.x)
            finite = bool(torch.isfinite(out).all())
            values.append(float(by(out, batch.y)) if finite else torch.nan)
    return torch.tensor(values, dtype=torch.float64)


@contextmanager
def deployed(f: ModelFn) -> Iterator[None]:
    """The function as it will be used: random layers off, the module's mode put back afterwards."""
    active: list[nn.Module] = []
    if isinstance(f, Functional) and not f.pointwise:
        active = [m for m in f.module.modules() if m.training]
    try:
        for module in active:
            module.training = False
        yield
    finally:
        for module in active:
            module.training = True
