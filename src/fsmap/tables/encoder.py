"""Encode the cells of a table as numbers; the encoding is learned once and kept with the model.

The kind of a column is decided in this order; ``--drop`` and ``--category`` overrule it.

1. No value, one value throughout, row numbers, identifiers: left out, with the reason.
2. Numbers, also ``12 %``, ``$1,200.50``, ``1'200`` and ``3,14``: standardized; a missing one
   becomes the median, and a 0/1 column marks it. Codes such as ``00417`` are categories.
3. Dates: days since the first one, and the season, the weekday and the hour as angles.
4. At least four of five cells are numbers: an error, because text among numbers is usually a typo.
5. Text: one 0/1 column per category; a rare or unknown one has none of them.
"""

from __future__ import annotations

import datetime
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fsmap.errors import InputError, did_you_mean
from fsmap.tables.reader import MISSING, Cells, Table

Floats = npt.NDArray[np.float64]

NUMBER, CATEGORY, DATE, LEFT_OUT = "number", "category", "date", "left out"
REGRESSION, CLASSIFICATION = "regression", "classification"
TASKS = (REGRESSION, CLASSIFICATION)
MOSTLY = 0.8  # share of numbers from which text in a column is an error
MAX_LEVELS = 50  # the most frequent categories of a column; the others are one, "other"
MIN_COUNT = 2  # rarer categories are "other", too
MANY = 20  # up to so many distinct texts are categories, whatever the number of rows
MANY_CLASSES = 100
FEW_NUMBERS = 10  # up to so many distinct whole numbers may be classes: a note says so
LARGEST = 1e100  # larger numbers have no finite variance
FAR = 1.0  # distance from the training range, relative to it, above which a warning is given
ABSENT = "(missing)"  # the level of a category's missing cells
FLAG_STD = 0.25  # at least, of a 0/1 column: else a 1 in a thousand rows is encoded as 30

_UNIT = re.compile(r"[\s\u00a0\u202f'’_]|(%|[$€£¥]|\b(?:USD|EUR|GBP|CHF|JPY)\b)")
_CURRENCIES = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY"}
_THOUSANDS = {
    ".": re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?"),
    ",": re.compile(r"[-+]?[1-9]\d{0,2}(\.\d{3})+(,\d+)?"),
}
_COMMA = re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?")
_ID = re.compile(r"(^|[^a-z])(id|uuid|guid|key|index|nr|number)s?$", re.IGNORECASE)
_CYCLES = tuple(f": {cycle} {f}" for cycle in ("year", "week", "day") for f in "cs")
_FORMATS = ["%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d.%m.%y", "%m/%d/%y"]
_FORMATS += ["%d/%m/%y", "%d %b %Y", "%Y-%m"]


class UnseenWarning(UserWarning):
    """A table has categories, or numbers of a size, that were not in the training rows."""


class Column(NamedTuple):
    """How one column is encoded."""

    name: str  # in the table
    kind: str  # "number", "category", "date" or "left out"
    levels: tuple[str, ...] = ()  # categories with a 0/1 column, the most frequent first
    fill: float = 0.0  # value for a missing number: the median
    missing: bool = False  # whether values were missing when this was learned
    reason: str = ""  # the reason if it is left out
    form: str = "."  # how it is written: the decimal mark of numbers, the format of dates
    low: float = 0.0  # the smallest number in training
    high: float = 0.0  # the largest
    unit: str | None = None  # "%", a currency or none, ""; None: models of an earlier version

    def all_levels(self) -> tuple[str, ...]:
        """The categories with a 0/1 column."""
        return (*self.levels, ABSENT) if self.missing else self.levels

    def shown(self, value: float) -> str:
        """A value in words: a number or a date."""
        return str(np.datetime64(math.floor(value), "D")) if self.kind == DATE else f"{value:g}"

    def names(self) -> list[str]:
        """Names of its encoded features: ``age``, ``age is missing``, ``town=Bern``."""
        if self.kind == CATEGORY:
            return [f"{self.name}={level}" for level in self.all_levels()]
        ends = (": days", *_CYCLES) if self.kind == DATE else ("",)
        return [self.name + end for end in ends] + [f"{self.name} is missing"] * self.missing


