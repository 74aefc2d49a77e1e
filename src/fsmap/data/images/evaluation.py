"""Batches of images as functions of random numbers: crops, flips, and the p_X of image training.

p_X is ``train`` (the training images), the name of another set (``kmnist``, ``cifar100``, …),
``white-noise`` (10,000 fixed images N(0, I) in normalized space), or a mixture such as
``kmnist+white-noise`` or ``0.8*train+0.2*white-noise``. Draws are tensors of their own
(:class:`Shifts`, :class:`Picks`): they are made on the CPU for a whole epoch ahead, and a captured
CUDA graph can read them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.errors import InputError

PADDING = 4  # of the paper's random crops
WHITE_NOISE = "white-noise"
NOISE_IMAGES = 10_000
NOISE_SEED = 0  # the images are fixed: the same in every run


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


class Augmentation(NamedTuple):
    """Random crop after padding with zeros, and a flip with probability one half."""

    padding: int = PADDING

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Shifts:
        """Random numbers for images of any number."""
        down, right, flip = (
            torch.randint(top, shape, generator=generator, device=generator.device)
            for top in (2 * self.padding + 1, 2 * self.padding + 1, 2)
        )
        return Shifts(down, right, flip.bool())

    def apply(self, images: Tensor, shifts: Shifts) -> Tensor:
        """Crop and flip."""
        height, width = images.shape[-2:]
        padded = torch.nn.functional.pad(images, (self.padding,) * 4)
        rows = torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device)
        mirrored = torch.where(shifts.flip[:, None], columns.flip(0), columns)  # [N, W]
        i = (shifts.down[:, None] + rows)[:, None, :, None]  # [N, 1, H, 1]
        j = (shifts.right[:, None] + mirrored)[:, None, None, :]  # [N, 1, 1, W]
        n = torch.arange(len(images), device=images.device)[:, None, None, None]
        c = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
        return padded[n, c, i, j]


class Source(NamedTuple):
    """One component."""

    name: str
    images: Tensor  # [D, C, H, W]: uint8, or float where already in normalized space
    augmented: bool = False


class Picks(NamedTuple):
    """Which images are drawn, and how each is cropped."""

    component: Tensor  # int64 [...]
    row: Tensor  # int64 [...]
    shifts: Shifts


class EvaluationSet(NamedTuple):
    """A mixture of tables of images; a draw is a set of indices."""

    sources: tuple[Source, ...]
    weights: tuple[float, ...]
    normalize: Normalization  # of the *training* set: other sets go through it too

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Picks:
        """Choose images, independently and with replacement."""
        size = torch.Size(shape).numel()
        weights = torch.tensor(self.weights, dtype=torch.float64)
        component = torch.multinomial(weights, size, replacement=True, generator=generator)
        sizes = torch.tensor([len(s.images) for s in self.sources])
        share = torch.rand(size, generator=generator, dtype=torch.float64)
        row = (share * sizes[component]).long()
        shifts = Augmentation().draw(shape, generator)
        return Picks(component.reshape(shape), row.reshape(shape), shifts)

    def take(self, picks: Picks, dtype: torch.dtype = torch.float32) -> Tensor:
        """The images of a draw, normalized."""
        x: Tensor | None = None
        for number, source in enumerate(self.sources):
            # Rows of other components may lie outside this table; what they give is not used.
            images = source.images[picks.row.clamp(max=len(source.images) - 1)]
            if source.augmented:
                images = Augmentation().apply(images, picks.shifts)
            if images.dtype == torch.uint8:
                images = self.normalize(images, dtype)
            chosen = (picks.component == number)[:, None, None, None]
            x = images.to(dtype) if x is None else torch.where(chosen, images.to(dtype), x)
        assert x is not None
        return x

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw ``n`` images: what makes this an evaluation distribution for ``fsmap.LMAP``."""
        component, row, shifts = self.draw((n,), generator)
        device = self.sources[0].images.device
        moved = Shifts(*(t.to(device) for t in shifts))
        picks = Picks(component.to(device), row.to(device), moved)
        return self.take(picks, torch.get_default_dtype())

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> EvaluationSet:
        """The same set on another device (bytes stay bytes)."""
        moved = tuple(s._replace(images=s.images.to(device)) for s in self.sources)
        return self._replace(sources=moved)


def parse(px: str) -> list[tuple[str, float]]:
    """Components and weights of a description.

    Examples:
        >>> parse("0.8*train+0.2*white-noise")
        [('train', 0.8), ('white-noise', 0.2)]
    """
    found: list[tuple[str, float]] = []
    for part in px.split("+"):
        weight, star, name = part.rpartition("*")
        try:
            number = float(weight) if star else 1.0
        except ValueError:
            number = -1.0
        if not name.strip() or not 0 < number < float("inf"):
            message = (
                f"p_X {px!r}: {part.strip()!r} is no component. Write a name, or names joined by "
                "+, each with an optional positive weight and *: 0.8*train+0.2*white-noise"
            )
            raise InputError(message)
        found.append((name.strip(), number))
    return found


def white_noise(shape: tuple[int, ...], number: int = NOISE_IMAGES) -> Tensor:
    """Fixed images N(0, I), float32 ``[number, *shape]``."""
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return torch.randn((number, *shape), generator=generator, dtype=torch.float32)
