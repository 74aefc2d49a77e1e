"""Experiments with a closed form: their numbers against definitions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from fsmap.errors import DivergedError
from fsmap.functional import functional
from fsmap.objective.objective import Gaussian, Normal
from fsmap.paper.closed_form import fourier, mixture, reparam, theory
from fsmap.paper.closed_form.fourier import FourierConfig, draw_problem, uniform_variants
from fsmap.paper.closed_form.mixture import DOUBLED, TRUE, MixtureConfig
from fsmap.types import Batch
from oracles import logdet_slow

SMALL = FourierConfig(num_frequencies=6, prior_std=2.0, steps=50, warmup=5, num_test=40, seeds=2)


def fitted(config: FourierConfig = SMALL, sizes=(15, 40)):
    problems = [draw_problem(config, n, seed) for n in sizes for seed in range(config.seeds)]
    return fourier.fit(config, problems, uniform_variants(config))


def test_log_posterior_is_the_generic_objective():
    """Gaussian + Normal − ½ log det of autograd's Jacobian on points where Φ is exactly I/2."""
    stack = fitted()
    f, _ = functional(SMALL.model())
    period = torch.linspace(-1, 1, 65)[:-1]
    form = uniform_variants(SMALL)[1].form(0.0)
    for k, q in ((0, 0), (1, 3), (2, 1)):
        problem, theta = stack.problems[q], stack.theta[k, q]
        params, train = {"theta": theta}, problem.train
        likelihood = Gaussian(SMALL.noise_std).value(f(params, train.x), train.y)
        prior = Normal(SMALL.prior_std).value(params)
        exact = likelihood + prior - 0.5 * logdet_slow(f, params, period, 0.0)
        assert_close(SMALL.log_posterior(theta, train, form), exact)


def test_compressed_data_have_the_same_likelihood():
    """Fewer and more points than parameters, at any θ."""
    f, _ = functional(SMALL.model())
    for size in (5, 40):
        train = draw_problem(SMALL, size, 0).train
        rows = fourier.compress(SMALL.model(), train)
        for theta in (torch.zeros(12), torch.linspace(-2, 2, 12)):
            share = size / len(rows.y)
            value = share * Gaussian(0.3).value(rows.x @ theta.tanh(), rows.y)
            assert_close(value, Gaussian(0.3).value(f({"theta": theta}, train.x), train.y))


def test_errors_and_curvature_are_their_definitions():
    """Root mean squares of the residuals; the mean eigenvalue of the Hessian."""
    stack = fitted()
    f, _ = functional(SMALL.model())
    problem, theta = stack.problems[2], stack.theta[1, 2]
    found = {
        m.metric: m.value
        for m in stack.measure("test_rmse", "train_rmse", "curvature")
        if (m.config["n_train"], m.config["objective"], m.seed) == (40, fourier.EXACT, 0)
    }

    def loss(t: torch.Tensor, batch: Batch = problem.train) -> torch.Tensor:
        return (f({"theta": t}, batch.x) - batch.y).square().mean()

    assert_close(found["train_rmse"], loss(theta).sqrt())
    assert_close(found["test_rmse"], loss(theta, problem.test).sqrt())
    assert_close(found["curvature"], torch.linalg.eigvalsh(torch.func.hessian(loss)(theta)).mean())


def test_where_data_do_not_decide_the_exact_optimum_is_twice_the_prior_variance():
    """−θ²/2α² + 2 log cosh θ peaks where θ = 2α² tanh θ; the paper's jitter stops it near 18."""
    config = FourierConfig(num_frequencies=2, prior_std=5.0, steps=1_500, lr=0.3, seeds=1)
    problem = draw_problem(config, 200, 0)
    far = problem._replace(train=problem.train._replace(y=3 * problem.train.y.sign()))
    variants = [variant._replace(noise_std=100.0) for variant in uniform_variants(config)[1:]]
    exact, paper = fourier.fit(config, [far], variants).theta[:, 0].abs()
    moved = exact > 1
    assert moved.any()
    assert_close(exact[moved], torch.full_like(exact[moved], 50.0), rtol=1e-3, atol=0)
    assert 15 < paper[moved].max() < 20


def test_the_narrow_distribution_keeps_what_is_not_rounding():
    config = dataclasses.replace(fourier.FourierPX.quick, num_points=500)
    factor = fourier.narrow_factor(config)
    assert 40 <= len(factor) <= 50
    x = 0.2 * torch.rand(500, **fourier.draw_options(0)) - 0.1
    assert_close(factor.mT @ factor, config.model().gram(x), rtol=0, atol=1e-15)


CONFIG = MixtureConfig(seeds=2, steps=1_500, lr=0.1)


@pytest.fixture(scope="module")
def solved():
    data = mixture.draw_data(CONFIG)
    return data, mixture.solve(CONFIG, data, 1.2)


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

        best = theory.maximize(log_posterior, torch.zeros(2))
        assert_close(found[method, objective][seed], best, rtol=0, atol=1e-5)


def test_distance_is_the_integral():
    x = torch.linspace(-1, 1, 20_001)
    a, b = torch.tensor([1.0, 0.5]), torch.tensor([0.9, 0.8])
    difference = mixture.build().design(x) @ (a - b)
    integral = torch.trapezoid(difference.square(), x) / 2
    assert_close(mixture.distance(a, b), integral.sqrt())


