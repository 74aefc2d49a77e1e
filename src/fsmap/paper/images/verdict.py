"""Tables, pictures and claims that several image experiments share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fsmap.assess.shift import METRICS
from fsmap.paper.images.measure import shown
from fsmap.paper.report import figures, tables
from fsmap.paper.report.tables import Mean
from fsmap.paper.rows import Claim, Row, key_of

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

IN_A_SENTENCE = {
    "white-noise": "L-MAP with white noise",
    "train": "L-MAP with training images",
    "other": "L-MAP with D'",
}
"""Kinds of L-MAP in claims."""

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


def mean_of(rows: Sequence[Row], metric: str, **where: Any) -> Mean:
    """Mean over seeds of one metric, in the unit of the tables; n = 0 where nothing was run."""
    return tables.mean(
        shown(metric, row.value) for row in tables.select(rows, metric=metric, **where)
    )


def shared(*sides: Sequence[Row]) -> list[Mean]:
    """Means over the seeds that all sides have, in the unit of the tables."""
    seeds = set.intersection(*({row.seed for row in side} for side in sides))
    return [
        tables.mean(shown(row.metric, row.value) for row in side if row.seed in seeds)
        for side in sides
    ]


class Compared(NamedTuple):
    """A kind of L-MAP beside PS-MAP, in the unit of the tables."""

    kind: str  # its row of image-table
    words: str  # the kind in a sentence
    mine: Mean  # mean over the seeds that both have
    plain: Mean  # PS-MAP's over the same seeds


def against_plain(rows: Sequence[Row], metric: str, **where: Any) -> Iterator[Compared]:
    """Every kind of L-MAP there is beside PS-MAP."""
    for kind, words in IN_A_SENTENCE.items():
        mine, plain = _beside(rows, metric, kind, "ps-map", **where)
        if mine.n:
            yield Compared(kind, words, mine, plain)


def _beside(rows: Sequence[Row], metric: str, one: str, other: str, **where: Any) -> list[Mean]:
    """Two rows of the table over the seeds that both have."""
    return shared(*(tables.select(rows, metric=metric, row=row, **where) for row in (one, other)))


def table_claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """Claims of Table 2; thresholds only where runs have their full length."""
    yield from ran(rows)
    for dataset in FULL_EPOCHS:
        mine = full_length(rows, dataset)
        if mine:
            yield from _paper_claims(mine, dataset)
    yield from _fashion_claims(full_length(rows, "fmnist"))
    yield from _cifar_claims(full_length(rows, "cifar10"))


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


def ran(rows: Sequence[Row]) -> Iterator[Claim]:
    """That training went well at all: at every size."""
    measured = tables.select(rows, metric="nll")
    nll = [row.value for row in measured]
    runs = len({key_of(row.unit) if row.unit else number for number, row in enumerate(measured)})
    yield Claim(
        "no run diverged, and none is left collapsed",
        bool(nll) and all(map(math.isfinite, nll)) and not _constant(rows),
        f"{runs} runs, NLL at most {max(nll, default=0):.3g}",
        None,
    )


def _constant(rows: Sequence[Row]) -> list[Row]:
    """Runs whose outputs no longer depend on the input: R is zero."""
    return [row for row in tables.select(rows, metric="laplacian_train") if not row.value > 1e-8]


def _paper_claims(rows: Sequence[Row], dataset: str) -> Iterator[Claim]:
    mine, plain = _beside(rows, "accuracy", "other", "ps-map")
    if mine.n:
        yield Claim(
            f"{dataset}: L-MAP with D' is about as accurate as PS-MAP (not lower by more than 0.2)",
            mine.mean >= plain.mean - 0.2,
            f"{mine.mean:.2f} against {plain.mean:.2f} %",
            {"fmnist": "94.1 against 93.9 %", "cifar10": "95.5 against 95.4 %"}[dataset],
        )
    mine, plain = _beside(rows, "ece", "other", "ps-map")
    if mine.n:
        yield Claim(
            f"{dataset}: L-MAP with D' is better calibrated than PS-MAP (lower ECE)",
            mine.mean < plain.mean,
            f"{mine.mean:.2f} against {plain.mean:.2f} %",
            {"fmnist": "4.1 against 4.0 %", "cifar10": "1.4 against 2.5 %"}[dataset],
        )


def _fashion_claims(rows: Sequence[Row]) -> Iterator[Claim]:
    plain = mean_of(rows, "accuracy", row="ps-map")
    if plain.n:
        yield Claim(
            "fmnist: PS-MAP's accuracy is the paper's within 0.3",
            abs(plain.mean - 93.9) <= 0.3,
            f"{plain.mean:.2f} % over {_seeds(plain.n)}",
            "93.9 ± 0.1 %",
        )


def _cifar_claims(rows: Sequence[Row]) -> Iterator[Claim]:
    plain = mean_of(rows, "accuracy", row="ps-map")
    if plain.n:
        yield Claim(
            "cifar10: PS-MAP's accuracy is at least 95.0 %",
            plain.mean >= 95.0,
            f"{plain.mean:.2f} % over {_seeds(plain.n)}",
            "95.4 ± 0.1 %",
        )


def _seeds(number: int) -> str:
    return f"{number} seed" + "s" * (number != 1)
