"""A folder that one process at a time writes to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsmap.errors import InputError


@contextmanager
def exclusive(lock: Path, folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder or a file.

    If the folder was made for a lock within it, and nothing else was written, it is removed again.

    Args:
        lock: A file, made if it is not there; held, not read.
        folder: The folder or file, for the messages.

    Yields:
        Nothing.

    Raises:
        InputError: If the lock cannot be written, or another process holds it.
    """
    try:
        made = [place for place in lock.parents if not place.exists()]
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        message = f"cannot write to {folder}: {error.strerror}. Choose another place, or --out."
        raise InputError(message) from error
    with file:
        if not (_held(file.fileno()) and _there(lock, file.fileno())):
            message = (
                f"another process is writing to {folder}. "
                "Wait for it, or choose another place (--out)."
            )
            raise InputError(message)
        try:
            yield
        finally:
            if folder in made and lock.parent == folder:
                _leave_no_trace(lock, made)


def _leave_no_trace(lock: Path, made: list[Path]) -> None:
    """Remove the lock and the folders made for it, if there is nothing else in them."""
    with suppress(OSError):  # somebody else uses or has removed one of them
        if [*lock.parent.iterdir()] == [lock]:
            lock.unlink()
            for place in made:
                place.rmdir()


def _there(lock: Path, descriptor: int) -> bool:
    """Whether what is held is still what others find: it may have been removed meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), lock.stat())
    except FileNotFoundError:
        return False


def _held(descriptor: int) -> bool:
    # The system releases these locks when a process dies, however it dies: none is ever stale.
    try:
        import fcntl
    except ImportError:
        return True  # no such locks on this system
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