class Encoder(NamedTuple):
    """How a table is encoded, learned from the training rows."""

    columns: tuple[Column, ...]  # all but the target, in the order of the training table
    mean: Floats  # subtracted from the encoded numbers, [D]
    std: Floats  # divides them, [D]
    notes: tuple[str, ...] = ()  # remarks about the columns

    @property
    def used(self) -> list[Column]:
        """The columns that are used."""
        return [column for column in self.columns if column.kind != LEFT_OUT]

    def names(self) -> list[str]:
        """Names of the D encoded features."""
        return [name for column in self.used for name in column.names()]

    def encode(self, table: Table) -> npt.NDArray[np.float32]:
        """Rows as standardized numbers ``[N, D]``; columns are found by name, in any order."""
        check_columns(table, [column.name for column in self.used])
        blocks = [_encoded(c, table.columns[c.name], table.mark) for c in self.used]
        standard = (np.concatenate(blocks, axis=1) - self.mean) / self.std
        with np.errstate(over="ignore"):  # a prediction that is not finite is an error
            return standard.astype(np.float32)


def learn_encoder(
    table: Table,
    features: Sequence[str],
    *,
    category: Sequence[str] = (),
    keep: Sequence[str] = (),
    rows: npt.NDArray[np.int64] | slice = slice(None),
) -> Encoder:
    """Learn how to encode these columns; InputError if one cannot be used, or none can.

    All rows decide what a column is, so that messages name the right row; ``rows``, those to train
    on, decide the rest. ``category`` names columns of categories that look like something else,
    ``keep`` columns to use although they look like row numbers or identifiers.
    """
    check_columns(table, [*features, *category, *keep])
    train = table.take(rows)
    columns: list[Column] = []
    for name in features:
        how: Any = {"mark": table.mark, "keep": name in keep}
        column = infer(name, table.columns[name], category=name in category, **how)
        if column.kind != LEFT_OUT:
            how |= {"category": column.kind == CATEGORY, "form": column.form}
            column = infer(name, train.columns[name], **how)
        columns.append(column)
    used = [column for column in columns if column.kind != LEFT_OUT]
    if not used:
        reasons = (
            "; ".join(f"{c.name!r}: {c.reason}" for c in columns) or "There is only the target"
        )
        raise InputError(f"no column is left to predict from. {reasons}.")
    raw = np.concatenate([_encoded(c, train.columns[c.name], table.mark) for c in used], axis=1)
    flag = [c.kind == CATEGORY or k > 0 for c in used for k in range(len(c.names()))]
    std = np.where(flag, np.maximum(raw.std(0), FLAG_STD), raw.std(0))
    notes = tuple(note for c in columns for note in _remarks(c, table))
    return Encoder(tuple(columns), raw.mean(0), np.where(std > 0, std, 1.0), notes)


def infer(
    name: str,
    cells: Cells,
    *,
    category: bool = False,
    keep: bool = False,
    form: str | None = None,
    mark: str = ".",
) -> Column:
    """Decide what a column is, by the rules at the top of this module; with ``form`` no codes."""
    filled = [cell for cell in cells if cell is not None]
    if not filled:
        return Column(name, LEFT_OUT, reason="it has no value in any row")
    if len(set(filled)) == 1 and len(filled) == len(cells):
        return Column(name, LEFT_OUT, reason=f"it is {filled[0]!r} in every row")
    if category or (form is None and _are_codes(filled)):
        return _category(name, filled, len(cells), asked=category)
    values, wrong, decimal = numbers(cells, form if form in _THOUSANDS else None, mark)
    if not wrong.any():
        return _number(name, values, decimal, keep)._replace(unit=_unit(name, cells))
    for dates in _FORMATS if form is None else [form]:
        days = _days(filled, dates)
        if days is None:
            continue
        low, middle, high = np.quantile(days, (0, 0.5, 1)).tolist()
        return Column(name, DATE, (), middle, len(filled) < len(cells), "", dates, low, high)
    if 1 - wrong.sum() / len(filled) >= MOSTLY:
        raise InputError(stray_text(name, cells, wrong, decimal))
    return _category(name, filled, len(cells), asked=False)


