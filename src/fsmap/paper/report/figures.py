"""Figures: the shared style, lines with errors, sliders, and values for hovering."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.sax.saxutils import escape, unescape

import numpy as np

from fsmap.errors import require
from fsmap.paper.rows import plain
from fsmap.train.files import write_whole

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform


class Curve(NamedTuple):
    """One line (or set of points) of a frame, drawn by the page with hover values."""

    name: str  # what the legend says
    x: Sequence[float]  # abscissae
    y: Sequence[float]  # ordinates, as many
    # "ps-map", "fs-map", "l-map" for that method's color; None for ink
    method: str | None = None
    style: str = "line"  # "line", "dashed" or "points"


class Frame(NamedTuple):
    """What is seen at one position of the slider: curves, or a matplotlib figure."""

    label: str  # what the slider says there, such as "ε = 0.01"
    curves: Sequence[Curve] = ()  # lines on axes shared by all frames
    figure: Figure | None = None  # A matplotlib figure in place of curves (for images and contours)
    note: str = ""  # one line below, such as the distances at this position


class Interactive(NamedTuple):
    """A slider and its frames."""

    title: str  # what is moved and what to watch
    parameter: str  # name of what the slider moves, such as "ε"
    frames: Sequence[Frame]  # in the order of the slider
    xlabel: str = ""  # label of the horizontal axis (curves only)
    ylabel: str = ""  # label of the vertical axis (curves only)
    start: int = 0  # index of the frame that is shown first

    def describe(self) -> dict[str, Any]:
        """Everything but the figures, ready for JSON."""
        frames = [
            {"label": f.label, "note": f.note, "curves": [c._asdict() for c in f.curves]}
            for f in self.frames
        ]
        return {**self._asdict(), "frames": frames}


MOST_POINTS = 300
"""Per line; a denser line is thinned, for hovering only."""

OPEN, CLOSE = '<metadata id="fsmap-hover">', "</metadata>"


def _series(ax: Axes) -> Iterator[tuple[Artist, np.ndarray, Transform]]:
    from matplotlib.collections import PathCollection

    for line in ax.get_lines():
        # A line that mixes coordinates (axhline, axvline) marks a place and holds no values.
        if line.get_transform().contains_branch(ax.transData):
            yield line, np.asarray(line.get_xydata(), dtype=float), line.get_transform()
    for dots in ax.collections:
        if isinstance(dots, PathCollection):
            points: np.ndarray = np.ma.filled(
                np.ma.asarray(dots.get_offsets(), dtype=float), np.nan
            )
            yield dots, points, dots.get_offset_transform()


def _color(artist: Artist) -> str:
    from matplotlib.colors import to_hex

    if hasattr(artist, "get_color"):
        return to_hex(artist.get_color())
    faces = artist.get_facecolor()  # type: ignore[attr-defined]
    return to_hex(faces[0]) if len(faces) == 1 else ""


def _points(ax: Axes, data: np.ndarray, transform: Transform, figure: Figure) -> list[list[float]]:
    step = -(-len(data) // MOST_POINTS) if len(data) else 1
    data = np.asarray(data[::step], dtype=float)
    data = data[np.isfinite(data).all(axis=1)]
    if not len(data):
        return []
    place = transform.transform(data)  # [points, 2]  pixels from the lower left corner
    box = ax.bbox.padded(1.0)
    inside = [box.contains(px, py) for px, py in place]
    scale = 72.0 / figure.dpi  # an SVG of matplotlib's is in points
    height = figure.bbox.height
    return [
        [round(px * scale, 2), round((height - py) * scale, 2), float(x), float(y)]
        for (px, py), (x, y), keep in zip(place, data, inside, strict=True)
        if keep and np.isfinite([px, py]).all()
    ]


def collect(figure: Figure) -> list[dict[str, Any]]:
    """Names, colors and points of all lines and scatters of a figure that has been drawn.

    Args:
        figure: The figure, after ``savefig``.

    Returns:
        One dict per series: panel, axis labels, name, color and ``points``, each of which is
        ``[svg x, svg y, x, y]``.
    """
    found = []
    for panel, ax in enumerate(figure.axes):
        labels = {"x": ax.get_xlabel(), "y": ax.get_ylabel()}
        for artist, data, transform in _series(ax):
            points = _points(ax, data, transform, figure)
            name = str(artist.get_label())
            if points:
                name = "" if name.startswith("_") else name
                series = {"panel": panel, **labels, "name": name, "color": _color(artist)}
                found.append({**series, "points": points})
    return found


def embed(svg: str, figure: Figure) -> str:
    """Put the values into the SVG.

    Args:
        svg: What ``savefig`` wrote.
        figure: The figure it was called on.

    Returns:
        The SVG with a ``metadata`` element that other programs ignore.
    """
    text = escape(json.dumps(plain(collect(figure)), ensure_ascii=False, separators=(",", ":")))
    head, end, _ = svg.rpartition("</svg>")
    return f"{head}{OPEN}{text}{CLOSE}\n{end}\n"


def extract(svg: str) -> tuple[str, list[dict[str, Any]]]:
    """Take the values out again.

    Returns:
        The SVG without them, and the values; an empty list where there are none.
    """
    head, found, rest = svg.partition(OPEN)
    if not found:
        return svg, []
    text, _, tail = rest.partition(CLOSE)
    return head + tail.lstrip("\n"), json.loads(unescape(text))


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
    """The shared style, for as long as the context lasts. ``draw`` is always called inside it."""
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


def to_svg(figure: Figure) -> str:
    """A figure as SVG text: transparent, deterministic, with its values for hovering."""
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
    """A jitter as text, such as ``ε = 1e−12``."""
    return f"ε = {jitter:.0e}".replace("e-0", "e-").replace("-", "\u2212")


def power(jitter: float) -> str:
    r"""A jitter in the notation of a figure, such as ``$\epsilon = 10^{-12}$``."""
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
    """One legend for the whole figure, above it."""
    number = len(set(ax.get_legend_handles_labels()[1]))
    legend_once(ax, figure, loc="outside upper center", ncols=min(columns, number))


def legend_once(ax: Axes, target: Figure | Axes | None = None, **options: Any) -> None:
    """A legend, of the axes or of another target, that names each label once."""
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    (target or ax).legend(list(unique.values()), list(unique), **options)
