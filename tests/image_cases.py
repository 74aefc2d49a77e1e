"""A network and settings small enough that an image run takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsmap.images import ImageRun, ImageSettings


class TinyNet(nn.Module):
    """Convolution, BatchNorm, ReLU, pooling, a linear layer."""

    def __init__(self, classes: int = 10, channels: int = 1, norm: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 3, 5, 4, bias=not norm)
        self.bn = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.fc = nn.Linear(3 * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn(self.conv(x)))
        return self.fc(nn.functional.adaptive_avg_pool2d(h, 2).flatten(1))


def bare(classes: int = 10, channels: int = 1) -> TinyNet:
    """Without BatchNorm: shares of a batch do not see each other."""
    return TinyNet(classes, channels, norm=False)


def noisy(classes: int = 10) -> nn.Module:
    """With a random layer."""
    return nn.Sequential(TinyNet(classes), nn.Dropout(0.1))


class Wrapped(TinyNet):
    """Its output is not a tensor."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x)}


SIZE = {"limit": 64, "valid": 32, "epochs": 2, "batch_size": 16, "num_points": 8}
DATA = {"data": "fmnist", "generated": True, "px": "kmnist"}
TINY = ImageSettings(model="image_cases:TinyNet", reg_strength=1e-3, **DATA, **SIZE)


def interrupt(run: ImageRun) -> None:
    raise KeyboardInterrupt


class KillAt:
    """A hook that ends a run as a kill would, between two steps, or in another way."""

    def __init__(self, step: int, end: Callable[[ImageRun], None] = interrupt) -> None:
        self.step, self.end = step, end

    def on_epoch(self, run: ImageRun) -> None: ...

    def on_step(self, run: ImageRun) -> None:
        if run.step == self.step:
            self.end(run)


def trained(settings: ImageSettings = TINY, **options: object) -> ImageRun:
    run = ImageRun(settings, **options)
    run.train(progress=False)
    return run
