"""What goes on around a training run of an experiment: progress, R after each epoch, company."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from fsmap.assess.laplacian import laplacian
from fsmap.experiments.experiment import Context
from fsmap.train.images import ImageRun

LOOKS = 50
"""How often R is measured during a run."""

DONE = "done"
"""A file that says that the run in its folder is at its end."""


class Advance:
    """Moves the progress bar, and marks a run that is at its end.

    Args:
        context: Whose bar.
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    def on_step(self, run: ImageRun) -> None:
        """Every ten steps."""
        if run.step % 10 == 0:
            self.context.advance(run.step / run.steps)

    def on_epoch(self, run: ImageRun) -> None:
        """Say where it is."""
        self.context.advance(f"epoch {run.epoch} of {run.settings.epochs}")


class TraceLaplacian:
    """R(θ) of the deployed network at fixed images as training goes on (``fig:loss_landscape``).

    After every epoch, or in long runs :data:`LOOKS` times.

    Args:
        images: Bytes ``[N, C, H, W]``.
    """

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def on_epoch(self, run: ImageRun) -> None:
        """Add it to the epoch's row.

        Args:
            run: The run.
        """
        if run.epoch % max(1, run.settings.epochs // LOOKS) and not run.done:
            return
        x = run.task.normalize(self.images.to(run.device))
        generator = torch.Generator().manual_seed(0)
        run.history[-1]["laplacian_other"] = laplacian(
            run.module, x, probes=1, generator=generator, batch_size=len(x)
        )[0]


def train_together(runs: Sequence[ImageRun]) -> None:
    """Train runs to their ends: one after another, or on CUDA several at the same time.

    A network of this size does not fill a large GPU. Each run has a thread and a stream of its own;
    its first steps, which compile and capture, are taken while no other thread runs.

    Args:
        runs: New ones, or as their checkpoints left them.
    """
    if len(runs) == 1 or runs[0].device.type != "cuda":
        for run in runs:
            _to_the_end(run)
        return
    for run in runs:
        run.train(max_seconds=0.0, progress=False)
    errors: list[BaseException] = []
    threads = [threading.Thread(target=_in_thread, args=(run, errors)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _in_thread(run: ImageRun, errors: list[BaseException]) -> None:
    try:
        with torch.cuda.stream(torch.cuda.Stream(run.device)):
            _to_the_end(run)
    except BaseException as error:  # handed to the thread that waits
        errors.append(error)


def _to_the_end(run: ImageRun) -> None:
    run.train(progress=False)
    if run.path is not None:
        (run.path.parent / DONE).touch()
