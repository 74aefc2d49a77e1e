"""What goes on around a training run of an experiment: progress, and R after each epoch."""

from __future__ import annotations

import torch
from torch import Tensor

from fsmap.assess.landscape import draw_psi, laplacian
from fsmap.experiments.experiment import Context
from fsmap.train.images import ImageRun
from fsmap.types import Params

LOOKS = 50
"""How often R is measured during a run."""

JOINT = 128
"""B and S of R in training mode, the paper's."""


class Advance:
    """Moves the progress bar.

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
    """R(θ) at fixed images as training goes on (``fig:loss_landscape``).

    After every epoch, or in long runs :data:`LOOKS` times, always with the same ψ; of the deployed
    network at images of D', and in training mode as the authors log it (:func:`joint_laplacian`).

    Args:
        images: Of D', bytes ``[N, C, H, W]``.
    """

    def __init__(self, images: Tensor) -> None:
        self.images = images
        self.psi: Params = {}

    def on_epoch(self, run: ImageRun) -> None:
        """Add it to the epoch's row.

        Args:
            run: The run.
        """
        if run.epoch % max(1, run.settings.epochs // LOOKS) and not run.done:
            return
        x = run.task.normalize(self.images.to(run.device))
        if not self.psi:  # drawing millions of numbers takes longer than the rest of this
            self.psi = draw_psi(run.module, 1, torch.Generator().manual_seed(0))
        row = run.history[-1]
        row["laplacian_other"] = laplacian(run.module, x, probes=self.psi, batch_size=len(x))[0]
        row["laplacian_joint"] = joint_laplacian(run, self.images, self.psi, batches=1)


def joint_laplacian(
    run: ImageRun, images: Tensor, probes: int | Params = 2, batches: int = 4
) -> float:
    """R(θ) as the authors log it: in training mode, over batches of which half are of D'.

    Args:
        run: The run.
        images: Of D', bytes ``[N, C, H, W]``.
        probes: As in :func:`fsmap.assess.landscape.laplacian`.
        batches: How many, each of 128 training images (not augmented) and 128 of D', or fewer.

    Returns:
        The mean over batches and points.
    """
    half = min(JOINT, len(images), len(run.task.train.x))
    number = min(batches, min(len(images), len(run.task.train.x)) // half)
    sets = [run.task.train.x, images.to(run.device)]
    parts = [s[: number * half].unflatten(0, (number, half)) for s in sets]
    x = run.task.normalize(torch.cat(parts, 1).flatten(0, 1))
    return laplacian(run.module, x, probes=probes, batch_size=2 * half, batch_statistics=True)[0]
