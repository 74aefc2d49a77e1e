"""Priors against torch.distributions, quadrature and hand-made Jacobians, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributions
from torch.func import grad, vmap
from torch.testing import assert_close

from fsmap.objective.objective import Flat, Normal, Reparametrized


def parameters(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (3, 2), "bias": (3,), "gain": ()}
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}


PARAMS = parameters()
SCALES = {
    "weight": torch.tensor([0.5, 2.0], dtype=torch.float64),
    "bias": 3.0,
    "gain": torch.tensor(0.1, dtype=torch.float64),
}
MEANS = {**parameters(7), "running_mean": torch.ones(3, dtype=torch.float64)}


def slow(scale, mean, params=PARAMS):
    """Entry by entry, the definition."""
    pick = lambda table, n: table[n] if isinstance(table, dict) else table  # noqa: E731
    total = torch.zeros(())
    for name, theta in params.items():
        s = torch.as_tensor(pick(scale, name)).expand_as(theta)
        m = torch.as_tensor(pick(mean, name)).expand_as(theta)
        for values in zip(theta.reshape(-1), m.reshape(-1), s.reshape(-1), strict=True):
            total = total + distributions.Normal(*values[1:]).log_prob(values[0])
    return total


@pytest.mark.parametrize("scale", [0.7, torch.tensor(2.0, dtype=torch.float64), SCALES])
@pytest.mark.parametrize("mean", [None, 0.3, MEANS])
def test_is_the_sum_of_log_densities(scale, mean):
    term = Normal(scale, mean)
    term.check(PARAMS)
    value = term.value(PARAMS)
    assert value.shape == ()
    assert_close(value, slow(scale, 0.0 if mean is None else mean), rtol=1e-12, atol=1e-12)


PRIORS = {
    "normal": Normal(0.7),
    "normal_transfer": Normal(SCALES, MEANS),
    "flat": Flat(),
    "sinh": Reparametrized(Normal(0.7), torch.asinh),
    "mixed": Reparametrized(
        Normal(SCALES), {"weight": torch.asinh, "bias": lambda t: t**3 + t, "gain": lambda t: 2 * t}
    ),
}


@pytest.fixture(params=PRIORS)
def prior(request):
    return PRIORS[request.param]


def test_scale_is_vmapped_and_learned():
    scales = torch.tensor([0.1, 1.0, 3.0])
    alone = torch.stack([Normal(float(s)).value(PARAMS) for s in scales])
    assert_close(vmap(lambda s: Normal(s).value(PARAMS))(scales), alone)
    step = 1e-6
    rise = Normal(1 + step).value(PARAMS) - Normal(1 - step).value(PARAMS)
    slope = grad(lambda s: Normal(s).value(PARAMS))(torch.ones(()))
    assert_close(slope, rise / (2 * step), rtol=1e-7, atol=1e-6)


# theta' = R(theta): name -> R, R^-1, log |d theta / d theta'| by hand, at theta'
MAPS = {
    "sinh": (torch.sinh, torch.asinh, lambda t: -0.5 * torch.log1p(t**2)),
    "scaled": (lambda t: 5 * t, lambda t: t / 5, lambda t: torch.full_like(t, -math.log(5))),
    "inverted": (lambda t: 1 / t, lambda t: 1 / t, lambda t: -2 * t.abs().log()),
    "cubed": (
        lambda t: (t - 0.4) ** 3,
        lambda t: 0.4 + t.sign() * t.abs() ** (1 / 3),
        lambda t: -math.log(3) - 2 / 3 * t.abs().log(),
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_change_of_variables_by_hand(name):
    forward, inverse, log_slope = MAPS[name]
    there = {n: forward(t) for n, t in PARAMS.items()}
    expected = Normal(1.2).value(PARAMS) + sum(log_slope(t).sum() for t in there.values())
    assert_close(Reparametrized(Normal(1.2), inverse).value(there), expected)


def test_gradients_and_members(prior):
    prior.check(PARAMS)
    names = [*PARAMS]
    inputs = tuple(t.clone().requires_grad_() for t in PARAMS.values())
    value = lambda *ts: prior.value(dict(zip(names, ts, strict=True))) + 0 * ts[0].sum()  # noqa: E731
    assert torch.autograd.gradcheck(value, inputs)
    members = [parameters(seed) for seed in range(3)]
    stacked = {n: torch.stack([m[n] for m in members]) for n in PARAMS}
    assert_close(vmap(prior.value)(stacked), torch.stack([prior.value(m) for m in members]))


def test_precision():
    params = {n: t.bfloat16() for n, t in PARAMS.items()}
    value = Normal(0.7).value(params)  # summed in float32
    assert value.dtype == torch.float32
    assert_close(value, Normal(0.7).value({n: t.float() for n, t in params.items()}))
    assert_close(Flat().value({"w": torch.ones(3, dtype=torch.float32)}), torch.zeros(()).float())
