"""Basis models against their definition, and log det(DΦD + εI) against 1,000 digits."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fsmap.errors import SingularGeometryError
from fsmap.functional import functional
from fsmap.objective.closed_form import (
    EXP,
    IDENTITY,
    TANH,
    BumpBasis,
    Diagonal,
    Dual,
    FourierBasis,
    Invertible,
    LogDetBasis,
    log_sech_squared,
)
from fsmap.types import Draws
from oracles import logdet_slow

MODELS = {
    "fourier": FourierBasis(5),
    "bumps": BumpBasis([-0.5, 0.5], 0.03),
    "tanh bumps": BumpBasis([-0.5, 0.1, 0.5], 0.2, TANH),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


def test_function_and_jacobian_are_the_weighted_sum_of_the_features(model, generator):
    f, params = functional(model)
    theta = torch.randn(len(model.theta), generator=generator)
    x = torch.rand(7, generator=generator)
    terms = model.squash.value(theta) * model.phi(x) * model.scale
    assert_close(f({"theta": theta}, x), terms.sum(-1))
    assert_close(f({"theta": theta}, x[:, None]), terms.sum(-1)[:, None])
    assert list(params) == ["theta"]
    assert not params["theta"].any()
    jacobian = torch.func.jacrev(lambda t: f({"theta": t}, x))(theta)
    assert_close(jacobian, model.design(x) * model.squash.log_slope(theta).exp())


def test_closed_form_gram_is_the_integral(model):
    nodes, weights = np.polynomial.legendre.leggauss(200)
    design = model.design(torch.tensor(nodes))
    integral = design.mT @ (torch.tensor(weights / 2)[:, None] * design)
    assert_close(model.uniform_gram(), integral, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num", [3, 50])
def test_factor_is_a_root_of_the_gram_of_the_points(model, num, generator):
    x = 2 * torch.rand(num, generator=generator) - 1
    factor = model.factor(x)
    assert len(factor) <= min(num, len(model.theta))
    assert_close(factor.mT @ factor, model.gram(x))


def test_factor_keeps_eigenvalues_that_the_gram_loses():
    """U(-0.1, 0.1) with 200 Fourier features: Φ keeps half the digits that its root keeps."""
    model, x = FourierBasis(100), torch.linspace(-0.1, 0.1, 2_001)
    squared = torch.linalg.svdvals(model.factor(x)).square()
    direct = torch.linalg.eigvalsh(model.gram(x)).flip(0)
    top = squared[0]
    assert 30 <= int((direct > 1e-15 * top).sum()) <= 40
    assert int((squared > 1e-29 * top).sum()) >= 45
    assert_close(squared[:30], direct[:30], rtol=1e-6, atol=0)


@given(st.floats(-2000, 2000))
def test_log_slope_of_tanh_and_its_gradient_are_exact_in_the_tails(theta):
    with mpmath.workdps(60):
        exact = float(2 * mpmath.log(mpmath.sech(mpmath.mpf(theta))))
    t = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    value = log_sech_squared(t)
    assert value.item() == pytest.approx(exact, rel=1e-14, abs=1e-15)
    (grad,) = torch.autograd.grad(value, t)
    assert grad.item() == pytest.approx(-2 * math.tanh(theta), rel=1e-14, abs=4e-16)


@pytest.mark.parametrize("squash", [TANH, EXP, IDENTITY], ids=["tanh", "exp", "identity"])
def test_log_slope_is_the_log_of_the_derivative(squash):
    theta = torch.linspace(-3, 3, 13)
    slope = torch.vmap(torch.func.grad(squash.value))(theta)
    assert_close(squash.log_slope(theta), slope.log())


JITTERS = [1e-32, 1e-12, 1e-6, 1.0]


def definition(log_slope: torch.Tensor, root: mpmath.matrix, jitter: float) -> float:
    """log det(D FᵀF D + εI) with D = exp(log_slope), entry by entry, in 1,000 digits."""
    with mpmath.workdps(1_000):  # more than the logarithms span: mpmath calls small pivots zero
        slope = [mpmath.exp(mpmath.mpf(value)) for value in log_slope.tolist()]
        gram = root.T * root
        P = len(slope)
        matrix = mpmath.matrix(P, P)
        for i in range(P):
            for j in range(P):
                matrix[i, j] = slope[i] * slope[j] * gram[i, j]
            matrix[i, i] += mpmath.mpf(jitter)
        return float(mpmath.log(mpmath.det(matrix)))


def fourier_root(num: int, points: int) -> mpmath.matrix:
    """Rows of scaled Fourier features on linspace(-1, 1, points), in 1,000 digits."""
    with mpmath.workdps(1_000):
        rows = []
        for j in range(points):
            x = mpmath.mpf(2 * j) / (points - 1) - 1
            angles = [i * mpmath.pi * x for i in range(1, num + 1)]
            rows.append([*map(mpmath.cos, angles), *map(mpmath.sin, angles)])
        return mpmath.matrix(rows) / mpmath.sqrt(2 * num * points)


def draws(num: int, spread: float, seed: int) -> torch.Tensor:
    return spread * torch.randn(num, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spread", [1.0, 15.0, 60.0])
def test_invertible_is_exact_where_the_slopes_underflow(spread):
    """σ'² = sech⁴(θ) underflows from |θ| = 187; the logarithm does not."""
    log_slope = log_sech_squared(draws(6, spread, 2))
    model = FourierBasis(3)
    x = torch.linspace(-0.9, 0.7, 40)
    value = Invertible.from_gram(model.gram(x)).value(log_slope)
    root = mpmath.matrix(model.factor(x).tolist())
    assert value.item() == pytest.approx(definition(log_slope, root, 0.0), rel=1e-12)


