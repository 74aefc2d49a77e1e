"""The Fourier stack against the generic objective, and what theory says about its optimum."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from fsmap.experiments.fourier_ablations import FourierPX, narrow_factor
from fsmap.experiments.fourier_fits import (
    EXACT,
    PAPER,
    Block,
    FourierConfig,
    Variant,
    draw_problem,
    fit,
    uniform_forms,
)
from fsmap.functional import functional
from fsmap.objective.closed_form import Diagonal, Dual
from fsmap.objective.likelihood import Gaussian
from fsmap.objective.prior import Normal
from oracles import logdet_slow

SMALL = FourierConfig(num_frequencies=6, prior_std=2.0, steps=50, warmup=5, num_test=40, seeds=2)


def fitted(config: FourierConfig = SMALL, sizes=(15, 40)):
    problems = [draw_problem(config, n, seed) for n in sizes for seed in range(config.seeds)]
    blocks = [Block(None, [Variant("ps-map", {}, 0.1)])]
    blocks += [Block(form, [Variant("fs-map", {}, 0.1)]) for form in uniform_forms(config).values()]
    return fit(config, problems, blocks)


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


def test_errors_are_root_mean_squares_of_the_residuals():
    stack = fitted()
    f, _ = functional(SMALL.model())
    problem, theta = stack.problems[2], stack.theta[1, 2]
    for values, batch in ((stack.train_rmse(), problem.train), (stack.test_rmse(), problem.test)):
        residual = f({"theta": theta}, batch.x) - batch.y
        assert_close(values[1, 2], residual.square().mean().sqrt())


def test_a_problem_in_the_stack_ends_where_it_would_end_alone():
    together = fitted()
    problem = together.problems[3]
    form = uniform_forms(SMALL)[PAPER]
    alone = fit(SMALL, [problem], [Block(form, [Variant("fs-map", {}, 0.1)])])
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
    blocks = [Block(f, [Variant("fs-map", {}, 100.0)]) for f in uniform_forms(config).values()]
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
