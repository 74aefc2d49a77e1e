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
from fsmap.objective.geometry import Geometry, Laplacian, NoGeometry, TraceBound
from fsmap.train.feed import Feed
from fsmap.types import ModelFn, Params

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
            required: Whether a step that cannot be captured is an error; else the eager step goes
                on, with a warning.
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
            static: Feed = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, feed)
            try:
                self._warm_up(static)
            except RuntimeError as error:
                if self.required:
                    raise
                self._give_up(error)
                return self.step(feed)
            self.captured[key] = self._capture(static)
        found = self.captured[key]
        for buffer, t in zip(tree_flatten(found.feed[:2])[0], leaves, strict=True):
            if t is not None:
                buffer.copy_(t)
        found.graph.replay()
        return found.row.clone()

    def _warm_up(self, static: Feed) -> None:
        """Take a few steps and undo them; raise if a step waits for the device.

        What waits cannot be captured, and a capture that fails leaves torch's generator on the
        device unusable (seen with 2.11): so it is found out before.
        """
        before = self._snapshot()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with torch.cuda.stream(side):
                for _ in range(WARMUP_STEPS):
                    self.step(static)
                with warnings.catch_warnings():  # torch's: "a prototype feature"
                    warnings.simplefilter("ignore", UserWarning)
                    torch.cuda.set_sync_debug_mode("error")
                self.step(static)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.current_stream().wait_stream(side)
            self._restore(before)

    def _capture(self, static: Feed) -> Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            row = self.step(static)
        return Captured(graph, static, row)

    def _give_up(self, error: RuntimeError) -> None:
        self.eager = True
        why = str(error).splitlines()[0]
        message = f"no CUDA graph: {why}. Training goes on without one, slower."
        warnings.warn(message, FallbackWarning, stacklevel=3)

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


def wanted(graph: bool | str, device: torch.device, f: ModelFn, geometry: Geometry) -> bool:
    """Whether to capture.

    Args:
        graph: ``"auto"``, True or False.
        device: Where training runs.
        f: The model function.
        geometry: The term that may need a matrix decomposition.

    Returns:
        The answer.

    Raises:
        InputError: If ``graph`` is none of these, or True where a capture is impossible.
    """
    if graph not in CHOICES:
        message = f"graph must be 'auto', True or False, got {graph!r}"
        raise InputError(message)
    why = None
    if device.type != "cuda":
        why = f"a CUDA device, and the parameters are on {device}"
    elif not getattr(f, "pointwise", True):
        why = "a model without random layers, and this one has some"
    elif not _free_of_decompositions(geometry):
        why = f"a geometry without matrix decompositions, and {type(geometry).__name__} has one"
    if graph is True and why:
        message = f"graph=True needs {why}. Use graph='auto' or False."
        raise InputError(message)
    return why is None and graph is not False


def _free_of_decompositions(geometry: Geometry) -> bool:
    if isinstance(geometry, Laplacian | TraceBound):
        return geometry.metric is None
    return isinstance(geometry, NoGeometry)
