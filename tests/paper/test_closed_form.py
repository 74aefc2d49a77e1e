"""Groups A and A' at tiny size, and their claims on rows made up to be right and wrong."""

from __future__ import annotations

import dataclasses
import math
import sys

import pytest
import torch
from torch.testing import assert_close

from closed_form_cases import GOOD, INF, NARROW, TINY, measure
from fsmap.functional import functional
from fsmap.objective.closed_form import Diagonal, Dual
from fsmap.objective.likelihood import Gaussian
from fsmap.objective.prior import Normal
from fsmap.paper.closed_form import mixture, reparam, theory_metric, theory_symmetry
from fsmap.paper.closed_form.fourier import (
    EXACT,
    FourierConfig,
    compress,
    draw_problem,
    fit,
    uniform_blocks,
    uniform_forms,
)
from fsmap.paper.closed_form.fourier_ablations import FourierPX, narrow_factor
from fsmap.paper.closed_form.mixture import (
    DOUBLED,
    TRUE,
    MixtureConfig,
    draw_data,
    log_det_form,
    moments,
)
from fsmap.paper.closed_form.theory_any_parameter import TARGETS, Task, TheoryAnyParameter
from fsmap.paper.closed_form.theory_flat import compare
from fsmap.paper.experiment import get
from fsmap.paper.newton import maximize
from fsmap.paper.report import figures
from fsmap.paper.rows import Row, encode
from fsmap.types import Batch
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


SMALL = FourierConfig(num_frequencies=6, prior_std=2.0, steps=50, warmup=5, num_test=40, seeds=2)


def fitted(config: FourierConfig = SMALL, sizes=(15, 40)):
    problems = [draw_problem(config, n, seed) for n in sizes for seed in range(config.seeds)]
    return fit(config, problems, uniform_blocks(config))


def test_log_posterior_is_the_generic_objective():
    """Gaussian + Normal − ½ log det of autograd's Jacobian on points where Φ is exactly I/2."""
    stack = fitted()
    f, _ = functional(SMALL.model())
    period = torch.linspace(-1, 1, 65)[:-1]
    values = stack.log_posterior(uniform_forms(SMALL)[EXACT])
    for k, q in ((0, 0), (1, 3), (2, 1)):
        params, train = {"theta": stack.theta[k, q]}, stack.problems[q].train
        likelihood = Gaussian(SMALL.noise_std).value(f(params, train.x), train.y)
        prior = Normal(SMALL.prior_std).value(params)
        exact = likelihood + prior - 0.5 * logdet_slow(f, params, period, 0.0)
        assert_close(values[k, q], exact)


def test_compressed_data_have_the_same_likelihood():
    """Fewer and more points than parameters, at any θ."""
    f, _ = functional(SMALL.model())
    for size in (5, 40):
        train = draw_problem(SMALL, size, 0).train
        rows = compress(SMALL.model(), train)
        for theta in (torch.zeros(12), torch.linspace(-2, 2, 12)):
            share = size / len(rows.y)
            value = share * Gaussian(0.3).value(rows.x @ theta.tanh(), rows.y)
            assert_close(value, Gaussian(0.3).value(f({"theta": theta}, train.x), train.y))


def test_errors_are_root_mean_squares_of_the_residuals():
    stack = fitted()
    f, _ = functional(SMALL.model())
    problem, theta = stack.problems[2], stack.theta[1, 2]
    for values, batch in ((stack.train_rmse(), problem.train), (stack.test_rmse(), problem.test)):
        residual = f({"theta": theta}, batch.x) - batch.y
        assert_close(values[1, 2], residual.square().mean().sqrt())


def test_curvature_is_the_mean_eigenvalue_of_the_hessian():
    stack = fitted()
    f, _ = functional(SMALL.model())
    train, theta = stack.problems[2].train, stack.theta[1, 2]

    def loss(t: torch.Tensor) -> torch.Tensor:
        return (f({"theta": t}, train.x) - train.y).square().mean()

    eigenvalues = torch.linalg.eigvalsh(torch.func.hessian(loss)(theta))
    assert_close(stack.curvature()[1, 2], eigenvalues.mean())


def test_a_problem_in_the_stack_ends_where_it_would_end_alone():
    together = fitted()
    problem = together.problems[3]
    alone = fit(SMALL, [problem], uniform_blocks(SMALL)[2:])
    assert_close(together.theta[2, 3], alone.theta[0, 0], rtol=1e-9, atol=1e-12)


