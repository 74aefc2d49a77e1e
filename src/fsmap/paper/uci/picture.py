"""The picture of ``uci-table``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fsmap.paper.report import figures
from fsmap.paper.report.records import Row
from fsmap.paper.uci.protocol import PAPER
from fsmap.paper.uci.verdict import DIFFERENCE, METHODS, PRINTED, Cell, cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(rows: Sequence[Row]) -> dict[str, Figure]:
    """Errors beside the paper's, and the paired differences of the fair protocol.

    Args:
        rows: Rows of a run.

    Returns:
        One figure with two panels.
    """
    table = cells(rows)
    figure, (left, right) = figures.axes(2, panel=(5.2, 3.2))
    names = list(dict.fromkeys(c.dataset for c in table))
    for cell in table:
        if cell.protocol == PAPER:
            _draw_cell(left, names.index(cell.dataset), cell)
        elif cell.method == DIFFERENCE:
            _draw_difference(right, names.index(cell.dataset), cell)
    left.set(title="Test RMSE against the paper's", ylabel="RMSE / paper's PS-MAP")
    left.axhline(1.0, color=figures.COLORS["data"], linewidth=0.8, linestyle=":")
    right.axhline(0.0, color=figures.COLORS["data"], linewidth=0.8, linestyle=":")
    right.set(title="L-MAP − PS-MAP, fair protocol, paired", ylabel="difference / standard error")
    for ax in (left, right):
        ax.set_xticks(range(len(names)), names, rotation=35, ha="right")
    looks = [_look(method, filled) for method in METHODS for filled in (True, False)]
    handles = [left.plot([], [], **look)[0] for look in looks]
    words = ["PS-MAP", "PS-MAP, paper", "L-MAP", "L-MAP, paper"]
    figure.legend(handles, words, ncols=4, loc="outside upper center")
    return {"uci-table": figure}


def _look(method: str, filled: bool) -> dict[str, Any]:
    look = figures.method_style(method, linestyle="", label=None)
    if filled:
        return look
    return {**look, "markerfacecolor": "none", "markeredgecolor": look["color"], "mew": 0.9}


def _draw_cell(ax: Any, place: int, cell: Cell) -> None:
    """Ours and the paper's, as multiples of the paper's PS-MAP."""
    if cell.printed is None:
        return
    unit = PRINTED[cell.dataset][0][0]
    shift = -0.18 if cell.method == "ps-map" else 0.12
    pairs = ((cell.mean.mean, cell.mean.stderr, True), (*cell.printed, False))
    for offset, (value, spread, filled) in zip((0.0, 0.1), pairs, strict=True):
        bar = None if math.isnan(spread) else spread / unit
        look = _look(cell.method, filled)
        ax.errorbar(place + shift + offset, value / unit, yerr=bar, elinewidth=0.9, **look)


def _draw_difference(ax: Any, place: int, cell: Cell) -> None:
    mean = cell.mean
    if mean.n > 1 and mean.stderr > 0:
        winner = "l-map" if mean.mean < 0 else "ps-map"
        ax.bar(place, mean.mean / mean.stderr, width=0.6, color=figures.COLORS[winner])
