"""Basis models: the function, its features, Φ in closed form against quadrature and points."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fsmap.errors import InputError
from fsmap.functional import functional
from fsmap.models.basis import (
    BumpBasis,
    FourierBasis,
    RBFBasis,
    log_sech_squared,
)

MODELS = {
    "fourier": FourierBasis(5),
    "bumps": BumpBasis([-0.5, 0.5], 0.03),
    "bumps_bias": BumpBasis([-0.5, 0.1, 0.5], 0.2, "tanh", bias=True, scale=1.0),
    "rbf": RBFBasis(8),
}


@pytest.fixture(params=MODELS, ids=str)
def model(request):
    return MODELS[request.param].double()


def test_the_function_is_the_weighted_sum_of_the_features(model, generator):
    f, params = functional(model)
    theta = torch.randn(len(model.theta), generator=generator)
    x = torch.rand(7, generator=generator)
    terms = model.squash.value(theta) * model.phi(x) * model.scale
    assert_close(f({"theta": theta}, x), terms.sum(-1))
    assert_close(f({"theta": theta}, x[:, None]), terms.sum(-1)[:, None])
    assert list(params) == ["theta"]
    assert not params["theta"].any()


def test_jacobian_is_slope_times_design(model, generator):
    f, _ = functional(model)
    theta = torch.randn(len(model.theta), generator=generator)
    x = torch.rand(6, generator=generator)
    jacobian = torch.func.jacrev(lambda t: f({"theta": t}, x))(theta)
    assert_close(jacobian, model.design(x) * model.squash.log_slope(theta).exp())


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-0.1, 0.1), (0.2, 1.3)])
def test_closed_form_gram_is_the_integral(model, low, high):
    nodes, weights = np.polynomial.legendre.leggauss(200)
    x = torch.tensor(low + (high - low) * (nodes + 1) / 2)
    design = model.design(x)
    integral = design.mT @ (torch.tensor(weights / 2)[:, None] * design)
    assert_close(model.uniform_gram(low, high), integral, rtol=1e-10, atol=1e-12)


def test_fourier_gram_on_the_period_is_half_the_identity():
    gram = FourierBasis(100, dtype=torch.float64).uniform_gram(-1.0, 1.0)
    assert_close(gram, torch.eye(200) / 400, rtol=0, atol=1e-15)


@pytest.mark.parametrize("num", [3, 50])
def test_factor_is_a_root_of_the_gram_of_the_points(model, num, generator):
    x = 2 * torch.rand(num, generator=generator) - 1
    factor = model.factor(x)
    assert len(factor) <= min(num, len(model.theta))
    assert_close(factor.mT @ factor, model.gram(x))


def test_factor_keeps_eigenvalues_that_the_gram_loses():
    """U(-0.1, 0.1) with 200 Fourier features: Φ keeps half the digits that its root keeps."""
    model = FourierBasis(100, dtype=torch.float64)
    x = torch.linspace(-0.1, 0.1, 2_001)
    squared = torch.linalg.svdvals(model.factor(x)).square()
    direct = torch.linalg.eigvalsh(model.gram(x)).flip(0)
    top = squared[0]
    assert 30 <= int((direct > 1e-15 * top).sum()) <= 40
    assert int((squared > 1e-29 * top).sum()) >= 45
    assert_close(squared[:30], direct[:30], rtol=1e-6, atol=0)


@given(st.floats(-400, 400))
def test_log_slope_of_tanh_is_exact_in_the_tails(theta):
    with mpmath.workdps(60):
        exact = float(2 * mpmath.log(mpmath.sech(mpmath.mpf(theta))))
    got = log_sech_squared(torch.tensor(theta, dtype=torch.float64)).item()
    assert got == pytest.approx(exact, rel=1e-14, abs=1e-15)


@pytest.mark.parametrize("theta", [0.0, 1e-9, 0.3, -5.0, 30.0, -200.0, 1e4])
def test_gradient_of_the_log_slope_of_tanh(theta):
    t = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(log_sech_squared(t), t)
    assert grad.item() == pytest.approx(-2 * math.tanh(theta), rel=1e-14, abs=4e-16)


@pytest.mark.parametrize("name", ["tanh", "exp", "identity"])
def test_log_slope_is_the_log_of_the_derivative(name):
    squash = FourierBasis(1, name).squash
    theta = torch.linspace(-3, 3, 13, requires_grad=True)
    (slope,) = torch.autograd.grad(squash.value(theta).sum() + 0 * theta.sum(), theta)
    assert_close(squash.log_slope(theta.detach()), slope.log())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FourierBasis(2, "relu"), r"one of 'tanh', 'exp', 'identity'.*got 'relu'"),
        (lambda: FourierBasis(0), "at least one feature, got 0"),
        (lambda: BumpBasis([0.0], 0.0), "width must be > 0, got 0"),
        (lambda: RBFBasis(1), "at least 2 to have a spacing, got 1"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError, match=message):
        make()
