"""The values behind a figure's lines, stored inside its SVG so that the page can show them.

Positions are in the SVG's own units, so the page needs to know nothing about axes or scales.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, unescape

import numpy as np

from fsmap.paper.report.records import plain

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform

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

    Args:
        svg: The text of an SVG file.

    Returns:
        The SVG without them, and the values; an empty list where there are none.
    """
    head, found, rest = svg.partition(OPEN)
    if not found:
        return svg, []
    text, _, tail = rest.partition(CLOSE)
    return head + tail.lstrip("\n"), json.loads(unescape(text))
