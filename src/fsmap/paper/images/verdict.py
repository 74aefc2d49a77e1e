"""Tables, pictures and comparisons that several image experiments share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsmap.assess.shift import METRICS
from fsmap.paper.experiment import judge
from fsmap.paper.images.protocol import DECAY, shown
from fsmap.paper.report import figures, tables
from fsmap.paper.report.tables import Mean, with_error
from fsmap.paper.rows import Claim, Row, not_tested

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"fmnist": "FashionMNIST", "cifar10": "CIFAR-10"}
WORDS = {
    "ps-map": "PS-MAP",
    "white-noise": "L-MAP, N(0, I)",
    "train": "L-MAP, train",
    "other": "L-MAP, D'",
    "nats": "LogTrace, train",
    "label-smoothing": "label smoothing",
    "sam": "SAM",
    "sam+nats": "SAM + LogTrace",
}
LINES = {
    "white-noise": (":", "<"),
    "train": ("-.", ">"),
    "other": ("-", "^"),
    "nats": ((0, (5, 1)), "v"),
    "sam+nats": ((0, (1, 1)), "P"),
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
    """Each row of the table as a point: ECE, and NLL before (hollow) and after scaling (filled)."""
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
    """Metrics along ``x``: a line per row of ``image-table``, a line of panels per data set."""
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


SHOWN = (*METRICS, "ood_auroc", "temperature", "laplacian_other", "reg_strength")
FULL_EPOCHS = {"fmnist": 50, "cifar10": 200}

TUNED = "ps-map, wd tuned"
"""PS-MAP with the weight decay that has the lowest NLL on held-out images."""

LONG = 12
"""Epochs from which on runs are compared."""

Printed = Mapping[tuple[Any, ...], Mapping[str, tuple[float, float]]]


def lines(
    rows: Sequence[Row],
    paper: Printed,
    *,
    by: Sequence[str] = ("dataset", "row"),
    metrics: Sequence[str] = SHOWN,
) -> list[dict[str, Any]]:
    """A table: mean ± standard error over seeds, in the paper's units, beside the paper's."""
    found = []
    for key, members in tables.group(tables.select(rows, metric=tuple(metrics)), *by).items():
        first = members[0]
        printed = paper.get(tuple(key), {})
        for metric in metrics:
            mine = tables.select(members, metric=metric)
            if not mine:
                continue
            mean = tables.mean(shown(metric, row.value) for row in mine)
            entry = dict(zip(by, key, strict=True))
            entry.update(method=first.method, px=first.config.get("px"), metric=metric)
            entry.update(ours=mean.mean, stderr=mean.stderr)
            value, error = printed.get(metric, (None, None))
            entry.update(paper=value, paper_stderr=error, runs=mean.n)
            found.append(entry)
    return found


def with_tuned(rows: Sequence[Row]) -> list[Row]:
    """Rows, and those of PS-MAP's best weight decay again as :data:`TUNED`, for each set."""
    found = list(rows)
    for (dataset,), mine in tables.group(rows, "dataset").items():
        tried = [n for n in {r.config["row"] for r in mine} if n == "ps-map" or n.startswith(DECAY)]
        if len(tried) < 2:
            continue
        best = min(tried, key=lambda n: tables.mean_of(mine, metric="valid_nll", row=n))
        chosen = tables.select(mine, dataset=dataset, row=best)
        found += [r._replace(config={**r.config, "row": TUNED}) for r in chosen]
    return [row for row in found if not row.config["row"].startswith(DECAY)]


def compare(
    claim: str,
    rows: Sequence[Row],
    metric: str,
    *,
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    command: str,
    paper: str | None = None,
    **bound: float,
) -> Claim:
    """A claim about the difference of two kinds of runs, over the seeds that both have."""
    sides = [tables.select(rows, metric=metric, **where) for where in (one, other)]
    unit = 100 if shown(metric, 1.0) == 100 else 1
    difference = tables.paired(*sides)
    effect = Mean(unit * difference.mean, unit * difference.stderr, difference.n)
    source: Any = "paper" if paper else "ours"
    if not effect.n:
        return not_tested(claim, command, paper, source)
    seeds = set.intersection(*({row.seed for row in side} for side in sides))
    means = [
        unit * tables.mean(row.value for row in side if row.seed in seeds).mean for side in sides
    ]
    ours = f"{means[0]:.4g} against {means[1]:.4g}, {with_error(effect.mean, effect.stderr)}"
    return judge(claim, *effect, ours=ours, paper=paper, source=source, **bound)


def full_length(rows: Sequence[Row], dataset: str) -> list[Row]:
    """Rows of a set that were trained on the real data for the protocol's number of epochs."""
    long = tables.select(rows, dataset=dataset, generated=False)
    return [
        row
        for row in long
        if row.config["epochs"] >= FULL_EPOCHS[dataset] and row.config["images"] > 2e4
    ]


def long_enough(rows: Sequence[Row]) -> list[Row]:
    """Rows of runs on the real data that are long enough to be judged."""
    return [row for row in rows if not row.config["generated"] and row.config["epochs"] >= LONG]


def command(experiment: str, **settings: str) -> str:
    """The command that would measure what is missing."""
    given = " ".join(f"--set {name}={value}" for name, value in settings.items())
    return f"fsmap run {experiment} --resume {given}".rstrip()
