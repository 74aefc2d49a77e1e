"""What is measured: networks, numbers of points, and the kinds of work."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

JITTER = 1e-2
PROBES = 16


class Cell(NamedTuple):
    """A network, its points, and how often it is evaluated there."""

    network: str
    module: nn.Module
    x: Tensor  # [S, ...]
    K: int

    @property
    def rows(self) -> int:
        """S·K."""
        return len(self.x) * self.K

    @property
    def P(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.module.parameters())


def mlp(width: int, K: int) -> nn.Module:
    """Three linear layers; width decides P."""
    return nn.Sequential(
        *(nn.Linear(16, width), nn.Tanh()),
        *(nn.Linear(width, width), nn.Tanh()),
        nn.Linear(width, K),
    )


def cnn(K: int) -> nn.Module:
    """Two convolutions and a linear layer on images of 12×12."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.GELU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(8, 16, 3), nn.GELU(), nn.Flatten()),
        nn.Linear(144, K),
    )


NETWORKS = {  # name: (module, shape of a point, K)
    "mlp-1e3": (lambda: mlp(23, 4), (16,), 4),
    "mlp-1e5": (lambda: mlp(306, 4), (16,), 4),
    "mlp-1e6": (lambda: mlp(990, 4), (16,), 4),
    "cnn": (lambda: cnn(4), (1, 12, 12), 4),
}
ROWS = (64, 256, 1024)
QUICK_ROWS = (64, 256)


def cell(network: str, rows: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Cell:
    """Build a cell with seeded parameters and points."""
    make, shape, K = NETWORKS[network]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make().to(device, dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(math.ceil(rows / K), *shape, generator=generator)
    return Cell(network, module, x.to(device, dtype), K)
