"""A matplotlib figure as a picture of the page: colors by theme, hover values.

Figures are drawn from rows when the page is made, with letters as outlines: no text of a row enters
the SVG, and no SVG is read from a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fsmap.paper.report import figures

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform

VARIABLES = {
    figures.INK: "--ink",
    figures.MUTED: "--muted",
    figures.GRID: "--grid",
    figures.PAPER: "--paper",
    "#000000": "--ink",
    **{figures.COLORS[name]: f"--{name}" for name in ("ps-map", "fs-map", "l-map", "bma")},
}
"""Name of the CSS variable that stands for a color of the shared style."""

MOST_POINTS = 300  # per line; a denser line is thinned, for hovering only

_COMMANDS = "alpha beta gamma epsilon theta lambda rho sigma phi psi pi Phi Delta nabla infty mid"
SYMBOLS = dict(zip(_COMMANDS.split(), "αβγεθλρσφψπΦΔ∇∞|", strict=True))  # for tooltips

_SKIP = re.compile(r"<!--.*?-->|<metadata>.*?</metadata>|<style\b.*?</style>", re.DOTALL)
_OPENING = re.compile(r'<svg[^>]*?viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>')
_NAME = re.compile(r'(\bid="|href="#|url\(#)([^")]+)')
_COLOR = re.compile("|".join(map(re.escape, VARIABLES)), re.IGNORECASE)


class Picture(NamedTuple):
    """A figure ready for the page."""

    id: str  # of the group that holds the drawing
    markup: str  # what is inside the ``svg`` element
    hover: list[dict[str, Any]]  # series with ``points``, each ``[svg x, svg y, x, y]``
    width: float  # points
    height: float
    panels: list[tuple[float, float, float, float]]  # x, y, width, height; for narrow screens


def picture(figure: Figure, prefix: str) -> Picture:
    """Draw a figure for a page with other pictures on it."""
    svg = re.sub(r'<g id="[^"]*"', "<g", _SKIP.sub("", figures.to_svg(figure)))
    prefix = re.sub(r"[^\w-]", "-", prefix)
    svg = _themed(_NAME.sub(rf"\g<1>{prefix}-\g<2>", svg))
    opening = _OPENING.search(svg)
    assert opening is not None  # matplotlib always writes one
    inside = svg[opening.end() : svg.rindex("</svg>")]
    width, height = (float(number) for number in opening.groups())
    inside = re.sub(r"\s*\n\s*", " ", inside).strip()
    markup = f'<g id="{prefix}">{inside}</g>'
    return Picture(prefix, markup, collect(figure), width, height, _panels(figure))


def _themed(text: str) -> str:
    return _COLOR.sub(lambda match: f"var({VARIABLES[match.group().lower()]})", text)


def _panels(figure: Figure) -> list[tuple[float, float, float, float]]:
    """Boxes of the legend and of each panel, to be stacked; none for a single panel."""
    scale, height = 72.0 / figure.dpi, figure.bbox.height
    boxes = [legend.get_window_extent() for legend in figure.legends]
    boxes += [box for ax in figure.axes if (box := ax.get_tightbbox()) is not None]
    found = [
        (box.x0 * scale, (height - box.y1) * scale, box.width * scale, box.height * scale)
        for box in (box.padded(3) for box in boxes)
    ]
    return found if len(found) > 1 else []


def collect(figure: Figure) -> list[dict[str, Any]]:
    """Names, colors and points of all lines, bars and scatters of a figure that has been drawn."""
    found = []
    for ax in figure.axes:
        labels = {"x": untex(ax.get_xlabel()), "y": untex(ax.get_ylabel() or ax.get_title())}
        names = {bars[0]: _label(bars) for bars in ax.containers}  # lines with error bars
        for artist, data, transform in _series(ax):
            if points := _points(ax, data, transform, figure):
                name = untex(_label(artist) or names.get(artist, ""))
                color = _themed(_color(artist))
                found.append({**labels, "name": name, "color": color, "points": points})
    return found


def _series(ax: Axes) -> Iterator[tuple[Artist, np.ndarray, Transform]]:
    from matplotlib.collections import PathCollection
    from matplotlib.container import BarContainer

    for line in ax.get_lines():
        points: Any = np.asarray(line.get_xydata(), dtype=float)
        in_x, in_y = line.get_transform().contains_branch_seperately(ax.transData)
        if in_x and in_y:
            yield line, points, line.get_transform()
        elif in_y and _label(line):  # axhline: a value without x. An axvline marks a place
            across = np.linspace(*ax.get_xlim(), 50)[:, None]
            yield line, np.insert(across, 1, points[0, 1], axis=1), ax.transData
    for bars in ax.containers:
        for bar in bars if isinstance(bars, BarContainer) else ():
            yield bar, np.array([bar.get_corners()[2:].mean(0)]), ax.transData
    for dots in ax.collections:
        if isinstance(dots, PathCollection):
            points = np.ma.asarray(dots.get_offsets(), dtype=float)
            yield dots, points.filled(np.nan), dots.get_offset_transform()


def _label(artist: Any) -> str:
    """The label in the legend, or ``text`` of a label ``_text``, which the legend does not show."""
    label = str(artist.get_label() or "")
    made_up = re.match(r"_(child|container|line|nolegend)?_?\d*$", label)
    return "" if made_up or label == "None" else label.removeprefix("_")


def _color(artist: Any) -> str:
    from matplotlib.colors import to_hex

    if hasattr(artist, "get_color"):
        return to_hex(artist.get_color())
    faces = np.atleast_2d(artist.get_facecolor())
    return to_hex(faces[0]) if len(faces) == 1 else ""


def _points(ax: Axes, data: np.ndarray, transform: Transform, figure: Figure) -> list[list[Any]]:
    data = data[:: max(1, math.ceil(len(data) / MOST_POINTS))]
    data = data[np.isfinite(data).all(axis=1)]
    place = transform.transform(data)  # [points, 2]  pixels from the lower left corner
    box, height = ax.bbox.padded(1.0), figure.bbox.height
    scale = 72.0 / figure.dpi  # an SVG of matplotlib's is in points
    ticks = _named_ticks(ax.xaxis)
    return [
        [round(px * scale, 2), round((height - py) * scale, 2), _tick(ticks, float(x)), float(y)]
        for (px, py), (x, y) in zip(place, data, strict=True)
        if np.isfinite([px, py]).all() and box.contains(px, py)
    ]


def _named_ticks(axis: Axis) -> dict[float, str]:
    """Places and words of an axis whose ticks are words."""
    from matplotlib.ticker import FixedLocator

    if not isinstance(axis.get_major_locator(), FixedLocator):
        return {}
    texts = [untex(label.get_text()) for label in axis.get_ticklabels()]
    if not any(text[:1].isalpha() for text in texts):
        return {}
    return dict(zip(map(float, axis.get_ticklocs()), texts, strict=False))


def _tick(ticks: dict[float, str], x: float) -> float | str:
    near = min(ticks, key=lambda place: abs(place - x), default=None)
    return ticks[near] if near is not None and abs(near - x) < 0.5 else x


RAISED = str.maketrans("0123456789-−", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁻")


def untex(label: str) -> str:
    r"""An axis label without TeX, for a tooltip.

    Examples:
        >>> untex(r"noise $\sigma/\sigma^*$, $\log p(f\mid\mathcal{D})$")
        'noise σ/σ*, log p(f|D)'
        >>> untex("$10^{-2}$")
        '10⁻²'
    """
    if "$" not in label and "\\" not in label:
        return label
    label = re.sub(r"\\(?:mathcal|mathrm|mathbf|mathit|text|operatorname)\s*", "", label)
    label = label.replace(r"\|", "‖")
    label = re.sub(r"\\([A-Za-z]+)\s?", lambda m: _word(m.group(1)), label)
    label = re.sub(r"\^\{?([-−]?\d+)\}?", lambda m: m.group(1).translate(RAISED), label)
    return re.sub(r"[${}^_\\]", "", re.sub(r"\\[,;!: ]", "", label)).strip()


def _word(name: str) -> str:
    found = SYMBOLS.get(name, name)
    return found + " " if found.isascii() and found.isalpha() else found
