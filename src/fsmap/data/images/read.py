"""Image sets as uint8 tensors: from files checked against their checksums, or generated."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsmap.data.catalogue import find
from fsmap.data.sources import locate
from fsmap.errors import InputError, MissingDataError, require

Folder = str | os.PathLike[str] | None

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


def read_images(name: str, split: str = "train", data_dir: Folder = None) -> Images:
    """Read an image set.

    Args:
        name: ``fmnist``, ``kmnist``, ``mnist``, ``cifar10``, ``cifar100``,
            ``cifar10.1``, ``kmnist-train``.
        split: ``train``, ``test`` or ``all``; KMNIST's training images are a set of their own. The
            official split of CIFAR-100 is lost: in file order its first 10,000 images are ``test``
            and the others ``train``, so that test accuracy cannot be compared with published ones.
        data_dir: A folder to look into first.

    Returns:
        uint8 images ``[N, C, H, W]`` and labels.

    Raises:
        InputError: If the set has no such split, or is no image set.
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
