"""What the rows of ``uci-table`` say: cells of the table, and claims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fsmap.paper.report import tables
from fsmap.paper.report.numbers import number
from fsmap.paper.report.records import Claim, Row
from fsmap.paper.report.tables import Mean
from fsmap.paper.uci.baselines import NAMES
from fsmap.paper.uci.protocol import BASELINES, FAIR, PAPER

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
    """One number of the table.

    Attributes:
        dataset: The table.
        method: Whose error.
        protocol: How it was chosen and tested.
        values: Test errors (or differences) by split.
        config: The configuration that was chosen.
        edges: Which of its numbers are the largest (``↑``) or smallest (``↓``) that were tried.
    """

    dataset: str
    method: str
    protocol: str
    values: dict[int, float]
    config: dict[str, float]
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
    """The table: protocols, tables and methods in order; after ``fair``, the paired differences.

    Args:
        rows: Rows of a run, finished or not.

    Returns:
        One cell per line.
    """
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
    """Everything the table is said to show.

    Args:
        rows: Rows of a run.

    Yields:
        Claims that can come out false.
    """
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