def test_the_truth_depends_on_the_seed_only():
    one, other = draw_problem(SMALL, 10, 4), draw_problem(SMALL, 200, 4)
    noiseless = dataclasses.replace(SMALL, noise_std=0.0)
    design = SMALL.model().design
    long = draw_problem(noiseless, 200, 4).train
    weights = torch.linalg.lstsq(design(long.x), long.y).solution
    assert_close(design(one.test.x) @ weights, one.test.y)
    assert_close(design(other.test.x) @ weights, other.test.y)
    assert abs((other.train.y - design(other.train.x) @ weights).std() - 0.1) < 0.02


def test_where_data_do_not_decide_the_exact_optimum_is_twice_the_prior_variance():
    """−θ²/2α² + 2 log cosh θ peaks where θ = 2α² tanh θ; the paper's jitter stops it near 18."""
    config = FourierConfig(
        num_frequencies=2, prior_std=5.0, steps=1_500, lr=0.3, seeds=1, num_test=5
    )
    problem = draw_problem(config, 200, 0)
    far = problem._replace(train=problem.train._replace(y=3 * problem.train.y.sign()))
    blocks = [
        block._replace(variants=[block.variants[0]._replace(noise_std=100.0)])
        for block in uniform_blocks(config)[1:]
    ]
    exact, paper = fit(config, [far], blocks).theta[:, 0].abs()
    moved = exact > 1
    assert moved.any()
    assert_close(exact[moved], torch.full_like(exact[moved], 50.0), rtol=1e-3, atol=0)
    assert 15 < paper[moved].max() < 20


def test_the_narrow_distribution_keeps_what_is_not_rounding():
    config = dataclasses.replace(FourierPX.quick, num_points=500)
    factor = narrow_factor(config)
    assert 40 <= len(factor) <= 50
    x = 0.2 * torch.rand(500, generator=torch.Generator().manual_seed(0)) - 0.1
    assert_close(factor.mT @ factor, config.model().gram(x), rtol=0, atol=1e-15)


@pytest.mark.parametrize("jitter", [1e-6, 1e-2])
def test_wide_and_dual_forms_are_the_same_where_both_apply(jitter):
    model = SMALL.model()
    period = torch.linspace(-1, 1, 65)[:-1]
    log_slope = model.squash.log_slope(torch.linspace(-3, 3, 12))
    dual = Dual(model.factor(period), jitter).value(log_slope)
    diagonal = Diagonal(model.uniform_gram(-1.0, 1.0).diagonal(), jitter).value(log_slope)
    assert_close(dual, diagonal)


CONFIG = MixtureConfig(seeds=2, steps=1_500, lr=0.1)


@pytest.fixture(scope="module")
def solved():
    data = mixture.draw_data(CONFIG)
    return data, {(s.method, s.objective): s.theta for s in mixture.solve(CONFIG, data, 1.2)}


@pytest.mark.parametrize(
    ("method", "objective", "shift"),
    [("ps-map", "none", 0.0), ("fs-map", TRUE, -1.44), ("fs-map", DOUBLED, -2.88)],
)
def test_solutions_are_maxima_of_a_shifted_prior(solved, method, objective, shift):
    """log det 𝒥 = 2Σθ + const, so −½ log det turns N(0, α²) into N(−α², α²); doubled: −2α²."""
    data, found = solved
    f, _ = functional(mixture.build())
    for seed, batch in enumerate(data):

        def log_posterior(theta: torch.Tensor, batch=batch) -> torch.Tensor:
            likelihood = Gaussian(0.1).value(f({"theta": theta}, batch.x), batch.y)
            return likelihood - (theta - shift).square().sum() / (2 * 1.2**2)

        best = maximize(log_posterior, torch.zeros(2))
        assert_close(found[method, objective][seed], best, rtol=0, atol=1e-5)


def test_the_log_determinant_is_that_of_the_jacobian():
    config = MixtureConfig(num_points=100)
    form = mixture.log_det_form(config)
    f, _ = functional(mixture.build())
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(config.num_points, generator=generator) - 1
    theta = torch.tensor([0.3, -1.7])
    assert_close(form.value(theta), logdet_slow(f, {"theta": theta}, x, 0.0))


def test_distance_is_the_integral():
    x = torch.linspace(-1, 1, 20_001)
    a, b = torch.tensor([1.0, 0.5]), torch.tensor([0.9, 0.8])
    difference = mixture.build().design(x) @ (a - b)
    integral = torch.trapezoid(difference.square(), x) / 2
    assert_close(mixture.distance(a, b), integral.sqrt())


