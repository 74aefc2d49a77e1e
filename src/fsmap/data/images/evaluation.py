"""Evaluation sets: the p_X of the image experiments, as finite tables of images.

``train`` (the training images), the name of another set (``kmnist``, ``cifar100``, …),
``white-noise`` (10,000 fixed images N(0, I) in normalized space), or a mixture such as
``kmnist+white-noise`` or ``0.8*train+0.2*white-noise``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.data.images.augment import Augmentation, Normalization, Shifts
from fsmap.errors import InputError

WHITE_NOISE = "white-noise"
NOISE_IMAGES = 10_000
NOISE_SEED = 0  # the images are fixed: the same in every run


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
    """A mixture of tables of images; a draw is a set of indices, made ahead for an epoch."""

    sources: tuple[Source, ...]
    weights: tuple[float, ...]
    normalize: Normalization
    augment: Augmentation = Augmentation()

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Picks:
        """Choose images, independently and with replacement."""
        size = torch.Size(shape).numel()
        weights = torch.tensor(self.weights, dtype=torch.float64)
        component = torch.multinomial(weights, size, replacement=True, generator=generator)
        sizes = torch.tensor([len(s.images) for s in self.sources])
        share = torch.rand(size, generator=generator, dtype=torch.float64)
        row = (share * sizes[component]).long()
        shifts = self.augment.draw(shape, generator)
        return Picks(component.reshape(shape), row.reshape(shape), shifts)

    def take(self, picks: Picks, dtype: torch.dtype = torch.float32) -> Tensor:
        """The images of a draw, normalized."""
        x: Tensor | None = None
        for number, source in enumerate(self.sources):
            # Rows of other components may lie outside this table; what they give is not used.
            images = source.images[picks.row.clamp(max=len(source.images) - 1)]
            if source.augmented:
                images = self.augment.apply(images, picks.shifts)
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
        picks = Picks(component.to(device), row.to(device), shifts.to(device))
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


def evaluation_set(
    px: str,
    tables: dict[str, Tensor],
    normalize: Normalization,
    *,
    shape: tuple[int, ...],
    augmented: bool,
    noise_images: int = NOISE_IMAGES,
) -> EvaluationSet:
    """Build p_X from its description.

    Args:
        px: See :func:`parse`.
        tables: uint8 images of every component but the white noise.
        normalize: Of the *training* set: other sets go through it too.
        shape: ``(C, H, W)``.
        augmented: Whether images are cropped and flipped as training images are.
        noise_images: How many images of white noise there are.

    Returns:
        The set.

    Raises:
        InputError: If a set's images have another shape.
    """
    sources, weights = [], []
    for name, weight in parse(px):
        if name == WHITE_NOISE:
            source = Source(name, white_noise(shape, noise_images))
        else:
            source = Source(name, tables[name], augmented)
        if tuple(source.images.shape[1:]) != tuple(shape):
            message = (
                f"p_X {name!r} has images of shape {tuple(source.images.shape[1:])}, the training "
                f"images have {tuple(shape)}. Choose a set of the same shape, or white-noise."
            )
            raise InputError(message)
        sources.append(source)
        weights.append(weight)
    return EvaluationSet(tuple(sources), tuple(weights), normalize)
