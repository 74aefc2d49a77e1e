"""The column to be predicted: numbers (regression) or classes (classification), and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fsmap.data.columns import MOSTLY, numbers, stray_text, texts
from fsmap.data.encoder import check_columns
from fsmap.data.tables import Table
from fsmap.errors import InputError

REGRESSION, CLASSIFICATION = "regression", "classification"
TASKS = (REGRESSION, CLASSIFICATION)
MANY_CLASSES = 100
FEW_NUMBERS = 10  # so few whole numbers may be classes in disguise, which is worth a remark


class Target(NamedTuple):
    """What the target column is.

    Attributes:
        name: Its name.
        task: ``"regression"`` or ``"classification"``.
        why: How that was decided, in words.
        classes: The classes in order of their label.
        mean: Of the numbers in the training rows.
        std: Of the same.
    """

    name: str
    task: str
    why: str = ""
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0

    @property
    def outputs(self) -> int:
        """K, how many numbers a network for it returns."""
        return len(self.classes) or 1

    def standardized(self, rows: npt.NDArray[np.float64]) -> Target:
        """The same target with mean and standard deviation of these values."""
        return self._replace(mean=float(rows.mean()), std=float(rows.std()) or 1.0)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**self._asdict(), "classes": list(self.classes)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Target:
        """Undo :meth:`to_json`."""
        return cls(**{**values, "classes": tuple(values["classes"])})


def find_target(table: Table, name: str, task: str = "auto") -> Target:
    """Look at the target column and decide what the task is.

    Text is classes. Two distinct numbers are classes. Other numbers are numbers.

    Args:
        table: The table.
        name: The target column.
        task: ``"auto"``, ``"regression"`` or ``"classification"``.

    Returns:
        The target.

    Raises:
        InputError: If there is no such column, or it is constant, has gaps, or does not fit the
            task.
    """
    check_columns(table, [name])
    cells = table.columns[name]
    shown = texts(cells)
    empty = [row + 1 for row, cell in enumerate(shown) if cell is None]
    if len(empty) == len(shown):
        message = f"the target {name!r} has no value in any row. Choose another column."
        raise InputError(message)
    if empty:
        rows = ", ".join(map(str, empty[:5])) + (" …" if len(empty) > 5 else "")
        message = (
            f"the target {name!r} has no value in {len(empty)} of {len(shown)} rows "
            f"(row{'s' if len(empty) > 1 else ''} {rows}). Remove what has no target: nothing can "
            "be learned from it."
        )
        raise InputError(message)
    distinct = Counter(shown)
    if len(distinct) == 1:
        message = (
            f"the target {name!r} is {shown[0]!r} in every row: there is nothing to predict. "
            "Choose another column, or more rows."
        )
        raise InputError(message)
    values, wrong = numbers(cells)
    if task == "auto":
        task, why = _decide(values, int(wrong.sum()), len(distinct))
    else:
        why = "as --task says"
    if task == CLASSIFICATION:
        return Target(name, task, why, _classes(name, distinct))
    if wrong.any():
        hint = stray_text(name, cells, wrong).partition(" Correct")[0]
        message = f"the target of a regression is a number: {hint} Or use --task classification."
        raise InputError(message)
    return Target(name, task, why).standardized(values)


def labels(table: Table, target: Target) -> npt.NDArray[Any]:
    """The target column as what a likelihood takes.

    Args:
        table: A table with the target column, without gaps.
        target: What it is.

    Returns:
        Standardized numbers, float32 ``[N, 1]``, or labels, int64 ``[N]``.

    Raises:
        InputError: If a class is not known, or a number is none.
    """
    cells = table.columns[target.name]
    if target.task == REGRESSION:
        values, _ = numbers(cells)
        if np.isnan(values).any():
            row = int(np.flatnonzero(np.isnan(values))[0])
            message = f"the target {target.name!r} is no number in row {row + 1}"
            raise InputError(message)
        return ((values - target.mean) / target.std).astype(np.float32)[:, None]
    place = {name: k for k, name in enumerate(target.classes)}
    shown = texts(cells)
    strange = [cell for cell in shown if cell not in place]
    if strange:
        message = (
            f"the target {target.name!r} has the class {strange[0]!r}, which was not seen in "
            f"training. The classes are: {', '.join(target.classes)}."
        )
        raise InputError(message)
    return np.array([place[cell] for cell in shown if cell is not None], dtype=np.int64)


def _decide(values: npt.NDArray[np.float64], wrong: int, distinct: int) -> tuple[str, str]:
    if 1 - wrong / len(values) < MOSTLY:
        return CLASSIFICATION, f"text with {distinct} distinct values"
    if wrong:
        return REGRESSION, "numbers"  # with stray text, which is refused by name
    if distinct == 2:
        return CLASSIFICATION, "two distinct numbers"
    if distinct <= FEW_NUMBERS and (values == np.round(values)).all():
        why = f"{distinct} distinct whole numbers; if these are classes: --task classification"
        return REGRESSION, why
    return REGRESSION, f"{distinct} distinct numbers"


def _classes(name: str, distinct: Counter[str | None]) -> tuple[str, ...]:
    found = [level for level in distinct if level is not None]
    if len(found) > MANY_CLASSES:
        message = (
            f"the target {name!r} has {len(found)} distinct values, more classes than the "
            f"{MANY_CLASSES} that fit takes. Is it the right column? For numbers: --task regression"
        )
        raise InputError(message)
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(sorted(found))