def test_three_ways_to_average(solved):
    data, found = solved
    config = mixture.BMAConfig(seeds=2, panels=60, chain=300, chain_warmup=200)
    statistics = mixture.moments(data)
    for alpha in (1.2, 20.0):
        peak = found["ps-map", "none"][0]
        average = mixture.quadrature(config, statistics, 0, alpha, peak)
        finer = mixture.BMAConfig(panels=120)
        again = mixture.quadrature(finer, statistics, 0, alpha, peak)
        assert_close(average.mean, again.mean, rtol=0, atol=1e-6)
        assert average.edge < 1e-12
        grid = mixture.authors_grid(config, statistics, 0, alpha, peak)
        assert mixture.distance(grid, average.mean) < 0.005
    pytest.importorskip("pyro", reason="the extra 'mcmc' is not installed")
    chain = mixture.by_nuts(config, statistics, alpha)
    assert ((chain.mean - average.mean).abs() < 5 * chain.stderr).all()
    assert (chain.stderr < 0.05).all()


def test_with_a_wide_prior_fs_map_removes_the_right_bump(solved):
    data, _ = solved
    found = {s.objective: s.theta for s in mixture.solve(CONFIG, data, 20.0)}
    assert (found[TRUE][:, 1].exp() < 1e-3).all()
    assert (found["none"][:, 1].exp() > 0.4).all()


@pytest.mark.parametrize("chart", reparam.CHARTS, ids=lambda chart: chart.name)
def test_charts_know_their_derivatives(chart):
    t = torch.linspace(-2, 2, 9)
    slope = torch.vmap(torch.func.grad(chart.squash.value))(t)
    assert_close(chart.squash.log_slope(t), slope.log())
    assert_close(chart.to_theta(chart.from_theta(t)), t)


def test_in_the_coordinates_of_appendix_a_the_prior_is_infinite_at_the_target():
    config = TheoryAnyParameter.quick
    data = draw_data(config)
    task = Task(moments(data), log_det_form(config), config)
    sign = torch.ones(len(TARGETS), 1, len(data), 2)

    def rise(method: str) -> torch.Tensor:
        near, nearer = (torch.full_like(sign, value) for value in (-20.0, -30.0))
        return task.log_posterior(method, nearer, sign) - task.log_posterior(method, near, sign)

    assert_close(rise("ps-map"), torch.full_like(rise("ps-map"), 40.0), rtol=0, atol=1e-4)
    assert rise("fs-map").abs().max() < 1e-4


def test_the_fixed_point_is_singular_and_its_neighbors_are_not():
    x = torch.linspace(-2, 2, 50)
    fixed = torch.tensor(theory_symmetry.FIXED)
    apart = fixed + 0.1 * torch.tensor(theory_symmetry.AWAY)
    values = torch.linalg.svdvals(theory_symmetry.scaled_jacobian(torch.stack([fixed, apart]), x))
    assert (values[0, 2:] < 1e-15).all()
    assert (values[1] > 1e-6).all()
    assert theory_symmetry.log_dets(apart[None], x).item() == pytest.approx(
        2 * values[1].log().sum().item(), rel=1e-9
    )


def test_swapping_the_units_leaves_the_function():
    x = torch.linspace(-2, 2, 9)
    swapped = torch.tensor([0.5, 1.5, -1.0, 2.0])[[1, 0, 3, 2]]
    f = theory_symmetry.network
    assert_close(f(swapped, x), f(torch.tensor([0.5, 1.5, -1.0, 2.0]), x))


def test_the_metrics_sums_are_the_definition():
    generator = torch.Generator().manual_seed(0)
    jacobian = torch.randn(3, 2, 4, generator=generator)
    metric = torch.randn(3, 2, 3, 2, generator=generator)
    exact = torch.einsum("ika,ikjl,jlb->ab", jacobian, metric, jacobian)
    assert_close(theory_metric._sum_over_metric(jacobian, metric), exact)
    assert_close(theory_metric._mean_over_metric(jacobian, metric), exact)


def test_hessian_and_gram_are_one_where_the_residual_is_zero():
    config = FourierConfig(num_frequencies=3)
    theta = torch.linspace(-1, 1, 6)
    x = torch.linspace(-0.9, 0.8, 20)
    y = config.model().design(x) @ theta.tanh()
    gap, residual = compare(config, theta, Batch(x, y))
    assert residual < 1e-15
    assert gap < 1e-14
    gap, residual = compare(config, theta, Batch(x, y + 0.3 * torch.sin(7 * x)))
    assert residual > 0.1
    assert gap > 1e-3
