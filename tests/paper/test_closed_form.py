"""Groups A and A' at tiny size, and their claims on rows made up to be right and wrong."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from closed_form_cases import GOOD, INF, NARROW, TINY, measure
from fsmap.paper.experiment import get
from fsmap.paper.report import figures
from fsmap.paper.rows import Row, encode


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
    experiment, rows = measured
    assert rows
    for row in rows:
        values = row.value if isinstance(row.value, list) else [row.value]
        flat = [v for value in values for v in (value if isinstance(value, list) else [value])]
        assert all(math.isfinite(v) for v in flat), (row.metric, row.config)
        encode(row._asdict())


def test_units_are_different(measured):
    experiment, _ = measured
    for config in (experiment.config, experiment.quick):
        keys = [encode(unit) for unit in experiment.units(config)]
        assert len(keys) == len(set(keys)) >= 1


def test_tables_claims_and_pictures_come_from_the_rows(measured):
    experiment, rows = measured
    table, claims = experiment.table(rows), experiment.claims(rows)
    assert table
    assert all(math.isfinite(entry["ours"]) for entry in table)
    assert len(claims) >= 2
    for claim in claims:
        assert isinstance(claim.holds, bool)
        assert claim.ours is not None
        assert "nan" not in str(claim.ours), claim
    with figures.style():
        drawn = experiment.draw(rows)
    assert experiment.id in drawn
    assert all(figure.axes for figure in drawn.values())
    encode([claim._asdict() for claim in claims])


def test_the_slider_of_mixture_bma(tmp_path):
    experiment, rows = get("mixture-bma"), measure("mixture-bma", tmp_path)
    slider = experiment.interactive(rows)
    assert [frame.label for frame in slider.frames] == ["α = 1.2", "α = 20"]
    assert {c.name for c in slider.frames[0].curves} == {"PS-MAP", "FS-MAP", "BMA", "data"}
    assert "PS-MAP 0.0" in slider.frames[0].note
    encode(slider.describe())
    assert experiment.interactive([]) is None


@pytest.mark.parametrize("name", GOOD)
def test_all_claims_hold_on_good_rows(name):
    claims = get(name).claims(list(GOOD[name]()))
    assert [claim.claim for claim in claims if not claim.holds] == []


@pytest.mark.parametrize("name", GOOD)
def test_no_claim_holds_without_rows(name):
    claims = get(name).claims([])
    assert not any(claim.holds for claim in claims)


def change(**where):
    """Replace values of matching rows; ``to`` is a value or a function of the old one."""
    to = where.pop("to")

    def changed(row: Row) -> Row:
        matches = all(
            (getattr(row, k) if k in ("metric", "method", "seed") else row.config.get(k)) == v
            for k, v in where.items()
        )
        if not matches:
            return row
        return row._replace(value=to(row.value) if callable(to) else to)

    return changed


BAD = [
    ("mixture-posterior", change(metric="peak", to=-0.4), ["peak at different"]),
    ("mixture-posterior", change(metric="right_height", to=0.5), ["visibly lower"]),
    ("mixture-bma", change(metric="distance", method="ps-map", prior_std=1.2, to=0.07),
     ["PS-MAP is nearer to the BMA at α = 1.2"]),
    ("mixture-bma", change(metric="distance", method="fs-map", prior_std=20.0, to=0.2),
     ["FS-MAP is nearer to the BMA at α = 20", "at every larger α"]),
    ("mixture-bma", change(metric="chain_z", prior_std=10.0, to=5.0), ["NUTS agree"]),
    ("mixture-bma", change(metric="chain_z", prior_std=10.0, to=math.nan), ["NUTS agree"]),
    ("mixture-bma", change(metric="quadrature_error", prior_std=10.0, to=0.1), ["NUTS agree"]),
    ("mixture-bma", change(metric="distance_of_grid", prior_std=20.0, to=0.01), ["grid over θ_R"]),
    ("fourier", change(metric="log_posterior_gain", objective="exact", to=-1.0),
     ["above PS-MAP's at every N and seed (true"]),
    ("fourier", change(metric="log_posterior_gain_long", objective="paper", to=10.0),
     ["once Adam has converged (paper"]),
    ("fourier", change(metric="curvature", objective="paper", to=0.02),
     ["flatter at every N (paper"]),
    ("fourier", change(metric="test_rmse", objective="exact", n_train=400, to=0.09),
     ["below 0.8 of PS-MAP's (true"]),
    ("fourier", change(metric="test_rmse", objective="exact", n_train=400, to=0.2),
     ["lower for N ≥ 200 (true", "below 0.8 of PS-MAP's (true"]),
    ("fourier", change(metric="test_rmse", objective="exact", n_train=100, to=0.2), []),
    ("fourier", change(metric="train_rmse", objective="exact", n_train=400, to=0.12),
     ["within 0.09–0.115 for N ≥ 200 (true"]),
    ("fourier", change(metric="train_rmse", method="ps-map", n_train=100, to=0.09),
     ["overfits at small N, FS-MAP does not (true", "overfits at small N, FS-MAP does not (paper"]),
    ("fourier-points", change(metric="test_rmse", points=100, jitter=1e-6, to=0.08),
     ["falls with the number of evaluation points (ε = 1e−6)"]),
    ("fourier-points", change(metric="test_rmse", points=100, jitter=1e-32, to=math.nan),
     ["falls with the number of evaluation points (ε = 1e−32)"]),
    ("fourier-points", change(metric="test_rmse", points=300, jitter=1e-32, to=0.05),
     ["flat once Φ has full rank, at the value of Uniform(−1, 1) (ε = 1e−32)"]),
    ("fourier-points", change(metric="test_rmse", points=INF, jitter=1e-6, to=0.05),
     ["flat once Φ has full rank, at the value of Uniform(−1, 1) (ε = 1e−6)"]),
    ("fourier-pX", change(px=NARROW, jitter=1e-6, to=0.03), ["and than PS-MAP (ε = 1e−6)"]),
    ("fourier-pX", change(px="none", to=0.03),
     ["and than PS-MAP (ε = 1e−32)", "and than PS-MAP (ε = 1e−6)"]),
    ("fourier-noise", change(ratio=0.333333, objective="exact", to=0.2), ["are alike (true"]),
    ("fourier-noise", change(ratio=10.0, objective="paper", to=0.1),
     ["explodes (paper", "PS-MAP's stays (paper"]),
    ("fourier-noise", change(ratio=10.0, method="ps-map", to=0.9),
     ["PS-MAP's stays (true", "PS-MAP's stays (paper"]),
    ("reparam", change(metric="roughness", to=10.0), ["rougher"]),
    ("reparam", change(metric="median_weight", to=1.0), ["away from zero"]),
    ("reparam", change(metric="gradient_gap", method="fs-map", to=0.1), ["covariantly"]),
    ("reparam", change(metric="gradient_gap", method="ps-map", to=0.0), ["covariantly"]),
    ("reparam", change(metric="function_gap", method="fs-map", to=0.1), ["reaches the same"]),
    ("reparam", change(metric="function_gap", method="ps-map", to=1e-11), ["reaches the same"]),
    ("theory-metric", change(model="mlp", to=1e-9), ["of a tanh network"]),
    ("theory-metric", change(model="square", to=1.0), ["for a square Jacobian"]),
    ("theory-metric", change(metric="expectation_gap", to=0.1), ["signed metric"]),
    ("theory-any-parameter", change(metric="distance_to_target", method="ps-map", to=1.0),
     ["returns θ₀"]),
    ("theory-any-parameter", change(metric="moved", method="fs-map", to=0.3), ["FS-MAP does not"]),
    ("theory-any-parameter", change(metric="distance_to_target", method="fs-map", to=0.0),
     ["FS-MAP does not"]),
    ("theory-symmetry", change(metric="null_angle", to=0.5), ["null space"]),
    ("theory-symmetry", change(metric="growth", jitter=0.0, to=0.1), ["without bound"]),
    ("theory-symmetry", change(metric="growth", jitter=1e-8, to=9.0), ["bounded with a jitter"]),
    ("theory-symmetry", change(metric="expected_log_det", samples=10_000, to=-40.0),
     ["q = N(θ, s²(𝒥+εI)⁻¹)", "q = N(θ, s²I)"]),
    ("theory-symmetry", change(metric="expected_log_det", samples=10_000, to=-math.inf),
     ["q = N(θ, s²(𝒥+εI)⁻¹)", "q = N(θ, s²I)"]),
    ("theory-flat", change(metric="relative_gap", noise_std=0.01, to=0.3),
     ["fits well", "vanishes"]),
    ("theory-large-data", change(metric="distance", method="fs-map", to=0.1),
     ["approaches", "faster than"]),
    ("theory-large-data", change(metric="distance", method="ps-map", to=lambda v: v**2),
     ["faster than"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "false"), BAD)
def test_claims_come_out_false_where_the_rows_say_so(name, spoil, false):
    claims = get(name).claims([spoil(row) for row in GOOD[name]()])
    refuted = [claim.claim for claim in claims if not claim.holds]
    assert len(refuted) == len(false), refuted
    for said, expected in zip(refuted, false, strict=True):
        assert expected in said


def test_without_a_sampler_the_rows_and_the_claim_say_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyro.infer.mcmc", None)
    rows = measure("mixture-bma", tmp_path)
    notes = [note for row in rows if row.metric == "chain_z" for note in row.deviations]
    assert notes
    assert all("pip install 'fsmap[mcmc]'" in note for note in notes)
    (claim,) = [c for c in get("mixture-bma").claims(rows) if "NUTS" in c.claim]
    assert not claim.holds
    assert "no Markov chain" in claim.ours
