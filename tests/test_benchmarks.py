"""The benchmark compares ways to the same number, and counts as it says."""

from __future__ import annotations

import importlib
import inspect
import json
import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import cases
import fsmap
import oracles
from fsmap.functional import count

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of benchmarks/, which is no part of the package."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.mark.filterwarnings("ignore")  # the other libraries' own
@pytest.mark.parametrize("network", ["mlp-1e3", "cnn"])
def test_all_ways_give_the_same_number(bench, network, seeded):
    cells, ours, others = bench("cells"), bench("ours"), bench("others")
    cell = cells.cell(network, 16, dtype=torch.float64)
    exact = {
        "log_det": float(next(iter(ours.log_det(cell).values()))().detach()),
        "trace": float(next(iter(ours.exact_trace(cell).values()))().detach()),
    }
    with torch.no_grad():
        for way in (*ours.log_det(cell).items(), *others.log_det(cell).items()):
            if way[0].split()[-1] not in ("svd_clip", "pseudo", "first_order"):
                assert float(way[1]()) == pytest.approx(exact["log_det"], rel=1e-9), way[0]
        for name, work in others.exact_trace(cell).items():
            assert float(work()) == pytest.approx(exact["trace"], rel=1e-9), name
        for name, work in {**ours.trace(cell), **others.trace(cell)}.items():
            values = torch.tensor([float(work()) for _ in range(12)])
            error = values.std() / math.sqrt(12)
            assert abs(values.mean() - exact["trace"]) < 6 * error, name
        for kind in ("log_det_by_lanczos", "log_det_by_products"):
            for name, work in {**getattr(ours, kind)(cell), **getattr(others, kind)(cell)}.items():
                values = torch.tensor([float(work()) for _ in range(8)])
                error = values.std() / math.sqrt(8)
                assert abs(values.mean() - exact["log_det"]) < 6 * error + 1e-6, name


def test_measuring(bench, seeded):
    measure = bench("measure")
    module = torch.nn.Linear(1, 1)
    slow = torch.ones(300, 300)

    def long():
        return (slow @ slow @ slow).sum()

    def short():
        return slow.sum()

    found = measure.in_turns({"long": long, "short": short}, module, gradient=False)
    assert found["long"].median > found["short"].median
    assert found["short"].values[0] == 90_000
    assert len(found["long"].seconds) == len(found["short"].seconds) >= 3
    low, high = found["long"].quartiles
    assert low <= found["long"].median <= high
    assert measure.ratio(short, long, module, gradient=False, once=0.1) > 1


def test_strengths_beside_each_other(bench, tmp_path, monkeypatch, seeded):
    strength = bench("strength")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # the other tests' business
    task = strength.steering()
    few = [(x[:100], y[:100]) for x, y in task.splits]
    monkeypatch.setitem(strength.SETS, "steering", lambda: task._replace(splits=few))
    options = ["--epochs", "3", "--seeds", "2", "--out", str(tmp_path / "rows")]
    strength.main(["--ways", "plain", "lam=0", "lam=0.1", "nats=0.05", "trim=0.05", *options])
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    plain, zero, large, nats, trimmed = (rows[i] for i in range(0, 10, 2))
    assert zero["test"]["nll"] != plain["test"]["nll"]  # `joint` has p_X's points in its batches
    assert large["test"]["nll"] > zero["test"]["nll"]
    assert nats["lam"] > 0
    assert 0.05 / 4 <= trimmed["nats"] <= 0.05 * 4
    assert trimmed["nats"] != nats["nats"] == 0.05


def test_sam_with_a_penalty_counts_one_step(bench, seeded):
    """The gradient is that at θ + ρ·g/‖g‖, at the same draws; statistics are of the first pass."""
    strength = bench("strength")
    x, y = torch.randn(20, 8), torch.arange(20) % 2
    model = strength.steering().network().double()
    lm, penalty = fsmap.LMAP(model, x, num_points=8), fsmap.LogTrace(0.1)
    twin, params = deepcopy(model), list(model.parameters())
    other, plain = fsmap.LMAP(twin, x, num_points=8), fsmap.LogTrace(0.1)
    drawn = other.draw(x)

    def gradient() -> list[torch.Tensor]:
        out, R = other(x, drawn=drawn)
        return torch.autograd.grad(F.cross_entropy(out, y) + plain(R), list(twin.parameters()))

    first = gradient()
    statistics, mean = [b.clone() for b in twin.buffers()], plain.mean.clone()
    norm = torch.cat([g.flatten() for g in first]).norm()
    with torch.no_grad():
        for p, g in zip(twin.parameters(), first, strict=True):
            p += 0.5 * g / norm
    start = [p.detach().clone() for p in params]
    strength.step({"sam": 0.5, "nats": 0.1}, torch.optim.SGD(params, lr=1.0), lm, penalty, x, y)
    torch.testing.assert_close([a - p for a, p in zip(start, params, strict=True)], gradient())
    torch.testing.assert_close(list(model.buffers()), statistics)
    assert (int(penalty.steps), lm.step) == (1, 1)
    assert penalty.mean == mean


