"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from fsmap.errors import InputError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file; the one that was there stays until the new one is complete on the disk.

    Args:
        path: The file; its folder must exist.
        content: Text (UTF-8) or bytes.

    Raises:
        OSError: With the name of the file, if it cannot be written; nothing is left behind.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # a full disk needs the room
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    _sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder that results will be written to, before hours are spent on them.

    Args:
        folder: Where; made with its parents where it is not there.

    Raises:
        InputError: If it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"cannot write to {folder}: {error.strerror}. Choose another folder with --out."
        raise InputError(message) from error


def _sync_folder(folder: Path) -> None:
    """Make the new name itself durable, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # the file is there; some file systems do not sync folders
            os.fsync(handle)
    finally:
        os.close(handle)
