"""From the files of an image set to uint8 tensors; every file is checked against its checksum."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsmap.data.catalogue import find
from fsmap.data.images.idx import read_idx
from fsmap.data.sources import locate
from fsmap.errors import InputError, MissingDataError, require

Folder = str | os.PathLike[str] | None

CIFAR100_TEST = 10_000


class Images(NamedTuple):
    """Labelled images."""

    x: Tensor  # uint8 [N, C, H, W]
    y: Tensor  # int64 [N]

    def take(self, rows: Tensor | slice) -> Images:
        """Some of them.

        Args:
            rows: Which.

        Returns:
            These images and labels.
        """
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
    """The 32×32 images of a mosaic, row by row.

    Args:
        mosaic: ``[rows·32, columns·32, 3]``.

    Returns:
        ``[rows·columns, 32, 32, 3]``.
    """
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
    """SHA-256 of pixels and labels: what data a run was made with.

    Args:
        images: The images.

    Returns:
        The first 16 hexadecimal digits.
    """
    digest = hashlib.sha256(repr(tuple(images.x.shape)).encode())
    for tensor in images:
        digest.update(tensor.contiguous().cpu().numpy().data)
    return digest.hexdigest()[:16]


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
