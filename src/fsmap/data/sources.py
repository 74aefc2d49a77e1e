"""Where data is looked for: ``--data-dir``, ``$FSMAP_DATA``, ``../shared/data``, system, cache.

A file counts only if its checksum is right. One that is missing is reported with what was wanted,
where it was looked for, and the command that gets it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fsmap.data.catalogue import DataFile, DataSet, find
from fsmap.errors import InputError, MissingDataError

SHARED = Path("..") / "shared" / "data"
SYSTEM = Path("/usr/share/datasets")
CHUNK = 2**20


class Root(NamedTuple):
    """A folder that may hold data, and why it is looked into."""

    why: str
    path: Path


class Found(NamedTuple):
    """What is known of one file.

    Attributes:
        file: What was looked for.
        path: Where it is with the right content, or None.
        damaged: Where it is with another content.
    """

    file: DataFile
    path: Path | None
    damaged: tuple[Path, ...] = ()


def cache_folder() -> Path:
    """Where downloads go: ``$XDG_CACHE_HOME/fsmap``, else ``~/.cache/fsmap``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fsmap"


def roots(data_dir: str | os.PathLike[str] | None = None) -> list[Root]:
    """The folders that are looked into, in order."""
    given = [Root("--data-dir", Path(data_dir))] if data_dir is not None else []
    named = os.environ.get("FSMAP_DATA")
    chosen = [Root("$FSMAP_DATA", Path(named))] if named else []
    rest = [Root("shared", SHARED), Root("system", SYSTEM), Root("cache", cache_folder())]
    return [*given, *chosen, *rest]


def checksum(file: Path | io.BytesIO, *, content: bool = False) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    raw = file.open("rb") if isinstance(file, Path) else file
    with raw, gzip.open(raw) if content else raw as stream:
        try:
            while block := stream.read(CHUNK):
                digest.update(block)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            return f"unreadable: {error}"
    return digest.hexdigest()


def is_intact(path: Path, file: DataFile) -> bool:
    """Whether a file is the one of the catalogue."""
    if not file.content and path.stat().st_size != file.size:
        return False
    return checksum(path, content=file.content) == file.sha256


def look_for(file: DataFile, data_dir: str | os.PathLike[str] | None = None) -> Found:
    """Look for one file in all folders."""
    damaged: list[Path] = []
    for root in roots(data_dir):
        path = root.path / file.path
        if not path.is_file():
            continue
        if is_intact(path, file):
            return Found(file, path, tuple(damaged))
        damaged.append(path)
    return Found(file, None, tuple(damaged))


def locate(name: str, data_dir: str | os.PathLike[str] | None = None) -> dict[str, Path]:
    """The files of a data set, each with the right checksum.

    Args:
        name: The data set.
        data_dir: A folder to look into first.

    Returns:
        Paths by file name, in the order of the catalogue.

    Raises:
        InputError: If ``data_dir`` is given and no folder.
        MissingDataError: If a file is missing or damaged: which, where it was looked for, and the
            command that gets it.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        message = f"the data folder that was given, {data_dir}, does not exist or is no folder"
        raise InputError(message)
    entry = find(name)
    found = [look_for(file, data_dir) for file in entry.files]
    if any(item.path is None for item in found):
        raise MissingDataError(describe_missing(entry, found, data_dir))
    return {item.file.path.rpartition("/")[2]: item.path for item in found if item.path}


def describe_missing(
    entry: DataSet, found: Iterable[Found], data_dir: str | os.PathLike[str] | None = None
) -> str:
    """What is missing, where it was looked for, and what to do."""
    lost = [item for item in found if item.path is None]
    names = ", ".join(item.file.path for item in lost[:4])
    names += f" and {len(lost) - 4} more files" if len(lost) > 4 else ""
    places = ", ".join(f"{root.path} ({root.why})" for root in roots(data_dir))
    story = f"data set {entry.name!r}: {names} not found. Looked in {places}."
    bad = [path for item in lost for path in item.damaged]
    if bad:
        listed = ", ".join(map(str, bad))
        story += f" There is {listed}, but its checksum is wrong: delete or replace it."
    return f"{story} {advice(entry)}"


def advice(entry: DataSet) -> str:
    """How to get a data set."""
    if entry.downloads or entry.package:
        return f"Get it with: fsmap data get {entry.name}"
    return (
        f"It cannot be fetched by a program; put its files into a folder that is looked into. "
        f"Official source: {entry.page}"
    )
