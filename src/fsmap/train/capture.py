"""A training step in a CUDA graph: captured once, then replayed without launching its kernels.

A captured step is a function without arguments that reads fixed tensors and changes fixed tensors:
copy the next batch and the next draws into them (``lm.draw()``, ``lm(x, drawn=...)``), then call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from fsmap.errors import FallbackWarning

WARMUP_STEPS = 3  # torch's recommendation: lazy initialization and compilation must be over


class CapturedStep:
    """Replay a step; the first call captures it.

    Args:
        step: Reads and writes fixed tensors only, and never waits for the device. No graph of an
            earlier step may be alive: torch ties it to the stream on which it was made.
        state: Every tensor that the step changes: put back after the warm-up. Tensors that the
            warm-up adds at the end of the list are set to zero.
        strict: Raise a RuntimeError before the capture if the step waits for the device: a capture
            that fails leaves torch's generator on the device unusable (torch 2.11).
    """

    def __init__(
        self,
        step: Callable[[], object],
        state: Callable[[], Sequence[Tensor]],
        *,
        strict: bool = False,
    ) -> None:
        self._step, self._state, self._strict = step, state, strict
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Take a step."""
        if self._graph is None:
            self._graph = self.capture()
        self._graph.replay()

    def capture(self) -> torch.cuda.CUDAGraph:
        """Take a few steps, undo them, and capture one."""
        kept = [t.detach().clone() for t in self._state()]
        current, other = torch.cuda.current_stream(), torch.cuda.Stream()
        other.wait_stream(current)
        try:
            with torch.cuda.stream(other):
                for _ in range(WARMUP_STEPS):
                    self._step()
                if self._strict:
                    with _no_waiting():
                        self._step()
        finally:
            current.wait_stream(other)
            self._restore(kept)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=other):  # gradients accumulate on this stream
            self._step()
        return graph

    @torch.no_grad()
    def _restore(self, kept: Sequence[Tensor]) -> None:
        state = self._state()
        for t, before in zip(state, kept, strict=False):
            t.copy_(before)
        for t in state[len(kept) :]:
            t.zero_()


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Raise a RuntimeError where the host waits for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch's: "a prototype feature"
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class Graphed:
    """The step of an ensemble, captured once for each shape of its feed; eager if that fails."""

    def __init__(
        self, step: Callable[[Any], Tensor], state: Callable[[], Sequence[Tensor]]
    ) -> None:
        self.step, self.state, self.eager = step, state, False
        # by shapes: the graph, the tensors that it reads, and what it measures
        self.captured: dict[object, tuple[torch.cuda.CUDAGraph, list[Any], dict[str, Tensor]]] = {}

    def __call__(self, feed: Any) -> Tensor:
        """One step."""
        leaves, structure = tree_flatten(feed[:2])
        key = (str(structure), *(None if t is None else tuple(t.shape) for t in leaves))
        if key not in self.captured and not self.eager:
            try:
                self._capture(feed, key)
            except RuntimeError as error:
                self.eager = True
                why = str(error).splitlines()[0]
                message = f"no CUDA graph: {why}. Training goes on without one, slower."
                warnings.warn(message, FallbackWarning, stacklevel=2)
        if self.eager:
            return self.step(feed)
        graph, buffers, measured = self.captured[key]
        for buffer, t in zip(buffers, leaves, strict=True):
            if t is not None:
                buffer.copy_(t)
        graph.replay()
        return measured["row"].clone()

    def _capture(self, feed: Any, key: object) -> None:
        fixed = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, feed)
        measured: dict[str, Tensor] = {}

        def step() -> None:
            measured["row"] = self.step(fixed)

        graph = CapturedStep(step, self.state, strict=True).capture()
        self.captured[key] = graph, tree_flatten(fixed[:2])[0], measured