def numbers(
    cells: Cells, form: str | None = None, mark: str = "."
) -> tuple[Floats, npt.NDArray[np.bool_], str]:
    """The numbers (nan: missing or none), which cells are not finite numbers, the decimal mark.

    ``form`` is the decimal mark; None: the cells decide, or ``mark``, that of the table, if all
    could be read either way, as 1,234. Cells with another decimal mark are not numbers.
    """
    absent = np.array([c is None for c in cells], dtype=bool)
    values = np.array([_float(c or "") for c in cells])
    if form != "," and not (np.isnan(values) & ~absent).any():  # plain numbers, the usual case
        return values, np.zeros_like(absent), "."
    bare = ["" if c is None else _UNIT.sub("", c) for c in cells]
    commas = any("," in c for c in bare)
    seen = _decimal_mark(bare) or ("," if mark == "," or (form == "," and commas) else ".")
    form = form or (seen if commas else ".")
    if seen == form:
        group = "." if form == "," else ","
        bare = [c.replace(group, "") if _THOUSANDS[form].fullmatch(c) else c for c in bare]
    if form == ",":
        bare = [c.replace(",", ".") if _COMMA.fullmatch(c) else c.replace(".", "?") for c in bare]
    values = np.array([_float(c) for c in bare])
    return values, np.isnan(values) & ~absent, form


def _unit(name: str, cells: Cells, unit: str | None = None) -> str:
    """The unit of all cells; InputError if they have several, or another one than ``unit``."""
    for row, cell in enumerate(cells):
        found = "".join(_UNIT.findall(cell or ""))
        found = _CURRENCIES.get(found, found)
        unit = found if unit is None and cell is not None else unit
        if cell is not None and found != unit:
            raise InputError(
                f"column {name!r} has {unit or 'no unit'}, in training or in other rows, but row "
                f"{row + 1} is {cell!r}. Write all numbers in one unit"
            )
    return unit or ""


def _decimal_mark(bare: Sequence[str]) -> str | None:
    """The decimal mark of a cell that can be read in one way only; None if there is none."""
    for mark, group in (".,", ",."):
        sure = (c for c in bare if mark in c and not _THOUSANDS[group].fullmatch(c))
        if any(not math.isnan(_float(c.replace(group, "").replace(mark, "."))) for c in sure):
            return mark
    return None


def stray_text(name: str, cells: Cells, wrong: npt.NDArray[np.bool_], form: str) -> str:
    """The message about text in a column of numbers: the cells, their rows, and what to do."""
    first = cells[wrong][:1]
    if not numbers(first)[1].any():
        marks = "commas" if form == "," else "points"
        return (
            f"column {name!r} has decimal {marks}, in training or in other rows, but {first[0]!r} "
            f"in row {int(wrong.argmax()) + 1} has not. Write all numbers in one way"
        )
    return (
        f"column {name!r} holds numbers, but {examples(cells, wrong)}. Correct it; if it means 'no "
        f"value', say so with --missing {cells[wrong][0]!r}; if the column holds categories, with "
        f"`fsmap fit --category {name}`"
    )


def examples(cells: Cells, wrong: npt.NDArray[np.bool_]) -> str:
    """A clause on the first cells that are not numbers, with their rows."""
    rows = np.flatnonzero(wrong)
    shown = ", ".join(f"{cells[row]!r} in row {row + 1}" for row in rows[:3])
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    verb = "is not a finite number" if len(rows) == 1 else "are not finite numbers"
    return f"{shown}{more} {verb}"


