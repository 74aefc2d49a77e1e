"""What the rows of ``image-recipe`` say: the Pareto front, claims, and the curve over λ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fsmap.experiments.image_measure import shown
from fsmap.experiments.image_pictures import NAMES, UNITS
from fsmap.experiments.image_verdict import long_enough, ran, shared
from fsmap.report import figures, tables
from fsmap.report.records import Claim, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXES = {"accuracy": 1, "nll": -1, "ece": -1, "nll_scaled": -1}
"""What is weighed against each other; +1: more is better."""

MORE = ("ece_scaled", "temperature", "test_temperature", "valid_nll", "seconds_per_step")
CLOSE, LOSS = 0.1, 0.3
"""Largest |log T| on test images, and largest loss of accuracy in percent, of a steered run."""


class Tried(NamedTuple):
    """One kind of run: means over seeds, in the units of the tables."""

    dataset: str
    name: str
    part: str
    config: Mapping[str, Any]
    values: Mapping[str, float]
    runs: int

    @property
    def strength(self) -> float:
        """λ, or where steering ended."""
        return self.values.get("reg_strength", 0.0)


def everything_tried(rows: Sequence[Row]) -> list[Tried]:
    """Means over seeds of each kind of run.

    Args:
        rows: Rows of a run.

    Returns:
        In the order of the rows.
    """
    found = []
    for (dataset, name, part), some in tables.group(rows, "dataset", "row", "part").items():
        values = {}
        for metric in (*AXES, *MORE, "reg_strength", "collapses"):
            mine = [shown(metric, row.value) for row in tables.select(some, metric=metric)]
            if mine:
                values[metric] = sum(mine) / len(mine)
        runs = len(tables.select(some, metric="nll"))
        found.append(Tried(dataset, name, part, some[0].config, values, runs))
    return found


def is_dominated(one: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> bool:
    """Whether another is at least as good on every axis and better on one.

    Args:
        one: Values by axis.
        others: Values of the others.

    Returns:
        True where it is not on the Pareto front.

    Examples:
        >>> a = {"accuracy": 94.0, "nll": 0.2, "ece": 1.0, "nll_scaled": 0.2}
        >>> is_dominated({**a, "ece": 2.0}, [a]), is_dominated({**a, "nll": 0.1}, [a])
        (True, False)
    """

    def beats(other: Mapping[str, float]) -> bool:
        gains = [sign * (other[axis] - one[axis]) for axis, sign in AXES.items()]
        return all(gain >= 0 for gain in gains) and any(gain > 0 for gain in gains)

    return any(beats(other) for other in others)


def recipe_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line per kind of run; ``pareto`` says whether nothing tried on that set beats it.

    Args:
        rows: Rows of a run.

    Returns:
        The lines.
    """
    tried = everything_tried(rows)
    lines = []
    for one in tried:
        rivals = [other.values for other in tried if other.dataset == one.dataset]
        c = one.config
        line: dict[str, Any] = {"dataset": one.dataset, "run": one.name}
        line.update(batchnorm=c["batchnorm"], estimator=c["estimator"], num_points=c["num_points"])
        line.update(every=c["every"], lam=one.strength or None)
        line.update({axis: one.values[axis] for axis in AXES})
        line.update(temperature=one.values.get("temperature"))
        seconds = one.values.get("seconds_per_step")  # not kept where runs shared a GPU
        line.update(ms_per_step=None if seconds is None else 1e3 * seconds, runs=one.runs)
        line.update(pareto=not is_dominated(one.values, rivals))
        lines.append(line)
    return lines


def recipe_claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """What the controller has to show; only of runs that are long enough to be judged.

    Args:
        rows: Rows of a run.

    Yields:
        Claims.
    """
    yield from ran(rows)
    for (dataset,), mine in tables.group(long_enough(rows), "dataset").items():
        steered = tables.group(tables.select(mine, part="steered"), "batchnorm")
        for (mode,), some in steered.items():
            yield from _steered_claims(f"{dataset}, {mode}", some, mine)
            yield from _against_others(f"{dataset}, {mode}", some, mine)


def _steered_claims(where: str, steered: Sequence[Row], rows: Sequence[Row]) -> Iterator[Claim]:
    ends = tables.select(steered, metric="test_temperature")
    far = {(row.config["row"], row.seed): abs(math.log(row.value)) for row in ends}
    name, seed = worst = max(far, key=lambda run: far[run])
    different = len({(row.seed, row.value) for row in tables.select(steered, metric="nll")})
    same = "" if different == len(far) else f"; {different} different of {len(far)} runs"
    names = list(dict.fromkeys(name for name, _ in far))
    yield Claim(
        f"{where}: steered from {len(names)} first values, |log T| on test images ends below "
        f"{CLOSE} in every run",
        far[worst] < CLOSE,
        f"at most {far[worst]:.3f} ({name}, seed {seed}){same}",
        None,
    )
    accuracy = tables.select(rows, metric="accuracy")
    sides = {name: (tables.select(accuracy, row=name), _plain(accuracy)) for name in names}
    means = {name: shared(*both) for name, both in sides.items()}
    means = {name: both for name, both in means.items() if both[0].n}
    if not means:
        return
    low = min(means, key=lambda name: means[name][0].mean - means[name][1].mean)
    mine, plain = means[low]
    collapses = sum(row.value for row in tables.select(steered, metric="collapses"))
    yield Claim(
        f"{where}: no steered run collapsed, and from no first value more than {LOSS} % of accuracy"
        " is lost (means over seeds)",
        not collapses and mine.mean >= plain.mean - LOSS,
        f"{mine.mean:.2f} % ({low}) against {plain.mean:.2f} %, {collapses:g} collapses undone",
        None,
    )


