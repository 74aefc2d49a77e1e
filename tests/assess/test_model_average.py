"""Posterior means by quadrature: known answers, an honest error, and agreement with a sampler."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from fsmap.assess.model_average import Interval, interval, nuts_mean, posterior_mean
from fsmap.errors import InputError


def lognormal(theta: torch.Tensor) -> torch.Tensor:
    """Independent N(0.3, 0.5²) and N(-1, 2²), unnormalized."""
    a, b = theta.unbind(-1)
    return -0.5 * ((a - 0.3) / 0.5).square() - 0.5 * ((b + 1) / 2).square()


def test_means_of_lognormals():
    got = posterior_mean(lognormal, torch.exp, interval(-5, 5, 20), interval(-16, 16, 40))
    assert_close(got.mean, torch.tensor([0.3 + 0.125, -1 + 2.0]).exp(), rtol=1e-10, atol=0)
    assert got.error < 1e-8


def test_the_error_says_when_the_panels_are_too_wide():
    nodes, weights = Interval((0.0, 1.0, 2.0, 5.0)).nodes(every=2)  # halving keeps both ends
    assert weights.sum().item() == pytest.approx(5)
    assert 4.9 < nodes.max() < 5
    narrow = lambda t: -(t - 0.123).square().sum(-1) / 2e-4  # noqa: E731
    coarse = posterior_mean(narrow, torch.exp, interval(-5, 5, 2), interval(-5, 5, 2))
    fine = posterior_mean(narrow, torch.exp, interval(-1, 1, 80), interval(-1, 1, 80))
    assert coarse.error > 1e-3
    assert fine.error < 1e-8


@pytest.mark.parametrize(("low", "high", "panels"), [(1.0, 1.0, 4), (0.0, 1.0, 1)])
def test_an_empty_interval_is_refused(low, high, panels):
    with pytest.raises(InputError, match=r"low < high and at least 2 panels.*got"):
        interval(low, high, panels)


def test_nuts_agrees_within_its_own_error():
    pytest.importorskip("pyro", reason="the extra 'mcmc' is not installed")
    states = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    sizes = {"num_samples": 300, "num_warmup": 100, "seed": 1}
    chain = nuts_mean(lognormal, torch.exp, torch.zeros(2, dtype=torch.float64), **sizes)
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]
    assert abs(chain.mean[0] - math.exp(0.3 + 0.125)) < 5 * chain.stderr[0]
    assert 0 < chain.stderr[0] < 0.2