def check_columns(table: Table, wanted: Sequence[str]) -> None:
    """Raise InputError if a table lacks a column, with the closest name that there is."""
    lacking = [name for name in wanted if name not in table.columns]
    if lacking:
        hint = did_you_mean(lacking[0], table.columns)
        named, there = (", ".join(map(repr, names)) for names in (lacking, table.columns))
        raise InputError(f"there is no column {named}.{hint} The columns are: {there}.")


def _float(cell: str) -> float:
    try:
        value = float(cell) if cell.isascii() and "_" not in cell else math.nan
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _are_codes(cells: Sequence[str]) -> bool:
    """Digits of one length, some with a leading zero: postal codes and their like."""
    one_length = len({len(cell) for cell in cells}) == 1 and all(map(str.isdigit, cells))
    return one_length and len(cells[0]) > 1 and any(cell[0] == "0" for cell in cells)


def _days(cells: Sequence[str], form: str) -> list[float] | None:
    """Days since 1970; None if a cell is no date of this form."""
    try:
        return [_parse_date(cell, form)[0] for cell in cells]
    except ValueError:
        return None


def _parse_date(cell: str, form: str) -> tuple[float, datetime.datetime]:
    """Days since 1970, and the date with its time."""
    words, place = re.sub(r"(?<=\d)T(?=\d)", " ", cell).split(), form.count(" ") + 1
    day = datetime.datetime.strptime(" ".join(words[:place]), form)  # noqa: DTZ007
    if words[place:]:
        day = datetime.datetime.combine(day, _clock(" ".join(words[place:])))
    return (day - datetime.datetime(1970, 1, 1)) / datetime.timedelta(days=1), day  # noqa: DTZ001


def _known(name: str, values: Floats) -> Floats:
    """The numbers that are there; InputError if one is too large to be standardized."""
    known = values[~np.isnan(values)]
    if (np.abs(known) > LARGEST).any():
        raise InputError(f"column {name!r} has numbers beyond {LARGEST:g}: rescale it or --drop it")
    return known


def _clock(text: str) -> datetime.time:
    """A time of day, such as 09:05, 9:05:00 or 9:05 PM."""
    if text[-1] in "mM":
        form = "%I:%M:%S %p" if text.count(":") == 2 else "%I:%M %p"
        return datetime.datetime.strptime(text, form).time()  # noqa: DTZ007
    return datetime.time.fromisoformat("0" * (text[1:2] == ":") + text).replace(tzinfo=None)


def _number(name: str, values: Floats, form: str, keep: bool) -> Column:
    known = _known(name, values)
    missing = len(known) < len(values)
    whole = bool((known == np.round(known)).all())
    counts = len(values) > 2 and (np.diff(values) == 1).all() and values[0] in (0, 1)
    unique = whole and len(np.unique(known)) == len(known) > MANY
    if not keep and (counts or (unique and _ID.search(name))):
        reason = "it counts the rows" if counts else "an identifier: its name, no number twice"
        return Column(name, LEFT_OUT, reason=f"{reason} (to use it: --keep {name})")
    low, fill, high = (float(f(known)) for f in (np.min, np.median, np.max))
    return Column(name, NUMBER, fill=fill, missing=missing, form=form, low=low, high=high)


def _category(name: str, filled: list[str], rows: int, *, asked: bool) -> Column:
    counts = Counter(filled)
    if len(counts) > max(MANY, len(filled) / 2) and not asked:
        reason = f"{len(counts)} different texts in {len(filled)} rows, such as {filled[0]!r}: an "
        reason += "identifier, free text, or numbers or dates in a form that is not read"
        return Column(name, LEFT_OUT, reason=reason)
    ranked = sorted(counts, key=lambda level: (-counts[level], level))
    levels = tuple(level for level in ranked[:MAX_LEVELS] if counts[level] >= MIN_COUNT)
    if not levels:
        return Column(name, LEFT_OUT, reason="no category occurs twice")
    return Column(name, CATEGORY, levels, missing=len(filled) < rows)


