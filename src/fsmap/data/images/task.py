"""An image task: training, held-out and test images with the paper's normalization, and p_X."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.data.catalogue import Folder, find
from fsmap.data.images.evaluation import (
    NOISE_IMAGES,
    WHITE_NOISE,
    Augmentation,
    EvaluationSet,
    Normalization,
    Source,
    parse,
    white_noise,
)
from fsmap.data.images.read import (
    READERS,
    Images,
    fingerprint,
    generate,
    is_folder,
    read_folder,
    read_images,
)
from fsmap.errors import InputError

KNOWN = ("train", WHITE_NOISE, *READERS)
"""What p_X may name."""


class ImageSet(NamedTuple):
    """What the protocol says about a training set (section D of the experiments)."""

    shape: tuple[int, int, int]
    normalize: Normalization
    augment: bool
    valid: int  # images held out by the protocol
    classes: int = 10
    ordered: bool = False  # hold out the first training images, whatever split_seed is
    note: str = ""  # for who trains on it


SETS = {
    "fashion-mnist": ImageSet((1, 28, 28), Normalization((0.2861,), (0.3530,)), False, 10_000),
    "mnist": ImageSet((1, 28, 28), Normalization((0.1307,), (0.3081,)), False, 10_000),
    "cifar10": ImageSet(
        (3, 32, 32),
        Normalization((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        True,
        5_000,
    ),
    "cifar100": ImageSet(
        (3, 32, 32),
        Normalization((0.5074, 0.4867, 0.4411), (0.2675, 0.2566, 0.2763)),
        True,
        5_000,
        classes=100,
        ordered=True,
        note="the official split of CIFAR-100 is lost: the first 10,000 images of the files are "
        "test, the next held out, the rest training. Do not compare test accuracy with published "
        "numbers",
    ),
}
"""Sets that can be trained on."""

GENERATED_TRAIN, GENERATED_TEST = 2_000, 1_000


class ImageTask(NamedTuple):
    """Everything a run reads; bytes, wherever ``to`` put them."""

    name: str
    train: Images
    valid: Images  # may hold no image
    test: Images
    normalize: Normalization
    augment: Augmentation | None
    classes: int
    px: EvaluationSet | None
    note: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """``(C, H, W)``."""
        return tuple(self.train.x.shape[1:])

    def to(self, device: torch.device | str) -> ImageTask:
        """The same data on a device."""
        train, valid, test = (part.to(device) for part in (self.train, self.valid, self.test))
        px = None if self.px is None else self.px.to(device)
        return self._replace(train=train, valid=valid, test=test, px=px)

    def fingerprint(self) -> dict[str, str]:
        """Checksums of what is trained and evaluated on, for the checkpoint."""
        found = {"train": fingerprint(self.train), "valid": fingerprint(self.valid)}
        for source in self.px.sources if self.px else ():
            images = source.images[:64] if source.name == WHITE_NOISE else source.images
            bytes_ = images if images.dtype == torch.uint8 else (images * 16).to(torch.int8)
            found[f"px {source.name}"] = fingerprint(Images(bytes_, torch.zeros(0)))
        return found


def load_task(
    data: str,
    *,
    px: str | None = None,
    valid: int | None = None,
    split_seed: int = 0,
    label_noise: float = 0.0,
    label_noise_seed: int = 0,
    limit: int | None = None,
    generated: bool = False,
    augment: bool | None = None,
    data_dir: Folder = None,
) -> ImageTask:
    """Read a training set and the evaluation set that goes with it, to the CPU.

    Args:
        data: One of ``SETS``, or a folder (:mod:`fsmap.data.images.read`).
        px: p_X, see :mod:`fsmap.data.images.evaluation`; None: none is needed.
        valid: Images of the training set held out; None is the protocol's number. They are chosen
            by ``split_seed`` alone, of CIFAR-100 in file order.
        split_seed: Which images are held out; the same for runs of different seeds.
        label_noise: Fraction of *training* labels replaced by uniformly random ones.
        label_noise_seed: Seed of that; held-out labels stay clean.
        limit: Use only so many training images (and as many test images), for short runs.
        generated: Use generated images of the same shape instead of reading anything.
        augment: Crop and flip; None: as the protocol has it.
        data_dir: A folder to look into first.
    """
    facts, name = facts_of(data), data if is_folder(data) else find(data).name
    if is_folder(data):
        train, test = read_folder(data)[:2]
    elif generated:
        train = generate(facts.shape, GENERATED_TRAIN, seed=0)
        test = generate(facts.shape, GENERATED_TEST, seed=1)
    else:
        train, test = (read_images(name, split, data_dir) for split in ("train", "test"))
    number = _valid(valid, facts, len(train.x), limit)
    train, held_out = _held_out(train, number, None if facts.ordered else split_seed, limit)
    train = train._replace(y=noisy_labels(train.y, label_noise, facts.classes, label_noise_seed))
    flips = facts.augment if augment is None else augment
    evaluation = None
    if px is not None:
        found = [
            (_source(one, train.x, facts.shape, generated, limit, data_dir), weight)
            for one, weight in parse(px)
        ]
        sources = tuple(s._replace(augmented=flips and s.name != WHITE_NOISE) for s, _ in found)
        evaluation = EvaluationSet(sources, tuple(w for _, w in found), facts.normalize)
    return ImageTask(
        name,
        train,
        held_out,
        test.take(slice(limit)),
        facts.normalize,
        Augmentation() if flips else None,
        facts.classes,
        evaluation,
        facts.note,
    )


def noisy_labels(y: Tensor, fraction: float, classes: int, seed: int) -> Tensor:
    """Replace round(fraction·N) labels by uniformly random ones, some of them right by chance.

    For one seed a larger fraction keeps the noise of a smaller one.
    """
    if not 0 <= fraction <= 1:
        message = f"label_noise is a fraction between 0 and 1, got {fraction:g}"
        raise InputError(message)
    if fraction == 0:
        return y
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    drawn = torch.randint(classes, (len(y),), generator=generator)
    rows = order[: round(fraction * len(y))]
    noisy = y.clone()
    noisy[rows] = drawn[rows].to(y.dtype)
    return noisy


def facts_of(data: str) -> ImageSet:
    """What the protocol says about a training set."""
    if is_folder(data):
        folder = read_folder(data)
        shape: Any = tuple(folder.train.x.shape[1:])
        return ImageSet(shape, folder.normalize, False, len(folder.train.x), len(folder.classes))
    name = find(data, SETS).name
    if name not in SETS:
        message = f"cannot train on {data!r}; image sets with a protocol: {', '.join(SETS)}"
        raise InputError(message)
    return SETS[name]


def _valid(valid: int | None, facts: ImageSet, available: int, limit: int | None) -> int:
    """How many images are held out."""
    if valid is None:  # a short run keeps the protocol's proportion
        valid = facts.valid if limit is None and available > facts.valid else available // 6
        valid = valid if limit is None else min(valid, max(1, limit // 5))
    if not 0 <= valid < available:
        message = (
            f"valid must lie in 0..{available - 1}, the number of training images, got {valid}"
        )
        raise InputError(message)
    return valid


def _held_out(
    train: Images, valid: int, seed: int | None, limit: int | None
) -> tuple[Images, Images]:
    """Training and held-out images: a random part, without a seed the first ones."""
    order = torch.arange(len(train.x))
    if seed is not None:
        order = torch.randperm(len(train.x), generator=torch.Generator().manual_seed(seed))
    rest = order[valid:].sort().values
    if limit is not None and limit < 1:
        message = f"limit must be at least 1, got {limit}"
        raise InputError(message)
    return train.take(rest[:limit]), train.take(order[:valid].sort().values)


def _source(
    name: str,
    train: Tensor,
    shape: tuple[int, int, int],
    generated: bool,
    limit: int | None,
    data_dir: Folder,
) -> Source:
    """One component of p_X."""
    if name == WHITE_NOISE:
        return Source(name, white_noise(shape, min(NOISE_IMAGES, limit or NOISE_IMAGES)))
    if name == "train":
        return Source(name, train)
    known = find(name, KNOWN).name
    if generated:
        return Source(name, generate(shape, GENERATED_TEST, seed=2).x)
    split = READERS[known][0][0] if known in READERS else "train"
    images = read_images(name, split, data_dir).x
    if tuple(images.shape[1:]) != shape:
        message = (
            f"p_X {name!r} has images of shape {tuple(images.shape[1:])}, the training images have "
            f"{shape}. Choose a set of the same shape, or white-noise."
        )
        raise InputError(message)
    return Source(name, images)
