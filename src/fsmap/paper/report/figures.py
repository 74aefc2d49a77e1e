"""Figures: the shared style, lines with errors, sliders, and pictures of image classifiers."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fsmap.files import write_whole
from fsmap.paper.report.tables import word

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fsmap.assess.landscape import Landscape
    from fsmap.assess.shift import Assessment


class Curve(NamedTuple):
    """One line (or set of points) of a frame, drawn by the page with hover values."""

    name: str  # text of the legend
    x: Sequence[float]  # abscissae
    y: Sequence[float]  # ordinates, as many
    method: str | None = None  # "ps-map", "fs-map", "l-map" for that method's color; None for ink
    style: str = "line"  # "line", "dashed", "dotted" or "points"


class Frame(NamedTuple):
    """The curves at one position of the slider."""

    label: str  # text of the slider there, such as "ε = 0.01"
    curves: Sequence[Curve]  # lines on axes shared by all frames
    note: str = ""  # one line below, such as the distances at this position


class Interactive(NamedTuple):
    """A slider and its frames."""

    title: str  # what is moved and what to watch
    parameter: str  # name of what the slider moves, such as "ε"
    frames: Sequence[Frame]  # in the order of the slider
    xlabel: str
    ylabel: str
    start: int = 0  # index of the frame that is shown first


INK, MUTED, GRID, PAPER = "#24292f", "#6b7280", "#d8dce2", "#fffffe"
"""Colors of text, axes, grid and background; the page replaces them on a dark background."""

BLACK, WHITE = "#101010", "#fefefe"  # the same on every background: for marks on an image

COLORS = {
    "ps-map": "#1f5fae",
    "fs-map": "#d0312d",
    "l-map": "#c98200",
    "bma": "#5f6b2f",
    "truth": INK,
    "data": MUTED,
}
"""Color by method, red and blue as in the paper; ``bma`` is the Bayesian model average, ``truth``
what made the data. Methods differ in lightness, marker and line as well."""

DARK = {
    INK: "#e6e8eb",
    MUTED: "#9aa3af",
    GRID: "#353b44",
    PAPER: "#15181c",
    COLORS["ps-map"]: "#6aa9f5",
    COLORS["fs-map"]: "#ff7468",
    COLORS["l-map"]: "#f2c14e",
    COLORS["bma"]: "#b5c46a",
}
"""Replacement of each color on a dark page."""

MARKERS = {"ps-map": "o", "fs-map": "s", "l-map": "^", "bma": "D"}
DASHES: dict[str, Any] = {"ps-map": (0, (5, 2)), "fs-map": "-", "l-map": (0, (6, 1.5, 1.5, 1.5))}

_CYCLE = [COLORS[name] for name in ("fs-map", "ps-map", "l-map", "bma", "data")]

STYLE: dict[str, Any] = {
    "font.family": ["STIXGeneral", "DejaVu Sans"],
    "mathtext.fontset": "stix",
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 11),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 10),
    **dict.fromkeys(("text.color", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.7),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **{"legend.facecolor": PAPER, "legend.edgecolor": "none", "legend.framealpha": 1.0},
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "axes.prop_cycle": f"cycler('color', {_CYCLE})",
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "lines.markeredgewidth": 0.0,
    "image.cmap": "cividis",
    "svg.fonttype": "path",
    "svg.hashsalt": "fsmap",  # the same rows give the same file
}


def style() -> AbstractContextManager[None]:
    """The shared style, for as long as the context lasts. ``draw`` is always called inside it."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def axes(
    columns: int = 1, rows: int = 1, *, panel: tuple[float, float] = (3.3, 2.5), **subplots: Any
) -> tuple[Figure, Any]:
    """A figure of panels of one size (inches), and its ``Axes`` or an array of several."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(panel[0] * columns, panel[1] * rows), layout="constrained")
        return figure, figure.subplots(rows, columns, **subplots)


def method_style(method: str, **changes: Any) -> dict[str, Any]:
    """Color, line, marker and label of a method: ``ax.plot(x, y, **method_style("fs-map"))``."""
    look = {"color": COLORS[method], "marker": MARKERS[method], "label": word(method)}
    return {"linestyle": DASHES.get(method, "-"), **look, **changes}


def plot_mean(
    ax: Axes,
    x: Sequence[float],
    mean: Sequence[float],
    stderr: Sequence[float],
    method: str | None = None,
    **changes: Any,
) -> None:
    """A line with a band of one standard error (nan: no band); ``changes`` go to ``plot``."""
    look = changes if method is None else method_style(method, **changes)
    low = [m - s for m, s in zip(mean, stderr, strict=True)]
    high = [m + s for m, s in zip(mean, stderr, strict=True)]
    ax.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    ax.plot(x, mean, **look)


def to_svg(figure: Figure) -> str:
    """A figure as SVG text: transparent, and the same for the same values."""
    from matplotlib.collections import QuadMesh

    for mesh in figure.findobj(QuadMesh):  # thousands of cells: an image is smaller and sharper
        mesh.set_rasterized(True)
    with style():
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", dpi=160, metadata={"Date": None, "Creator": None})
        return buffer.getvalue()


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write ``name.svg`` and ``name.png`` (on white) to a folder, each in one piece."""
    write_whole(folder / f"{name}.svg", to_svg(figure))
    with style():
        buffer, about = io.BytesIO(), {"Software": None}
        figure.savefig(buffer, format="png", dpi=160, facecolor="white", metadata=about)
    write_whole(folder / f"{name}.png", buffer.getvalue())


