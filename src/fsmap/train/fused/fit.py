"""``fit_population(..., engine="fused")``: the loop around :class:`FusedPopulation`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.train.fused.feed import StackedFeed
from fsmap.train.fused.population import FusedPopulation
from fsmap.train.graph import Graphed
from fsmap.train.history import History
from fsmap.train.loop import Loop
from fsmap.train.members import Members
from fsmap.train.optim import constant
from fsmap.train.settings import Settings
from fsmap.train.state import PopulationState
from fsmap.train.verdict import Verdict


def fit_fused(
    members: Members,
    settings: Settings,
    batch_size: int | None,
    replace: bool,
    graph: bool | str,
    **unknown: object,
) -> tuple[PopulationState, History]:
    """Train a population whose gradient is written out.

    Args:
        members: Starts, objectives and data.
        settings: The knobs of the loop.
        batch_size: B.
        replace: Must be True.
        graph: False, or capture the step where the parameters are on a GPU.
        **unknown: Options that the engine does not have; all must be None.

    Returns:
        As ``fit_population``.
    """
    population = FusedPopulation(members, check_options(batch_size, replace, **unknown))
    members.objective(0).check(members.f, members.first(0), members.splits.batch(0))
    leaf, grid = population.leaf, members.grid
    capture = leaf.is_cuda and graph is not False
    moving = settings.optimizer.build(
        [leaf], capturable=capture, moving_lr=settings.schedule != constant()
    )
    verdict = Verdict(grid)
    config = {}
    if settings.checkpoint is not None:
        config = members.describe(batch_size=batch_size, engine="fused") | settings.describe()
    extra = {"diverged": verdict.diverged}
    loop = Loop(settings, {"theta": leaf}, moving, verdict.judge, config, len(grid), extra)

    def eager(feed: StackedFeed) -> Tensor:
        return population.step(feed, moving)

    step: Callable[..., Tensor] = eager
    if capture:
        flags = torch.zeros(1, device=leaf.device)
        step = Graphed(eager, {"theta": leaf}, moving, flags, required=graph is True)  # type: ignore[arg-type]
    loop.run(lambda number: step(population.make(number)), f"fit {len(grid)} members")
    verdict.report()
    found = population.params()
    state = PopulationState(found, loop.step, grid, members.f, verdict.diverged.clone(), None)
    return state, loop.recorder.history(verdict.diverged)


def check_options(batch_size: int | None, replace: bool, **unknown: object) -> int:
    """Refuse what the fused engine does not do.

    Args:
        batch_size: B.
        replace: Whether batches are drawn with replacement.
        **unknown: Options that must not be given.

    Returns:
        B.

    Raises:
        InputError: With what to leave out.
    """
    given = [name for name, value in unknown.items() if value is not None]
    if given or batch_size is None or not replace:
        message = (
            "engine='fused' takes a fixed number of steps on batches drawn with replacement: give "
            f"batch_size and replace=True, and leave out {', '.join(unknown)}"
            f"{f' (given: {given})' if given else ''}, or use engine='vmap'."
        )
        raise InputError(message)
    return batch_size
