"""Group B at tiny size, and its claims on rows made up to be right and wrong."""

from __future__ import annotations

import dataclasses
import math

import pytest
import scipy.stats
import torch

from fsmap import log_det, trace
from fsmap.data.synthetic import moons
from fsmap.functional import functional, ravel
from fsmap.linalg.jacobian import jacobian
from fsmap.objective.geometry import Laplacian, LogDet, NoGeometry
from fsmap.paper.experiment import Context, get
from fsmap.paper.networks import moons_solutions
from fsmap.paper.networks.logdet_mc import LogDetConfig, LogDetMC
from fsmap.paper.networks.moons_fits import METHODS, Fitted, MoonsConfig, builder, network, train
from fsmap.paper.networks.moons_pathology import PROBLEMS, between, climb, merged, path
from fsmap.paper.networks.moons_solutions import PAPER_JITTERS, SolutionsConfig, chain
from fsmap.paper.networks.scaled_networks import (
    CloudConfig,
    draw_network,
    jitter_text,
    jitter_title,
    spearman,
    square,
)
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
from oracles import logdet_slow


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


TINY_MOONS = MoonsConfig(steps=4, lr=1e-2, grid=6, lap_points=9, det_points=5)


def nothing(share):
    assert 0 <= share <= 1


def test_objectives_are_those_of_their_names():
    jitter = torch.tensor(0.5)
    kinds = {"ps-map": NoGeometry, "fs-map": LogDet, "l-map": Laplacian}
    for method in METHODS:
        objective = builder(TINY_MOONS, method, 200)(*([] if method == "ps-map" else [jitter]))
        assert isinstance(objective.geometry, kinds[method])
        assert objective.num_data == 200
    assert builder(TINY_MOONS, "l-map", 200)(jitter).geometry.probes == 1


def test_full_size_is_the_papers():
    config = MoonsConfig()
    assert (config.steps, config.lr, len(config.px())) == (10_000, 1e-3, 1600)
    assert sum(p.numel() for p in network(0).parameters()) == 354
    assert config.deviations("ps-map") == ()
    assert len(config.deviations("l-map")) == 1
    assert len(TINY_MOONS.deviations("ps-map")) == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_member_does_not_depend_on_its_neighbors(method):
    both = list(train(TINY_MOONS, method, [0.1, 10.0], 0, nothing))
    alone = list(train(TINY_MOONS, method, [10.0], 0, nothing))
    assert len(both) == (1 if method == "ps-map" else 2)
    for name, p in alone[0].params.items():
        torch.testing.assert_close(both[-1].params[name], p)
    moved = [not torch.equal(p, network(0).get_parameter(n)) for n, p in alone[0].params.items()]
    assert all(moved)


def test_training_can_start_elsewhere():
    start = {n: torch.zeros_like(p) for n, p in network(0).named_parameters()}
    (zero,) = train(TINY_MOONS, "ps-map", (), 0, nothing, start=start)
    # all weights at zero: only the output's biases have a gradient
    assert zero.params["layers.0.weight"].abs().max() == 0
    (fitted,) = train(TINY_MOONS, "ps-map", (), 0, nothing)
    assert fitted.params["layers.0.weight"].abs().max() > 0


def test_a_chain_goes_down_and_each_link_starts_where_the_last_one_ended():
    config = SolutionsConfig(steps=5, grid=6, lap_points=9)
    links = list(chain(config, "l-map", [0.1, 1.0, 10.0], 0, nothing))
    assert [link.member["jitter"] for link in links] == [10.0, 1.0, 0.1]
    step = MoonsConfig(steps=1, grid=6, lap_points=9)
    (again,) = train(step, "l-map", [0.1], 0, nothing, start=links[1].params)
    assert all(torch.equal(p, again.params[n]) for n, p in links[2].params.items())


def test_numbers_of_a_fit():
    f, params = functional(network(3))
    data = moons(dtype=torch.float64)
    fitted = Fitted({}, f, params, data)
    out = f(params, data.x)
    assert abs(fitted.nll() - torch.nn.functional.cross_entropy(out, data.y).item()) < 1e-12
    assert fitted.accuracy() == (out.argmax(1) == data.y).double().mean()
    x = TINY_MOONS.px().all()
    exact = trace(f, params, x, method="exact").value
    torch.testing.assert_close(fitted.eigenvalues(x).sum(), exact.detach())


def test_the_slider_contains_the_papers_jitters():
    jitters = SolutionsConfig().jitters()
    assert len(jitters) == 13
    assert set(PAPER_JITTERS) <= set(jitters)
    assert jitters == sorted(jitters)


def test_points_of_a_picture_go_row_by_row_from_below():
    points = moons_solutions.points(3)
    assert points[0].tolist() == pytest.approx(list(moons_solutions.LOW))
    assert points[2].tolist() == pytest.approx([moons_solutions.HIGH[0], moons_solutions.LOW[1]])
    assert points[-1].tolist() == pytest.approx(list(moons_solutions.HIGH))


def test_networks_depend_on_their_index_only():
    config = CloudConfig(draws=5, block=2)
    blocks = [list(config.networks(unit)) for unit in config.units()]
    assert [network.draw for block in blocks for network in block] == [0, 1, 2, 3, 4]
    again = draw_network(3)
    assert all(torch.equal(blocks[1][1].params[n], p) for n, p in again.params.items())
    assert blocks[1][1].scale == again.scale != blocks[0][0].scale


def test_networks_are_those_of_the_paper():
    network = draw_network(0)
    assert sum(p.numel() for p in network.params.values()) == 898
    assert all(p.dtype == torch.float64 for p in network.params.values())
    points = CloudConfig().points()
    assert points.shape == (1600, 2)
    assert points.dtype == torch.float64
    assert points.abs().max() == 5
    assert len(square(40)) == 1600


