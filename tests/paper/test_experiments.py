"""Every experiment on a CPU at tiny size, and its claims on committed rows, right and wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fsmap.files import plain, revive
from fsmap.paper.closed_form.fourier import NARROW
from fsmap.paper.engine import Context, get, judge_all, paired_effect, summary_of
from fsmap.paper.report import figures
from fsmap.paper.report.tables import Mean
from fsmap.paper.rows import Row, RunFolder, encode, key_of

FOURIER = {"num_frequencies": 8, "steps": 60, "warmup": 10, "num_test": 50, "seeds": 2}
NETWORKS = {"draws": 3, "block": 2, "width": 3, "grid": 6}
TINY: dict[str, dict[str, Any]] = {
    "mixture-posterior": {"seeds": 2, "steps": 400},
    "mixture-bma": {"prior_stds": (1.2, 20.0), "panels": 24, "chain": 30, "chain_warmup": 20,
                    "seeds": 1, "steps": 300},
    "fourier": {**FOURIER, "sizes": (20, 400), "long_steps": 80},
    "fourier-points": {**FOURIER, "n_train": 40, "points": (4, 12, 18, 30)},
    "fourier-pX": {**FOURIER, "n_train": 40, "num_points": 100},
    "fourier-noise": {**FOURIER, "n_train": 40, "ratios": (1 / 3, 1.0, 10.0)},
    "reparam": {"num_centers": 40, "steps": 200, "seeds": 2, "small_steps": 100},
    "theory-metric": {"draws": 20, "points": 20, "metrics": 1},
    "theory-any-parameter": {"starts": 2, "steps": 60, "seeds": 2},
    "theory-symmetry": {"points": 20, "path": 9, "samples": 1_000, "seeds": 2},
    "theory-flat": {"num_frequencies": 4, "n_train": 30, "noise_stds": (0.01, 0.1), "seeds": 2},
    "theory-large-data": {"sizes": (50, 100, 400), "panels": 8, "seeds": 2},
    "logdet-mc": {**NETWORKS, "samples": (18, 9)},
    "laplacian-vs-logdet": {**NETWORKS, "probes": 4},
    "moons-eigs": {"steps": 3, "grid": 5, "lap_points": 6, "det_points": 5, "seeds": 1,
                   "jitters": (0.1, 10.0)},
    "moons-solutions": {"steps": 3, "grid": 5, "lap_points": 6, "between": 0, "pixels": 4},
    "moons-pathology": {"jitters": (1e-4,), "seeds": 2, "steps": 3, "stages": 2, "decades": 2},
}  # fmt: skip


def measure(name: str, folder: Path, **changes: Any) -> list[Row]:
    """Rows of the tiny size, after a trip through JSON."""
    experiment = get(name)
    config = dataclasses.replace(experiment.quick, **TINY[name] | changes)
    shares: list[float] = []
    context = Context(torch.device("cpu"), folder, shares.append, size="quick")
    rows = [
        Row(name, **revive(plain(m._asdict())))
        for unit in experiment.units(config)
        for m in experiment.run(config, unit, context)
    ]
    assert all(0 <= share <= 1 for share in shares)
    return rows


def committed(name: str) -> RunFolder:
    """The committed run of an experiment."""
    return RunFolder(Path(__file__).parents[2] / "results" / name)


@pytest.fixture(scope="module", params=TINY)
def measured(request, tmp_path_factory):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # as in production: nothing may lean on float64
    try:
        rows = measure(request.param, tmp_path_factory.mktemp("out"))
    finally:
        torch.set_default_dtype(before)
    return get(request.param), rows


def test_every_number_is_there_and_is_a_number(measured):
    _, rows = measured
    assert rows
    for row in rows:
        assert torch.isfinite(torch.tensor(row.value, dtype=torch.float64)).all(), row
        encode(row._asdict())


def test_tables_claims_and_pictures_come_from_the_rows(measured):
    experiment, rows = measured
    for config in (experiment.config, experiment.quick):
        keys = [encode(unit) for unit in experiment.units(config)]
        assert len(keys) == len(set(keys)) >= 1
    table, claims = experiment.table(rows), experiment.claims(rows)
    assert table
    assert all(math.isfinite(entry["ours"]) for entry in table)
    assert claims
    for claim in claims:
        assert claim.seeds, claim
        assert "nan" not in str(claim.ours), claim
    with figures.style():
        drawn = experiment.draw(rows)
    assert experiment.id in drawn
    assert all(figure.axes for figure in drawn.values())
    encode([claim._asdict() for claim in claims])


def rounded(text: str) -> str:
    """JSON whose numbers do not depend on the last bits of a logarithm."""
    return re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda found: f"{float(found[0]):.8g}", text)


@pytest.mark.parametrize("name", sorted(path.name for path in committed("").path.glob("[!.]*/")))
def test_committed_summaries_are_those_of_the_rows_and_without_rows_no_claim_is_tested(name):
    run = committed(name)
    written = json.loads(run.summary_file.read_bytes())
    assert rounded(encode(written)) == rounded(encode(summary_of(get(name), run.content())))
    for claim in get(name).claims([]):
        assert (claim.holds, claim.seeds) == (None, 0), claim


def change(**where):
    """Replace values of matching rows; ``to`` is a value or a function of the old one."""
    to = where.pop("to")

    def changed(row: Row) -> Row:
        fields = {"metric": row.metric, "method": row.method, **row.config}
        if any(fields.get(name) != value for name, value in where.items()):
            return row
        return row._replace(value=to(row.value) if callable(to) else to)

    return changed


def shuffled(values):
    return [values[(7 * k) % len(values)] for k in range(len(values))]


BAD = [
    ("mixture-posterior", change(metric="peak", to=-0.4), ["peaks at a θ_R"]),
    ("mixture-posterior", change(metric="right_height", to=0.5), ["right bump"]),
    ("mixture-bma", change(metric="distance", method="ps-map", prior_std=1.2, to=0.07),
     ["PS-MAP is nearer"]),
    ("mixture-bma", change(metric="distance", method="fs-map", prior_std=20.0, to=0.2),
     ["FS-MAP is nearer"]),
    ("mixture-bma", change(metric="distance_of_grid", prior_std=20.0, to=0.01), ["grid over θ_R"]),
    ("fourier", change(metric="log_posterior_gain", objective="exact", to=-1.0), ["log p(f|D)"]),
    ("fourier", change(metric="log_posterior_gain_long", objective="paper", to=10.0),
     ["once Adam has converged"]),
    ("fourier", change(metric="curvature", objective="paper", to=0.02), ["less curved"]),
    ("fourier", change(metric="test_rmse", objective="exact", n_train=400, to=0.2), ["test RMSE"]),
    ("fourier", change(metric="test_rmse", objective="exact", n_train=100, to=0.2), []),
    ("fourier", change(metric="train_rmse", objective="exact", n_train=400, to=0.12),
     ["within 0.015 of the noise"]),
    ("fourier", change(metric="train_rmse", method="ps-map", n_train=100, to=0.09), ["overfits"]),
    ("fourier-points", change(metric="test_rmse", points=10, jitter=1e-6, to=0.04),
     ["falls by", "rises by"]),
    ("fourier-points", change(metric="test_rmse", points=100, jitter=1e-32, to=math.nan),
     ["rises by"]),
    ("fourier-points", change(metric="test_rmse", points=300, jitter=1e-32, to=0.05),
     ["that of Uniform"]),
    ("fourier-points", change(metric="test_rmse", points=math.inf, jitter=1e-6, to=0.05),
     ["that of Uniform"]),
    ("fourier-pX", change(px=NARROW, jitter=1e-6, to=0.03), ["at every ε"]),
    ("fourier-pX", change(px="none", to=0.03), ["at every ε"]),
    ("fourier-noise", change(ratio=0.333333, objective="exact", to=0.2), ["factor of 1.25"]),
    ("fourier-noise", change(ratio=10.0, objective="paper", to=0.1), ["5 times", "twice"]),
    ("fourier-noise", change(ratio=10.0, method="ps-map", to=0.9), ["twice"]),
    ("reparam", change(metric="roughness", to=10.0), ["as rough"]),
    ("reparam", change(metric="median_weight", to=1.0), ["median"]),
    ("reparam", change(metric="gradient_gap", method="fs-map", to=0.1), ["covariantly"]),
    ("reparam", change(metric="gradient_gap", method="ps-map", to=0.0), ["covariantly"]),
    ("reparam", change(metric="function_gap", method="fs-map", to=0.1), ["reaches the same"]),
    ("reparam", change(metric="function_gap", method="ps-map", to=1e-11), ["reaches the same"]),
    ("theory-metric", change(model="mlp", to=1e-9), ["of a tanh network"]),
    ("theory-metric", change(model="square", to=1.0), ["only shifts"]),
    ("theory-metric", change(metric="expectation_gap", to=0.1), ["signed metric"]),
    ("theory-any-parameter", change(metric="distance_to_target", method="ps-map", to=1.0),
     ["returns θ₀"]),
    ("theory-any-parameter", change(metric="moved", method="fs-map", to=0.3), ["FS-MAP does not"]),
    ("theory-any-parameter", change(metric="distance_to_target", method="fs-map", to=0.0),
     ["FS-MAP does not"]),
    ("theory-symmetry", change(metric="null_angle", to=0.5), ["null space"]),
    ("theory-symmetry", change(metric="growth", jitter=0.0, to=0.1), ["without bound"]),
    ("theory-symmetry", change(metric="growth", jitter=1e-8, to=9.0), ["bounded with a jitter"]),
    ("theory-symmetry", change(metric="expected_log_det", samples=10_000, to=-40.0), ["finite"]),
    ("theory-flat", change(metric="relative_gap", noise_std=0.001, to=30.0),
     ["fits well", "vanishes"]),
    ("theory-large-data", change(metric="distance", method="fs-map", to=0.1),
     ["approaches", "more slowly"]),
    ("theory-large-data", change(metric="distance", method="ps-map", to=lambda v: v**2),
     ["more slowly"]),
    ("logdet-mc", change(points=800, to=lambda v: [x - 100 for x in v]), ["s ≤ 1"]),
    ("logdet-mc", change(points=400, to=lambda v: [x + 1_000 for x in v]), ["Fewer points"]),
    ("logdet-mc", change(points=200, to=lambda v: [x - 1e4 for x in shuffled(v)]), ["same order"]),
    ("laplacian-vs-logdet", change(metric="log_det", jitter=1e3, to=lambda v: [2 * x for x in v]),
     ["On the diagonal", "gets better"]),  # a factor of 2
    ("laplacian-vs-logdet", change(metric="log_det", jitter=1e-3, to=shuffled), ["Monotone"]),
    ("moons-eigs", change(method="fs-map", jitter=1e-10, to=200.0), ["below a tenth"]),
    ("moons-eigs", change(method="l-map", jitter=100.0, to=20.0), ["factor of 2"]),
    ("moons-solutions", change(metric="spread", start="chain", to=0.02), ["two optima"]),
    ("moons-solutions", change(metric="spread", start="random", jitter=0.01, to=0.2),
     ["Near-constant"]),
    ("moons-solutions", change(metric="train_nll", start="random", jitter=10.0, to=0.15),
     ["As good as", "better all the way"]),
    ("moons-solutions", change(metric="train_nll", start="random", jitter=0.1, to=0.75),
     ["better all the way"]),
    ("moons-solutions",
     change(metric="probability", start="chain", jitter=0.1, to=lambda v: [0.5] * len(v)),
     ["from the next larger"]),
    ("moons-pathology", change(metric="path", jitter=0.0, to=lambda v: [0.05 * x for x in v]),
     ["no bound", "With jitter"]),
    ("moons-pathology", change(metric="eigenvalue_ratio", jitter=0.0, to=[0.1] * 40),
     ["the optimizer goes there"]),
    ("moons-pathology", change(metric="objective", jitter=0.0, to=lambda v: [0.1 * x for x in v]),
     ["every stage"]),
    ("moons-pathology", change(metric="objective", jitter=1e-4, to=lambda v: [1e4 * x for x in v]),
     ["With jitter"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "false"), BAD)
def test_claims_differ_if_the_rows_say_so(name, spoil, false):
    rows, judge = committed(name).content().rows, get(name).claims
    if name == "moons-solutions":  # of one seed nothing is decided
        rows += [row._replace(seed=1) for row in rows]
    pairs = zip(judge(rows), judge([spoil(row) for row in rows]), strict=True)
    refuted = [after.claim for before, after in pairs if before.holds != after.holds is not True]
    assert len(refuted) == len(false), refuted
    for said, expected in zip(refuted, false, strict=True):
        assert expected in said


def test_several_effects_are_judged_by_the_weakest():
    effects = {"a": Mean(-1.0, 0.1, 3), "b": Mean(-0.1, 0.1, 3), "c": Mean(-9.0, math.nan, 1)}
    assert judge_all("falls", {"a": effects["a"]}, below=0).holds
    undecided = judge_all("falls", {k: effects[k] for k in "ab"}, below=0)
    assert undecided.holds is None
    assert "(b)" in undecided.ours
    assert judge_all("falls", effects, below=0).reason == "one seed: the error is not known"
    assert judge_all("falls", {**effects, "d": Mean(1.0, 0.1, 3)}, below=0).holds is False
    assert judge_all("falls", {**effects, "d": Mean(math.nan, 0.1, 3)}, below=0).holds is False
    values = (("a", 0, 1.0), ("a", 1, 1.1), ("a", 7, 9.0), ("b", 0, 2.0), ("b", 1, 2.2))
    rows = [Row("e", "m", value, method, seed) for method, seed, value in values]
    ratio = paired_effect(rows, {"method": "a"}, {"method": "b"}, ratio=True)
    assert ratio.n == 2
    assert judge_all("half", {"": ratio}, ratio=True, below=0.6).ours == "0.5 times"
    assert judge_all("half", {"": ratio}, ratio=True, within=1.5).holds is False


@pytest.mark.parametrize(
    ("metric", "value", "holds"),
    [("chain_z", 3.0, True), ("chain_z", 5.0, False), ("chain_z", math.nan, False)]
    + [("quadrature_error", 0.1, False)],
)
def test_quadrature_and_chain_have_to_agree(metric, value, holds):
    rows = [row._replace(deviations=()) for row in committed("mixture-bma").content().rows]
    rows = [change(metric="chain_z", to=1.5)(row) for row in rows]
    rows = [change(metric=metric, prior_std=10.0, to=value)(row) for row in rows]
    (claim,) = [claim for claim in get("mixture-bma").claims(rows) if "NUTS" in claim.claim]
    assert claim.holds is holds


def test_claims_and_the_live_figure_have_the_noise_of_the_run(tmp_path):
    rows = measure("mixture-posterior", tmp_path, prior_std=3.0, noise_std=0.2)
    live = get("mixture-posterior").live(rows)
    assert (live["alpha"], live["sigma"]) == (3.0, 0.2)
    rows = measure("fourier", tmp_path, noise_std=0.05)
    assert "noise (0.05)" in str(get("fourier").claims(rows))


def test_every_part_of_a_run_has_claims_and_pictures():
    for name in ("fourier-points", "mixture-bma", "moons-solutions", "moons-pathology"):
        lines, experiment = committed(name).content().lines, get(name)
        units = list(dict.fromkeys(key_of(line.row.unit) for line in lines))
        for some in [*([u] for u in units), *(units[:k] for k in range(1, len(units), 2))]:
            rows = [line.row for line in lines if key_of(line.row.unit) in some]
            assert experiment.claims(rows)
            with figures.style():
                experiment.draw(rows)
    assert get("shift").draw([]) == {}


def test_claims_whose_rows_are_missing_are_not_tested(tmp_path):
    rows = measure("moons-pathology", tmp_path, stages=1, decades=1)
    assert [bool(c.seeds) for c in get("moons-pathology").claims(rows)] == [0, 1, 0, 0]
    claims = get("mixture-bma").claims(measure("mixture-bma", tmp_path, prior_stds=(0.5,)))
    assert not claims[-1].seeds  # of the grid, at the paper's α


def test_without_a_sampler_the_rows_and_the_claim_say_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyro.infer.mcmc", None)
    rows = measure("mixture-bma", tmp_path)
    (claim,) = [c for c in get("mixture-bma").claims(rows) if "NUTS" in c.claim]
    assert claim.holds is None
    assert "pip install 'fsmap[mcmc]'" in claim.reason
