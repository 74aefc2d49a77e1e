"""From rows to numbers people compare: mean ± standard error, ours beside the paper's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fsmap.paper.report.records import Row

Table = list[dict[str, Any]]

ROW_FIELDS = ("experiment", "metric", "method", "seed", "device")


class Mean(NamedTuple):
    """A mean and its standard error; the latter is nan for a single value."""

    mean: float
    stderr: float
    n: int


class Line(NamedTuple):
    """Means over seeds along what varies, ready to be drawn."""

    x: list[float]
    mean: list[float]
    stderr: list[float]


def field(row: Row, name: str) -> Any:
    """A field of a row, or an entry of its config.

    Args:
        row: The row.
        name: ``"method"``, ``"seed"``, ``"n_train"`` …

    Returns:
        Its value, or None where the row has no such entry.
    """
    return getattr(row, name) if name in ROW_FIELDS else row.config.get(name)


def select(rows: Iterable[Row], **where: Any) -> list[Row]:
    """Rows that agree with all of ``where``.

    Args:
        rows: Any rows.
        **where: Fields or entries of ``config``; a tuple, list or set means any of these.

    Returns:
        The rows, in order.

    Examples:
        >>> rows = [Row("fourier", "rmse", 0.1, "fs-map", 0, {"n_train": n}) for n in (100, 200)]
        >>> [row.config["n_train"] for row in select(rows, metric="rmse", n_train=200)]
        [200]
    """

    def agrees(row: Row) -> bool:
        for name, wanted in where.items():
            found = field(row, name)
            several = isinstance(wanted, tuple | list | set | frozenset)
            if found not in wanted if several else found != wanted:
                return False
        return True

    return [row for row in rows if agrees(row)]


def group(rows: Iterable[Row], *by: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by what they have in common.

    Args:
        rows: Any rows.
        *by: Fields or entries of ``config``.

    Returns:
        Lists of rows by the values of ``by``, in order of first appearance.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(field(row, name) for name in by), []).append(row)
    return groups


def mean(values: Iterable[float]) -> Mean:
    """Mean and standard error, s/√n with s the sample standard deviation.

    Args:
        values: Numbers.

    Returns:
        Both, and how many there were. No values: nan; one value: the standard error is nan.

    Examples:
        >>> mean([1.0, 2.0, 3.0])
        Mean(mean=2.0, stderr=0.5773502691896258, n=3)
    """
    numbers = [float(value) for value in values]
    if not numbers:
        return Mean(math.nan, math.nan, 0)
    if not all(map(math.isfinite, numbers)):
        return Mean(sum(numbers) / len(numbers), math.nan, len(numbers))
    centre = statistics.fmean(numbers)
    if len(numbers) == 1:
        return Mean(centre, math.nan, 1)
    return Mean(centre, statistics.stdev(numbers) / math.sqrt(len(numbers)), len(numbers))


def line(rows: Iterable[Row], x: str) -> Line:
    """Means over everything but ``x``, sorted by it.

    Args:
        rows: Rows of one metric and one method.
        x: What varies along the line.

    Returns:
        Abscissae, means and standard errors.
    """
    groups = sorted(group(rows, x).items(), key=lambda item: item[0][0])
    means = [mean(row.value for row in members) for _, members in groups]
    return Line([key[0] for key, _ in groups], [m.mean for m in means], [m.stderr for m in means])


def summarize(rows: Iterable[Row], *by: str, paper: Mapping[Any, Any] | None = None) -> Table:
    """Mean ± standard error of each group, with the paper's value beside it.

    Args:
        rows: Rows with scalar values.
        *by: What tells the lines of the table apart, such as ``"n_train", "method", "metric"``.
        paper: Printed values by the values of ``by`` (a tuple; a bare value for a single one): a
            number, or ``(number, standard error)``.

    Returns:
        One dict per group: ``by``, ``ours``, ``stderr``, ``runs``, ``paper``, ``paper_stderr``.
    """
    table = []
    for key, members in group(rows, *by).items():
        ours = mean(row.value for row in members)
        entry = dict(zip(by, key, strict=True))
        entry.update(ours=ours.mean, stderr=ours.stderr, runs=ours.n)
        if paper is not None:
            printed = paper.get(key[0] if len(key) == 1 else key)
            pair = printed if isinstance(printed, tuple | list) else (printed, None)
            entry.update(paper=pair[0], paper_stderr=pair[1])
        table.append(entry)
    return table


def columns(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """All keys of a table, in order of first appearance.

    Args:
        table: Dicts that need not have the same keys.

    Returns:
        The keys.
    """
    return list(dict.fromkeys(key for entry in table for key in entry))
