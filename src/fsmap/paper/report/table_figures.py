"""Pictures of a fitted table: predictions, calibration, and how the strengths were chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fsmap import metrics
from fsmap.assess.table_fit import Fitted
from fsmap.assess.tables import LEVELS, coverage_curve
from fsmap.data.target import REGRESSION
from fsmap.paper.report import figures
from fsmap.paper.report.numbers import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = ("ps-map", "l-map")
MOST_DOTS = 600  # per panel: more would be a blot, and a slow page
SHADES = (0.25, 0.5, 0.75, 1.0)  # of lines that differ in weight decay
BINS = 10


class Picture(NamedTuple):
    """A figure and what to see in it."""

    name: str
    figure: Figure
    caption: str


def pictures(fitted: Fitted) -> list[Picture]:
    """All pictures of the page.

    Args:
        fitted: A tested model.

    Returns:
        In the order of the page.
    """
    with figures.style():
        if fitted.model.target.task == REGRESSION:
            return [_predictions(fitted), _coverage(fitted), _search(fitted)]
        return [_reliability(fitted), _search(fitted)]


def _predictions(fitted: Fitted) -> Picture:
    target = fitted.model.target
    figure, panels = figures.axes(2, sharex=True, sharey=True)
    truth = target.mean + target.std * fitted.y[:, 0].numpy()
    rows = np.linspace(0, len(truth) - 1, min(len(truth), MOST_DOTS)).astype(int)
    for ax, method in zip(panels, SHOWN, strict=True):
        guess = target.mean + target.std * fitted.runs[method].out[:, 0].numpy()
        look = figures.method_style(method, linestyle="none", alpha=0.55, markersize=4)
        ax.plot(truth[rows], guess[rows], **look)
        _diagonal(ax, [min(truth.min(), guess.min()), max(truth.max(), guess.max())])
        ax.set_title(figures.NAMES[method])
        ax.set_xlabel(f"{target.name}, true")
    panels[0].set_ylabel("predicted")
    caption = "Test rows: what was predicted against what is true. On the line, both agree."
    return Picture("predictions", figure, caption)


def _coverage(fitted: Fitted) -> Picture:
    figure, ax = figures.axes()
    _diagonal(ax, [0, 1])
    for method in SHOWN:
        run = fitted.runs[method]
        assert run.spread is not None
        found = coverage_curve(run.out, fitted.y, fitted.model.target, run.spread)
        ax.plot(LEVELS, found, **figures.method_style(method, markersize=3.5))
    ax.set_xlabel("intervals that should hold")
    ax.set_ylabel("that do, on test rows")
    ax.legend()
    caption = (
        "Calibration: intervals of every level, as wide as errors on validation rows say. Above "
        "the line they are wider than they had to be, below it they promise too much."
    )
    return Picture("calibration", figure, caption)


def _reliability(fitted: Fitted) -> Picture:
    figure, ax = figures.axes()
    _diagonal(ax, [0, 1])
    for method in SHOWN:
        table = metrics.reliability(fitted.runs[method].out, fitted.y, BINS)
        full = table.count > 0
        ax.plot(table.confidence[full], table.accuracy[full], **figures.method_style(method))
    ax.set_xlabel("confidence")
    ax.set_ylabel("accuracy on test rows")
    ax.legend()
    caption = (
        "Calibration: of the rows predicted with some confidence, the share that is right. Below "
        "the line the model is over-confident, above it under-confident."
    )
    return Picture("calibration", figure, caption)


def _search(fitted: Fitted) -> Picture:
    regression = fitted.model.target.task == REGRESSION
    ylabel = "validation RMSE (standardized)" if regression else "validation log loss"
    figure, (left, right) = figures.axes(2, sharey=True)
    search = fitted.runs["l-map"].trained.search
    decays = sorted({line["weight_decay"] for line in search})
    for decay, shade in zip(decays, SHADES, strict=True):
        lines = [line for line in search if line["weight_decay"] == decay]
        look = figures.method_style("l-map", alpha=shade, label=f"L-MAP, w = {number(decay)}")
        left.plot([v["reg_strength"] for v in lines], [v["value"] for v in lines], **look)
    best = fitted.runs["ps-map"].trained.value
    left.axhline(best, color=figures.COLORS["ps-map"], linestyle="--", label="best PS-MAP")
    left.set_xscale("log")
    left.set_xlabel(r"strength $\lambda$")
    left.set_ylabel(ylabel)
    left.legend(fontsize=8)
    for method in SHOWN:
        steps, values = zip(*fitted.runs[method].trained.curve, strict=True)
        right.plot(steps, values, **figures.method_style(method, marker=""))
    right.set_xlabel("steps of the chosen run")
    right.legend()
    _from_the_useful_range(left, fitted)
    caption = (
        "How the strengths were chosen: the validation loss of every configuration of one "
        "population (left; w is the weight decay), and of the two chosen runs while they trained."
    )
    return Picture("strengths", figure, caption)


def _from_the_useful_range(ax: Axes, fitted: Fitted) -> None:
    """Cut off the start of training, where any network is bad."""
    runs = [fitted.runs[method].trained for method in SHOWN]
    values = [line["value"] for run in runs for line in run.search]
    finite = [value for value in values if np.isfinite(value)]
    low, high = min(finite), max(finite)
    room = max(high - low, 0.05 * low)
    ax.set_ylim(low - 0.1 * room, high + 0.6 * room)


def _diagonal(ax: Axes, ends: list[Any]) -> None:
    ax.axline((ends[0], ends[0]), (ends[1], ends[1]), color=figures.MUTED, linewidth=0.8)
