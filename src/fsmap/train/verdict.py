"""Members that diverge: noted when, left alone, told at the end."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from fsmap.errors import DivergedError, DivergedWarning
from fsmap.train.grid import Grid
from fsmap.train.history import Recorder


class Verdict:
    """Which members have stopped being finite, and at which step."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.diverged = torch.full((len(grid),), -1, dtype=torch.long)  # [M]

    def judge(self, recorder: Recorder, values: Tensor) -> None:
        """Look at freshly fetched numbers.

        Args:
            recorder: Where they came from.
            values: [T, C, M].

        Raises:
            DivergedError: If no member is left.
        """
        bad = ~torch.isfinite(values).all(1)  # [T, M]
        new = bad.any(0) & (self.diverged < 0)
        self.diverged[new] = recorder.first + bad.int().argmax(0)[new]
        if (self.diverged >= 0).all():
            when = self.diverged
            message = (
                f"all {len(when)} members diverged, between step {int(when.min())} and "
                f"{int(when.max())}. Lower the learning rate, clip the gradient (clip=1.0), or "
                "change the grid."
            )
            raise DivergedError(message)

    def report(self) -> None:
        """Warn once, with names, if some diverged."""
        gone = (self.diverged >= 0).nonzero().flatten().tolist()
        if not gone:
            return
        shown = "; ".join(f"{self.grid[k]} at step {int(self.diverged[k])}" for k in gone[:3])
        more = f"; and {len(gone) - 3} more" if len(gone) > 3 else ""
        message = f"{len(gone)} of {len(self.diverged)} members diverged: {shown}{more}"
        warnings.warn(message, DivergedWarning, stacklevel=3)
