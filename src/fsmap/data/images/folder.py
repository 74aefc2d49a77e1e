"""A folder of the user's own images: one sub-folder per class, named by it.

``folder/class/*.png`` (a sixth of the images becomes the test set, always the same ones), or
``folder/train/class/*.png`` with ``folder/test/class/*.png``. Images of one common size keep it;
others are scaled and cropped to a square of ``?size=N`` pixels: ``photos?size=64``.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsmap.data.images.augment import Normalization
from fsmap.data.images.read import Images
from fsmap.errors import InputError, MissingDataError, require

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TEST_SHARE = 6  # one image in six, without a test folder
MOST_BYTES = 4 * 2**30


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
    """Read a folder of images.

    Args:
        data: Its path, with ``?size=N`` behind it or not.

    Returns:
        Bytes ``[N, C, H, W]``; one channel if no image has a colour.

    Raises:
        MissingDataError: If it does not exist, or holds no images in sub-folders.
        InputError: If an option is unknown, or classes of train and test differ.
    """
    path, size = _parsed(data)
    parts = [path / "train", path / "test"]
    split = all(part.is_dir() for part in parts)
    found = [_files(part) for part in parts] if split else [_files(path)]
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
    pixels = _read([file for part in listed for file, _ in part], size)
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


def _parsed(data: str) -> tuple[Path, int | None]:
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


def _files(folder: Path) -> dict[str, list[Path]]:
    found = {}
    for part in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        files = sorted(f for f in part.rglob("*") if f.suffix.lower() in ENDINGS)
        if files:
            found[part.name] = files
    return found


def _read(files: list[Path], size: int | None) -> Tensor:
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
