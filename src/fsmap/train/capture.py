"""A training step in a CUDA graph: captured once, then replayed without launching its kernels.

The step is a function without arguments that reads fixed tensors and changes fixed tensors: copy
the next batch and the next draws into them (``lm.draw()``, ``lm(x, drawn=...)``), then call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARMUP_STEPS = 3  # torch's recommendation: lazy initialization and compilation must be over


class CapturedStep:
    """Replay a step; the first call captures it.

    Args:
        step: Reads and writes fixed tensors only, and never waits for the device. No graph of an
            earlier step may be alive: torch ties it to the stream on which it was made.
        state: Every tensor that the step changes: put back after the warm-up, so that capturing
            takes no step.

    Example:
        >>> import torch
        >>> if torch.cuda.is_available():
        ...     x = torch.zeros(3, device="cuda")
        ...     step = CapturedStep(lambda: x.add_(1), lambda: [x])
        ...     step(), step()
        ...     assert x.tolist() == [2, 2, 2]
    """

    def __init__(self, step: Callable[[], object], state: Callable[[], Sequence[Tensor]]) -> None:
        self._step, self._state = step, state
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Take a step."""
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        kept = [t.detach().clone() for t in self._state()]
        current, other = torch.cuda.current_stream(), torch.cuda.Stream()
        other.wait_stream(current)
        with torch.cuda.stream(other):
            for _ in range(WARMUP_STEPS):
                self._step()
        current.wait_stream(other)
        with torch.no_grad():
            for t, before in zip(self._state(), kept, strict=True):
                t.copy_(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=other):  # gradients accumulate on the warm-up's stream
            self._step()
        return graph
