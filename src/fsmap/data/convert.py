"""From the tables that official sources offer to the CSV files of the catalogue.

The CSV files hold the shortest decimal form of each number, so that the result of a conversion has
one checksum, whatever program wrote the source.
"""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib
from collections.abc import Callable
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fsmap.data.catalogue import Download
from fsmap.errors import InputError, MissingExtraError, require

Table = NDArray[np.float64]

UNREADABLE = (
    *(ValueError, IndexError, OSError, EOFError, zlib.error, zipfile.BadZipFile),
    *(NotImplementedError, RuntimeError),  # of zipfile: a compression or a password
)
"""What readers raise for a file that is not what they expect."""


def convert(raw: bytes, download: Download, limit: int = 2**30) -> bytes:
    """Turn what was downloaded into the file of the catalogue.

    Args:
        raw: What was downloaded.
        download: What it is, and what it should become.
        limit: Bytes that an uncompressed file may have at most.

    Returns:
        Content of the file.

    Raises:
        InputError: If the source does not have the expected form.
    """
    if raw[:512].lstrip().startswith(b"<"):
        message = (
            f"{download.url} sent a web page in place of data: this network asks you to sign in, "
            "or the source has moved. Open the address in a browser."
        )
        raise InputError(message)
    if download.kind == "copy":
        return raw
    try:
        if download.kind == "gunzip":
            with gzip.open(io.BytesIO(raw)) as stream:
                return _read(stream, limit)
        parts = [_member(raw, name, limit) for name in download.member.split()] or [raw]
        table = READERS[download.kind](*parts)
    except UNREADABLE as error:
        message = f"{download.url} is not the table that was expected: {error}"
        raise InputError(message) from error
    if download.columns:
        table = table[:, list(download.columns)]
    if table.shape[1] != len(download.header):
        message = (
            f"{download.url} has {table.shape[1]} columns, expected {len(download.header)} "
            f"({', '.join(download.header)})."
        )
        raise InputError(message)
    return write_csv(download.header, table)


def write_csv(header: tuple[str, ...], table: Table) -> bytes:
    r"""A CSV file with the shortest form of every number.

    Args:
        header: Column names.
        table: ``[N, columns]``.

    Returns:
        The file.

    Examples:
        >>> write_csv(("a", "b"), np.array([[1.0, 0.25], [1e-5, -3.0]]))
        b'a,b\n1,0.25\n1e-05,-3\n'
    """
    lines = [",".join(header)]
    lines += [",".join(repr(value).removesuffix(".0") for value in row) for row in table.tolist()]
    return ("\n".join(lines) + "\n").encode()


def _member(raw: bytes, name: str, limit: int) -> bytes:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        for found in archive.namelist():
            if found == name or found.endswith(f"/{name}"):
                with archive.open(found) as stream:
                    return _read(stream, limit)
        message = f"the archive holds {', '.join(archive.namelist())}, and no {name}."
    raise InputError(message)


def _read(stream: IO[bytes] | gzip.GzipFile, limit: int) -> bytes:
    content = stream.read(limit + 1)
    if len(content) > limit:
        message = f"uncompressed, it has more than {limit:,} bytes"
        raise ValueError(message)
    return content


def _text(raw: bytes, delimiter: str | None, skip: int) -> Table:
    lines = raw.decode("utf-8", errors="replace").splitlines()[skip:]
    return np.loadtxt(lines, delimiter=delimiter, ndmin=2)


def _statlib(raw: bytes) -> Table:
    """Boston: 22 lines of prose, then every row on two lines of 11 and 3 numbers."""
    lines = [line.split() for line in raw.decode("latin-1").splitlines()[22:] if line.strip()]
    rows = [[*first, *second] for first, second in zip(lines[::2], lines[1::2], strict=True)]
    return np.array(rows, dtype=np.float64)


def _excel(raw: bytes) -> Table:
    pandas = require("pandas", extra="data")
    try:
        sheet = pandas.read_excel(io.BytesIO(raw))
    except ImportError as error:
        message = (
            f"reading this Excel file needs one more package: {error} "
            "Install xlrd for .xls files, openpyxl for .xlsx files."
        )
        raise MissingExtraError(message) from error
    table: Table = sheet.dropna(how="all").dropna(how="all", axis=1).to_numpy(np.float64)
    return table


READERS: dict[str, Callable[..., Table]] = {
    "comma": lambda raw: _text(raw, ",", 1),
    "semicolon": lambda raw: _text(raw, ";", 1),
    "space": lambda raw: _text(raw, None, 0),
    "pair": lambda a, b: np.hstack([_text(a, None, 0), _text(b, None, 0)]),
    "statlib": _statlib,
    "excel": _excel,
}