@pytest.mark.parametrize("jitter", [0.0, *JITTERS])
def test_diagonal(jitter):
    log_slope = log_sech_squared(draws(5, 20, 3))
    diagonal = torch.tensor([0.5, 0.1, 2.0, 1e-3, 0.25])
    with mpmath.workdps(100):
        root = mpmath.diag([mpmath.sqrt(v) for v in diagonal.tolist()])
    exact = definition(log_slope, root, jitter)
    assert Diagonal(diagonal, jitter).value(log_slope).item() == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("jitter", JITTERS)
@pytest.mark.parametrize("rank", [2, 6, 9, 14])
@pytest.mark.parametrize("spread", [1.0, 15.0])
def test_dual_at_any_rank(rank, jitter, spread):
    factor = torch.randn(rank, 9, generator=torch.Generator().manual_seed(rank))
    log_slope = log_sech_squared(draws(9, spread, 4))
    exact = definition(log_slope, mpmath.matrix(factor.tolist()), jitter)
    assert Dual(factor, jitter).value(log_slope).item() == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("jitter", JITTERS)
@pytest.mark.parametrize("points", [2, 3, 6, 9, 10, 11, 12, 25])
def test_lattice_below_at_and_above_the_rank(points, jitter):
    """Five frequencies: Φ is singular up to M = 11."""
    log_slope = log_sech_squared(draws(10, 12, points))
    form = FourierBasis(5).lattice(points, jitter)
    exact = definition(log_slope, fourier_root(5, points), jitter)
    assert form.value(log_slope).item() == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("points", "rank"), [(2, 1), (10, 9), (100, 99), (150, 148), (200, 198), (201, 199), (202, 200)]
)
def test_rank_of_the_lattice(points, rank):
    """The end points coincide, and on 201 points sin(100πx) vanishes."""
    model = FourierBasis(100)
    assert model.lattice(points, 1e-6).rank == rank
    singular = torch.linalg.svdvals(model.design(torch.linspace(-1, 1, points)))
    assert int((singular > 1e-10).sum()) == rank


@pytest.mark.parametrize("jitter", [1e-12, 1e-6])
@pytest.mark.parametrize("points", [10, 150, 202])
def test_lattice_and_dual_agree_at_full_size(points, jitter):
    log_slope = log_sech_squared(draws(200, 10, points)).requires_grad_()
    model = FourierBasis(100)
    factor = model.factor(torch.linspace(-1, 1, points))
    forms = model.lattice(points, jitter), Dual(factor, jitter)
    values = [form.value(log_slope) for form in forms]
    grads = [torch.autograd.grad(value, log_slope)[0] for value in values]
    assert_close(values[0], values[1], rtol=1e-12, atol=0)
    assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-11)


FORMS = {
    "invertible": Invertible(torch.tensor(0.7, dtype=torch.float64)),
    "diagonal": Diagonal(torch.arange(1.0, 7, dtype=torch.float64), 0.3),
    "dual": Dual(torch.sin(torch.arange(24, dtype=torch.float64)).reshape(4, 6), 0.3),
    "lattice": FourierBasis(3).lattice(5, 0.03),
}


@given(seed=st.integers(0, 1000), spread=st.floats(0.1, 3))
def test_gradients(seed, spread):
    for form in FORMS.values():
        assert torch.autograd.gradcheck(form.value, draws(6, spread, seed).requires_grad_())


@pytest.mark.parametrize("name", FORMS)
def test_members_of_a_batch_do_not_see_each_other(name):
    form, batch = FORMS[name], torch.stack([draws(6, 2, s) for s in range(6)]).reshape(2, 3, 6)
    alone = torch.stack([form.value(row) for row in batch.reshape(6, 6)]).reshape(2, 3)
    assert_close(form.value(batch), alone, rtol=1e-13, atol=1e-13)
    assert_close(torch.vmap(form.value)(batch), alone, rtol=1e-13, atol=1e-13)
    if name != "invertible":  # one jitter per member
        jitters = torch.tensor([1e-9, 1e-3, 10.0])
        together = form._replace(jitter=jitters).value(batch)
        pairs = zip(jitters.tolist(), batch.unbind(1), strict=True)
        apart = [form._replace(jitter=jitter).value(rows) for jitter, rows in pairs]
        assert_close(together, torch.stack(apart, dim=1))


@pytest.mark.parametrize("num", [3, 40])
def test_as_a_geometry_term_it_is_half_the_generic_log_det(num, generator):
    model = BumpBasis([-0.5, 0.2, 0.4], 0.1)
    f, _ = functional(model)
    params = {"theta": torch.randn(3, generator=generator)}
    x = 2 * torch.rand(num, generator=generator) - 1
    term = LogDetBasis(Dual(model.factor(x), 0.01), EXP.log_slope)
    assert term.draw(f, params, None) == Draws()
    assert_close(term.value(f, params, Draws()), -0.5 * logdet_slow(f, params, x, 0.01))


def test_a_singular_gram_is_refused():
    with pytest.raises(SingularGeometryError, match="eigenvalues"):
        Invertible.from_gram(FourierBasis(3).gram(torch.linspace(-1, 1, 4)))
