"""Pictures of an assessed image classifier, and of loss landscapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fsmap.assess.images import Assessment
from fsmap.assess.landscape import Landscape
from fsmap.paper.report import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKS = {
    "as trained": {"color": figures.COLORS["fs-map"], "marker": "o"},
    "scaled": {"color": figures.COLORS["l-map"], "marker": "^", "linestyle": "--"},
}


def assessment_figure(found: Assessment) -> Figure:
    """Reliability before and after temperature scaling, and selective accuracy."""
    figure, (left, right) = figures.axes(2, panel=(3.8, 3.0))
    left.axline((0, 0), (1, 1), color=figures.MUTED, linewidth=0.8)
    for name, table in found.reliability.items():
        full = table.count > 0
        words = name if name != "scaled" else f"after T = {found.temperature:.2f}"
        left.plot(table.confidence[full], table.accuracy[full], label=words, **LOOKS[name])
    left.set(title="Reliability", xlabel="confidence", ylabel="accuracy")
    left.legend()
    curve = found.selective
    right.plot(100 * curve.coverage, 100 * curve.accuracy, color=figures.COLORS["fs-map"])
    right.set(title="Selective prediction", xlabel="most confident, %", ylabel="accuracy, %")
    return figure


def landscape_figure(found: Mapping[str, Landscape]) -> Figure:
    """Training loss along random directions: mean, and the middle two thirds."""
    figure, ax = figures.axes(panel=(4.6, 3.2))
    for name, one in found.items():
        low, high = (one.loss.quantile(q, dim=0) for q in (1 / 6, 5 / 6))
        (line,) = ax.plot(one.steps, one.mean, label=name)
        ax.fill_between(one.steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    ax.set(xlabel="step, filter norms", ylabel="training loss")
    ax.set_yscale("symlog", linthresh=1.0)
    ax.legend()
    return figure