def _remarks(column: Column, table: Table) -> Iterable[str]:
    """Remarks about a column that may surprise a user."""
    name, cells = repr(column.name), table.columns[column.name]
    if column.kind == LEFT_OUT:
        yield f"column {name} is left out: {column.reason}"
    if column.kind == DATE:
        yield f"column {name} holds dates ({column.form}): days, season, weekday and hour are used"
        swapped = column.form.replace("%m/%d", "%d/%m")
        if swapped != column.form and _days([c for c in cells if c is not None], swapped):
            yield f"column {name} may also hold {swapped}. If it does, write dates as 2021-12-31"
    if column.kind == CATEGORY and _are_codes(column.levels):
        yield f"column {name} has codes with leading zeros: categories"
    if column.kind == NUMBER:
        if found := _example(cells, numbers(cells, column.form, table.mark)[0]):
            yield f"column {name} is read as numbers: {found}"


def _example(cells: Cells, values: Floats) -> str:
    """A clause on the first cell that is not written as a plain number; "" if there is none."""
    odd = (k for k, c in enumerate(cells) if c is not None and math.isnan(_float(c)))
    return next((f"{cells[k]!r} is {values[k]:g}" for k in odd), "")


def _encoded(column: Column, cells: Cells, mark: str) -> Floats:
    if column.kind == CATEGORY:
        return _categories(column, cells)
    block = _dates(column, cells) if column.kind == DATE else _numbers(column, cells, mark)
    absent = np.array([cell is None for cell in cells], dtype=bool)
    known, low, high = block[~absent, 0], column.low, column.high
    room = FAR * (high - low)
    far = known[(known < low - room) | (known > high + room)]
    if len(far) and high > low:
        _warn(
            f"column {column.name!r} was between {column.shown(low)} and {column.shown(high)} in "
            f"training and is {column.shown(far[0])} here (far outside in {len(far)} rows)"
        )
    if column.missing:
        return np.concatenate([block, absent[:, None].astype(np.float64)], axis=1)
    if absent.any():
        _warn(
            f"column {column.name!r} had no missing values in training and has "
            f"{int(absent.sum())} here: {column.shown(column.fill)} stands in for them"
        )
    return block


def _numbers(column: Column, cells: Cells, mark: str) -> Floats:
    values, wrong, _ = numbers(cells, column.form, mark)
    if wrong.any():
        raise InputError(stray_text(column.name, cells, wrong, column.form))
    if column.unit is not None:
        _unit(column.name, cells, column.unit)
    return np.where(np.isnan(values), column.fill, values)[:, None]


def _dates(column: Column, cells: Cells) -> Floats:
    rows = []
    for row, cell in enumerate(cells):
        if cell is None:
            rows.append([column.fill] + [0.0] * 6)
            continue
        try:
            days, when = _parse_date(cell, column.form)
        except ValueError as error:
            raise InputError(
                f"column {column.name!r} held dates ({column.form}), but row {row + 1} is {cell!r}"
            ) from error
        turns = [when.timetuple().tm_yday / 365.25, when.weekday() / 7, days % 1]
        waves = [f(2 * math.pi * t) for t in turns for f in (math.cos, math.sin)]
        rows.append([days, *waves])
    return np.array(rows)


def _categories(column: Column, cells: Cells) -> Floats:
    place = {level: k for k, level in enumerate(column.all_levels())}
    named = [ABSENT if cell is None else cell for cell in cells]
    unseen = [level for level in named if level not in place]
    if unseen:
        shown = ", ".join(map(repr, list(dict.fromkeys(unseen))[:3]))
        _warn(
            f"column {column.name!r} has values that were rare or not there in training ({shown}; "
            f"in {len(unseen)} rows). They count as 'other': none of the known ones"
        )
    code = np.array([place.get(level, -1) for level in named])  # -1: other
    return np.asarray(code[:, None] == np.arange(len(place)), dtype=np.float64)


def _warn(message: str) -> None:
    warnings.warn(message, UnseenWarning, stacklevel=5)


