"""Numbers, lists and tables in plain text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable

WIDTH = 98


def columns(rows: list[list[str]]) -> list[str]:
    """Cells below each other, indented."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        ("     " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def wrap(text: str, indent: str, first: str | None = None) -> list[str]:
    """Lines of at most ``WIDTH`` columns; a no-break space holds words together."""
    start = indent if first is None else first
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False
    )
    return [line.replace("\xa0", " ") for line in lines]


def listed(items: Iterable[int]) -> str:
    """Numbers, cut where they are many."""
    names = [str(item) for item in items]
    return ", ".join(names) if len(names) <= 8 else ", ".join(names[:7]) + f", … ({len(names)})"


def plural(number: int, word: str) -> str:
    """The word, with an s unless there is one."""
    return word if number == 1 else word + "s"


def number(value: float | None, form: str) -> str:
    """A number, or a dash."""
    return "–" if value is None else format(value, form)


def percent(value: float) -> str:
    """A relative error."""
    if math.isinf(value) or value >= 10:
        return "> 10×"
    return f"{100 * value:.2g} %"


def count(number: int) -> str:
    """Digits in groups of three."""
    return f"{number:,}"


def seconds(value: float) -> str:
    """A duration, for people."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return (
        f"{value:.1f} s"
        if value < 100
        else f"{value / 60:.0f} min"
        if value < 6000
        else f"{value / 3600:.0f} h"
    )


def size(number: int) -> str:
    """Bytes, for people."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number} B"