def test_three_ways_to_average(solved):
    data, found = solved
    config = mixture.BMAConfig(seeds=2, panels=60, chain=300, chain_warmup=200)
    for alpha in (1.2, 20.0):
        peak = found["ps-map", "none"][0]
        average = mixture.quadrature(config, data[0], alpha, peak)
        again = mixture.quadrature(mixture.BMAConfig(panels=120), data[0], alpha, peak)
        assert_close(average.mean, again.mean, rtol=0, atol=1e-6)
        grid = mixture.authors_grid(config, data[0], alpha, peak)
        assert mixture.distance(grid, average.mean) < 0.005
    pytest.importorskip("pyro", reason="the extra 'mcmc' is not installed")
    chain = mixture.by_nuts(config, data[0], alpha)
    assert ((chain.mean - average.mean).abs() < 5 * chain.stderr).all()
    assert (chain.stderr < 0.05).all()


@pytest.mark.parametrize("chart", reparam.CHARTS, ids=lambda chart: chart.name)
def test_charts_know_their_derivatives(chart):
    t = torch.linspace(-2, 2, 9)
    slope = torch.vmap(torch.func.grad(chart.squash.value))(t)
    assert_close(chart.squash.log_slope(t), slope.log())
    assert_close(chart.to_theta(chart.from_theta(t)), t)


def test_in_the_coordinates_of_appendix_a_the_prior_is_infinite_at_the_target():
    config = theory.TheoryAnyParameter.quick
    data = mixture.draw_data(config)
    task = theory.Task(data, mixture.log_det_form(config), config)
    sign = torch.ones(len(theory.TARGETS), 1, len(data), 2)

    def rise(method: str) -> torch.Tensor:
        near, nearer = (torch.full_like(sign, value) for value in (-20.0, -30.0))
        return task.log_posterior(method, nearer, sign) - task.log_posterior(method, near, sign)

    assert_close(rise("ps-map"), torch.full_like(rise("ps-map"), 40.0), rtol=0, atol=1e-4)
    assert rise("fs-map").abs().max() < 1e-4


def test_the_fixed_point_is_singular_and_its_neighbors_are_not():
    x = torch.linspace(-2, 2, 50)
    fixed = torch.tensor(theory.FIXED)
    apart = fixed + 0.1 * torch.tensor(theory.AWAY)
    values = torch.linalg.svdvals(theory.scaled_jacobian(torch.stack([fixed, apart]), x))
    assert (values[0, 2:] < 1e-15).all()
    assert (values[1] > 1e-6).all()
    assert_close(theory.log_dets(apart[None], x)[0], 2 * values[1].log().sum())


def test_hessian_and_gram_are_one_where_the_residual_is_zero():
    config = FourierConfig(num_frequencies=3)
    theta = torch.linspace(-1, 1, 6)
    x = torch.linspace(-0.9, 0.8, 20)
    y = config.model().design(x) @ theta.tanh()
    gap, residual = theory.hessian_gap(config, theta, Batch(x, y))
    assert residual < 1e-15
    assert gap < 1e-14
    gap, residual = theory.hessian_gap(config, theta, Batch(x, y + 0.3 * torch.sin(7 * x)))
    assert residual > 0.1
    assert gap > 1e-3


def test_newton_finds_a_maximum_to_the_last_digit_or_says_that_it_did_not():
    center = torch.tensor([1.3, -0.4, 5.0])
    found = theory.maximize(lambda t: -torch.cosh(t - center).sum(), torch.zeros(3))
    assert_close(found, center, rtol=0, atol=1e-14)

    def bumps(t: torch.Tensor) -> torch.Tensor:  # between them the curvature has the wrong sign
        return torch.exp(-(t - 2).square()).sum() + 0.5 * torch.exp(-(t + 2).square()).sum()

    assert theory.maximize(bumps, torch.tensor([0.4])).item() == pytest.approx(2, abs=1e-6)
    with pytest.raises(DivergedError, match="step 5"):
        theory.maximize(lambda t: t.sum(), torch.zeros(2), steps=5)


def test_regression_is_the_function_plus_noise():
    data = fourier.regression(torch.sin, 20_000, noise_std=0.1, low=-3.0, **fourier.draw_options(0))
    assert data.x.shape == data.y.shape == (20_000,)
    assert -3 <= data.x.min() < data.x.max() <= 1
    assert data.x.mean().item() == pytest.approx(-1, abs=0.05)
    residual = data.y - data.x.sin()
    assert residual.std().item() == pytest.approx(0.1, rel=0.02)
    assert abs(residual.mean()) < 0.003
    exact = fourier.regression(torch.cos, 50, **fourier.draw_options(0))
    assert_close(exact.y, exact.x.cos(), rtol=0, atol=0)


def test_two_bumps():
    data = mixture.two_bumps(num_left=5_000, **fourier.draw_options(0))
    assert (data.x[-1], data.y[-1]) == (0.7, 0.1)
    left, height = data.x[:-1], data.y[:-1]
    assert left.mean().item() == pytest.approx(-0.5, abs=0.01)
    assert left.std().item() == pytest.approx(0.2, rel=0.05)
    noise = height - torch.exp(-(left + 0.5).square() / 0.03)
    assert noise.std().item() == pytest.approx(0.1, rel=0.05)
    one, same, other = (mixture.two_bumps(**fourier.draw_options(seed)) for seed in (1, 1, 2))
    assert len(one.x) == 11
    assert_close(one, same, rtol=0, atol=0)
    assert (one.y[:5] != other.y[:5]).all()


def test_fourier_sum_is_the_sum():
    f = fourier.fourier_sum(3, **fourier.draw_options(4))
    a, b = torch.randn(2, 3, **fourier.draw_options(4))
    x = torch.linspace(0, 1, 5)
    by_hand = sum(a[i] * ((i + 1) * x).sin() + b[i] * ((i + 1) * x).cos() for i in range(3))
    assert_close(f(x), by_hand)
