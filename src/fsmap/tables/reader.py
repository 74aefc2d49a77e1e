"""Tables in CSV files, with any usual separator, as columns by name.

For another kind of file the error names the likely format. Cells are text, or None where
there is no value. What a column means is decided by :mod:`fsmap.tables.encoder`.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fsmap.errors import InputError, MissingDataError

Cells = npt.NDArray[Any]  # one column: objects that are str or None

# Cells (in any case) that hold no value; the UCI archive writes "?".
MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "?"})
SEPARATORS = ",;\t|"
SIGNATURES = {
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "a gzip archive",
    b"PK\x03\x04": "a zip archive or an Excel workbook (.xlsx)",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook (.xls)",
    b"%PDF": "a PDF",
}
POINT = re.compile(r"[-+]?(0\.\d*|\d*\.(\d{0,2}|\d{4,}))")  # a decimal point for sure
MARKUP = re.compile(r"\s*((?P<xml><[?!]|<(html|table|xml))|[{\[]\s*[\[{\"\]}])", re.IGNORECASE)
FORMULA = re.compile(r"[=+@\t\r-].*[(|!]", re.DOTALL)  # a spreadsheet may call what it names


class Table(NamedTuple):
    """Columns by name, all of one length, and remarks on how they were read."""

    columns: dict[str, Cells]
    notes: tuple[str, ...] = ()
    mark: str = "."  # the decimal mark of cells such as 1,234, unless others in the column tell

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values()), ()))

    def take(self, rows: npt.NDArray[np.int64] | slice) -> Table:
        """Some of the rows."""
        return self._replace(columns={n: cells[rows] for n, cells in self.columns.items()})


def read_table(path: str | Path, *, missing: Sequence[str] = (), target: str = "") -> Table:
    """Read a CSV file.

    ``missing`` are further cells that mean "no value", such as ``-999``, which is ``-999.0``, too.
    In the column ``target`` NA and its like stay: they may be classes. Raises InputError if it is
    something else, empty, ragged, or has bad column names.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingDataError(f"there is no file {path}")
    text, notes = _decoded(path)
    header, rows, more = _csv(path, text)
    notes += more
    tokens = {_key(token.strip()): token for token in missing}
    table, count = {}, Counter[str | None]()
    for name, cells in zip(header, zip(*rows, strict=True), strict=True):
        found = [tokens.get(_key(cell)) if tokens else None for cell in cells]
        count.update(found)
        pairs = zip(cells, found, strict=True)
        none = {""} if name == target else MISSING
        known = [None if c.lower() in none or token is not None else c for c, token in pairs]
        table[name] = np.array(known, dtype=object)
    notes += [f"--missing {token}: {count[token]} cells" for token in tokens.values()]
    if "" in table and len(table) > 1:  # the row numbers that spreadsheets and pandas write
        del table[""]
        notes.append("the first column has no name and is taken for row numbers: left out")
    pointed = any(POINT.fullmatch(cell) for row in rows for cell in row)
    return Table(table, tuple(notes), "," if _separator(text) == ";" and not pointed else ".")


def write_table(columns: Mapping[str, Sequence[Any]]) -> str:
    """A table as CSV, by column; an apostrophe before text that a spreadsheet could execute."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in (columns, *zip(*columns.values(), strict=True)):
        hostile = [isinstance(cell, str) and FORMULA.match(cell) for cell in row]
        writer.writerow([f"'{c}" if bad else c for c, bad in zip(row, hostile, strict=True)])
    return text.getvalue()


def _csv(path: Path, text: str) -> tuple[list[str], list[list[str]], list[str]]:
    """Column names, rows of cells, and notes; blank lines are no rows."""
    try:
        separator = _separator(text)
        lines = [row for row in csv.reader(io.StringIO(text), delimiter=separator) if row]
    except csv.Error as error:
        raise InputError(f"{path} is not a CSV: {error}") from error
    lines = [[cell.strip() for cell in line] for line in lines]
    header, *rows = list(dropwhile(lambda line: not any(line), lines)) or [[]]
    read, width = len(rows), len(header)
    while rows and not any(rows[-1]):  # spreadsheets write empty rows at the end
        rows.pop()
    more = f"the last {read - len(rows)} of {read} rows have no values: left out"
    while width > 1 and not any(any(row[width - 1 :]) for row in (header, *rows)):
        width -= 1  # the lines end in a separator
    _check_names(path, header := header[:width])
    for number, row in enumerate(rows, start=1):
        if not any(row[width:]):
            del row[width:]
        if not any(row):
            row += [""] * (width - len(row))
        if len(row) != width:
            raise InputError(
                f"{path}: row {number} has {len(row)} cells and the header has {width} "
                f"(separator {separator!r}): {_listed(row)}. Is this a CSV, and is text with a "
                "separator in it quoted?"
            )
    if not rows:
        raise InputError(f"{path} has column names ({_listed(header)}) and no rows.")
    return header, rows, [more] * (read > len(rows))


def _decoded(path: Path) -> tuple[str, list[str]]:
    """The text of a file, and a note if it is not UTF-8."""
    data = path.read_bytes()
    if not data.strip():
        raise InputError(
            f"{path} is empty. A table has a line of column names and at least one row."
        )
    found = next((what for start, what in SIGNATURES.items() if data.startswith(start)), None)
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    if found is None and b"\0" in data[:65536] and not wide:
        found = "a binary file"
    notes = []
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", errors="replace")
        notes.append("the file is not UTF-8: it was read as Latin-1 (Windows-1252)")
    if start := MARKUP.match(text):
        found = "HTML or XML" if start["xml"] else "JSON"
    if found is not None:
        raise InputError(f"{path} is not a CSV: it looks like {found}. Export it as CSV.")
    return text, notes


def _separator(text: str) -> str:
    """The separator that cuts the first lines into equally many cells, at least two."""
    sample = "\n".join(text.splitlines()[:50])

    def quality(separator: str) -> tuple[float, int]:
        counts = [len(row) for row in csv.reader(io.StringIO(sample), delimiter=separator) if row]
        usual, times = Counter(counts).most_common(1)[0]
        return (times / len(counts) if usual > 1 else 0.0, usual)

    return max(SEPARATORS, key=quality)


def _check_names(path: Path, names: list[str]) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise InputError(
            f"{path} has several columns named {_listed(twice)}. Rename or remove one of each."
        )
    if len(names) > 1 and all(_is_number(name) for name in names):
        raise InputError(
            f"the first line of {path} is {_listed(names)}: data, not column names. Add a line of "
            "names at the top."
        )
    if "" in names[1:]:
        number = names.index("", 1) + 1
        raise InputError(f"{path}: column {number} of the header has no name. Give it one.")


def _key(cell: str) -> str | float:
    """What is equal for cells that mean the same: a number or text in lower case."""
    return float(cell) if _is_number(cell) else cell.lower()


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


def _listed(items: Sequence[str]) -> str:
    """The first few items, quoted."""
    more = f" and {len(items) - 6} more" if len(items) > 6 else ""
    return ", ".join(map(repr, items[:6])) + more
