"""Tables, pictures and comparisons that several image experiments share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsmap.assess.shift import METRICS
from fsmap.paper.images.protocol import KINDS, base_of, shown
from fsmap.paper.report import figures, tables
from fsmap.paper.report.tables import Mean, with_error, word
from fsmap.paper.rows import Claim, Row, Rows, judge, not_tested

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {name: word(name) for name in ("fmnist", "cifar10")}
LINES = {
    "white-noise": (":", "<"),
    "train": ("-.", ">"),
    "other": ("-", "^"),
    "nats": ((0, (5, 1)), "v"),
    "sam+nats": ((0, (1, 1)), "P"),
    "label-smoothing": ("-", "s"),
    "sam": ("--", "D"),
}
"""Line and marker of rows that share a method."""

UNITS = {"accuracy": "accuracy, %", "ece": "ECE, %", "nll": "NLL", "nll_scaled": "NLL after T"}

PRINTED: dict[str, Any] = {"color": figures.INK, "linestyle": ":", "linewidth": 1.0}
"""Look of the paper's values."""

Cells = Mapping[str, tuple[float, float | None]]  # value and error by metric
Printed = Mapping[tuple[Any, ...], Cells]  # what the paper prints, by row of a table


def look_of(row: Row, **changes: Any) -> dict[str, Any]:
    """Color by method (baselines are grey), line, marker and label by row of ``image-table``."""
    name, method = row.config["row"], str(row.method)
    line, marker = LINES.get(base_of(name), ("-", figures.MARKERS.get(method, "D")))
    color = figures.COLORS.get(method, figures.MUTED)
    return {"color": color, "linestyle": line, "marker": marker, "label": word(name), **changes}


def once_named(rows: Rows, **changes: Any) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Rows and their looks; of several seeds one is in the legend."""
    named: set[str] = set()
    for row in rows:
        look = look_of(row, **changes)
        name = look["label"]
        yield row, {**look, "label": f"_{name}, seed {row.seed}" if name in named else name}
        named.add(name)


def panels(
    rows: Rows, columns: int, panel: tuple[float, float] = (3.6, 2.6)
) -> tuple[Figure, list[tuple[str, Any, list[Row]]]]:
    """A figure with a line of panels per data set: the set, its panels and its rows."""
    sets = tables.group(rows, "dataset")
    figure, found = figures.axes(columns, len(sets), panel=panel, squeeze=False)
    pairs = zip(sets.items(), found, strict=True)
    return figure, [(dataset, line, mine) for ((dataset,), mine), line in pairs]


def draw_table(rows: Rows, paper: Printed, id: str) -> dict[str, Figure]:
    """Each row of the table as a point: ECE, and NLL before (hollow) and after scaling (filled)."""
    if not rows:
        return {}
    figure, found = panels(rows, 2, (5.2, 2.9))
    for dataset, line, mine in found:
        names = list(dict.fromkeys(row.config["row"] for row in mine))
        for place, name in enumerate(names):
            some, printed = tables.select(mine, row=name), paper.get((dataset, name), {})
            _point(line[0], place, some, "ece", printed, filled=True)
            _point(line[1], place - 0.12, some, "nll", printed, filled=False)
            _point(line[1], place + 0.12, some, "nll_scaled", {}, filled=True)
        for ax, title in zip(line, ("ECE, %", "NLL: ○ as trained, ● scaled"), strict=True):
            known = any(artist.get_label() == "_paper" for artist in ax.get_lines())
            ax.set(title=f"{NAMES[dataset]}: {title}" + " (lines: paper)" * known)
            ax.set_xticks(range(len(names)), map(word, names), rotation=30, ha="right")
            ax.set_xlim(-0.6, len(names) - 0.4)
        line[0].set_ylim(bottom=0)
    return {id: figure}


def _point(ax: Axes, place: float, rows: Rows, metric: str, paper: Cells, *, filled: bool) -> None:
    if not (mine := shown(tables.select(rows, metric=metric))):
        return
    mean = tables.mean(row.value for row in mine)
    look = look_of(mine[0], linestyle="")
    name = f"_{look.pop('label')}, {mean.n} seed{'s' * (mean.n != 1)}"
    if not filled:
        look |= {"markerfacecolor": "none", "markeredgecolor": look["color"], "mew": 0.9}
    error = None if math.isnan(mean.stderr) else mean.stderr
    ax.errorbar(place, mean.mean, yerr=error, elinewidth=0.9, **look)[0].set_label(name)
    if metric in paper:
        at = [place - 0.18, place + 0.18]
        ax.plot(at, [paper[metric][0]] * 2, color=figures.INK, linewidth=1.2, label="_paper")


def draw_lines(
    rows: Rows, id: str, x: str, metrics: Sequence[str], xlabel: str, paper: Printed | None = None
) -> dict[str, Figure]:
    """Metrics along ``x``: a line per row of ``image-table``, a line of panels per data set."""
    if not rows:
        return {}
    figure, found = panels(rows, len(metrics))
    for dataset, line, mine in found:
        for ax, metric in zip(line, metrics, strict=True):
            for some in tables.group(shown(tables.select(mine, metric=metric)), "row").values():
                figures.plot_mean(ax, *tables.line(some, x), **look_of(some[0]))
            if known := {k[1]: v[metric][0] for k, v in (paper or {}).items() if k[0] == dataset}:
                ax.plot(list(known), list(known.values()), label="L-MAP, paper", **PRINTED)
            ax.set(title=NAMES[dataset], xlabel=xlabel, ylabel=UNITS[metric])
            if paper:
                ax.set_xscale("log", base=2)  # as in the paper's figure
        line[0].legend()
    return {id: figure}


SHOWN = (*METRICS, "ood_auroc", "temperature", "laplacian_other", "reg_strength")
FULL_EPOCHS = {"fmnist": 50, "cifar10": 200}

TUNED = "@tuned"  # the change of a row that has the lowest NLL on held-out images


def lines(
    rows: Rows,
    paper: Printed,
    *,
    by: Sequence[str] = ("dataset", "row"),
    metrics: Sequence[str] = SHOWN,
) -> list[dict[str, Any]]:
    """A table: mean ± standard error over seeds, in the paper's units, beside the paper's."""
    printed = {(*key, m): cell for key, cells in paper.items() for m, cell in cells.items()}
    found = []
    for members in tables.group(rows, *by, metric=tuple(metrics)).values():
        about = {"method": members[0].method, "px": members[0].config.get("px")}
        mine = shown(tables.in_order(members, *metrics))
        found += [e | about for e in tables.summarize(mine, *by, "metric", paper=printed)]
    return found


def with_tuned(rows: Rows) -> list[Row]:
    """Rows as the table has them, then the best of each one's changes (tuned: of several)."""
    found = []
    for members in tables.group(rows, "dataset").values():
        tried: dict[str, dict[str, dict[int, float]]] = {}
        for (name,), mine in tables.group(members, "row").items():
            nll = tables.values_by(mine, "seed", metric="valid_nll")
            if nll and "@valid" not in name:
                tried.setdefault(base_of(name), {})[name] = nll
            if base_of(name) == name or "@valid" in name:
                found += mine
        for base, losses in tried.items():
            seeds = set.intersection(*map(set, losses.values()))
            if not seeds:
                continue
            means = {name: sum(nll[seed] for seed in seeds) for name, nll in losses.items()}
            best = min(means, key=means.__getitem__)
            name = base + TUNED if len(losses) > 1 else best
            if name != base:  # which is there
                mine = tables.select(members, row=best)
                found += [row._replace(config={**row.config, "row": name}) for row in mine]
    names = [row.config["row"] for row in found]
    places = {name: (base_of(name) != name, [*KINDS].index(base_of(name))) for name in names}
    return sorted(found, key=lambda row: places[row.config["row"]])


