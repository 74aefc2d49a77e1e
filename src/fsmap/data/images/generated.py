"""Images that are drawn, for tests and short runs where no data set is at hand."""

from __future__ import annotations

import math

import torch

from fsmap.data.images.read import Images

CLASSES = 10
NOISE = 40.0  # grey levels; makes the task learnable, not trivial


def generate(shape: tuple[int, int, int], number: int, *, seed: int) -> Images:
    """Stripes: the class is their direction, phase and contrast vary a little, noise is added.

    Args:
        shape: ``(C, H, W)``.
        number: How many.
        seed: Of everything random.

    Returns:
        Images and labels of ten classes.
    """
    channels, height, width = shape
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (number,), generator=generator)
    angle = (y.float() * math.pi / CLASSES)[:, None, None]  # [N, 1, 1]
    phase = math.pi / 2 * torch.rand(number, 1, 1, generator=generator, dtype=torch.float32)
    rows = torch.linspace(-1, 1, height, dtype=torch.float32)[:, None]
    columns = torch.linspace(-1, 1, width, dtype=torch.float32)
    wave = torch.sin(9 * (angle.cos() * columns + angle.sin() * rows) + phase)  # [N, H, W]
    bright = torch.rand(number, channels, 1, 1, generator=generator, dtype=torch.float32)
    grey = 128 + 90 * (0.5 + bright) * wave[:, None]
    grey = grey + NOISE * torch.randn(number, *shape, generator=generator, dtype=torch.float32)
    return Images(grey.clamp(0, 255).to(torch.uint8), y)
