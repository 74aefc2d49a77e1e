"""A budget on R: the λ that holds it, on a problem where the answer is known."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.testing import assert_close

import fsmap
from fsmap.errors import InputError
from fsmap.models.mlp import MLP


def hold(limit: float, noise: float = 0.0, steps: int = 4_000) -> tuple[float, float]:
    """Minimize (θ − 2)² + λR, R = θ²: θ = 2/(1 + λ), so R = b at λ = 2/√b − 1.

    What comes back are the means of R and λ over the last thousand steps.
    """
    theta = torch.tensor(2.0, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    budget = fsmap.Budget(limit, start=0.01)
    optimizer = torch.optim.SGD([theta], lr=0.02)
    strengths, seen = [], []
    for _ in range(steps):
        # one draw of R: a chi-square around its mean, as ‖Jψ‖² is
        psi = 1 + noise * (torch.randn((), generator=generator).square() - 1)
        R = theta.square() * psi
        loss = (theta - 2).square() + budget.strength * R
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        strengths.append(budget.update(R))
        seen.append(float(R.detach()))
    return sum(seen[-1_000:]) / 1_000, sum(strengths[-1_000:]) / 1_000


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
    budget = fsmap.Budget(1.0, start=1.0, gain=10.0, rate=10.0, memory=1)
    for _ in range(20):
        budget.update(1e9)
    assert budget.strength == pytest.approx(1e6)
    for _ in range(20):
        budget.update(0.0)
    assert budget.strength == pytest.approx(1e-6)
    budget.update(1.0)  # at the budget again: nothing has wound up behind the bound
    assert budget.strength == pytest.approx(1e-6)
    budget.update(math.e)
    assert budget.strength == pytest.approx(1e-6 * math.exp(5.0 + 4.0))  # γ·½ and κ·1


def test_rate_bounds_the_way_and_not_the_change():
    """What one update may not do the next ones do: noise that is cut off does not become drift."""
    budget = fsmap.Budget(1.0, start=1.0, gain=1e-9, rate=0.5, memory=1)
    steps = [math.log(budget.update(R)) for R in (2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0)]
    assert steps[:6] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5, 4 * math.log(2)])
    assert steps[-1] == pytest.approx(4 * math.log(2) - 0.5)


class Network:
    """log R of a network that is trained: it drifts up, and λ pulls it down, with lag and noise.

    Shaped by the classifier below: without λ its R doubles in some hundred steps, λ = 5e-3 stops
    that, and ten times as much halves R in a hundred steps.
    """

    def __init__(self, seed: int, critical: float, speed: float) -> None:
        self.random = random.Random(seed)
        self.critical, self.speed = critical, speed
        self.value, self.lagged = math.log(5.0), 0.0

    def step(self, strength: float) -> float:
        self.lagged += 0.05 * (strength / self.critical - self.lagged)
        self.value += self.speed * (1 - min(self.lagged, 10.0) ** 0.5)
        # one draw: ‖Jψ‖² has about twenty degrees of freedom
        draw = sum(self.random.gauss(0, 1) ** 2 for _ in range(20)) / 20
        return math.exp(self.value) * draw


@pytest.mark.parametrize("start", [1e-5, 1e-4, 1e-2])
@pytest.mark.parametrize(("critical", "speed"), [(5e-3, 0.005), (5e-4, 0.02), (5e-3, 0.02)])
def test_a_plant_with_lag_and_noise_settles(start: float, critical: float, speed: float):
    plant, budget = Network(0, critical, speed), fsmap.Budget(50.0, start=start)
    for i in range(5_000):
        budget.update(plant.step(budget.strength))
        if i >= 2_500:
            assert abs(math.exp(plant.value) / 50 - 1) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_holds_r_of_a_classifier(seed: int):
    """The guide's example: R settles at the budget, and the fit is not ruined on the way."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 4, generator=generator, dtype=torch.float32)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = MLP([4, 64, 2], "tanh", generator=generator).float()
    px = fsmap.px.Normal(shape=(4,))
    penalty = fsmap.LaplacianPenalty(model, px, num_points=64, seed=seed)
    budget = fsmap.Budget(50.0, start=1.8e-4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found, losses = [], []
    for _ in range(3_000):
        R = penalty()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        (loss + budget.strength * R).backward()
        optimizer.step()
        budget.update(R)
        found.append(float(R.detach()))
        losses.append(float(loss.detach()))
    means = torch.tensor(found[1_500:]).reshape(-1, 100).mean(1) / 50
    assert (means - 1).abs().max() < 0.2
    assert max(losses[500:]) < 0.4  # log 2 is a constant


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
        ({"gain": 0.0}, "gain must be positive and finite, got 0"),
        ({"rate": math.inf}, "rate must be positive and finite, got inf"),
        ({"memory": 0}, "memory must be at least 1 update, got 0"),
    ],
)
def test_numbers_out_of_range(options, message):
    given = {"limit": 1.0, "start": 1.0, **options}
    with pytest.raises(InputError, match=message):
        fsmap.Budget(given.pop("limit"), **given)


def test_a_negative_r_is_refused():
    with pytest.raises(InputError, match="R is a squared norm and never negative, got -1"):
        fsmap.Budget(1.0, start=1.0).update(-1.0)


def test_a_diverged_r_is_refused():
    with pytest.raises(InputError, match="R is nan: training has diverged"):
        fsmap.Budget(1.0, start=1.0).update(math.nan)
