"""``uci-table`` (Table 1): cells, claims and the picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report import figures, tables
from fsmap.paper.report.tables import Mean, number
from fsmap.paper.rows import Claim, Row
from fsmap.paper.uci.protocol import (
    BASELINES,
    FAIR,
    NAMES,
    PAPER,
    Config,
    run_baseline,
    run_fair,
    run_paper,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("ps-map", "l-map")
DIFFERENCE = "l-map \u2212 ps-map"

SYMBOLS = {"weight_decay": "w", "reg_strength": "λ", "alpha": "α"}
"""What was tuned."""

LIMIT_SECONDS = 120.0

PRINTED = {
    "boston": ((0.329, 0.033), (0.352, 0.040)),
    "concrete": ((0.272, 0.016), (0.261, 0.013)),
    "energy": ((0.042, 0.003), (0.041, 0.002)),
    "naval": ((0.032, 0.005), (0.018, 0.002)),
    "power": ((0.219, 0.006), (0.218, 0.005)),
    "protein": ((0.584, 0.005), (0.580, 0.005)),
    "winered": ((0.851, 0.029), (0.792, 0.031)),
    "winewhite": ((0.758, 0.013), (0.714, 0.017)),
}
"""Table 1 of the paper: (mean, standard error) of PS-MAP and L-MAP."""


class Cell(NamedTuple):
    """One number of the table."""

    dataset: str  # the table
    method: str  # whose error
    protocol: str  # how it was chosen and tested
    values: dict[int, float]  # test errors (or differences) by split
    config: dict[str, float]  # the configuration that was chosen
    # which of its numbers are the largest (↑) or smallest (↓) that were tried
    edges: tuple[str, ...] = ()

    @property
    def mean(self) -> Mean:
        """Mean and standard error over splits."""
        return tables.mean(self.values.values())

    @property
    def printed(self) -> tuple[float, float] | None:
        """What the paper prints, where it prints something."""
        if self.method not in METHODS or self.dataset not in PRINTED:
            return None
        return PRINTED[self.dataset][METHODS.index(self.method)]

    @property
    def excess(self) -> float:
        """How much worse than the paper, in combined standard errors; nan where nobody can say."""
        if self.printed is None or self.mean.n < 2:
            return math.nan
        paper, spread = self.printed
        return (self.mean.mean - paper) / math.hypot(self.mean.stderr, spread)

    def line(self) -> dict[str, Any]:
        """A line of the table."""
        paper, spread = self.printed or (None, None)
        return {
            "dataset": self.dataset,
            "method": self.method,
            "protocol": FAIR if self.protocol == BASELINES else self.protocol,
            "ours": self.mean.mean,
            "stderr": self.mean.stderr,
            "paper": paper,
            "paper_stderr": spread,
            "runs": self.mean.n,
            **self.config,
            "edge": " ".join(self.edges) or None,
        }


def cells(rows: Sequence[Row]) -> list[Cell]:
    """The table: protocols, tables and methods in order; after ``fair``, the paired differences."""
    found: list[Cell] = []
    for protocol, names in ((PAPER, METHODS), (FAIR, METHODS), (BASELINES, tuple(NAMES))):
        for (dataset,), members in tables.group(
            tables.select(rows, protocol=protocol), "dataset"
        ).items():
            mine = [_cell(dataset, protocol, m, tables.select(members, method=m)) for m in names]
            found += [cell for cell in mine if cell is not None]
            if protocol == FAIR and all(mine):
                found.append(_difference(*mine))
    return found


def _cell(dataset: str, protocol: str, method: str, rows: Sequence[Row]) -> Cell | None:
    """The chosen configuration and its test errors; None where nothing was run."""
    if protocol == PAPER:
        final = tables.select(rows, metric="test_rmse", stage="final")
        if not final:
            return None
        values = {int(row.config["split"]): float(row.value) for row in final}
        tried = [_knobs(row) for row in tables.select(rows, metric="valid_rmse", stage="tune")]
        chosen = _knobs(final[0])
        return Cell(dataset, method, protocol, values, chosen, _edges(chosen, tried))
    valid = _by_config(tables.select(rows, metric="valid_rmse"))
    test = _by_config(tables.select(rows, metric="test_rmse"))
    if not valid:
        return None
    splits = set.intersection(*(set(column) for column in valid.values()))
    best = min(valid, key=lambda key: _mean_over(valid[key], splits))
    values = {split: test[best][split] for split in sorted(splits)}
    chosen = dict(best)
    return Cell(dataset, method, protocol, values, chosen, _edges(chosen, [*map(dict, valid)]))


def _edges(chosen: dict[str, float], tried: Sequence[dict[str, float]]) -> tuple[str, ...]:
    """``w↑`` where the chosen w is the largest of three or more, ``λ↓`` for the smallest λ."""
    found = []
    for name, value in chosen.items():
        values = sorted({config[name] for config in tried})
        if len(values) >= 3 and value in (values[0], values[-1]):
            found.append(SYMBOLS[name] + ("↑" if value == values[-1] else "↓"))
    return tuple(found)


def _by_config(rows: Sequence[Row]) -> dict[tuple[tuple[str, float], ...], dict[int, float]]:
    """Values by split, by configuration; pieces of the run joined."""
    found: dict[tuple[tuple[str, float], ...], dict[int, float]] = {}
    for row in rows:
        column = found.setdefault(tuple(_knobs(row).items()), {})
        column.update(zip(row.config["split"], row.value, strict=True))
    return found


def _knobs(row: Row) -> dict[str, float]:
    return {name: row.config[name] for name in SYMBOLS if name in row.config}


def _mean_over(column: dict[int, float], splits: set[int]) -> float:
    total = sum(column[split] for split in splits) / len(splits)
    return math.inf if math.isnan(total) else total


def _difference(ps: Cell, lm: Cell) -> Cell:
    values = {split: lm.values[split] - ps.values[split] for split in ps.values}
    return Cell(ps.dataset, DIFFERENCE, FAIR, values, {})


def claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """Everything the table is said to show."""
    table = cells(rows)
    paper = [cell for cell in table if cell.protocol == PAPER]
    if paper:
        yield from _against_paper(paper)
        yield from _in_time(tables.select(rows, protocol=PAPER))
    if any(cell.protocol == FAIR for cell in table):
        yield from _fair(table)
    yield from _against_baselines(table)


def _against_paper(paper: Sequence[Cell]) -> Iterator[Claim]:
    worse = sorted((c for c in paper if c.excess > 2), key=lambda c: -c.excess)
    listed = ", ".join(f"{c.dataset} {c.method} by {c.excess:.1f}" for c in worse) or "none"
    yield Claim(
        "at most 2 of the paper's 16 cells are worse by more than two combined standard errors",
        len(worse) <= 2,
        f"{len(worse)} of {len(paper)}: {listed}",
        "the cells themselves",
    )
    known = [c.excess for c in paper if not math.isnan(c.excess)]
    yield Claim(
        "no cell is worse than the paper's by more than three combined standard errors",
        all(excess <= 3 for excess in known),
        f"largest excess {max(known, default=math.nan):.2f}",
        "the cells themselves",
    )
    pairs = _pairs(paper)
    wins = [d for d, (ps, lm) in pairs.items() if lm.mean.mean < ps.mean.mean]
    yield Claim(
        "L-MAP's mean test error is below PS-MAP's on 7 of 8 tables (paper's protocol)",
        8 * len(wins) >= 7 * len(pairs),
        f"{len(wins)} of {len(pairs)}: {', '.join(wins) or 'none'}",
        "7 of 8",
    )


def _in_time(rows: Sequence[Row]) -> Iterator[Claim]:
    """Only where all of it ran on a GPU."""
    devices = {row.device for row in rows}
    units = {row.config["dataset"]: row.seconds for row in rows}
    if all("cuda" in device for device in devices) and set(units) == set(PRINTED):
        runs = len(tables.select(rows, metric="test_rmse"))
        yield Claim(
            f"the paper's protocol, {runs} runs, takes at most 120 s on one GPU",
            sum(units.values()) <= LIMIT_SECONDS,
            f"{sum(units.values()):.0f} s on {', '.join(sorted(devices))}",
            "about 17 s a run with the authors' code",
        )


def _fair(table: Sequence[Cell]) -> Iterator[Claim]:
    pairs = {c.dataset: c.mean for c in table if c.method == DIFFERENCE}
    score = {d: m.mean / m.stderr for d, m in pairs.items() if m.n > 1 and m.stderr > 0}
    wins = [d for d, m in pairs.items() if m.mean < 0]
    better = [d for d, z in score.items() if z < -2]
    worse = [d for d, z in score.items() if z > 2]
    splits = sorted({m.n for m in pairs.values()})
    yield Claim(
        "L-MAP's mean test error is below PS-MAP's on most tables (fair protocol)",
        2 * len(wins) > len(pairs),
        f"{len(wins)} of {len(pairs)} ({' or '.join(map(str, splits))} splits each): "
        f"{', '.join(wins) or 'none'}",
        None,
    )
    yield Claim(
        "on no table is L-MAP worse by more than two paired standard errors (fair protocol)",
        not worse,
        f"better on {', '.join(better) or 'none'}; worse on {', '.join(worse) or 'none'}",
        None,
    )


def _against_baselines(table: Sequence[Cell]) -> Iterator[Claim]:
    ours = {c.dataset: c for c in table if c.protocol == FAIR and c.method == "l-map"}
    for method, name in NAMES.items():
        theirs = {c.dataset: c for c in table if c.method == method}
        both = [d for d in ours if d in theirs]
        if not both:
            continue
        pairs = {d: _paired(ours[d], theirs[d]) for d in both}
        lost = [d for d in both if not pairs[d].mean < 0]
        splits = " or ".join(map(str, sorted({pair.n for pair in pairs.values()})))
        difference = tables.mean(pair.mean for pair in pairs.values()).mean
        yield Claim(
            f"L-MAP (fair) has a lower test error than scikit-learn's {name} on most tables, "
            f"on the splits both were run on ({splits})",
            2 * len(lost) < len(both),
            f"{len(both) - len(lost)} of {len(both)}; higher on {', '.join(lost) or 'none'}; mean "
            f"difference {number(difference, 2)}",
            None,
        )


def _paired(one: Cell, other: Cell) -> Mean:
    splits = [split for split in one.values if split in other.values]
    return tables.mean(one.values[s] - other.values[s] for s in splits)


def _pairs(found: Sequence[Cell]) -> dict[str, tuple[Cell, Cell]]:
    by_name = {(c.dataset, c.method): c for c in found}
    both = [d for d, method in by_name if method == "l-map" and (d, "ps-map") in by_name]
    return {d: (by_name[d, "ps-map"], by_name[d, "l-map"]) for d in both}


def draw(rows: Sequence[Row]) -> dict[str, Figure]:
    """Errors beside the paper's, and the paired differences of the fair protocol."""
    table = cells(rows)
    figure, (left, right) = figures.axes(2, panel=(5.2, 3.2))
    names = list(dict.fromkeys(c.dataset for c in table))
    for cell in table:
        if cell.protocol == PAPER:
            _draw_cell(left, names.index(cell.dataset), cell)
        elif cell.method == DIFFERENCE:
            _draw_difference(right, names.index(cell.dataset), cell)
    left.set(title="Test RMSE against the paper's", ylabel="RMSE / paper's PS-MAP")
    left.axhline(1.0, color=figures.COLORS["data"], linewidth=0.8, linestyle=":")
    right.axhline(0.0, color=figures.COLORS["data"], linewidth=0.8, linestyle=":")
    right.set(title="L-MAP − PS-MAP, fair protocol, paired", ylabel="difference / standard error")
    for ax in (left, right):
        ax.set_xticks(range(len(names)), names, rotation=35, ha="right")
    looks = [_look(method, filled) for method in METHODS for filled in (True, False)]
    handles = [left.plot([], [], **look)[0] for look in looks]
    words = ["PS-MAP", "PS-MAP, paper", "L-MAP", "L-MAP, paper"]
    figure.legend(handles, words, ncols=4, loc="outside upper center")
    return {"uci-table": figure}