LINES: tuple[dict[str, Any], ...] = (
    {"linestyle": "-", "marker": "s"},
    {"linestyle": (0, (4, 2)), "marker": "D"},
    {"linestyle": (0, (1, 1.5)), "marker": "v"},
)
"""Looks of one method at several jitters."""

GUIDE: dict[str, Any] = {"color": COLORS["data"], "linewidth": 0.8, "linestyle": ":"}
"""Look of a line that marks a value."""

PAPER_LOOK: dict[str, Any] = {
    **{"linestyle": (0, (1, 1.5)), "marker": "", "color": INK, "label": "FS-MAP, paper's jitter"}
}
"""Look of FS-MAP by the paper's numerical protocol: on top of the true objective's line."""


def power(jitter: float) -> str:
    r"""A jitter in the notation of a figure, such as ``$\epsilon = 10^{-12}$``."""
    return rf"$\epsilon = 10^{{{round(math.log10(jitter))}}}$"


def log_scale(ax: Axes, which: str = "xy") -> None:
    """Logarithmic axes with plain numbers as ticks. Call it after plotting: the range decides."""
    from matplotlib import ticker

    for name, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
        if name in which:
            ax.set(**{f"{name}scale": "log"})
            low, high = axis.get_view_interval()
            subs = (1.0, 2.0, 5.0) if math.log10(high / low) < 2.6 else (1.0,)
            axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
            axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
            axis.set_minor_locator(ticker.NullLocator())


def legend_above(figure: Figure, ax: Axes) -> None:
    """One legend for the whole figure, above it."""
    number = len(set(ax.get_legend_handles_labels()[1]))
    legend_once(ax, figure, loc="outside upper center", ncols=min(4, number))


def legend_once(ax: Axes, target: Figure | Axes | None = None, **options: Any) -> None:
    """A legend, of the axes or of another target, that names each label once."""
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    (target or ax).legend(list(unique.values()), list(unique), **options)


RELIABILITY = {
    "as trained": {"color": COLORS["fs-map"], "marker": "o"},
    "scaled": {"color": COLORS["l-map"], "marker": "^", "linestyle": "--"},
}


def assessment_figure(found: Assessment) -> Figure:
    """Reliability before and after temperature scaling, and selective accuracy."""
    figure, (left, right) = axes(2, panel=(3.8, 3.0))
    left.axline((0, 0), (1, 1), color=MUTED, linewidth=0.8)
    for name, table in found.reliability.items():
        full = table.count > 0
        words = name if name != "scaled" else f"after T = {found.temperature:.2f}"
        left.plot(table.confidence[full], table.accuracy[full], label=words, **RELIABILITY[name])
    left.set(title="Reliability", xlabel="confidence", ylabel="accuracy")
    left.legend()
    curve = found.selective
    right.plot(100 * curve.coverage, 100 * curve.accuracy, color=COLORS["fs-map"])
    right.set(title="Selective prediction", xlabel="most confident, %", ylabel="accuracy, %")
    return figure


def landscape_figure(found: Mapping[str, Landscape]) -> Figure:
    """Training loss along random directions: mean, and the middle two thirds."""
    figure, ax = axes(panel=(4.6, 3.2))
    for name, one in found.items():
        low, high = (one.loss.quantile(q, dim=0) for q in (1 / 6, 5 / 6))
        (line,) = ax.plot(one.steps, one.mean, label=name)
        ax.fill_between(one.steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    ax.set(xlabel="step, filter norms", ylabel="training loss")
    ax.set_yscale("symlog", linthresh=1.0)
    ax.legend()
    return figure
