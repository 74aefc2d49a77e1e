"""One style for every figure: sizes, fonts, a color and a marker per method; files in PNG and SVG.

Figures are made without pyplot, and the style is a context, so matplotlib's global state stays as
it was. Every color of the style has a dark twin: the page replaces one by the other.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.errors import require
from fsmap.files import write_whole
from fsmap.report.hover import embed
from fsmap.report.numbers import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#24292f", "#6b7280", "#d8dce2", "#fffffe"
"""Colors of text, axes, grid and background; the page replaces them on a dark background."""

BLACK, WHITE = "#101010", "#fefefe"
"""The same on every background: for marks that lie on an image."""

COLORS = {
    "ps-map": "#c8552d",
    "fs-map": "#2468b2",
    "l-map": "#17806b",
    "bma": "#7a4fa3",
    "truth": INK,
    "data": MUTED,
}
"""Color by method; ``bma`` is the Bayesian model average, ``truth`` what made the data."""

DARK = {
    INK: "#e6e8eb",
    MUTED: "#9aa3af",
    GRID: "#353b44",
    PAPER: "#15181c",
    COLORS["ps-map"]: "#f0895f",
    COLORS["fs-map"]: "#6cb0f5",
    COLORS["l-map"]: "#4fc9ab",
    COLORS["bma"]: "#bd93e8",
}
"""What stands for each color on a dark page."""

NAMES = {"ps-map": "PS-MAP", "fs-map": "FS-MAP", "l-map": "L-MAP", "bma": "BMA"}
MARKERS = {"ps-map": "o", "fs-map": "s", "l-map": "^", "bma": "D"}

_CYCLE = "cycler('color', [{}])".format(
    ", ".join(f"'{COLORS[name]}'" for name in ("fs-map", "ps-map", "l-map", "bma", "data"))
)

PANEL = (3.3, 2.5)
"""Width and height of one panel in inches."""

STYLE: dict[str, Any] = {
    "font.family": ["STIXGeneral", "DejaVu Sans"],
    "mathtext.fontset": "stix",
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "axes.prop_cycle": _CYCLE,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "lines.markeredgewidth": 0.0,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "image.cmap": "cividis",
    "svg.fonttype": "path",
    "svg.hashsalt": "fsmap",  # the same rows give the same file
}


@contextmanager
def style() -> Iterator[None]:
    """The shared style, for as long as the context lasts. ``draw`` is always called inside it.

    Yields:
        Nothing.
    """
    matplotlib = require("matplotlib", extra="report")
    with matplotlib.rc_context(STYLE):
        yield


def axes(
    columns: int = 1,
    rows: int = 1,
    *,
    panel: tuple[float, float] = PANEL,
    **subplots: Any,
) -> tuple[Figure, Any]:
    """A figure of equal panels.

    Args:
        columns: Panels beside each other.
        rows: Panels below each other.
        panel: Width and height of one panel in inches.
        **subplots: Passed to ``Figure.subplots`` (``sharex``, ``sharey``, ``width_ratios``, …).

    Returns:
        The figure, and one ``Axes`` (a single panel) or an array of them.
    """
    require("matplotlib", extra="report")
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(panel[0] * columns, panel[1] * rows), layout="constrained")
        return figure, figure.subplots(rows, columns, **subplots)


def method_style(method: str, **changes: Any) -> dict[str, Any]:
    """Color, marker and label of a method, for ``ax.plot(x, y, **method_style("fs-map"))``.

    Args:
        method: ``"ps-map"``, ``"fs-map"``, ``"l-map"``, ``"bma"``.
        **changes: What to add or replace.

    Returns:
        Keywords of ``plot``.
    """
    look = {"color": COLORS[method], "marker": MARKERS[method], "label": NAMES[method]}
    return {**look, **changes}


def plot_mean(
    ax: Axes,
    x: Sequence[float],
    mean: Sequence[float],
    stderr: Sequence[float],
    method: str | None = None,
    **changes: Any,
) -> None:
    """A line with a band of one standard error.

    Args:
        ax: Where to draw.
        x: Abscissae.
        mean: Means.
        stderr: Standard errors; nan draws no band.
        method: Decides color, marker and label; None: ``changes`` do.
        **changes: What to add or replace in the line's look.
    """
    look = changes if method is None else method_style(method, **changes)
    low = [m - s for m, s in zip(mean, stderr, strict=True)]
    high = [m + s for m, s in zip(mean, stderr, strict=True)]
    ax.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    ax.plot(x, mean, **look)


def plain_log(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers at 1, 2 and 5 times the powers of ten.

    Args:
        axis: ``ax.xaxis`` or ``ax.yaxis``, after ``ax.set_xscale("log")``.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    narrow = high < 30 * low  # about one and a half decades
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if narrow else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(float(value), 3)))
    axis.set_minor_locator(NullLocator())


def to_svg(figure: Figure) -> str:
    """A figure as SVG text: transparent, deterministic, with the values of its lines for hovering.

    Args:
        figure: The figure.

    Returns:
        The SVG document.
    """
    from matplotlib.collections import QuadMesh

    for mesh in figure.findobj(QuadMesh):  # thousands of cells: an image is smaller and sharper
        mesh.set_rasterized(True)
    with style():
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", dpi=220, metadata={"Date": None, "Creator": None})
        return embed(buffer.getvalue(), figure)


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write ``name.svg`` and ``name.png`` (on white), each in one piece.

    Args:
        figure: The figure.
        folder: Where to; it must exist.
        name: File name without ending.
    """
    write_whole(folder / f"{name}.svg", to_svg(figure))
    with style():
        buffer = io.BytesIO()
        figure.savefig(
            buffer, format="png", dpi=200, facecolor="white", metadata={"Software": None}
        )
    write_whole(folder / f"{name}.png", buffer.getvalue())
