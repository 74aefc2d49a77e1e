"""``uci-table`` (Table 1): test errors of PS-MAP and L-MAP on eight regression tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report.records import Claim, Row
from fsmap.paper.uci.baselines import NAMES, run_baseline
from fsmap.paper.uci.picture import draw
from fsmap.paper.uci.protocol import (
    BASELINES,
    FAIR,
    PAPER,
    Config,
    run_fair,
    run_paper,
)
from fsmap.paper.uci.verdict import cells, claims

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    cost = "2 min paper, 12 min fair on an H200"
    protocol = (
        "mean squared error + w‖θ‖² + λR by one-sided differences, β = 1e-3; on a GPU products of "
        "pairs of bfloat16 (16 bits of mantissa, float32 sums), on a CPU float32. paper: authors' "
        "scaling, tuned on split 0, 6 splits; fair: scaled by training statistics, every "
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