def _plain(rows: Sequence[Row]) -> list[Row]:
    return tables.select(rows, part="ps-map")


def _against_others(where: str, steered: Sequence[Row], rows: Sequence[Row]) -> Iterator[Claim]:
    mine = tables.select(steered, metric="nll")
    tried = [one for one in everything_tried(rows) if one.part == "fixed"]
    fixed = [one for one in tried if math.isfinite(one.values["nll"])]
    if fixed:
        best = min(fixed, key=lambda one: one.values["valid_nll"]).name
        ours, theirs = shared(mine, tables.select(rows, metric="nll", row=best))
        if ours.n:
            yield Claim(
                f"{where}: steered runs have a lower mean test NLL than the fixed λ, of any mode, "
                "that is best on the same held-out images",
                ours.mean < theirs.mean,
                f"{ours.mean:.4f} against {theirs.mean:.4f} ({best})",
                None,
            )
    ours, theirs = shared(mine, _plain(tables.select(rows, metric="nll_scaled")))
    if ours.n:
        yield Claim(
            f"{where}: steered runs, unscaled, have a lower mean test NLL than PS-MAP after "
            "temperature scaling",
            ours.mean < theirs.mean,
            f"{ours.mean:.4f} against {theirs.mean:.4f}",
            None,
        )


def draw(rows: Sequence[Row]) -> Figure:
    """NLL before and after scaling, ECE and T over λ; steered runs where they ended.

    Args:
        rows: Rows of a run.

    Returns:
        The figure.
    """
    tried = everything_tried(rows)
    sets = list(dict.fromkeys(one.dataset for one in tried))
    metrics = ("nll", "nll_scaled", "ece", "temperature")
    figure, panels = figures.axes(len(metrics), len(sets), squeeze=False)
    for line, dataset in zip(panels, sets, strict=True):
        for ax, metric in zip(line, metrics, strict=True):
            _panel(ax, [one for one in tried if one.dataset == dataset], metric)
            ax.set(
                title=NAMES[dataset], xlabel=r"$\lambda$", ylabel=UNITS.get(metric, "T, held-out")
            )
        line[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def _panel(ax: Axes, tried: Sequence[Tried], metric: str) -> None:
    from matplotlib.colors import to_rgb

    for mode, shade in {"joint": 1.0, "frozen": 0.6, "batch": 0.3}.items():
        color = [1 - shade * (1 - part) for part in to_rgb(figures.COLORS["l-map"])]
        fixed = [o for o in tried if o.part == "fixed" and o.config["batchnorm"] == mode]
        if fixed:
            x, y = [o.strength for o in fixed], [o.values[metric] for o in fixed]
            ax.plot(x, y, color=color, marker="^", label=f"{mode}, fixed{_size(fixed)}")
        ends = [o for o in tried if o.part == "steered" and o.config["batchnorm"] == mode]
        if ends:
            x, y = [o.strength for o in ends], [o.values[metric] for o in ends]
            ax.plot(x, y, "*", color=color, markersize=9, label=f"{mode}, steered{_size(ends)}")
    for one in tried:
        if one.part == "ps-map":
            style = {"color": figures.COLORS["ps-map"], "linestyle": "--"}
            ax.axhline(one.values[metric], label=f"PS-MAP{_seeds([one])}", **style)
    ax.margins(y=0.08)  # room for PS-MAP's line at the edge
    if any(one.strength > 0 for one in tried):
        ax.set_xscale("log")
        ax.xaxis.set_minor_formatter("")  # powers of ten are enough


def _size(tried: Sequence[Tried]) -> str:
    """S and ``every`` of runs that have the same, and how many seeds they have."""
    sizes = {(o.config["num_points"], o.config["every"]) for o in tried}
    same = ", S = {}, every {}".format(*sizes.pop()) if len(sizes) == 1 else ""
    return same + _seeds(tried)


def _seeds(tried: Sequence[Tried]) -> str:
    few, many = min(o.runs for o in tried), max(o.runs for o in tried)
    number = str(few) if few == many else f"{few} to {many}"
    return f", {number} seed{'s' * (many > 1)}"
