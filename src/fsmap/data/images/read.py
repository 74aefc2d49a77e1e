"""Image sets as uint8 tensors: files of the catalogue, a folder of the user's own, or generated.

A folder has one sub-folder per class: ``folder/class/*.png`` (a sixth of the images becomes the
test set, always the same ones), or ``folder/train/class/*.png`` with ``folder/test/class/*.png``.
Images of one common size keep it; others are scaled and cropped to a square of ``?size=N`` pixels:
``photos?size=64``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import struct
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsmap.data.catalogue import Folder, find, locate
from fsmap.data.images.evaluation import Normalization
from fsmap.errors import InputError, MissingDataError, require

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TEST_SHARE = 6  # one image in six, in a folder without a test folder
MOST_BYTES = 4 * 2**30
CIFAR100_TEST = 10_000
UNSIGNED_BYTE = 0x08  # the only type of value these sets have
CLASSES = 10
NOISE = 40.0  # grey levels; makes the task learnable, not trivial


class Images(NamedTuple):
    """Labelled images."""

    x: Tensor  # uint8 [N, C, H, W]
    y: Tensor  # int64 [N]

    def take(self, rows: Tensor | slice) -> Images:
        """Some of them."""
        return Images(self.x[rows], self.y[rows])

    def to(self, device: torch.device | str) -> Images:
        """The same images on a device."""
        return Images(self.x.to(device), self.y.to(device))


def read_images(name: str, split: str = "train", data_dir: Folder = None) -> Images:
    """Read an image set of the catalogue.

    Args:
        name: ``fmnist``, ``kmnist``, ``mnist``, ``cifar10``, ``cifar100``,
            ``cifar10.1``, ``kmnist-train``.
        split: ``train``, ``test`` or ``all``; KMNIST's training images are a set of their own. The
            official split of CIFAR-100 is lost: in file order its first 10,000 images are ``test``
            and the others ``train``, so that test accuracy cannot be compared with published ones.
        data_dir: A folder to look into first.
    """
    entry = find(name, READERS)
    if entry.name not in READERS:
        message = f"{entry.name!r} is no image set; image sets: {', '.join(READERS)}"
        raise InputError(message)
    allowed, reader = READERS[entry.name]
    if split not in allowed:
        message = f"{entry.name} has the splits {', '.join(allowed)}, got {split!r}"
        raise InputError(message)
    if split == "all" and reader is not _cifar100:
        parts = [reader(entry.name, part, data_dir) for part in ("train", "test")]
        return Images(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))
    return reader(entry.name, split, data_dir)


def _idx(name: str, split: str, data_dir: Folder) -> Images:
    files = locate(name, data_dir)
    start = "train" if split == "train" else "t10k"
    paths = {key: path for key, path in files.items() if key.startswith(start)}
    x = next(read_idx(path) for key, path in paths.items() if "images" in key)
    y = next(read_idx(path) for key, path in paths.items() if "labels" in key)
    return _checked(name, x[:, None], y)


def _cifar10(name: str, split: str, data_dir: Folder) -> Images:
    files = locate(name, data_dir)
    batches = (
        [f"data_batch_{i}.png" for i in range(1, 6)] if split == "train" else ["test_batch.png"]
    )
    pixels = [_picture(files[batch]).reshape(-1, 32, 32, 3) for batch in batches]
    labels = json.loads(files[f"{split}_lables.json"].read_text())  # the package's spelling
    return _checked(name, _planar(np.concatenate(pixels)), torch.tensor(labels))


def _cifar100(name: str, split: str, data_dir: Folder) -> Images:
    files = locate(name, data_dir)
    mosaics = [path for key, path in files.items() if key.endswith(".webp")]
    pixels = np.concatenate([tiles(_picture(path)) for path in mosaics])
    labels = np.frombuffer(files["labels_fine.bin"].read_bytes(), dtype=np.uint8)
    whole = _checked(name, _planar(pixels), torch.from_numpy(labels.astype(np.int64)))
    parts = {"test": slice(CIFAR100_TEST), "train": slice(CIFAR100_TEST, None)}
    return whole.take(parts.get(split, slice(None)))


def _cifar10_1(name: str, split: str, data_dir: Folder) -> Images:
    files = locate(name, data_dir)
    pixels = np.load(files["cifar10.1_v6_data.npy"], allow_pickle=False)
    labels = np.load(files["cifar10.1_v6_labels.npy"], allow_pickle=False)
    return _checked(name, _planar(pixels), torch.from_numpy(labels.astype(np.int64)))


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


def _checked(name: str, x: Tensor, y: Tensor) -> Images:
    if x.dtype != torch.uint8 or x.ndim != 4 or len(x) != len(y):
        message = (
            f"{name}: expected bytes [N, C, H, W] and N labels, got {x.dtype} {list(x.shape)} and "
            f"{len(y)} labels"
        )
        raise MissingDataError(message)
    return Images(x, y.to(torch.int64))


def fingerprint(images: Images) -> str:
    """SHA-256 of pixels and labels: what data a run was made with."""
    digest = hashlib.sha256(repr(tuple(images.x.shape)).encode())
    for tensor in images:
        digest.update(tensor.contiguous().cpu().numpy().data)
    return digest.hexdigest()[:16]


def read_idx(path: Path) -> Tensor:
    """An array of bytes from an IDX file, compressed or not."""
    try:
        raw = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        message = f"{path} is truncated or damaged ({error}). Replace it."
        raise MissingDataError(message) from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != UNSIGNED_BYTE:
        message = f"{path} is not an IDX file of bytes: it starts with {raw[:4]!r}"
        raise MissingDataError(message)
    rank = raw[3]
    start = 4 + 4 * rank
    shape = struct.unpack(f">{rank}I", raw[4:start]) if len(raw) >= start else ()
    if len(raw) - start != math.prod(shape) or not shape:
        message = (
            f"{path} holds {len(raw) - start} bytes of data and states the shape {shape}: it is "
            "truncated or damaged. Replace it."
        )
        raise MissingDataError(message)
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).reshape(shape)


def generate(shape: tuple[int, int, int], number: int, *, seed: int) -> Images:
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
    """What a folder holds."""

    train: Images
    test: Images
    classes: tuple[str, ...]
    normalize: Normalization


def is_folder(data: str) -> bool:
    """Whether a data set is named by a path and not by a name of the catalogue."""
    path = data.partition("?")[0]
    return "/" in path or "\\" in path or Path(path).is_dir()


@lru_cache(maxsize=2)
def read_folder(data: str) -> ImageFolder:
    """Read a folder of images; one channel if no image has a colour."""
    path, size = _folder_and_size(data)
    parts = [path / "train", path / "test"]
    split = all(part.is_dir() for part in parts)
    found = [_files_by_class(part) for part in parts] if split else [_files_by_class(path)]
    classes = tuple(sorted({name for part in found for name in part}))
    for part, place in zip(found, parts, strict=False):
        missing = [name for name in classes if name not in part]
        if missing:
            message = f"{place} has no sub-folder with images for the class {missing[0]!r}"
            raise InputError(message)
    if len(classes) < 2:
        message = (
            f"{path} has images of {len(classes)} classes; at least two are needed, one sub-folder "
            f"each ({', '.join(ENDINGS)})"
        )
        raise MissingDataError(message)
    listed = [[(f, k) for k, name in enumerate(classes) for f in part[name]] for part in found]
    pixels = _pixels([file for part in listed for file, _ in part], size)
    labels = torch.tensor([label for part in listed for _, label in part])
    if split:
        rows = torch.arange(len(labels))
        train, test = rows[: len(listed[0])], rows[len(listed[0]) :]
    else:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        cut = max(1, len(labels) // TEST_SHARE)
        test, train = order[:cut].sort().values, order[cut:].sort().values
    images = Images(pixels, labels)
    return ImageFolder(images.take(train), images.take(test), classes, _moments(pixels[train]))


def _folder_and_size(data: str) -> tuple[Path, int | None]:
    text, _, query = data.partition("?")
    path = Path(text)
    if not path.is_dir():
        message = f"there is no folder {path}: --data takes a name (fmnist, cifar10 …) or a folder"
        raise MissingDataError(message)
    if not query:
        return path, None
    key, _, value = query.partition("=")
    if key != "size" or not value.isdigit() or not 4 <= int(value) <= 1024:
        message = f"the option of a folder is ?size=N with N from 4 to 1024, got {query!r}"
        raise InputError(message)
    return path, int(value)


def _files_by_class(folder: Path) -> dict[str, list[Path]]:
    found = {}
    for part in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        files = sorted(f for f in part.rglob("*") if f.suffix.lower() in ENDINGS)
        if files:
            found[part.name] = files
    return found


def _pixels(files: list[Path], size: int | None) -> Tensor:
    image: Any = require("PIL.Image", extra="data")
    ops: Any = require("PIL.ImageOps", extra="data")
    sizes, grey = set(), True
    for file in files:
        try:
            with image.open(file) as opened:
                sizes.add(opened.size)
                grey &= opened.mode in ("1", "L", "LA", "I;16")
        except OSError as error:
            message = f"{file} is no image that can be read: {error}"
            raise InputError(message) from error
    if size is None and len(sizes) > 1:
        shown = ", ".join(f"{w}×{h}" for w, h in sorted(sizes)[:3])
        message = (
            f"the images have {len(sizes)} different sizes ({shown} …). Add ?size=64 to the folder "
            "(or another number) to scale and crop them to a square."
        )
        raise InputError(message)
    width, height = (size, size) if size else next(iter(sizes))
    channels = 1 if grey else 3
    needed = len(files) * channels * width * height
    if needed > MOST_BYTES:
        message = (
            f"{len(files)} images of {width}×{height} take {needed / 1e9:.1f} GB, at most "
            f"{MOST_BYTES / 1e9:.1f} are read. Use a smaller ?size=N."
        )
        raise InputError(message)
    pixels = np.empty((len(files), height, width, channels), np.uint8)
    for row, file in zip(pixels, files, strict=True):
        with image.open(file) as opened:
            picture = opened.convert("L" if grey else "RGB")
            if size:
                picture = ops.fit(picture, (size, size))
            row[:] = np.asarray(picture).reshape(row.shape)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _moments(pixels: Tensor) -> Normalization:
    some = pixels[:: max(1, len(pixels) // 2_000)].float() / 255
    std = some.std((0, 2, 3)).clamp_min(1e-3)
    return Normalization(tuple(some.mean((0, 2, 3)).tolist()), tuple(std.tolist()))


Reader = Callable[[str, str, Folder], Images]
# Splits and reader; the first split is what p_X draws from.
READERS: dict[str, tuple[tuple[str, ...], Reader]] = {
    "fashion-mnist": (("train", "test", "all"), _idx),
    "mnist": (("train", "test", "all"), _idx),
    "kmnist": (("test",), _idx),
    "kmnist-train": (("train",), _idx),
    "cifar10": (("train", "test", "all"), _cifar10),
    "cifar100": (("all", "train", "test"), _cifar100),
    "cifar10.1": (("test",), _cifar10_1),
}
