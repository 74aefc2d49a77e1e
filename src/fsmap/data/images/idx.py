"""The IDX format of MNIST and its relatives: a header of big-endian sizes, then bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from fsmap.errors import MissingDataError

UNSIGNED_BYTE = 0x08  # the only type of value these sets have


def read_idx(path: Path) -> Tensor:
    """An array of bytes from an IDX file, compressed or not.

    Args:
        path: The file; ``.gz`` is unpacked.

    Returns:
        uint8, with the shape that the file states.

    Raises:
        MissingDataError: If it is not an IDX file of bytes, or shorter or longer than it states.
    """
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