def test_walks_count_the_files_that_a_call_visits(bench, seeded):
    walks = bench("walks")
    walks.doctor()()  # imports
    files, _ = walks.count(walks.doctor())
    assert {"doctor/doctor.py", "doctor/spectrum.py", "doctor/page.py"} <= set(files)
    assert not any(file.startswith(("train/", "objective/", "cli/")) for file in files)
    assert walks.count(lambda: None) == ([], 0)


@pytest.fixture
def hutchpp(bench, monkeypatch):
    """The module, with its estimator known by name for one test."""
    from fsmap.linalg import estimators

    monkeypatch.setattr(estimators, "ESTIMATORS", dict(estimators.ESTIMATORS))
    module = bench("hutchpp")
    estimators.register(module.HutchPlusPlus)
    return module


@pytest.mark.parametrize("name", ["wide", "cnn", "batchnorm_train"])
def test_hutchpp(hutchpp, name, generator):
    """Exact if the sketch spans everything, unbiased if it does not; so is the gradient."""
    case = cases.case(name)
    truth = oracles.trace_slow(case.f, case.params, case.x)
    site = hutchpp.Site(case.f, case.params, case.x)
    vectors = torch.randn(3, count(case.params), generator=generator)
    gram = oracles.gram_slow(case.f, case.params, case.x)
    torch.testing.assert_close(hutchpp.products(site, vectors), vectors @ gram)
    rank = int(torch.linalg.matrix_rank(gram))
    whole = fsmap.trace(*case[:3], method="hutch++", probes=2 * rank, generator=generator)
    torch.testing.assert_close(whole.value.detach(), truth, rtol=1e-6, atol=0)
    values = [
        fsmap.trace(*case[:3], method="hutch++", probes=6, generator=generator).value
        for _ in range(150)
    ]
    mean, sem = oracles.mean_and_sem([float(v.detach()) for v in values])
    assert abs(mean - float(truth)) < 5 * sem
    slow = lambda p: oracles.trace_slow(case.f, p, case.x)  # noqa: E731
    found = [next(cases.slopes(value, slow, case.params, 1)) for value in values[:60]]
    mean, sem = oracles.mean_and_sem([slope for slope, _ in found])
    assert abs(mean - found[0][1]) < 5 * sem


def test_hutchpp_knows_its_error(hutchpp, generator):
    case = cases.case("wide")
    found = [
        fsmap.trace(*case[:3], method="hutch++", probes=16, generator=generator) for _ in range(100)
    ]
    spread = torch.stack([e.value.detach() for e in found]).std()
    reported = torch.stack([e.stderr for e in found]).square().mean().sqrt()
    assert float(reported) == pytest.approx(float(spread), rel=0.3)


def test_the_docs_show_hutchpp_as_it_is_measured(bench):
    page = (ROOT / "docs" / "develop" / "add_a_term.md").read_text()
    module = bench("hutchpp")
    for part in (module.HutchPlusPlus, module.products):
        assert inspect.getsource(part) in page


def test_tables_are_measured_and_shown(bench, monkeypatch):
    tables = bench("tables")
    monkeypatch.setattr(tables, "MOST_ROWS", 60)
    found = {method: tables.fold("wine", method, 0) for method in ("linear", "boosting")}
    assert all(row["accuracy"] > 0.7 and 0 < row["log_loss"] < 1 for row in found.values())
    rows = [{"dataset": "wine", "method": m, "fold": 0} | row for m, row in found.items()]
    assert tables.table(rows).splitlines()[1].split()[:3] == ["log", "loss", "wine"]
