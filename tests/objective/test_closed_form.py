"""Closed forms of log det(DΦD + εI) against the definition in 1,000 digits, and their gradients."""

from __future__ import annotations

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fsmap.errors import InputError, SingularGeometryError
from fsmap.functional import functional
from fsmap.models.basis import EXP, BumpBasis, FourierBasis, log_sech_squared
from fsmap.objective.closed_form import (
    PAPER_JITTER,
    Diagonal,
    Dual,
    Invertible,
    LogDetBasis,
    fourier_lattice,
)
from fsmap.types import Draws
from oracles import logdet_slow

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


def test_the_oracle_itself():
    """In float64, where float64 is enough."""
    log_slope, root = (
        draws(4, 0.3, 0),
        torch.randn(6, 4, generator=torch.Generator().manual_seed(1)),
    )
    slope = log_slope.exp()
    matrix = slope[:, None] * (root.mT @ root) * slope + 0.1 * torch.eye(4)
    with mpmath.workdps(100):
        exact = definition(log_slope, mpmath.matrix(root.tolist()), 0.1)
    assert_close(torch.logdet(matrix).item(), exact)


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


def test_the_papers_protocol_cuts_the_exact_objective_off():
    half = torch.full((1,), 0.5)
    exact, paper = Diagonal(half, 0.0), Diagonal(half, PAPER_JITTER)
    near, far = log_sech_squared(torch.tensor([[10.0], [30.0]]))
    assert_close(paper.value(near), exact.value(near), rtol=1e-13, atol=0)
    assert_close(paper.value(far).item(), -73.682722976)  # log 1e-32, not −117.9
    assert exact.value(far) < -117


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
    form = fourier_lattice(5, points, jitter)
    exact = definition(log_slope, fourier_root(5, points), jitter)
    assert form.value(log_slope).item() == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("points", "rank"), [(2, 1), (10, 9), (100, 99), (150, 148), (200, 198), (201, 199), (202, 200)]
)
def test_rank_of_the_lattice(points, rank):
    """The end points coincide, and on 201 points sin(100πx) vanishes."""
    assert fourier_lattice(100, points, 1e-6).rank == rank
    singular = torch.linalg.svdvals(FourierBasis(100).design(torch.linspace(-1, 1, points)))
    assert int((singular > 1e-10).sum()) == rank


@pytest.mark.parametrize("jitter", [1e-12, 1e-6])
@pytest.mark.parametrize("points", [10, 150, 202])
def test_lattice_and_dual_agree_at_full_size(points, jitter):
    log_slope = log_sech_squared(draws(200, 10, points)).requires_grad_()
    model = FourierBasis(100)
    forms = (
        fourier_lattice(100, points, jitter),
        Dual(model.factor(torch.linspace(-1, 1, points)), jitter),
    )
    values = [form.value(log_slope) for form in forms]
    grads = [torch.autograd.grad(value, log_slope)[0] for value in values]
    assert_close(values[0], values[1], rtol=1e-12, atol=0)
    assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-11)


FORMS = {
    "invertible": Invertible(torch.tensor(0.7, dtype=torch.float64)),
    "diagonal": Diagonal(torch.arange(1.0, 7, dtype=torch.float64), 0.3),
    "dual": Dual(torch.sin(torch.arange(24, dtype=torch.float64)).reshape(4, 6), 0.3),
    "lattice": fourier_lattice(3, 5, 0.03),
}


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


@given(seed=st.integers(0, 1000), spread=st.floats(0.1, 3))
def test_gradients(seed, spread):
    for form in FORMS.values():
        log_slope = draws(6, spread, seed).requires_grad_()
        assert torch.autograd.gradcheck(form.value, log_slope)


def test_members_of_a_batch_do_not_see_each_other(form):
    batch = torch.stack([draws(6, 2, s) for s in range(6)]).reshape(2, 3, 6)
    alone = torch.stack([form.value(row) for row in batch.reshape(6, 6)]).reshape(2, 3)
    assert_close(form.value(batch), alone, rtol=1e-13, atol=1e-13)
    assert_close(torch.vmap(form.value)(batch), alone, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["diagonal", "dual", "lattice"])
def test_one_jitter_per_member(name):
    form, batch = FORMS[name], torch.stack([draws(6, 2, s) for s in range(3)])
    jitters = torch.tensor([1e-9, 1e-3, 10.0])
    together = form._replace(jitter=jitters).value(batch)
    alone = [
        form._replace(jitter=j).value(row) for j, row in zip(jitters.tolist(), batch, strict=True)
    ]
    assert_close(together, torch.stack(alone))


@pytest.mark.parametrize("num", [3, 40])
def test_as_a_geometry_term_it_is_half_the_generic_log_det(num, generator):
    model = BumpBasis([-0.5, 0.2, 0.4], 0.1)
    f, _ = functional(model)
    params = {"theta": torch.randn(3, generator=generator)}
    x = 2 * torch.rand(num, generator=generator) - 1
    term = LogDetBasis(Dual(model.factor(x), 0.01), EXP.log_slope)
    assert term.draw(f, params, None) == Draws()
    assert_close(term.value(f, params, Draws()), -0.5 * logdet_slow(f, params, x, 0.01))


def test_refusals():
    singular = FourierBasis(3).gram(torch.linspace(-1, 1, 4))
    with pytest.raises(SingularGeometryError, match="eigenvalues"):
        Invertible.from_gram(singular)
    with pytest.raises(SingularGeometryError, match="lattice"):
        fourier_lattice(3, 4, 0.0).value(torch.zeros(6))
    with pytest.raises(InputError, match="least"):
        fourier_lattice(3, 1, 0.1)
    with pytest.raises(InputError, match="jitter"):
        Diagonal(torch.ones(3), -1.0).value(torch.zeros(3))
