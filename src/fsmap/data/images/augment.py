"""Crop, flip and normalize a batch of images at once: random numbers in, images out.

Draws are tensors of their own (:class:`Shifts`), so that a batch is a function of them: they can be
made for a whole epoch ahead, on the CPU, and a captured CUDA graph can read them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PADDING = 4  # of the paper's random crops


class Normalization(NamedTuple):
    """(x/255 − mean)/std, channel by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normalize bytes."""
        mean, std = (
            torch.stack([torch.full((1, 1), v, dtype=dtype, device=images.device) for v in values])
            for values in self  # made on the device: a captured graph may copy nothing to it
        )
        return (images.to(dtype) / 255 - mean) / std


class Shifts(NamedTuple):
    """What a random crop and flip does to each image."""

    down: Tensor  # int64 [...]  0 .. 2·padding
    right: Tensor  # int64 [...]
    flip: Tensor  # bool [...]

    def to(self, device: torch.device) -> Shifts:
        """The same draws elsewhere."""
        return Shifts(*(t.to(device) for t in self))


class Augmentation(NamedTuple):
    """Random crop after padding with zeros, and a flip with probability one half."""

    padding: int = PADDING
    flips: bool = True

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Shifts:
        """Random numbers for images of any number."""
        device, top = generator.device, 2 * self.padding + 1
        down = torch.randint(top, shape, generator=generator, device=device)
        right = torch.randint(top, shape, generator=generator, device=device)
        flip = torch.randint(2, shape, generator=generator, device=device).bool()
        return Shifts(down, right, flip if self.flips else torch.zeros_like(flip))

    def apply(self, images: Tensor, shifts: Shifts) -> Tensor:
        """Crop and flip."""
        height, width = images.shape[-2:]
        p = self.padding
        padded = torch.nn.functional.pad(images, (p, p, p, p))
        rows = torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device)
        mirrored = torch.where(shifts.flip[:, None], columns.flip(0), columns)  # [N, W]
        i = (shifts.down[:, None] + rows)[:, None, :, None]  # [N, 1, H, 1]
        j = (shifts.right[:, None] + mirrored)[:, None, None, :]  # [N, 1, 1, W]
        n = torch.arange(len(images), device=images.device)[:, None, None, None]
        c = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
        return padded[n, c, i, j]

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Crop and flip at random."""
        shifts = self.draw((len(images),), generator)
        return self.apply(images, shifts.to(images.device))
