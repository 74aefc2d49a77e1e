"""``uci-table``: the paper's loss, both protocols on a made-up table, and every claim both ways."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

import fsmap
from fsmap.data import uci
from fsmap.paper.engine import Context
from fsmap.paper.report import tables
from fsmap.paper.rows import Row
from fsmap.paper.uci import table as protocol
from fsmap.paper.uci.table import DIFFERENCE, METHODS, PRINTED, UCITable, cells, on_most
from fsmap.px import Stream

SIZES = {"fair_splits": 3, "baseline_splits": 1, "steps": 60, "batch": 16, "points": 8, "width": 8}
TINY = dataclasses.replace(
    UCITable.quick, datasets=("boston",), strengths=(1e-3,), epochs=5, lr=1e-3, **SIZES
)


@pytest.fixture
def made_up(monkeypatch):
    """A table that needs no file."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3))
    y = np.sin(x.sum(1, keepdims=True)) + 0.05 * rng.normal(size=(80, 1))
    table = uci.Table("boston", x, y)
    monkeypatch.setattr(uci, "read_table", lambda *_: table)
    return table


def context(tmp_path) -> Context:
    return Context(torch.device("cpu"), tmp_path, size="quick")


def as_rows(measured) -> list[Row]:
    return [Row("uci-table", **m._asdict()) for m in measured]


def test_the_objective_is_the_paper_s_loss():
    """Its gradient is that of mean squared error + w‖θ‖² + λR, written here as the authors do."""
    w, strength, num_data = torch.tensor(1e-3), torch.tensor(0.02), 57
    f, params = fsmap.functional(protocol.network(TINY, 3, 0, torch.device("cpu")).double())
    params = {n: p.detach().requires_grad_() for n, p in params.items()}
    objective = protocol.objective(TINY, 3, num_data, w.double(), strength.double())
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 3, generator=generator), torch.randn(16, 1, generator=generator)
    draws = objective.draw(f, params, Stream(0, 0))
    shifted = {n: p + 1e-3 * draws.psi[n][0] for n, p in params.items()}
    change = (f(shifted, draws.x) - f(params, draws.x)).square().sum(-1).mean() / 1e-6
    decay = sum(p.square().sum() for p in params.values())
    theirs = (f(params, x) - y).square().mean() + 1e-3 * decay + 0.02 * change
    ours, _ = objective.loss(f, params, fsmap.Batch(x, y), draws)
    leaves = list(params.values())
    grads = [torch.autograd.grad(loss, leaves) for loss in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-9)


def test_the_paper_s_protocol_tunes_on_split_0_only(made_up, tmp_path):
    rows = as_rows(protocol.run_paper(TINY, "boston", context(tmp_path)))
    tuned = tables.select(rows, metric="valid_rmse", stage="tune")
    assert {row.config["split"] for row in tuned} == {0}
    assert len(tuned) == 4
    final = tables.select(rows, metric="test_rmse", stage="final")
    assert [(r.method, r.seed) for r in final] == [(m, s) for m in METHODS for s in (0, 1)]
    for method in METHODS:
        best = min(tables.select(tuned, method=method), key=lambda r: r.value)
        used = {r.config["weight_decay"] for r in tables.select(final, method=method)}
        assert used == {best.config["weight_decay"]}
    # the first final run repeats the tuned one: same split, seed and start
    first = {"stage": "tune", "metric": "test_rmse", "method": "ps-map"}
    again = tables.values_by(rows, "weight_decay", **first)
    assert final[0].value == pytest.approx(again[final[0].config["weight_decay"]], rel=1e-5)


def test_everything_at_tiny_size(made_up, tmp_path):
    here, experiment = context(tmp_path), UCITable()
    rows = as_rows(m for u in experiment.units(TINY) for m in experiment.run(TINY, u, here))
    table = experiment.table(rows)
    found = {(line["protocol"], line["method"]): line for line in table}
    assert set(found) == {
        *(("paper", m) for m in METHODS),
        *(("fair", m) for m in (*METHODS, DIFFERENCE, "sklearn-mlp", "boosting", "ridge")),
    }
    assert found["fair", "l-map"]["runs"] == 3
    assert found["paper", "ps-map"]["paper"] == 0.329
    assert found["fair", "ridge"]["paper"] is None
    assert all(math.isfinite(line["ours"]) for line in table)
    assert list(UCITable().draw(rows)) == ["uci-table"]
    assert len(UCITable().claims(rows)) == 6


