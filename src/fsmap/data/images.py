"""Images as uint8 tensors: reading, splitting, label noise, augmentation, and p_X of an image task.

A set is a name of the catalogue or a folder with one sub-folder per class: ``folder/class/*.png``
(a sixth of each class becomes the test set), or ``folder/train/class/*.png`` with
``folder/test/class/*.png``. Images that all have one size keep it; others are scaled and
cropped to a square of ``?size=N`` pixels: ``photos?size=64``.

p_X is ``train`` (the training images), another set (``kmnist``, ``cifar100``, a folder, …),
``white-noise`` (10,000 fixed images N(0, I) in normalized space), or a mixture such as
``kmnist+white-noise`` or ``0.8*train+0.2*white-noise``. Draws (:class:`Shifts`, :class:`Picks`) are
tensors of their own, made ahead: a captured CUDA graph can read them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import shlex
import struct
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fsmap.data.catalogue import Folder, catalogue, find, locate
from fsmap.errors import InputError, MissingDataError, require

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}  # no classes
GREY = ("1", "L", "LA")  # modes of Pillow
TEST_SHARE = 6  # one image in six, in a folder without a test folder
CIFAR100_TEST = 10_000
CLASSES = 10  # of generated images
NOISE = 40.0  # grey levels; makes the task learnable, not trivial
GENERATED_TRAIN, GENERATED_TEST = 2_000, 1_000
PADDING = 4  # of the paper's random crops
WHITE_NOISE = "white-noise"
NOISE_IMAGES = 10_000


class Images(NamedTuple):
    """Labelled images."""

    x: Tensor  # uint8 [N, C, H, W]
    y: Tensor  # int64 [N]

    def take(self, rows: Tensor | slice) -> Images:
        """Some of them."""
        return Images(self.x[rows], self.y[rows])


def read_images(name: str, split: str = "train", data_dir: Folder = None) -> Images:
    """Read an image set of the catalogue, one of ``READERS``.

    The official split of CIFAR-100 is lost: in file order its first 10,000 images are ``test`` and
    the others ``train``, so that test accuracy cannot be compared with published ones.
    """
    entry = find(name, READERS)
    if entry.name not in READERS:
        raise InputError(f"{entry.name!r} is not an image set; image sets: {', '.join(READERS)}")
    allowed, reader = READERS[entry.name]
    if split not in allowed:
        raise InputError(f"{entry.name} has the splits {', '.join(allowed)}, got {split!r}")
    return reader(locate(entry.name, data_dir), split)


def read_others(
    name: str,
    shape: tuple[int, ...],
    split: str | None = None,
    data_dir: Folder = None,
    classes: tuple[str, ...] | None = None,
) -> Images:
    """Read a set of this ``shape``: a split (the first, if missing), or a folder of ``classes``."""
    if is_folder(name):
        found = read_folder(name, least=1)
        if classes not in (None, found.classes):
            raise InputError(f"{name!r} has other classes: {', '.join(found.classes)}")
        images = Images(*map(torch.cat, zip(found.train, found.test, strict=True)))
    else:
        splits = READERS.get(find(name, KNOWN).name, (("train",),))[0]
        images = read_images(name, split if split in splits else splits[0], data_dir)
    if tuple(images.x.shape[1:]) != shape:
        raise InputError(
            f"{name!r} has images of shape {tuple(images.x.shape[1:])}, the training images have "
            f"{shape}. Choose a set of the same shape, or of a folder another ?size=N."
        )
    return images


Files = dict[str, Path]


def _idx(files: Files, split: str) -> Images:
    start = "train" if split == "train" else "t10k"  # sorted: images, labels
    x, y = (read_idx(files[name]) for name in sorted(files) if name.startswith(start))
    return Images(x[:, None], y.long())


def _cifar10(files: Files, split: str) -> Images:
    start = "data_batch" if split == "train" else "test_batch"
    batches = [files[name] for name in sorted(files) if name.startswith(start)]
    pixels = [_picture(batch).reshape(-1, 32, 32, 3) for batch in batches]
    labels = json.loads(files[f"{split}_lables.json"].read_text("utf-8"))  # the package's spelling
    return Images(_planar(np.concatenate(pixels)), torch.tensor(labels))


def _cifar100(files: Files, split: str) -> Images:
    mosaics = [path for name, path in files.items() if name.endswith(".webp")]
    pixels = np.concatenate([tiles(_picture(path)) for path in mosaics])
    labels = np.frombuffer(files["labels_fine.bin"].read_bytes(), dtype=np.uint8)
    whole = Images(_planar(pixels), torch.from_numpy(labels.astype(np.int64)))
    parts = {"test": slice(CIFAR100_TEST), "train": slice(CIFAR100_TEST, None)}
    return whole.take(parts.get(split, slice(None)))


def _cifar10_1(files: Files, split: str) -> Images:
    x, y = (np.load(files[f"cifar10.1_v6_{k}.npy"], allow_pickle=False) for k in ("data", "labels"))
    return Images(_planar(x), torch.from_numpy(y.astype(np.int64)))


def tiles(mosaic: np.ndarray) -> np.ndarray:
    """The 32×32 images of a mosaic, row by row."""
    rows, columns = mosaic.shape[0] // 32, mosaic.shape[1] // 32
    cut = mosaic.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 1, 3, 4)
    return cut.reshape(rows * columns, 32, 32, 3)


def _picture(path: Path) -> np.ndarray:
    image: Any = require("PIL.Image", extra="data")
    with image.open(path) as opened:
        return np.asarray(opened.convert("RGB"))


def _planar(pixels: np.ndarray) -> Tensor:
    """``[N, H, W, C]`` to ``[N, C, H, W]``."""
    return torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).contiguous()


def read_idx(path: Path) -> Tensor:
    """An array of bytes from an IDX file, compressed or not."""
    raw = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
    start = 4 + 4 * raw[3]  # two zeros, the type (bytes), the number of dimensions; then the shape
    shape = struct.unpack(f">{raw[3]}I", raw[4:start])
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).reshape(shape)


# Splits and reader; the first split is what p_X draws from.
READERS: dict[str, tuple[tuple[str, ...], Callable[[Files, str], Images]]] = {
    "fashion-mnist": (("train", "test"), _idx),
    "mnist": (("train", "test"), _idx),
    "kmnist": (("test",), _idx),
    "kmnist-train": (("train",), _idx),
    "cifar10": (("train", "test"), _cifar10),
    "cifar100": (("all", "train", "test"), _cifar100),
    "cifar10.1": (("test",), _cifar10_1),
}


def generate(shape: tuple[int, ...], number: int, *, seed: int) -> Images:
    """Stripes: the class is their direction, phase and contrast vary a little, noise is added."""
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


class ImageFolder(NamedTuple):
    """The images of a folder."""

    train: Images
    test: Images
    classes: tuple[str, ...]
    normalize: Normalization


def is_folder(data: str) -> bool:
    """Whether a data set is named by a path; a name of the catalogue wins over a folder."""
    path = data.partition("?")[0]
    if not path:
        raise InputError(f"{data!r} names no data. Give a set or a folder; '.' is the current one.")
    return "/" in path or "\\" in path or (not _shortest(path) and Path(path).is_dir())


def one_spelling(data: str) -> str:
    """The shortest spelling of a set's name; a folder without ``./`` and a ``/`` at the end."""
    path, mark, option = data.partition("?")
    short = str(Path(path))
    if is_folder(data):
        return (short if is_folder(short) else f"./{short}") + mark + option
    return _shortest(data) or data


