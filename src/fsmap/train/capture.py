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
        state: Every tensor that the step changes: put back after the warm-up, so that capturing
            takes no step. Tensors that the warm-up adds at the end of the list are set to zero.
        strict: Raise a RuntimeError before the capture if the step waits for the device: a capture
            that fails leaves torch's generator on the device unusable (torch 2.11).

    Example:
        >>> import torch
        >>> if torch.cuda.is_available():
        ...     x = torch.zeros(3, device="cuda")
        ...     step = CapturedStep(lambda: x.add_(1), lambda: [x])
        ...     step(), step()
        ...     assert x.tolist() == [2, 2, 2]
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
        self._stream: torch.cuda.Stream | None = None

    def __call__(self) -> None:
        """Take a step."""
        if self._graph is None:
            self.warm_up()
            self.capture()
        assert self._graph is not None
        self._graph.replay()

    def warm_up(self) -> None:
        """Take a few steps and undo them."""
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
            restore(self._state(), kept)
        self._stream = other  # gradients accumulate on the warm-up's stream

    def capture(self) -> None:
        """Capture the step, after :meth:`warm_up`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._step()
        self._graph = graph


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


@torch.no_grad()
def restore(state: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Put tensors back, in place; those that are new are set to zero."""
    for t, before in zip(state, kept, strict=False):
        t.copy_(before)
    for t in state[len(kept) :]:
        t.zero_()


class Graphed:
    """The step of an ensemble, captured.

    Batches and draws are made outside and copied into buffers that the graph reads. Steps whose
    feed has another shape (``every=k`` leaves draws out) have a graph of their own. If a step
    cannot be captured, the eager one goes on with a warning.
    """

    def __init__(
        self, step: Callable[[Any], Tensor], state: Callable[[], Sequence[Tensor]]
    ) -> None:
        self.step, self.state, self.eager = step, state, False
        self.captured: dict[object, tuple[CapturedStep, list[Tensor], dict[str, Tensor]]] = {}

    def __call__(self, feed: Any) -> Tensor:
        """One step."""
        leaves, structure = tree_flatten(feed[:2])
        key = (str(structure), *(None if t is None else tuple(t.shape) for t in leaves))
        if key not in self.captured and not self.eager:
            fixed = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, feed)
            measured: dict[str, Tensor] = {}
            captured = CapturedStep(
                lambda: measured.update(row=self.step(fixed)), self.state, strict=True
            )
            try:
                captured.warm_up()
            except RuntimeError as error:
                self.eager = True
                why = str(error).splitlines()[0]
                message = f"no CUDA graph: {why}. Training goes on without one, slower."
                warnings.warn(message, FallbackWarning, stacklevel=2)
            else:
                captured.capture()
                self.captured[key] = captured, tree_flatten(fixed[:2])[0], measured
        if self.eager:
            return self.step(feed)
        captured, buffers, measured = self.captured[key]
        for buffer, t in zip(buffers, leaves, strict=True):
            if t is not None:
                buffer.copy_(t)
        captured()
        return measured["row"].clone()
