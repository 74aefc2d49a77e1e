"""Several runs on one GPU at the same time, each on a stream of its own, launched in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from fsmap.errors import InputError
from fsmap.train.images.run import ImageRun

TURN = 20
"""Steps that a run launches at a time: work enough for the GPU while another run evaluates."""


def train_together(runs: Sequence[ImageRun]) -> None:
    """Train runs to their ends.

    A network of this size leaves part of a large GPU idle: kernels end raggedly, and some move
    bytes while others multiply. On CUDA the steps of several runs overlap; elsewhere runs are
    trained one after another. A run takes the same steps as it would alone.

    Args:
        runs: New ones, or as their checkpoints left them.

    Raises:
        InputError: If some of them allow only deterministic kernels and others do not.
    """
    modes = {run.settings.deterministic for run in runs}
    if len(modes) > 1:
        message = "runs that are trained together must agree in deterministic"
        raise InputError(message)
    if len(runs) == 1 or any(run.device.type != "cuda" for run in runs):
        for run in runs:
            run.train(progress=False)
        return
    with runs[0].kernels():
        waiting = [(_stream(run), run.stepping(run.steps)) for run in runs]
        while waiting:
            waiting = [(stream, steps) for stream, steps in waiting if _turn(stream, steps)]
    for run in runs:
        torch.cuda.synchronize(run.device)


def _stream(run: ImageRun) -> AbstractContextManager[object]:
    stream = torch.cuda.Stream(run.device)
    stream.wait_stream(torch.cuda.current_stream(run.device))
    return torch.cuda.stream(stream)


def _turn(stream: AbstractContextManager[object], steps: Iterator[None]) -> bool:
    """Launch a few steps; whether there are more."""
    with stream:
        return all(next(steps, stream) is None for _ in range(TURN))
