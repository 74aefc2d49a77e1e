"""Files: atomic writes, locks, JSON, and the commit and device that rows record."""

from __future__ import annotations

import functools
import glob
import math
import os
import secrets
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fsmap.errors import InputError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file; the one that was there stays until the new one is complete on the disk.

    The content goes to a new file beside it, ``.NAME.XXXXXXXX.partial``, which then takes its name.
    A file that is replaced keeps its permissions. A symbolic link is replaced, not followed. If it
    cannot be written, nothing is left behind.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = beside(path, f"{secrets.token_hex(4)}.partial")
    mode = None  # permissions of the file that is replaced
    try:
        with suppress(FileNotFoundError):
            found = os.lstat(path).st_mode
            mode = stat.S_IMODE(found) if stat.S_ISREG(found) else None
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # fails on a file or link of that name
        handle = os.open(partial, new, 0o666 if mode is None else 0o600)
        with open(handle, "wb") as file:
            if mode is not None:
                os.chmod(partial, mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # free the space on a full disk
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    with suppress(OSError):  # the file is there; not all file systems sync its name
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_partial(path: Path) -> None:
    """Remove partial files of killed writers; only while no other process writes this file."""
    for left in path.parent.glob(glob.escape(beside(path, "").name) + "*.partial"):
        with suppress(OSError):
            left.unlink()


def beside(path: Path, end: str) -> Path:
    """The hidden file ``.NAME.END`` in the same folder."""
    return path.with_name(f".{path.name}.{end}")


def make_folder(folder: Path) -> None:
    """Make a folder for results, and check that it can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: {error.strerror}. Choose another folder with --out."
        ) from error


@contextmanager
def exclusive(lock: Path, folder: Path) -> Iterator[None]:
    """Hold the file ``lock``, which keeps other processes out of a folder or a file.

    If the folder was made for a lock within it, and nothing else was written, it is removed again.
    If the lock cannot be written, or another process holds it, InputError is raised.
    """
    try:
        made = [place for place in lock.parents if not place.exists()]
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: {error.strerror}. Choose another one (--out)."
        ) from error
    with file:
        held = _take_lock(file.fileno()) and lock.exists()  # it may have been removed meanwhile
        if not (held and os.path.samestat(os.fstat(file.fileno()), lock.stat())):
            raise InputError(
                f"another process is writing to {folder}. "
                "Wait for it, or choose another place (--out)."
            )
        try:
            yield
        finally:
            if folder in made and lock.parent == folder:
                with suppress(OSError):  # another process uses or has removed one of them
                    if [*folder.iterdir()] == [lock]:
                        lock.unlink()
                        for place in made:
                            place.rmdir()


def _take_lock(descriptor: int) -> bool:
    """Take a lock that the system releases when the process dies; False if it is taken."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, BlockingIOError) as error:
        return isinstance(error, ImportError)  # no such locks on this system
    return True


def plain(value: Any) -> Any:
    """Convert tensors, arrays, tuples and non-finite floats to JSON values."""
    if hasattr(value, "tolist"):  # torch tensors, numpy arrays and numpy scalars
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range | set | frozenset):
        return [plain(item) for item in value]
    finite = not isinstance(value, float) or math.isfinite(value)
    known = value is None or isinstance(value, bool | int | float | str)
    return value if known and finite else str(value)


def revive(value: Any) -> Any:
    """Floats in place of the ``"nan"``, ``"inf"`` and ``"-inf"`` of :func:`plain`."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, dict):
        return {key: revive(item) for key, item in value.items()}
    return [revive(item) for item in value] if isinstance(value, list) else value


def _git(*arguments: str, folder: Path) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


PACKAGE = Path(__file__).resolve().parent


@functools.cache
def commit() -> str:
    """The commit of the code that runs (``+dirty`` if files differ), else the version."""
    # A package installed below somebody else's checkout is not part of it: it is not tracked.
    if _git("ls-files", "--error-unmatch", "errors.py", folder=PACKAGE) is not None:
        head = _git("rev-parse", "--short", "HEAD", folder=PACKAGE)
        if head:
            changed = _git("status", "--porcelain", "--", ".", folder=PACKAGE)
            return f"{head}+dirty" if changed else head
    try:
        return f"v{metadata.version('fsmap')}"
    except metadata.PackageNotFoundError:
        return "unknown"


def circumstances(device: str) -> dict[str, str]:
    """Commit, torch version and device, which every row holds."""
    card = f" ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else ""
    return {"commit": commit(), "torch": torch.__version__, "device": device + card}