def _shortest(name: str) -> str:
    """The shortest spelling of a name in the catalogue, empty for another name."""
    spelled = ((one.name, *one.aliases) for one in catalogue().values())
    return next((min(names, key=len) for names in spelled if name.lower() in names), "")


@lru_cache(maxsize=2)
def read_folder(data: str, least: int = 2) -> ImageFolder:
    """Read a folder of images; one channel if no image has a colour."""
    text, _, query = data.partition("?")
    path, size = Path(text), query.removeprefix("size=")
    if not path.is_dir():
        raise MissingDataError(
            f"there is no folder {path}: --data takes a name (fmnist, cifar10 …) or a folder"
        )
    if query and (size == query or not size.isdigit() or not 4 <= int(size) <= 1024):
        raise InputError(f"the option of a folder is ?size=N with N from 4 to 1024, got {query!r}")
    parts = [part for name in ("train", "test") if (part := path / name).is_dir()]
    parts = parts if len(parts) == 2 else [path]
    listed = [_files_and_classes(part) for part in parts]
    classes = tuple(sorted({name for one in listed for _, name in one}))
    if len(classes) < least:
        raise MissingDataError(
            f"{path} has images of {len(classes)} classes; at least {least} needed, a sub-folder "
            f"each ({', '.join(ENDINGS)})"
        )
    if {name.lower() for name in classes} <= SPLITS:
        raise InputError(
            f"{path} has the sub-folders {' and '.join(classes)}, which are no classes. Name them "
            "train and test."
        )
    pixels = _pixels([file for one in listed for file, _ in one], int(size or 0), text, least > 1)
    labels = torch.tensor([classes.index(name) for one in listed for _, name in one])
    if len(parts) == 2:
        n = len(listed[0])
        train, test = torch.arange(n), n + mixed(labels[n:], seed=0)
    else:
        test, train = mixed(labels, seed=0).tensor_split([max(1, len(labels) // TEST_SHARE)])
    some = pixels[train][:: max(1, len(train) // 2_000)].float() / 255
    mean, std = some.mean((0, 2, 3)), some.std((0, 2, 3)).clamp_min(1e-3)
    normalize = Normalization(tuple(mean.tolist()), tuple(std.tolist()))
    images = Images(pixels, labels)
    return ImageFolder(images.take(train), images.take(test), classes, normalize)


def mixed(y: Tensor, seed: int) -> Tensor:
    """Rows in random order, so that each class has about its share of the first N, for any N."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    order, counts = order[y[order].sort(stable=True).indices], y.bincount()  # class by class
    rank = torch.arange(len(y)) - (counts.cumsum(0) - counts)[y[order]]
    jitter = torch.rand(len(y), generator=generator, dtype=torch.float64)
    return order[((rank + 0.25 + jitter / 2) / counts[y[order]]).argsort(stable=True)]


def _files_and_classes(folder: Path) -> list[tuple[Path, str]]:
    """The images in sub-folders, in order, and the name of the sub-folder."""
    folders = (folder, *folder.glob("*/**/"))  # */: links too
    files = sorted(f for f in folder.glob("*/**/*") if f.suffix.lower() in ENDINGS)
    named = {f: f.relative_to(folder).parts for f in (*folders, *files)}
    shown = {f: place for f, place in named.items() if not any(name[0] == "." for name in place)}
    for one in filter(shown.__contains__, folders):
        if not os.access(one, os.R_OK | os.X_OK):  # glob leaves it out without an error
            raise InputError(f"{one} cannot be read: permission denied")
    return [(f, shown[f][0]) for f in files if f in shown]


def _pixels(files: list[Path], size: int, folder: str, training: bool) -> Tensor:
    """The images, scaled and cropped to a square of ``size`` pixels unless that is 0."""
    image: Any = require("PIL.Image", extra="data")
    ops: Any = require("PIL.ImageOps", extra="data")
    found = []
    for file in files:
        try:
            with image.open(file) as opened:
                picture = ops.exif_transpose(opened)
        except (OSError, image.DecompressionBombError) as error:
            raise InputError(f"{file} cannot be read as an image: {error}") from error
        if picture.mode.startswith("I;16"):  # 16 bits: keep the upper 8, as for colours
            picture = image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
        if picture.mode in ("I", "F"):
            raise InputError(f"{file} has 32 bits a pixel. Convert it to 8 or 16 bits.")
        picture = picture.convert("L" if picture.mode in GREY else "RGB")
        found.append(np.asarray(ops.fit(picture, (size, size)) if size else picture))
    sizes = sorted({pixels.shape[:2] for pixels in found})
    if len(sizes) > 1:
        shown = ", ".join(f"{w}×{h}" for h, w in sizes[:3])
        short = int(np.median([min(pixels.shape[:2]) for pixels in found])) // 8 * 8
        named = shlex.quote(f"{folder}?size={min(max(short, 8), 64)}")  # ResNet-18 is slow above
        raise InputError(
            f"the images have {len(sizes)} different sizes ({shown} …). To scale and crop them to "
            f"squares, write {'--data ' * training}{named}"
        )
    grey = all(pixels.ndim == 2 for pixels in found)
    planes = [p[:, :, None].repeat(1 if grey else 3, 2) if p.ndim == 2 else p for p in found]
    return _planar(np.stack(planes))


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
    """The random crop and flip of each image."""

    down: Tensor  # int64 [...]  0 .. 2·padding
    right: Tensor  # int64 [...]
    flip: Tensor  # bool [...]


class Augmentation(NamedTuple):
    """Random crop after padding with zeros, and a flip with probability one half."""

    padding: int = PADDING

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Shifts:
        """Draw shifts of the given ``shape``."""
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
    """One component of an :class:`EvaluationSet`."""

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
            # Rows of other components may lie outside this table; their images are not used.
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
        """Draw ``n`` images: ``fsmap.LMAP`` takes the set as p_X."""
        device, picks = self.sources[0].images.device, self.draw((n,), generator)
        picks = tree_map_only(Tensor, lambda t: t.to(device), picks)
        return self.take(picks, torch.get_default_dtype())

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> EvaluationSet:
        """The same set on another device (bytes stay bytes)."""
        return tree_map_only(Tensor, lambda t: t.to(device), self)  # type: ignore[no-any-return]


COMPONENT = re.compile(r"(?:(\d*\.?\d+)\s*\*\s*)?([^*\s]+)")  # an optional weight, a name


def parse(px: str) -> list[tuple[str, float]]:
    """Components and weights of a description.

    Examples:
        >>> parse("0.8*train+0.2*white-noise")
        [('train', 0.8), ('white-noise', 0.2)]
    """
    found = []
    for part in px.split("+"):
        matched = COMPONENT.fullmatch(part.strip())
        if matched is None or (weight := float(matched[1] or 1)) == 0:
            raise InputError(
                f"p_X {px!r}: {part.strip()!r} is not a component. Write a name, or names joined "
                "by +, each with an optional positive weight and *: 0.8*train+0.2*white-noise"
            )
        found.append((matched[2], weight))
    return found


def white_noise(shape: tuple[int, ...], number: int = NOISE_IMAGES) -> Tensor:
    """Images N(0, I), float32 ``[number, *shape]``; the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((number, *shape), generator=generator, dtype=torch.float32)


KNOWN = ("train", WHITE_NOISE, *READERS)  # names of p_X


class ImageSet(NamedTuple):
    """The protocol of a training set."""

    shape: tuple[int, int, int]
    normalize: Normalization
    augment: bool
    valid: int  # images held out by the protocol
    foreign: str = ""  # the default out-of-distribution set
    classes: int = 10
    ordered: bool = False  # hold out the first training images, whatever split_seed is
    names: tuple[str, ...] = ()  # of the classes of a folder


FASHION, MNIST = Normalization((0.2861,), (0.3530,)), Normalization((0.1307,), (0.3081,))
CIFAR10 = Normalization((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
CIFAR100 = Normalization((0.5074, 0.4867, 0.4411), (0.2675, 0.2566, 0.2763))

SETS = {  # to train on; the official split of CIFAR-100 is lost, see read_images
    "fashion-mnist": ImageSet((1, 28, 28), FASHION, False, 10_000, "kmnist"),
    "mnist": ImageSet((1, 28, 28), MNIST, False, 10_000, "fashion-mnist"),
    "cifar10": ImageSet((3, 32, 32), CIFAR10, True, 5_000, "cifar100"),
    "cifar100": ImageSet((3, 32, 32), CIFAR100, True, 5_000, "cifar10", classes=100, ordered=True),
}


class ImageTask(NamedTuple):
    """The data of a run, as bytes on any device."""

    name: str
    train: Images
    valid: Images  # may hold no image
    test: Images
    normalize: Normalization
    augment: Augmentation | None
    classes: int
    px: EvaluationSet | None
    names: tuple[str, ...] = ()  # of the classes of a folder

    @property
    def shape(self) -> tuple[int, ...]:
        """``(C, H, W)``."""
        return tuple(self.train.x.shape[1:])

    def to(self, device: torch.device | str) -> ImageTask:
        """The same data on a device."""
        return tree_map_only(Tensor, lambda t: t.to(device), self)  # type: ignore[no-any-return]

    def fingerprint(self) -> dict[str, str]:
        """Checksums of the training and evaluation data, for the checkpoint."""
        found = {"train": _checksum(*self.train), "valid": _checksum(*self.valid)}
        for source in self.px.sources if self.px else ():
            images = source.images[:64] if source.name == WHITE_NOISE else source.images
            bytes_ = images if images.dtype == torch.uint8 else (images * 16).to(torch.int8)
            found[f"px {source.name}"] = _checksum(bytes_)
        return found


def _checksum(*tensors: Tensor) -> str:
    digest = hashlib.sha256(repr(tuple(tensors[0].shape)).encode())
    for tensor in tensors:
        digest.update(tensor.contiguous().cpu().numpy().data)
    return digest.hexdigest()[:16]


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

    ``data`` and ``px`` are described at the top of this module; the others are options of ``fsmap
    train``. Held-out images are chosen by ``split_seed`` alone (of CIFAR-100 in file order), and
    their labels stay clean. None stands for the protocol's value.
    """
    facts, folder = facts_of(data), is_folder(data)
    if folder:
        train, test = read_folder(data)[:2]
    elif generated:
        train = generate(facts.shape, GENERATED_TRAIN, seed=0)
        test = generate(facts.shape, GENERATED_TEST, seed=1)
    else:
        train, test = (read_images(data, split, data_dir) for split in ("train", "test"))
    train, held_out = _held_out(train, facts, valid, split_seed, limit)
    train = train._replace(y=noisy_labels(train.y, label_noise, facts.classes, label_noise_seed))
    flips = facts.augment if augment is None else augment

    def source(name: str) -> Source:
        if name == WHITE_NOISE:
            return Source(name, white_noise(facts.shape, min(NOISE_IMAGES, limit or NOISE_IMAGES)))
        if name == "train":
            return Source(name, train.x, flips)
        if generated and not is_folder(name):
            find(name, KNOWN)  # raises for an unknown name
            return Source(name, generate(facts.shape, GENERATED_TEST, seed=2).x, flips)
        return Source(name, read_others(name, facts.shape, data_dir=data_dir).x, flips)

    evaluation = None
    if px is not None:
        names, weights = zip(*parse(px), strict=True)
        evaluation = EvaluationSet(tuple(map(source, names)), weights, facts.normalize)
    name, crops = data if folder else _name(data), Augmentation() if flips else None
    about = (facts.normalize, crops, facts.classes, evaluation, facts.names)
    return ImageTask(name, train, held_out, test.take(slice(limit)), *about)


def noisy_labels(y: Tensor, fraction: float, classes: int, seed: int) -> Tensor:
    """Replace round(fraction·N) labels by uniformly random ones, some of which are right by chance.

    For one seed a larger fraction keeps the noise of a smaller one.
    """
    if not 0 <= fraction <= 1:
        raise InputError(f"label_noise is a fraction between 0 and 1, got {fraction:g}")
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
    """The protocol of a training set."""
    if is_folder(data):
        folder = read_folder(data)
        shape: Any = tuple(folder.train.x.shape[1:])
        size, names = len(folder.train.x), folder.classes
        return ImageSet(shape, folder.normalize, False, size, classes=len(names), names=names)
    return SETS[_name(data)]


def _name(data: str) -> str:
    """The name of a set with a protocol, of which ``data`` may be another spelling."""
    name = data if data in SETS else find(data, SETS).name
    if name not in SETS:
        raise InputError(f"cannot train on {data!r}; image sets with a protocol: {', '.join(SETS)}")
    return name


def _held_out(
    train: Images, facts: ImageSet, valid: int | None, seed: int, limit: int | None
) -> tuple[Images, Images]:
    available = len(train.x)
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, got {limit}")
    if valid is None:  # a short run keeps the protocol's proportion
        valid = facts.valid if limit is None and available > facts.valid else available // 6
        valid = valid if limit is None else min(valid, max(1, limit // 5))
    if not 0 <= valid < available:
        raise InputError(f"valid must be 0 to {available - 1} of {available} images, got {valid}")
    if facts.names:
        held_out, rest = mixed(train.y, seed).tensor_split([valid])
        return train.take(rest[:limit]), train.take(held_out)
    order = torch.arange(available)
    if not facts.ordered:
        order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    rest, held_out = order[valid:].sort().values, order[:valid].sort().values
    return train.take(rest[:limit]), train.take(held_out)
