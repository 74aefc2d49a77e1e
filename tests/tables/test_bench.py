"""``tables-bench``: rows of small runs, and every claim both ways."""

from __future__ import annotations

import pytest
import torch

from fsmap.paper.experiment import Context, get
from fsmap.paper.rows import Row
from fsmap.paper.tables_bench import Config

BENCH = get("tables-bench")


def rows(losses: dict[str, float], coverage: float, worst: float, seconds: float) -> list[Row]:
    found = []
    for dataset in "abcde":
        where = {"dataset": dataset, "fold": 0}
        found += [Row("tables-bench", "rmse", v, m, 0, where) for m, v in losses.items()]
        deciles = {f"coverage_decile_{k}": 0.9 for k in range(9)} | {"coverage_decile_9": worst}
        if dataset == "a":
            found.append(Row(BENCH.id, "cpu_seconds", seconds, "fsmap", 0, {"size": "1000x20"}))
        for metric, value in {"coverage": coverage, **deciles}.items():
            found.append(Row("tables-bench", metric, value, "fsmap", 0, where))
    return found


GOOD = {"fsmap": 1.01, "mlp-tuned": 2, "boosting": 1, "l-map": 1, "ps-map": 2}
BAD = {"fsmap": 2, "mlp-tuned": 1, "boosting": 1, "l-map": 2, "ps-map": 1}


@pytest.mark.parametrize(
    ("losses", "coverage", "worst", "seconds", "holds"),
    [(GOOD, 0.9, 0.85, 9, True), (BAD, 0.95, 0.85, 11, False), (BAD, 0.9, 0.75, 11, False)],
)
def test_claims_follow_the_rows(losses, coverage, worst, seconds, holds):
    claims = BENCH.claims(rows(losses, coverage, worst, seconds))
    assert len(claims) == 5
    assert all(claim.holds is holds for claim in claims)


def test_a_small_run(tmp_path):
    config = Config(datasets=("wine",), methods=("linear", "boosting"), sizes=(), most_rows=60)
    context = Context(torch.device("cpu"), tmp_path, size="quick")
    found = []
    for unit in BENCH.units(config):
        measured = BENCH.run(config, unit, context)
        found += [Row(BENCH.id, m.metric, m.value, m.method, m.seed, m.config) for m in measured]
    assert len(found) == 2 * 5 * 4
    table = BENCH.table(found)
    assert [line["metric"] for line in table] == ["log loss", "ece", "cpu seconds"]
    assert 0 < table[0]["linear"] < table[0]["boosting"]  # 48 rows: the linear model is better
    assert "tables-bench" in BENCH.draw(found)
    assert {claim.holds for claim in BENCH.claims(found)} == {None}  # too few sets