def _look(method: str, filled: bool) -> dict[str, Any]:
    look = figures.method_style(method, linestyle="", label=None)
    if filled:
        return look
    return {**look, "markerfacecolor": "none", "markeredgecolor": look["color"], "mew": 0.9}


def _draw_cell(ax: Any, place: int, cell: Cell) -> None:
    """Ours and the paper's, as multiples of the paper's PS-MAP."""
    if cell.printed is None:
        return
    unit = PRINTED[cell.dataset][0][0]
    shift = -0.18 if cell.method == "ps-map" else 0.12
    pairs = ((cell.mean.mean, cell.mean.stderr, True), (*cell.printed, False))
    for offset, (value, spread, filled) in zip((0.0, 0.1), pairs, strict=True):
        bar = None if math.isnan(spread) else spread / unit
        look = _look(cell.method, filled)
        ax.errorbar(place + shift + offset, value / unit, yerr=bar, elinewidth=0.9, **look)


def _draw_difference(ax: Any, place: int, cell: Cell) -> None:
    mean = cell.mean
    if mean.n > 1 and mean.stderr > 0:
        winner = "l-map" if mean.mean < 0 else "ps-map"
        ax.bar(place, mean.mean / mean.stderr, width=0.6, color=figures.COLORS[winner])


class UCITable(Experiment):
    """Normalized test RMSE, two protocols, beside the paper's and scikit-learn's."""

    id = "uci-table"
    label = "Table 1"
    title = "UCI regression"
    see = (
        "The two methods differ by about one standard error on most tables; the fair protocol, "
        "with 20 splits and paired differences, says where L-MAP really helps. The paper's numbers "
        "stand in parentheses; ↑ or ↓: the chosen w, λ or α is the largest or smallest that was "
        "tried (↓: hardly any regularization is wanted)."
    )
    device = "gpu"
    cost = "minutes on a GPU"
    protocol = (
        "mean squared error + w‖θ‖² + λR by one-sided differences, β = 1e-3; float32, in committed "
        "rows of a GPU products of pairs of bfloat16 (16 bits of mantissa, float32 sums). paper: "
        "authors' scaling, tuned on split 0, 6 splits; fair: scaled by training statistics, every "
        "configuration on 20 splits, chosen by mean validation error"
    )
    group = "uci"
    selecting = ("datasets", "protocols")
    config = Config()
    quick = Config(
        datasets=("boston", "winered"),
        decays=(1e-4, 1e-2),
        strengths=(1e-4, 1e-2),
        seeds=2,
        fair_splits=2,
        chunk=2,
        baseline_splits=2,
        steps=400,
        batch=64,
        points=64,
        width=32,
        lr=3e-3,
        epochs=40,
    )

    def units(self, config: Config) -> list[dict[str, Any]]:
        """The paper's protocol table by table, then pieces of the fair one, then baselines."""
        units: list[dict[str, Any]] = []
        if PAPER in config.protocols:
            units += [{"protocol": PAPER, "dataset": d} for d in config.datasets]
        if FAIR in config.protocols:
            pieces = range(0, config.fair_splits, config.chunk)
            units += [
                {"protocol": FAIR, "dataset": d, "first_split": first}
                for first in pieces
                for d in config.datasets
            ]
        if BASELINES in config.protocols:
            units += [
                {"protocol": BASELINES, "dataset": d, "method": method}
                for method in NAMES
                for d in config.datasets
            ]
        return units

    def run(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """One piece."""
        dataset = unit["dataset"]
        if unit["protocol"] == PAPER:
            return run_paper(config, dataset, context)
        if unit["protocol"] == BASELINES:
            return run_baseline(config, dataset, unit["method"], context)
        first = unit["first_split"]
        splits = range(first, min(first + config.chunk, config.fair_splits))
        return run_fair(config, dataset, splits, context)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """One line per protocol, table and method, ours beside the paper's."""
        return [cell.line() for cell in cells(rows)]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """The paper's cells and its count of wins; the fair comparison; the baselines."""
        return list(claims(rows))

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """Errors beside the paper's, and the paired differences."""
        return draw(rows)
