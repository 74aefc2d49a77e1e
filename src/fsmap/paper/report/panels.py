"""Small pieces of drawing that several figures share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fsmap.errors import require
from fsmap.paper.report.figures import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

LINES: tuple[dict[str, Any], ...] = (
    {"linestyle": "-", "marker": "s"},
    {"linestyle": (0, (4, 2)), "marker": "D"},
    {"linestyle": (0, (1, 1.5)), "marker": "v"},
)
"""Looks of one method at several jitters."""

PAPER_LOOK: dict[str, Any] = {
    "linestyle": (0, (1, 1.5)),
    "marker": "",
    "color": INK,
    "label": "FS-MAP, paper's jitter",
}
"""Look of FS-MAP by the paper's numerical protocol: on top of the true objective's line."""


def epsilon(jitter: float) -> str:
    """A jitter as text, such as ``ε = 1e−12``.

    Args:
        jitter: ε.

    Returns:
        The text.
    """
    return f"ε = {jitter:.0e}".replace("e-0", "e-").replace("-", "\u2212")


def power(jitter: float) -> str:
    r"""A jitter in the notation of a figure, such as ``$\epsilon = 10^{-12}$``.

    Args:
        jitter: ε, a power of ten.

    Returns:
        The text.
    """
    return rf"$\epsilon = 10^{{{round(math.log10(jitter))}}}$"


def log_scale(ax: Axes, which: str = "xy") -> None:
    """Logarithmic axes with plain numbers: at 1, 2 and 5, or at powers of ten where there are many.

    Call it after plotting: the range decides.

    Args:
        ax: The axes.
        which: ``"x"``, ``"y"`` or both.
    """
    for name, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
        if name in which:
            ax.set(**{f"{name}scale": "log"})
            low, high = axis.get_view_interval()
            _plain_numbers(axis, few=math.log10(high / low) < 2.6)


def _plain_numbers(axis: Axis, *, few: bool) -> None:
    ticker = require("matplotlib.ticker", extra="report")
    subs = (1.0, 2.0, 5.0) if few else (1.0,)
    axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_locator(ticker.NullLocator())


def legend_above(figure: Figure, ax: Axes, columns: int = 4) -> None:
    """One legend for the whole figure, above it.

    Args:
        figure: The figure.
        ax: Where the labels are taken from.
        columns: Entries beside each other.
    """
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(
        unique.values(), unique.keys(), loc="outside upper center", ncols=min(columns, len(unique))
    )