def test_fair_pieces_are_joined_and_need_not_be_complete(made_up, tmp_path):
    here = context(tmp_path)
    pieces = [as_rows(protocol.run_fair(TINY, "boston", splits, here)) for splits in ([0, 1], [2])]
    whole = {c.method: c for c in cells([*pieces[0], *pieces[1]])}
    part = {c.method: c for c in cells(pieces[0])}
    assert list(whole["l-map"].values) == [0, 1, 2]
    assert list(part["l-map"].values) == [0, 1]
    difference = whole[DIFFERENCE].values[2]
    assert difference == pytest.approx(whole["l-map"].values[2] - whole["ps-map"].values[2])


def test_a_run_that_diverged_is_never_chosen():
    diverged, good = protocol.Run(1e-4, 0.0, 0), protocol.Run(1e-3, 0.0, 0, 0.5, 0.6)
    other = protocol.Run(1e-2, 1e-3, 0, 0.1, 0.1)
    assert protocol.choose([diverged, good, other], "ps-map") is good
    assert protocol.choose([diverged, good, other], "l-map") is other


def rows_of(method, name, values, dataset="boston", **config) -> list[Row]:
    """Validation and test errors that are the same, a value per split."""
    where = {"dataset": dataset, "protocol": name, "stage": "all", **config}
    where["split"] = list(range(len(values)))
    return [Row("uci-table", m, values, method, None, where) for m in protocol.METRICS]


def printed_rows(shift: float = 0.0) -> list[Row]:
    """The paper's table as if we had measured it, L-MAP's cells moved by ``shift`` std. errors."""
    rows = []
    for (dataset, method), (mean, spread) in PRINTED.items():
        center = mean + (shift * spread * math.sqrt(2) if method == "l-map" else 0.0)
        for split, sign in enumerate((1.0, -1.0)):  # two values: standard error = spread
            where = {"dataset": dataset, "protocol": "paper", "stage": "final", "split": split}
            value = center + sign * spread
            rows += [Row("uci-table", m, value, method, split, where) for m in protocol.METRICS]
    return rows


@pytest.mark.parametrize(("shift", "holds"), [(0.0, True), (2.5, False), (3.5, False)])
def test_cells_against_the_paper_s(shift, holds):
    first, second, *rest = UCITable().claims(printed_rows(shift))
    assert first.holds is holds
    assert ("mean lower on 7 of 8" in second.ours) is (shift == 0)
    assert {claim.seeds for claim in rest} == {0}  # neither fair runs nor baselines
    if not shift:  # a split of one cell diverges; a cell is missing
        rows = printed_rows()
        diverged = [row._replace(value=math.nan) for row in rows[-2:]]
        assert UCITable().claims(rows[:-2] + diverged)[0].holds is False
        assert UCITable().claims(rows[:-4])[0].holds is None


@pytest.mark.parametrize(
    ("means", "stderr", "holds"),
    [((-1, -1, -1, 1), 0.1, True), ((-1, -1, 1, 1), 0.1, False), ((-1, -1, -1, 1), 1.0, None)],
)
def test_tables_are_counted_with_their_errors(means, stderr, holds):
    pairs = {str(k): tables.Mean(mean, stderr, 20) for k, mean in enumerate(means)}
    claim = on_most("lower on most", pairs, 5 / 8)
    assert (claim.holds, claim.seeds, claim.source) == (holds, 20, "ours")


@pytest.mark.parametrize(
    ("lm", "plain", "ridge"),
    [([0.1, 0.11, 0.12], True, True), ([0.21, 0.22, 0.231], False, True)]
    + [([0.4, 0.1, 0.3], None, None)],
)
def test_the_fair_comparison_is_paired_on_the_splits_that_both_have(lm, plain, ridge):
    rows = rows_of("ps-map", "fair", [0.2, 0.21, 0.22]) + rows_of("l-map", "fair", lm)
    rows += rows_of("ridge", "baselines", [0.25, 0.261])
    found = [claim for claim in UCITable().claims(rows) if claim.seeds]
    assert [(claim.holds, claim.seeds) for claim in found] == [(plain, 3), (ridge, 2)]
