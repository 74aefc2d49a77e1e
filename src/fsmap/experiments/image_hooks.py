"""What goes on around a training run of an experiment: progress, and R after each epoch."""

from __future__ import annotations

import torch
from torch import Tensor

from fsmap.assess.laplacian import draw_psi, laplacian
from fsmap.experiments.experiment import Context
from fsmap.train.images import ImageRun
from fsmap.types import Params

LOOKS = 50
"""How often R is measured during a run."""


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
    """R(θ) of the deployed network at fixed images as training goes on (``fig:loss_landscape``).

    After every epoch, or in long runs :data:`LOOKS` times, always with the same ψ.

    Args:
        images: Bytes ``[N, C, H, W]``.
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
        run.history[-1]["laplacian_other"] = laplacian(
            run.module, x, probes=self.psi, batch_size=len(x)
        )[0]
