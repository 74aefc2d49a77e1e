"""The mixture model: FS-MAP is PS-MAP under a shifted prior, and the averages agree."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from fsmap.functional import functional
from fsmap.objective.likelihood import Gaussian
from fsmap.paper.closed_form import mixture
from fsmap.paper.closed_form.mixture import DOUBLED, TRUE, MixtureConfig
from fsmap.train.newton import maximize
from oracles import logdet_slow

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
