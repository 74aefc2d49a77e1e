"""Pictures of classifiers of the two moons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.paper.networks.scaled_networks import jitter_title
from fsmap.paper.report import figures, tables
from fsmap.paper.report.interactive import Frame, Interactive
from fsmap.paper.report.panels import legend_above
from fsmap.paper.report.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTH = 144
"""Pixels of a picture along each side."""

LOW, HIGH = (-2.2, -1.7), (3.2, 2.2)
"""Corners of the picture: the data with some room around them."""

PATH = {
    "train_nll": "train NLL, nats",
    "spread": "spread of probabilities",
    "eigenvalue_sum": r"sum of eigenvalues of $\mathcal{J}$",
}
"""What is drawn against ε, and its name."""


def points(pixels: int) -> Tensor:
    """Points of the picture, row by row from below.

    Args:
        pixels: Points along each side.

    Returns:
        ``[pixels², 2]``.
    """
    x, y = (
        torch.linspace(a, b, pixels, dtype=torch.float64) for a, b in zip(LOW, HIGH, strict=True)
    )
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    return torch.stack([columns.reshape(-1), rows.reshape(-1)], dim=-1)


def panels(rows: Sequence[Row], jitters: Sequence[float]) -> Figure:
    """One panel per jitter.

    Args:
        rows: Rows with ``probability`` of L-MAP, ``inputs`` and ``labels``.
        jitters: ε.

    Returns:
        The figure.
    """
    figure, axes = figures.axes(len(jitters), panel=(2.6, 2.5), squeeze=False, sharey=True)
    for ax, jitter in zip(axes[0], jitters, strict=True):
        image = _draw_function(ax, rows, jitter)
        ax.set_title(jitter_title(jitter))
    axes[0, 0].set_ylabel("$x_2$")
    _color_bar(figure, image, axes)
    return figure


def slider(rows: Sequence[Row], notes: Mapping[float, str]) -> Interactive:
    """A slider over ε that starts near ε = 1.

    Args:
        rows: As for :func:`panels`.
        notes: One line for each ε.

    Returns:
        The slider.
    """
    frames = []
    for jitter, note in notes.items():
        figure, ax = figures.axes(panel=(4.6, 3.4))
        image = _draw_function(ax, rows, jitter)
        ax.set_ylabel("$x_2$")
        _color_bar(figure, image, ax)
        frames.append(Frame(f"ε = {jitter:.3g}", figure=figure, note=note))
    away = [abs(math.log10(jitter)) for jitter in notes]
    return Interactive("How much may the function react?", "ε", frames, start=away.index(min(away)))


def path(
    lines: Mapping[str, Mapping[str, Mapping[float, float]]], base: Mapping[str, float]
) -> Figure:
    """Numbers against ε, from several starts.

    Args:
        lines: Start, then metric, then ε to the number.
        base: PS-MAP's number by metric.

    Returns:
        The figure.
    """
    figure, axes = figures.axes(3, panel=(2.9, 2.6))
    looks = {"random": {}, "chain": {"linestyle": (0, (1, 1.2)), "marker": "v"}}
    names = {"random": "L-MAP, from random values", "chain": "L-MAP, from the next larger ε"}
    for ax, (metric, label) in zip(axes, PATH.items(), strict=True):
        for start, values in lines.items():
            look = figures.method_style("l-map", label=names[start], **looks[start])
            ax.plot(list(values[metric]), list(values[metric].values()), **look)
        ends = list(next(iter(lines.values()))[metric])
        look = figures.method_style("ps-map", marker="", linestyle=(0, (4, 2)))
        ax.plot([ends[0], ends[-1]], [base[metric]] * 2, **look)
        ax.set(xscale="log", xlabel=r"$\epsilon$", ylabel=label)
    axes[2].set_yscale("log")
    legend_above(figure, axes[0])
    return figure


def _draw_function(ax: Axes, rows: Sequence[Row], jitter: float) -> Any:
    where = {"metric": "probability", "method": "l-map", "start": "random", "seed": 0}
    (row,) = tables.select(rows, jitter=jitter, **where)
    field = _smooth(row.value)
    look = {"origin": "lower", "aspect": "auto", "interpolation": "none", "vmin": 0, "vmax": 1}
    box = (LOW[0], HIGH[0], LOW[1], HIGH[1])
    image = ax.imshow(field, extent=box, cmap=_color_map(), **look)
    if field.min() < 0.45 and field.max() > 0.55:  # the boundary of a constant is an accident
        x, y = (torch.linspace(a, b, SMOOTH) for a, b in zip(LOW, HIGH, strict=True))
        ax.contour(x, y, field, [0.5], colors=[figures.BLACK], linewidths=1.2)
    inputs = torch.tensor(tables.select(rows, metric="inputs")[0].value)
    labels = torch.tensor(tables.select(rows, metric="labels")[0].value)
    for label, color in ((0, figures.COLORS["fs-map"]), (1, figures.COLORS["ps-map"])):
        chosen = inputs[labels == label]
        ax.scatter(chosen[:, 0], chosen[:, 1], s=9, color=color, edgecolor=figures.WHITE,
                   linewidth=0.4, label=f"class {label}")  # fmt: skip
    ax.set(xlabel="$x_1$", xlim=(LOW[0], HIGH[0]), ylim=(LOW[1], HIGH[1]))
    ax.grid(visible=False)
    return image


def _smooth(values: Sequence[float]) -> Any:
    """The measured points, interpolated to a picture, ``[SMOOTH, SMOOTH]``."""
    pixels = math.isqrt(len(values))
    field = torch.tensor(values, dtype=torch.float64).reshape(1, 1, pixels, pixels)
    size = (SMOOTH, SMOOTH)
    larger = torch.nn.functional.interpolate(field, size=size, mode="bilinear", align_corners=True)
    return larger[0, 0].numpy()


def _color_map() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    # paler than the points that lie on it
    return LinearSegmentedColormap.from_list("moons", ["#86addb", "#f4f2ee", "#e8a88f"])


def _color_bar(figure: Figure, image: Any, axes: Any) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02, ticks=[0, 0.5, 1])
    bar.set_label("probability of class 1")
    bar.outline.set_visible(False)
