"""From the cells of a table to the numbers a network sees, learned once and kept with the model.

Numbers are standardized; a missing one becomes the median, and a 0/1 column says that it was
missing. A category has one 0/1 column per level; a level that is rare or unknown has none of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fsmap.data.columns import CATEGORY, LEFT_OUT, Column, infer, numbers, stray_text, texts
from fsmap.data.tables import Cells, Table
from fsmap.errors import InputError, did_you_mean

Floats = npt.NDArray[np.float64]

ABSENT = "(missing)"  # the level of a category's missing cells
FLAG_STD = 0.25
"""Least standard deviation of a 0/1 column: at its own, a level of one row in a thousand would be
encoded as 30 and rule the first layer."""


class UnseenWarning(UserWarning):
    """A table has values of a kind that the encoder has never seen."""


class Encoder(NamedTuple):
    """What was learned from the training rows.

    Attributes:
        columns: All columns but the target, in the order of the training table.
        mean: Subtracted from the encoded numbers, ``[D]``.
        std: What they are divided by, ``[D]``.
    """

    columns: tuple[Column, ...]
    mean: Floats
    std: Floats

    @property
    def width(self) -> int:
        """D, how many numbers a row becomes."""
        return len(self.mean)

    @property
    def used(self) -> list[Column]:
        """The columns that are used."""
        return [column for column in self.columns if column.kind != LEFT_OUT]

    def names(self) -> list[str]:
        """What each of the D numbers is: ``age``, ``age is missing``, ``town=Bern``."""
        return [name for column in self.used for name in _names(column)]

    def encode(self, table: Table) -> npt.NDArray[np.float32]:
        """Rows as standardized numbers; columns are found by name, in any order.

        Args:
            table: A table with at least the columns that are used.

        Returns:
            ``[N, D]``.
        """
        check_columns(table, [column.name for column in self.used])
        blocks = [_encoded(column, table.columns[column.name]) for column in self.used]
        standard = (np.concatenate(blocks, axis=1) - self.mean) / self.std
        return standard.astype(np.float32)

    def to_json(self) -> list[dict[str, Any]]:
        """The columns in plain values; mean and std are kept as tensors."""
        return [
            {**column._asdict(), "levels": list(column.levels), "others": list(column.others)}
            for column in self.columns
        ]

    @classmethod
    def from_json(cls, columns: Iterable[Mapping[str, Any]], mean: Floats, std: Floats) -> Encoder:
        """Undo :meth:`to_json`."""
        made = (
            Column(**{**c, "levels": tuple(c["levels"]), "others": tuple(c["others"])})
            for c in columns
        )
        return cls(tuple(made), mean, std)


def learn(table: Table, features: Sequence[str], *, category: Sequence[str] = ()) -> Encoder:
    """Learn how to encode these columns.

    Args:
        table: The training rows, and no others.
        features: The columns to look at.
        category: Those that hold categories although they look like numbers or free text.

    Returns:
        The encoder.

    Raises:
        InputError: If a column cannot be used, or none can.
    """
    check_columns(table, [*features, *category])
    columns = tuple(infer(n, table.columns[n], category=n in category) for n in features)
    used = [column for column in columns if column.kind != LEFT_OUT]
    if not used:
        reasons = "; ".join(f"{column.name!r}: {column.reason}" for column in columns)
        message = f"no column is left to predict from. {reasons or 'There is only the target'}."
        raise InputError(message)
    raw = np.concatenate([_encoded(c, table.columns[c.name]) for c in used], axis=1)
    flag = np.concatenate([_flags(column) for column in used])
    std = np.where(flag, np.maximum(raw.std(0), FLAG_STD), raw.std(0))
    return Encoder(columns, raw.mean(0), np.where(std > 0, std, 1.0))


def check_columns(table: Table, wanted: Sequence[str]) -> None:
    """Refuse a table that lacks a column.

    Args:
        table: The table.
        wanted: The columns it must have.

    Raises:
        InputError: With what is missing, what is there, and the closest name.
    """
    lacking = [name for name in wanted if name not in table.columns]
    if lacking:
        hint = did_you_mean(lacking[0], table.columns, cutoff=0.5)
        there = ", ".join(map(repr, table.columns))
        message = (
            f"there is no column {', '.join(map(repr, lacking))}.{hint} The columns are: {there}."
        )
        raise InputError(message)


def _names(column: Column) -> list[str]:
    if column.kind == CATEGORY:
        return [f"{column.name}={level}" for level in _places(column)]
    return [column.name, f"{column.name} is missing"] if column.missing else [column.name]


def _flags(column: Column) -> npt.NDArray[np.bool_]:
    """Which of the column's numbers are 0/1."""
    return np.array([column.kind == CATEGORY or k > 0 for k in range(len(_names(column)))])


def _places(column: Column) -> tuple[str, ...]:
    """The levels that have a number each."""
    return (*column.levels, ABSENT) if column.missing else column.levels


def _encoded(column: Column, cells: Cells) -> Floats:
    return _categories(column, cells) if column.kind == CATEGORY else _numbers(column, cells)


def _numbers(column: Column, cells: Cells) -> Floats:
    values, wrong = numbers(cells)
    if wrong.any():
        raise InputError(stray_text(column.name, cells, wrong, learned=True))
    absent = np.isnan(values)
    filled = np.where(absent, column.fill, values)
    if column.missing:
        return np.stack([filled, absent.astype(np.float64)], axis=1)
    if absent.any():
        _warn(
            f"column {column.name!r} had no missing values in training and has "
            f"{int(absent.sum())} here: the median, {column.fill:g}, stands in for them"
        )
    return filled[:, None]


def _categories(column: Column, cells: Cells) -> Floats:
    place = {level: k for k, level in enumerate(_places(column))}
    named = [ABSENT if cell is None else cell for cell in texts(cells)]
    unseen = [level for level in named if level not in place and level not in column.others]
    if unseen:
        shown = ", ".join(map(repr, list(dict.fromkeys(unseen))[:3]))
        _warn(
            f"column {column.name!r} has values that were not seen in training ({shown}; in "
            f"{len(unseen)} rows). They count as 'other': none of the known ones"
        )
    code = np.array([place.get(level, -1) for level in named])  # -1: other
    hot: Floats = (code[:, None] == np.arange(len(place))).astype(np.float64)
    return hot


def _warn(message: str) -> None:
    warnings.warn(message, UnseenWarning, stacklevel=5)