def difference(
    rows: Rows, metric: str, one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[Mean, list[float]]:
    """Difference of two kinds of runs over the seeds that both have, and the mean of each."""
    sides = [tables.select(rows, **{"metric": metric, **where}) for where in (one, other)]
    seeds = set.intersection(*({row.seed for row in side} for side in sides))
    sides = [shown(row for row in side if row.seed in seeds) for side in sides]
    return tables.paired(*sides), [tables.mean(row.value for row in side).mean for side in sides]


def claim_about(
    claim: str,
    rows: Rows,
    metric: str,
    *,
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    command: str,
    paper: str | None = None,
    **bound: float,
) -> Claim:
    """A claim about the difference of two kinds of runs, over the seeds that both have."""
    effect, means = difference(rows, metric, one, other)
    source: Any = "paper" if paper else "ours"
    if not effect.n:
        return not_tested(claim, command, paper, source)
    ours = f"{means[0]:.4g} against {means[1]:.4g}, {with_error(effect.mean, effect.stderr)}"
    return judge(claim, *effect, ours=ours, paper=paper, source=source, **bound)


def full_length(rows: Rows, dataset: str) -> list[Row]:
    """Rows of a set that were trained on the real data for the protocol's number of epochs."""
    real, epochs = tables.select(rows, dataset=dataset, generated=False), FULL_EPOCHS[dataset]
    return [r for r in real if r.config["epochs"] >= epochs and r.config["images"] > 2e4]


def command(experiment: str, **settings: str) -> str:
    """The command that would measure what is missing."""
    given = " ".join(f"--set {name}={value}" for name, value in settings.items())
    return f"fsmap run {experiment} --resume {given}".rstrip()
