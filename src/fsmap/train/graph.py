"""A step captured once as a CUDA graph and replayed.

Most of a small network's step is the launching of kernels; a replay launches them all at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map

from fsmap.errors import FallbackWarning, InputError
from fsmap.train.feed import Feed
from fsmap.types import Params

WARMUP_STEPS = 3  # torch's recommendation: lazy initialization must be over before the capture
CHOICES = ("auto", True, False)


class Captured(NamedTuple):
    """A graph, the buffers it reads and the row it writes."""

    graph: Any
    feed: Feed
    row: Tensor


class Graphed:
    """Takes the place of ``Ensemble.step``; the eager step is the definition, this replays it.

    Batches and draws are made outside, as ever, and copied into buffers that the graph reads. Steps
    whose feed has another shape (``every=k`` leaves draws out) have a graph of their own.
    """

    def __init__(
        self,
        step: Callable[[Feed], Tensor],
        params: Params,
        optimizer: Optimizer,
        flags: Tensor,
        *,
        required: bool,
    ) -> None:
        """Keep what a capture needs.

        Args:
            step: The eager step.
            params: The leaves it updates.
            optimizer: Their optimizer, built with ``capturable=True``.
            flags: Further state that it updates.
            required: Whether a failing capture is an error; else the eager step goes on, with a
                warning.
        """
        self.step, self.params, self.optimizer, self.flags = step, params, optimizer, flags
        self.required = required
        self.captured: dict[object, Captured] = {}
        self.eager = False

    def __call__(self, feed: Feed) -> Tensor:
        """One step."""
        if self.eager:
            return self.step(feed)
        leaves, structure = tree_flatten(feed[:2])
        key = (str(structure), *(None if t is None else tuple(t.shape) for t in leaves))
        if key not in self.captured:
            try:
                self.captured[key] = self._capture(feed)
            except RuntimeError as error:
                if self.required:
                    raise
                self.eager = True
                why = str(error).splitlines()[0]
                message = f"no CUDA graph: {why} Training goes on without one, slower."
                warnings.warn(message, FallbackWarning, stacklevel=2)
                return self.step(feed)
        found = self.captured[key]
        for buffer, t in zip(tree_flatten(found.feed[:2])[0], leaves, strict=True):
            if t is not None:
                buffer.copy_(t)
        found.graph.replay()
        return found.row.clone()

    def _capture(self, feed: Feed) -> Captured:
        static: Feed = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, feed)
        before = self._snapshot()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARMUP_STEPS):
                    self.step(static)
            torch.cuda.current_stream().wait_stream(side)
            self._restore(before)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                row = self.step(static)
        finally:
            self._restore(before)
        return Captured(graph, static, row)

    def _snapshot(self) -> tuple[Params, list[dict[str, Tensor]], Tensor]:
        state = [
            {k: v.clone() for k, v in self.optimizer.state[p].items() if isinstance(v, Tensor)}
            for p in self.params.values()
        ]
        return {n: p.detach().clone() for n, p in self.params.items()}, state, self.flags.clone()

    def _restore(self, before: tuple[Params, list[dict[str, Tensor]], Tensor]) -> None:
        """Undo the warm-up, in place: the graph holds addresses."""
        params, states, flags = before
        with torch.no_grad():
            for (name, p), old in zip(self.params.items(), states, strict=True):
                p.copy_(params[name])
                for key, value in self.optimizer.state[p].items():
                    if isinstance(value, Tensor):
                        # Adam and SGD start from zeros (torch makes them at the first step)
                        value.copy_(old[key]) if key in old else value.zero_()
            self.flags.copy_(flags)


def wanted(graph: bool | str, device: torch.device, pointwise: bool) -> bool:
    """Whether to capture.

    Args:
        graph: ``"auto"``, True or False.
        device: Where training runs.
        pointwise: Whether the model is free of random layers.

    Returns:
        The answer.

    Raises:
        InputError: If it is none of these, or True where it cannot be.
    """
    if graph not in CHOICES:
        message = f"graph must be 'auto', True or False, got {graph!r}"
        raise InputError(message)
    possible = device.type == "cuda" and pointwise
    if graph is True and not possible:
        why = (
            f"the parameters are on {device}"
            if device.type != "cuda"
            else "the model has random layers"
        )
        message = (
            f"graph=True needs a CUDA device and a model without dropout; {why}. Use graph='auto'."
        )
        raise InputError(message)
    return possible and graph is not False
