"""Files that are written whole or not at all, and folders that one process at a time writes to."""

from __future__ import annotations

import glob
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
            partial.unlink(missing_ok=True)  # a full disk needs the room
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
    """Remove what killed writers of this file left; only while no other process writes it."""
    for left in path.parent.glob(glob.escape(beside(path, "").name) + "*.partial"):
        with suppress(OSError):
            left.unlink()


def beside(path: Path, end: str) -> Path:
    """The hidden file ``.NAME.END`` in the same folder."""
    return path.with_name(f".{path.name}.{end}")


def make_folder(folder: Path) -> None:
    """Make a folder that results will be written to, before hours are spent on them."""
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
        file = lock.open("a")
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: {error.strerror}. Choose another place, or --out."
        ) from error
    with file:
        held = _held(file.fileno()) and lock.exists()  # it may have been removed meanwhile
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


def _held(descriptor: int) -> bool:
    """Take a lock that the system releases when the process dies, however it dies."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, BlockingIOError) as error:
        return isinstance(error, ImportError)  # no such locks on this system
    return True
