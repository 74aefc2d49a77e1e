"""What is called while a run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fsmap.train.images.run import ImageRun


class Hook(Protocol):
    """Something called while a run goes on; a plain function is taken as ``on_epoch``.

    It may read everything of the run, set ``run.reg_strength``, call ``run.glance()``,
    ``run.look()``, ``run.logits(split)``, ``run.snapshot()`` and ``run.restore(snapshot)``. If it
    also has ``on_step(run)``, that is called after every step; ``state_dict()`` (names to numbers
    or tensors) and ``load_state_dict(state)`` go into the checkpoint, and ``describe()`` says what
    a resumed run must have again (without it, the class). ``on_start(run)`` is called once, before
    a checkpoint is read, and may refuse the run. ``on_diverged(run)`` is called when a
    number is no longer finite, and returns whether it has brought the run back.
    """

    def on_epoch(self, run: ImageRun) -> None:
        """An epoch is over; ``run.history[-1]`` is its row, which may be added to."""


class FromFunction:
    """A plain function as a hook."""

    def __init__(self, function: Callable[[ImageRun], None]) -> None:
        self.function = function

    def on_epoch(self, run: ImageRun) -> None:
        """Call it."""
        self.function(run)


def described(hook: Hook) -> str:
    """What a resumed run must have again.

    Args:
        hook: One that keeps a state.

    Returns:
        Its ``describe()``, or the name of its class.
    """
    describe = getattr(hook, "describe", None)
    return type(hook).__name__ if describe is None else str(describe())
