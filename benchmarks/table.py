"""Rows of a run as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
TITLES = {
    "log_det": "log det(J + εI), exact",
    "log_det_by_lanczos": "log det by Lanczos quadrature, any operator",
    "log_det_by_products": "log det by Lanczos quadrature, products only",
    "exact_trace": "Tr J, exact",
    "trace": "Tr J, 16 probes",
}
COLUMNS = (("median", 10), ("quartiles", 16), ("n", 5), ("peak", 9), ("bias", 11), ("std", 10))
HEAD = " " * 34 + "".join(name.rjust(width) for name, width in COLUMNS) + "   ratio"


def title(row: Row) -> str:
    """The line above the ways to do one kind of work in one cell."""
    kind = "value and gradient" if row["gradient"] else "value"
    where = f"{row['network']}: P = {row['P']:,}, S·K = {row['rows']}"
    return f"\n{TITLES[row['work']]}, {kind} — {where}\n{HEAD}"


def line(row: Row) -> str:
    """One way to do it."""
    peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f} MB"
    quartiles = f"{_ms(row['low'])}–{_ms(row['high'])}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
    bias, std = (_small(row[name], row["reference"]) for name in ("bias", "std"))
    return (
        f"  {row['way']:32}{_ms(row['seconds']):>7} ms {quartiles:>15} {row['n']:>4} {peak:>8} "
        f"{bias:>10} {std:>9} {ratio:>7}"
    )


def summary(rows: Iterable[Row]) -> str:
    """Ratios over all cells, and what does not hold."""
    ratios = [row for row in rows if row["ratio"] is not None]
    lines = ["", "Ratio: time of the best of the others over ours, median of pairs of runs.", ""]
    for work in TITLES:
        for gradient in (False, True):
            part = [r["ratio"] for r in ratios if (r["work"], r["gradient"]) == (work, gradient)]
            if part:
                kind = "value and gradient" if gradient else "value"
                mean = statistics.geometric_mean(part)
                lines.append(
                    f"  {work + ', ' + kind:42} {len(part):2} cells: least {min(part):6.2f}, "
                    f"geometric mean {mean:7.2f}"
                )
    if ratios:
        every = [row["ratio"] for row in ratios]
        slow = [row for row in ratios if row["ratio"] < 0.95]
        lines += ["", f"  all {len(every)}: geometric mean {statistics.geometric_mean(every):.2f}"]
        lines += [f"  at least 0.95 in every cell: {'no' if slow else 'yes'}"]
        lines += [
            f"    below: {title(row).strip().splitlines()[0]}: {row['ratio']:.2f}" for row in slow
        ]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _small(value: float | None, reference: float | None) -> str:
    if value is None or reference is None or math.isnan(value):
        return ""
    return "0" if abs(value) <= 1e-12 * abs(reference) else f"{value:.1e}"
