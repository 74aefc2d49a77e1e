"""Group B at tiny size, and its claims on rows made up to be right and wrong."""

from __future__ import annotations

import math

import pytest
import torch

from fsmap.paper.experiment import get
from fsmap.paper.report import figures
from fsmap.paper.rows import encode
from network_cases import (
    TINY,
    eigs_rows,
    laplacian_rows,
    logdet_rows,
    measure,
    pathology_rows,
    solutions_rows,
)


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
        values = torch.tensor(row.value, dtype=torch.float64)
        assert torch.isfinite(values).all(), (row.metric, row.config)
        encode(row._asdict())


def test_units_are_different(measured):
    experiment, _ = measured
    for config in (experiment.config, experiment.quick):
        keys = [encode(unit) for unit in experiment.units(config)]
        assert len(keys) == len(set(keys)) > 1


def test_tables_claims_pictures_and_sliders_come_from_the_rows(measured):
    experiment, rows = measured
    table, claims = experiment.table(rows), experiment.claims(rows)
    assert table
    assert all(math.isfinite(entry["ours"]) for entry in table)
    assert len(claims) >= 3
    for claim in claims:
        assert isinstance(claim.holds, bool), claim
        assert claim.ours is not None
    with figures.style():
        drawn = experiment.draw(rows)
        slider = experiment.interactive(rows)
    assert experiment.id in drawn
    assert all(figure.axes for figure in drawn.values())
    encode([claim._asdict() for claim in claims])
    assert (slider is not None) == (experiment.id == "moons-solutions")


def verdicts(name, rows):
    return [claim.holds for claim in get(name).claims(rows)]


GOOD = {800: 0.0, 400: -0.005, 200: -0.01}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (logdet_rows(GOOD), [True, True, True, True, True]),
        # a bias that only large networks have: the median does not see it
        (logdet_rows({**GOOD, 800: -0.006}), [True, False, True, False, True]),
        (logdet_rows({**GOOD, 800: -0.05}), [False, False, False, False, False]),
        (logdet_rows({**GOOD, 400: 0.02}), [True, True, True, False, True]),  # above, not below
        # far from the diagonal on both sides: no bias, and no relation either
        (logdet_rows(GOOD, shuffle=True), [False, True, False, False, False]),
    ],
)
def test_claims_of_logdet_mc(rows, expected):
    assert verdicts("logdet-mc", rows) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (laplacian_rows({1e-3: 200.0, 1.0: 5.0, 1e3: 1.02}), [True, True, True]),
        (laplacian_rows({1e-3: 200.0, 1.0: 5.0, 1e3: 1.2}), [False, True, True]),
        (laplacian_rows({1e-3: 200.0, 1.0: 5.0, 1e3: 0.5}), [False, True, False]),  # a factor of 2
        (laplacian_rows({1e-3: 5.0, 1.0: 200.0, 1e3: 1.02}), [True, True, False]),
        (laplacian_rows({1e-3: 200.0, 1e3: 1.02}, shuffle=True), [True, False, True]),
    ],
)
def test_claims_of_laplacian_vs_logdet(rows, expected):
    assert verdicts("laplacian-vs-logdet", rows) == expected


SUMS = {
    ("ps-map", None): 100.0,
    ("fs-map", 1e-10): 2.0,
    ("fs-map", 100.0): 90.0,
    ("l-map", 1e-10): 3.0,
    ("l-map", 100.0): 80.0,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [True, True, True, True]),
        ({("fs-map", 1e-10): 20.0}, [False, True, True, True]),
        ({("l-map", 1e-10): 11.0}, [True, True, False, True]),
        ({("l-map", 100.0): 20.0}, [True, True, True, False]),
        ({("ps-map", None): 1.0}, [False, False, False, False]),
    ],
)
def test_claims_of_moons_eigs(change, expected):
    assert verdicts("moons-eigs", eigs_rows({**SUMS, **change})) == expected


WIDE = [0.2, 0.4, 0.9, 1.0]  # not constant at the smallest ε
STEADY = ([0.69, 0.4, 0.2, 0.1], [0.01, 0.4, 0.9, 1.0], [0.0, 0.15, 0.35, 0.5])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (solutions_rows(*STEADY), [True, True, True, True, True, True]),
        (solutions_rows(*STEADY, held=0.02), [True, True, True, True, True, False]),
        (solutions_rows(STEADY[0], WIDE, STEADY[2]), [False, True, True, True, True, False]),
        (
            solutions_rows([0.69, 0.4, 0.2, 0.15], *STEADY[1:]),
            [True, False, True, True, True, True],
        ),
        (solutions_rows([0.4, 0.69, 0.2, 0.1], *STEADY[1:]), [True, True, False, True, True, True]),
        (
            solutions_rows(*STEADY[:2], [0.0, 0.01, 0.45, 0.5]),
            [True, True, True, False, True, True],
        ),
    ],
)
def test_claims_of_moons_solutions(rows, expected):
    assert verdicts("moons-solutions", rows) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [True, True, True, True]),
        ({"slope": 0.5}, [False, True, True, True]),
        ({"ratio": 1e-3}, [True, False, True, True]),
        ({"climb": 0.5}, [True, True, False, True]),
        ({"jittered": 2.0}, [True, True, True, False]),
    ],
)
def test_claims_of_moons_pathology(change, expected):
    assert verdicts("moons-pathology", pathology_rows(**change)) == expected


def test_a_jump_on_the_way_down_is_seen():
    rows = solutions_rows(*STEADY)
    jumping = [
        row._replace(value=[0.5] * 4)
        if row.metric == "probability"
        and row.config["start"] == "chain"
        and row.config["jitter"] < 0.5
        else row
        for row in rows
    ]
    assert verdicts("moons-solutions", jumping) == [True, True, True, True, False, True]


def test_the_growth_on_a_path_must_not_slow_down():
    rows = pathology_rows()
    slowing = [
        row._replace(value=[math.sqrt(v) for v in row.value])
        if row.metric == "path" and row.config["jitter"] == 0
        else row
        for row in rows
    ]
    assert verdicts("moons-pathology", slowing)[0] is False
