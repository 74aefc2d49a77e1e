"""What a column of a table holds: numbers, categories, or nothing a model can use.

The rules, in this order; each can be overruled by naming the column.

1. No value at all, or a date: refused, because only the user knows what to do.
2. All filled cells are numbers: a number. One value throughout, or 1, 2, 3, …: left out.
3. At least four of five are numbers: refused. A stray text in a column of numbers is a mistake more
   often than a category.
4. Text: a category. One value throughout, or (nearly) as many values as rows: left out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsmap.data.tables import Cells
from fsmap.errors import InputError

Floats = npt.NDArray[np.float64]

NUMBER, CATEGORY, LEFT_OUT = "number", "category", "left out"
MOSTLY = 0.8  # a column with this share of numbers was meant to be numbers
MAX_LEVELS = 50  # the most frequent categories of a column; the others are one, "other"
MIN_COUNT = 2  # a category seen once teaches nothing that carries over
MANY = 20  # so few distinct texts are categories whatever the number of rows
_DATE = re.compile(r"(\d{4}[-/]\d{1,2}[-/]\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4})([T ].*)?")


class Column(NamedTuple):
    """How one column becomes numbers.

    Attributes:
        name: Its name in the table.
        kind: ``"number"``, ``"category"`` or ``"left out"``.
        levels: The categories that have a place of their own, most frequent first.
        others: The categories that were seen too rarely for one.
        fill: What stands for a missing number: the median.
        missing: Whether values were missing when this was learned (numbers: adds a 0/1 column).
        reason: Why it is left out.
    """

    name: str
    kind: str
    levels: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    fill: float = 0.0
    missing: bool = False
    reason: str = ""


def infer(name: str, cells: Cells, *, category: bool = False) -> Column:
    """Decide what a column is, by the rules at the top of this module.

    Args:
        name: The column's name.
        cells: Its cells, those of the training rows.
        category: The user says that these are categories.

    Returns:
        The column.

    Raises:
        InputError: If it has no value, holds dates, or numbers with text among them.
    """
    filled = [cell for cell in texts(cells) if cell is not None]
    if not filled:
        message = (
            f"column {name!r} has no value in any of the {len(cells)} rows. Leave it out: "
            f"--drop {name}"
        )
        raise InputError(message)
    if category:
        return _category(name, filled, len(cells), asked=True)
    values, wrong = numbers(cells)
    if not wrong.any():
        return _number(name, values)
    share = 1 - wrong.sum() / len(filled)
    if share >= MOSTLY:
        raise InputError(stray_text(name, cells, wrong))
    if _are_dates(filled):
        message = (
            f"column {name!r} holds dates, such as {filled[0]!r}, and fsmap does not guess what "
            "they mean. Replace it by numbers (year, month, weekday, days since …), or leave it "
            f"out: --drop {name}"
        )
        raise InputError(message)
    return _category(name, filled, len(cells), asked=False)


def texts(cells: Cells) -> list[str | None]:
    """Every cell as text, whole numbers without a point; None where there is no value."""
    if cells.dtype != object:
        return [None if math.isnan(v) else f"{v:.15g}" for v in cells.tolist()]
    return list(cells)


def numbers(cells: Cells) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Every cell as a number, nan where it is missing or none.

    Args:
        cells: A column.

    Returns:
        The numbers, and which cells hold something that is not a finite number, both ``[N]``.
    """
    if cells.dtype != object:
        values = cells.astype(np.float64)
        return np.where(np.isinf(values), np.nan, values), np.isinf(values)
    values = np.array([math.nan if c is None else _parse(c) for c in cells], dtype=np.float64)
    empty = np.array([c is None for c in cells], dtype=bool)
    return values, np.isnan(values) & ~empty


def stray_text(
    name: str, cells: Cells, wrong: npt.NDArray[np.bool_], *, learned: bool = False
) -> str:
    """The message for text in a column of numbers: what it is, where, and what can be done.

    Args:
        name: The column.
        cells: Its cells.
        wrong: Which of them are text.
        learned: A model has learned that this column holds numbers: only the table can change.

    Returns:
        One or two sentences.
    """
    rows = np.flatnonzero(wrong)
    shown = texts(cells)
    examples = ", ".join(f"{shown[row]!r} in row {row + 1}" for row in rows[:3])
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    several = len(rows) > 1
    what = "are no finite numbers" if several else "is no finite number"
    holds = "held numbers when the model was fitted" if learned else "holds numbers"
    text = (
        f"column {name!r} {holds}, but {examples}{more} {what}. Correct the "
        f"cell{'s' if several else ''}; if it means 'no value', say so with --missing "
        f"{shown[rows[0]]!r}"
    )
    return text if learned else f"{text}; if the column holds categories, with --category {name}"


def _parse(cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _number(name: str, values: Floats) -> Column:
    known = values[~np.isnan(values)]
    missing = len(known) < len(values)
    if (known == known[0]).all() and not missing:
        return Column(name, LEFT_OUT, reason=f"it is {known[0]:g} in every row")
    if len(values) > 2 and not missing and (np.diff(values) == 1).all() and values[0] in (0, 1):
        return Column(name, LEFT_OUT, reason="it counts the rows")
    return Column(name, NUMBER, fill=float(np.median(known)), missing=missing)


def _category(name: str, filled: list[str], rows: int, *, asked: bool) -> Column:
    counts = Counter(filled)
    missing = len(filled) < rows
    if len(counts) == 1 and not missing:
        return Column(name, LEFT_OUT, reason=f"it is {filled[0]!r} in every row")
    if len(counts) > max(MANY, len(filled) / 2) and not asked:
        reason = (
            f"{len(counts)} different texts in {len(filled)} rows: an identifier or free text "
            f"(to use it all the same: --category {name})"
        )
        return Column(name, LEFT_OUT, reason=reason)
    ranked = sorted(counts, key=lambda level: (-counts[level], level))
    levels = tuple(level for level in ranked[:MAX_LEVELS] if counts[level] >= MIN_COUNT)
    if not levels:
        return Column(name, LEFT_OUT, reason="no category occurs twice")
    return Column(name, CATEGORY, levels, tuple(ranked[len(levels) :]), missing=missing)


def _are_dates(filled: list[str]) -> bool:
    return sum(_DATE.fullmatch(cell) is not None for cell in filled) > len(filled) / 2