class Target(NamedTuple):
    """The target column: task, classes and scale."""

    name: str
    task: str  # "regression" or "classification"
    why: str = ""  # how that was decided, in words
    classes: tuple[str, ...] = ()  # in the order of their labels
    mean: float = 0.0  # of the numbers in the training rows
    std: float = 1.0  # of the same
    form: str = "."  # the decimal mark

    def standardized(self, rows: Floats) -> Target:
        """The same target with mean and standard deviation of these values."""
        return self._replace(mean=float(rows.mean()), std=float(rows.std()) or 1.0)

    def unscaled(self, out: Tensor) -> Floats:
        """Standardized targets ``[N, 1]`` as numbers in their own unit, ``[N]``."""
        return np.asarray(self.mean + self.std * out[:, 0].double().numpy(), dtype=np.float64)

    def values(self, table: Table) -> Floats:
        """The target column as numbers."""
        return numbers(table.columns[self.name], self.form, table.mark)[0]

    def labels(self, table: Table) -> npt.NDArray[Any]:
        """The column as a likelihood takes it: standardized ``[N, 1]``, or labels ``[N]``."""
        if self.task == REGRESSION:
            return ((self.values(table) - self.mean) / self.std).astype(np.float32)[:, None]
        place = {name: k for k, name in enumerate(self.classes)}
        return np.array([place[cell] for cell in table.columns[self.name]], dtype=np.int64)


def with_target(table: Table, name: str) -> Table:
    """The rows that have a target (NA is one among text); how many have none becomes a note."""
    check_columns(table, [name])
    cells = table.columns[name]
    count = Counter(cell for cell in cells if cell is not None and cell.lower() in MISSING)
    known = np.array([cell is not None and cell not in count for cell in cells])
    if count and known.any() and numbers(cells[known])[1].mean() > 1 - MOSTLY:
        told = ", ".join(f"{cell!r} in {rows} rows" for cell, rows in count.items())
        note = f"{told} of {name!r}: a class. If it means 'no value': --missing {next(iter(count))}"
        table = table._replace(notes=(*table.notes, note))
        known = np.array([cell is not None for cell in cells])
    if known.all():
        return table
    if not known.any():
        raise InputError(f"the target {name!r} has no value in any row. Choose another column.")
    note = f"{int((~known).sum())} of {len(known)} rows have no value of {name!r}: left out"
    kept = table.take(np.flatnonzero(known))
    return kept._replace(notes=(*kept.notes, note))


def find_target(table: Table, name: str, task: str = "auto") -> Target:
    """Decide what the task is: text or two distinct numbers are classes, other numbers are not."""
    cells = table.columns[name]
    distinct, first = set(cells), cells[0]
    if len(distinct) == 1:
        raise InputError(f"the target {name!r} is {first!r} in every row. Choose another column.")
    values, wrong, form = numbers(cells, None, table.mark)
    why = "as --task says"
    if task == "auto":
        task, why = REGRESSION, f"{len(distinct)} distinct numbers"
        if 1 - wrong.sum() / len(values) < MOSTLY:
            task, why = CLASSIFICATION, f"text with {len(distinct)} distinct values"
        elif len(distinct) == 2 and not wrong.any():
            task, why = CLASSIFICATION, "two distinct numbers"
        elif len(distinct) <= FEW_NUMBERS and (values == np.round(values)).all():
            why = f"{len(distinct)} distinct whole numbers"
            why += "; if these are classes: --task classification"
    if task == CLASSIFICATION:
        if len(distinct) > MANY_CLASSES:
            raise InputError(f"{name!r} has more than {MANY_CLASSES} classes: merge some of them")
        plain = not any(math.isnan(_float(cell)) for cell in distinct)
        return Target(name, task, why, tuple(sorted(distinct, key=float if plain else None)))
    if wrong.any():
        raise InputError(
            f"the target of a regression is a number, and {examples(cells, wrong)} in column "
            f"{name!r}. Correct it, or: --missing {cells[wrong][0]!r}, --task classification"
        )
    _unit(name, cells)
    why = "; ".join(filter(None, (why, _example(cells, values))))
    return Target(name, task, why, form=form).standardized(_known(name, values))
