"""Pictures that several image experiments share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fsmap.paper.images.measure import shown
from fsmap.paper.report import figures, tables
from fsmap.paper.report.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"fmnist": "FashionMNIST", "cifar10": "CIFAR-10"}
WORDS = {
    "ps-map": "PS-MAP",
    "white-noise": "L-MAP, N(0, I)",
    "train": "L-MAP, train",
    "other": "L-MAP, D'",
    "label-smoothing": "label smoothing",
    "sam": "SAM",
}
LINES = {
    "white-noise": (":", "<"),
    "train": ("-.", ">"),
    "other": ("-", "^"),
    "label-smoothing": ("-", "s"),
    "sam": ("--", "D"),
}
"""Line and marker of a row where its method's would not tell it from others."""

UNITS = {
    "accuracy": "accuracy, %",
    "ece": "ECE, %",
    "nll": "NLL",
    "nll_scaled": "NLL after T",
}


def look_of(row: Row, **changes: Any) -> dict[str, Any]:
    """Color by method (baselines are grey), line, marker and label by row of ``image-table``."""
    name, method = row.config["row"], str(row.method)
    line, marker = LINES.get(name, ("-", figures.MARKERS.get(method, "D")))
    color = figures.COLORS.get(method, figures.MUTED)
    look = {"color": color, "linestyle": line, "marker": marker, "label": WORDS.get(name, name)}
    return {**look, **changes}


def once_named(rows: Sequence[Row], **changes: Any) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Rows and their looks; of several seeds one is in the legend."""
    named: set[str] = set()
    for row in rows:
        look = look_of(row, **changes)
        yield row, {**look, "label": "_" if look["label"] in named else look["label"]}
        named.add(look["label"])


def draw_table(rows: Sequence[Row]) -> dict[str, Figure]:
    """Each row of the table as a point: ECE, and NLL before (hollow) and after scaling (filled).

    Args:
        rows: Rows of a run.

    Returns:
        One figure, a line of panels per data set.
    """
    sets = list(dict.fromkeys(row.config["dataset"] for row in rows))
    figure, panels = figures.axes(2, len(sets), panel=(4.4, 2.9), squeeze=False)
    for line, dataset in zip(panels, sets, strict=True):
        mine = tables.select(rows, dataset=dataset)
        names = list(dict.fromkeys(row.config["row"] for row in mine))
        for place, name in enumerate(names):
            some = tables.select(mine, row=name)
            _bar(line[0], place, some, "ece", filled=True)
            _bar(line[1], place - 0.12, some, "nll", filled=False)
            _bar(line[1], place + 0.12, some, "nll_scaled", filled=True)
        for ax, title in zip(line, ("ECE, %", "NLL: ○ as trained, ● scaled"), strict=True):
            ax.set(title=f"{NAMES[dataset]}: {title}")
            ax.set_xticks(
                range(len(names)), [WORDS.get(n, n) for n in names], rotation=30, ha="right"
            )
            ax.set_xlim(-0.6, len(names) - 0.4)
        line[0].set_ylim(bottom=0)
    return {"image-table": figure}


def _bar(ax: Axes, place: float, rows: Sequence[Row], metric: str, *, filled: bool) -> None:
    mine = tables.select(rows, metric=metric)
    if not mine:
        return
    mean = tables.mean(shown(metric, row.value) for row in mine)
    look = look_of(mine[0], linestyle="", label=None)
    if not filled:
        look |= {"markerfacecolor": "none", "markeredgecolor": look["color"], "mew": 0.9}
    error = None if math.isnan(mean.stderr) else mean.stderr
    ax.errorbar(place, mean.mean, yerr=error, elinewidth=0.9, **look)


def draw_lines(
    rows: Sequence[Row], x: str, metrics: Sequence[str], *, xlabel: str, name: str, log: bool
) -> dict[str, Figure]:
    """Metrics along what varies, a line per row of ``image-table``, a line of panels per data set.

    Args:
        rows: Rows of a run.
        x: Entry of ``config`` along the horizontal axis.
        metrics: One panel each.
        xlabel: Its label.
        name: File name.
        log: Logarithmic horizontal axis.

    Returns:
        One figure.
    """
    sets = list(dict.fromkeys(row.config["dataset"] for row in rows))
    figure, panels = figures.axes(len(metrics), len(sets), squeeze=False)
    for line, dataset in zip(panels, sets, strict=True):
        for ax, metric in zip(line, metrics, strict=True):
            mine = tables.select(rows, dataset=dataset, metric=metric)
            for some in tables.group(mine, "row").values():
                _line(ax, some, x, metric)
            ax.set(title=NAMES[dataset], xlabel=xlabel, ylabel=UNITS.get(metric, metric))
            if log:
                ax.set_xscale("log", base=2)
        line[0].legend()
    return {name: figure}


def _line(ax: Axes, rows: Sequence[Row], x: str, metric: str) -> None:
    look = look_of(rows[0])
    along = [row for row in rows if row.config.get(x) is not None]
    if not along:  # what does not vary is a level
        level = tables.mean(shown(metric, row.value) for row in rows)
        ax.axhline(level.mean, color=look["color"], linestyle=":", label=look["label"])
        return
    found = tables.line(along, x)
    mean, stderr = ([shown(metric, v) for v in values] for values in (found.mean, found.stderr))
    figures.plot_mean(ax, found.x, mean, stderr, **look)
