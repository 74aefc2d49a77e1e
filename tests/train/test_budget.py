"""A budget on R: the λ that holds it, on a problem where the answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import fsmap
from fsmap.errors import InputError


def hold(limit: float, noise: float = 0.0, steps: int = 1_500) -> tuple[float, float]:
    """Minimize (θ − 2)² + λR, R = θ²: θ = 2/(1 + λ), so R = b at λ = 2/√b − 1."""
    theta = torch.tensor(2.0, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    budget = fsmap.Budget(limit, start=0.01)
    optimizer = torch.optim.SGD([theta], lr=0.02)
    strengths = []
    for _ in range(steps):
        # one draw of R: a chi-square around its mean, as ‖Jψ‖² is
        psi = 1 + noise * (torch.randn((), generator=generator).square() - 1)
        R = theta.square() * psi
        loss = (theta - 2).square() + budget.strength * R
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        strengths.append(budget.update(R))
    return float(theta.detach().square()), sum(strengths[-400:]) / 400


def test_it_finds_the_multiplier():
    R, strength = hold(0.25)
    assert_close(R, 0.25, rtol=0.01, atol=0)
    assert_close(strength, 3.0, rtol=0.02, atol=0)


def test_it_stands_noise():
    R, strength = hold(0.25, noise=0.7)
    assert_close(R, 0.25, rtol=0.3, atol=0)
    assert_close(strength, 3.0, rtol=0.3, atol=0)


def test_a_budget_that_is_kept_anyway_costs_nothing():
    R, strength = hold(100.0)
    assert_close(R, 4.0, rtol=1e-3, atol=0)
    assert strength < 1e-6


def test_strengths_stay_where_they_can_come_back_from():
    budget = fsmap.Budget(1.0, start=1.0, rate=10.0, memory=1)
    for _ in range(10):
        budget.update(1e9)
    assert budget.strength == 1e6
    for _ in range(10):
        budget.update(0.0)
    assert budget.strength == 1e-6


def test_a_resumed_budget_goes_on_as_if_nothing_had_happened():
    whole, first = (fsmap.Budget(1.0, start=0.1) for _ in range(2))
    seen = [3.0, 0.5, 2.0, 7.0]
    expected = [whole.update(R) for R in seen]
    found = [first.update(R) for R in seen[:2]]
    second = fsmap.Budget(1.0, start=0.1)
    second.load_state_dict(first.state_dict())
    assert found + [second.update(R) for R in seen[2:]] == expected
    assert repr(second) == repr(whole)


def test_it_says_where_it_stands():
    budget = fsmap.Budget(50.0, start=1e-3)
    assert repr(budget) == "Budget(50, λ=0.001, R=not seen yet)"
    budget.update(torch.tensor(100.0, requires_grad=True))
    assert "R=100)" in repr(budget)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0.0}, "limit must be positive and finite, got 0"),
        ({"start": -1.0}, "start must be positive and finite, got -1"),
        ({"rate": math.inf}, "rate must be positive and finite, got inf"),
        ({"memory": 0}, "memory must be at least 1 update, got 0"),
    ],
)
def test_numbers_out_of_range(options, message):
    given = {"limit": 1.0, "start": 1.0, **options}
    with pytest.raises(InputError, match=message):
        fsmap.Budget(given.pop("limit"), **given)


def test_a_diverged_r_is_refused():
    with pytest.raises(InputError, match="R is nan: training has diverged"):
        fsmap.Budget(1.0, start=1.0).update(math.nan)