def test_scales_are_log_uniform():
    scales = torch.tensor([draw_network(k, width=1).scale for k in range(120)])
    share = scales.log10().add(1).div(2)  # uniform on [0, 1]
    assert scipy.stats.kstest(share.numpy(), "uniform").pvalue > 0.01


def test_eigenvalues_are_those_of_the_jacobian():
    network = draw_network(1, width=2)
    x = square(5).all()
    eigenvalues = network.eigenvalues(x)
    exact = trace(network.f, network.params, x, method="exact").value
    torch.testing.assert_close(eigenvalues.sum(), exact)
    slow = logdet_slow(network.f, network.params, x, 1e-3)
    torch.testing.assert_close((eigenvalues + 1e-3).log().sum(), slow)


def test_exact_values_and_estimates_are_log_determinants(tmp_path):
    config = dataclasses.replace(LogDetConfig(), draws=1, width=2, grid=5, samples=(12, 6))
    context = Context(torch.device("cpu"), tmp_path)
    rows = list(LogDetMC().run(config, {"first": 0}, context))
    network, x = draw_network(0, width=2), square(5).all()
    for m in (m for m in rows if m.metric == "log_det" and m.config["exact"]):
        expected = log_det(network.f, network.params, x, jitter=m.config["jitter"])
        torch.testing.assert_close(m.value, expected, rtol=1e-8, atol=1e-8)
    assert {m.config["points"] for m in rows if m.metric == "log_det"} == {25, 12, 6}
    dimension = next(m.value for m in rows if m.metric == "dimension")
    assert 0 < dimension < sum(p.numel() for p in network.params.values())


@pytest.mark.parametrize("shape", ["curve", "noise"])
def test_spearman_is_scipys(shape, generator):
    x = torch.rand(50, generator=generator)
    y = x.exp() if shape == "curve" else torch.rand(50, generator=generator)
    expected = scipy.stats.spearmanr(x, y).statistic
    assert math.isclose(spearman(x.tolist(), y.tolist()), expected, abs_tol=1e-12)
    assert math.isnan(spearman([1.0], [1.0]))


def test_titles_of_jitters():
    assert [jitter_text(j) for j in (1e-6, 0.0562, 1.0, 1e3)] == [
        "ε = 1e−6", "ε = 0.0562", "ε = 1", "ε = 1000",
    ]  # fmt: skip
    assert jitter_title(10.0) == r"$\epsilon = 10$"
    assert jitter_title(1e-3) == r"$\epsilon = 10^{-3}$"


def start(problem):
    f, params = functional(problem.network(0))
    return f, {n: p.detach() for n, p in params.items()}


@pytest.mark.parametrize("name", PROBLEMS)
def test_merged_units_are_a_fixed_point_and_singular(name):
    problem = PROBLEMS[name]()
    f, params = start(problem)
    end = merged(params)
    first = end["layers.0.weight"]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(params["layers.0.weight"][0], params["layers.0.weight"][1])
    rows = jacobian(f, end, problem.px.all()).flatten(0, 1)
    assert torch.linalg.matrix_rank(rows) < len(ravel(end))
    before = jacobian(f, params, problem.px.all()).flatten(0, 1)
    assert torch.linalg.matrix_rank(before) == len(ravel(params))


def test_the_path_ends_where_it_says():
    problem = PROBLEMS["1-2-1"]()
    _, params = start(problem)
    end = merged(params)
    assert torch.equal(ravel(between(params, end, 0.0)), ravel(end))
    torch.testing.assert_close(ravel(between(params, end, 1.0)), ravel(params))


def test_the_four_parameter_network_gains_four_log_ten_per_decade():
    # the smallest singular values fall like t and t³ where units merge at distance t
    problem = PROBLEMS["1-2-1"]()
    values = path(problem, 0.0, [1e-2, 1e-3])
    assert abs(float(values[1] - values[0]) - 4 * math.log(10)) < 0.05
    bounded = path(problem, 1e-4, [1e-2, 1e-3])
    assert abs(float(bounded[1] - bounded[0])) < 0.05


@pytest.mark.parametrize("jitter", [0.0, 1e-4])
def test_the_path_is_the_objective(jitter):
    problem = PROBLEMS["2-4-1"]()
    f, params = start(problem)
    (value,) = path(problem, jitter, [1.0])
    out = f(params, problem.data.x)
    likelihood = problem.likelihood.value(out, problem.data.y)
    prior = problem.objective(jitter).prior.value(params)
    rows = jacobian(f, params, problem.px.all()).flatten(0, 1) / math.sqrt(len(problem.px))
    gram = rows.mT @ rows + jitter * torch.eye(rows.shape[1])
    torch.testing.assert_close(
        value, likelihood + prior - 0.5 * torch.logdet(gram), rtol=1e-6, atol=1e-6
    )


def test_climbing_gains_and_records():
    shares = []
    problem = PROBLEMS["1-2-1"]()
    climbed = climb(
        problem, 1e-2, seeds=2, steps=20, stages=2, lr=0.03, every=10, advance=shares.append
    )
    assert climbed.step.tolist() == [10, 20, 30, 40]
    assert climbed.objective.shape == climbed.ratio.shape == (4, 2)
    assert (climbed.objective[-1] > climbed.objective[0]).all()
    assert shares[-1] == 1.0
    again = climb(
        problem, 1e-2, seeds=2, steps=20, stages=2, lr=0.03, every=10, advance=lambda _: None
    )
    assert torch.equal(climbed.objective, again.objective)
