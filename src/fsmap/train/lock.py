"""A folder that one process at a time writes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsmap.errors import InputError


@contextmanager
def exclusive(lock: Path, folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder.

    Args:
        lock: A file, made if it is not there; held, not read.
        folder: What it stands for, for the messages.

    Yields:
        Nothing.

    Raises:
        InputError: If the lock cannot be written, or another process holds it.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        message = f"cannot write to {folder}: {error.strerror}. Choose another folder with --out."
        raise InputError(message) from error
    with file:
        if not _held(file.fileno()):
            message = (
                f"another process is writing to {folder}. "
                "Wait for it, or choose another folder with --out."
            )
            raise InputError(message)
        yield


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
