"""Geometry terms against the slow definitions; draws are a function of the stream alone."""

from __future__ import annotations

import math

import pytest
import torch
from tests.cases import case
from tests.oracles import gram_slow, logdet_slow, trace_slow
from torch import nn
from torch.testing import assert_close

import fsmap
from fsmap.errors import InputError
from fsmap.linalg.estimators import by_name
from fsmap.objective.geometry import SHARE, Laplacian, LogDet, TraceBound
from fsmap.objective.objective import NoGeometry
from fsmap.px import Stream
from fsmap.types import Draws

PX = fsmap.px.Normal(shape=(2,))
EPS = torch.tensor(0.3, dtype=torch.float64)


def model(seed: int = 0):
    return case("wide", seed)


@pytest.mark.parametrize("method", ["auto", "dense", "dual", "slq"])
def test_logdet_is_minus_half_the_log_determinant(method: str) -> None:
    m = model()
    term = LogDet(PX, 6, EPS, method, None, 10**4)
    draws = term.draw(m.f, m.params, Stream(0, 0))
    value = term.value(m.f, m.params, draws)
    expected = -0.5 * logdet_slow(m.f, m.params, draws.x, 0.3)
    assert value.item() == pytest.approx(expected.item(), rel=2e-2 if method == "slq" else 1e-9)


@pytest.mark.parametrize("estimator", ["fd", "fd_central", "jvp", "vjp", "exact"])
def test_laplacian_is_minus_trace_over_two_epsilon(estimator: str) -> None:
    m = model()
    term = Laplacian(PX, 6, EPS, by_name(estimator), probes=400)
    draws = term.draw(m.f, m.params, Stream(0, 0))
    expected = -trace_slow(m.f, m.params, draws.x).item() / (2 * 0.3)
    value = term.value(m.f, m.params, draws).item()
    assert value == pytest.approx(expected, rel=1e-9 if estimator == "exact" else 0.1)


def test_every_leaves_steps_out_and_keeps_the_mean() -> None:
    m = model()
    term = Laplacian(PX, 6, EPS, by_name("exact"), every=3)
    values = []
    for step in range(3):
        draws = term.draw(m.f, m.params, Stream(0, step))
        values.append(term.value(m.f, m.params, draws).item())
    assert values[1:] == [0.0, 0.0]
    draws = term.draw(m.f, m.params, Stream(0, 0))
    once = term._replace(every=1).value(m.f, m.params, draws)
    assert values[0] == pytest.approx(3 * once.item(), rel=1e-12)


@pytest.mark.parametrize(
    "term",
    [
        LogDet(PX, 6, EPS, "slq"),
        Laplacian(PX, 6, EPS),
        Laplacian(PX, 6, EPS, by_name("vjp")),
        TraceBound(PX, 6, EPS, EPS),
        NoGeometry(),
    ],
    ids=["slq", "jvp", "vjp", "bound", "none"],
)
@pytest.mark.usefixtures("seeded")
def test_draws_depend_on_the_stream_alone(term) -> None:
    m, noisy = model(), nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))
    before = torch.get_rng_state()
    term.draw(*fsmap.functional(noisy), Stream(0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    a, b, c = (term.draw(m.f, m.params, Stream(0, s)) for s in (1, 1, 2))
    assert torch.equal(term.value(m.f, m.params, a), term.value(m.f, m.params, b))
    if not isinstance(term, NoGeometry):
        assert not torch.equal(term.value(m.f, m.params, a), term.value(m.f, m.params, c))


def bound(rank: int, jitter: float, points: int = 6, **options) -> TraceBound:
    """The term as a bound of log det for a matrix of this rank."""
    nats, r0 = torch.tensor(rank / 2), torch.tensor(rank * jitter)
    return TraceBound(PX, points, nats, r0, by_name("exact"), **options)


@pytest.mark.parametrize("jitter", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_lies_between_logdet_and_its_first_order(seed: int, jitter: float) -> None:
    m, eps = model(seed), torch.tensor(jitter)
    P = sum(p.numel() for p in m.params.values())
    for points in (2, 40):  # rank below the number of parameters, and all of them
        draws = Draws(PX.sample(points, torch.Generator().manual_seed(seed)).double())
        rank = int(torch.linalg.matrix_rank(gram_slow(m.f, m.params, draws.x)))
        exact = -0.5 * (fsmap.log_det(m.f, m.params, draws.x, jitter=jitter) - P * math.log(jitter))
        value = bound(rank, jitter, points).value(m.f, m.params, draws)
        first = Laplacian(PX, points, eps, by_name("exact")).value(m.f, m.params, draws)
        assert first < value < exact


@pytest.mark.usefixtures("seeded")
def test_the_bound_is_met_by_equal_eigenvalues() -> None:
    f, params = fsmap.functional(nn.Linear(4, 1, bias=False))
    x = 3 * torch.linalg.qr(torch.randn(4, 4)).Q  # 𝒥 = XᵀX/4 = 9/4 I
    exact = -0.5 * (fsmap.log_det(f, params, x, jitter=0.1) - 4 * math.log(0.1))
    assert_close(bound(4, 0.1).value(f, params, Draws(x)), exact)


def test_the_gradient_of_the_bound_is_that_of_its_formula() -> None:
    m = model()
    term = bound(3, 0.2)
    draws = term.draw(m.f, m.params, Stream(0, 0))
    leaves = {n: p.detach().clone().requires_grad_() for n, p in m.params.items()}
    R = fsmap.trace(m.f, leaves, draws.x, method="exact").value
    assert_close(R, trace_slow(m.f, m.params, draws.x))
    both = R, term.value(m.f, leaves, draws)
    slow, found = (
        torch.autograd.grad(v, list(leaves.values()), materialize_grads=True) for v in both
    )
    assert_close(found, tuple(-1.5 / (R.detach() + 0.6) * g for g in slow))
    assert slow[0].norm() > 1
    later = bound(3, 0.2, every=2)
    assert later.value(m.f, m.params, later.draw(m.f, m.params, Stream(0, 1))) == 0
    assert_close(later.value(m.f, m.params, draws), 2 * term.value(m.f, m.params, draws))


def test_r0_comes_from_the_first_parameters() -> None:
    m = model()
    term = TraceBound(PX, 6, torch.tensor(2.0), estimator=by_name("exact"))
    draws = term.draw(m.f, m.params, Stream(5, 0))
    with pytest.raises(InputError, match="R₀"):
        term.value(m.f, m.params, draws)
    started = term.started(m.f, m.params, Stream(5, 0))
    assert_close(started.r0, SHARE * trace_slow(m.f, m.params, draws.x))
    assert started.started(m.f, m.params, Stream(6, 0)) is started
    assert started.value(m.f, m.params, draws).item() == pytest.approx(-2 * math.log(101))
    zero = {n: 0 * p for n, p in m.params.items()}
    with pytest.raises(InputError, match="R is 0"):
        term.started(lambda params, x: 0 * m.f(params, x), zero, Stream(5, 0))


@pytest.mark.parametrize("optimizer", [fsmap.sgd(0.02), fsmap.adam(0.02)])
def test_a_factor_of_r_changes_no_fit(optimizer) -> None:
    """The output multiplied, with noise to match, and the metric multiplied: R times 1000."""
    x = PX.sample(20, torch.Generator().manual_seed(1)).double()
    m = model()
    y, root = m.f(m.params, x).detach() + 1, math.sqrt(1000)

    def fitted(scale: float = 1.0, metric: torch.Tensor | None = None):
        noise, knobs = fsmap.Gaussian(0.5 * scale), {"num_points": 6, "num_data": 20}
        objective = fsmap.l_map(noise, fsmap.Normal(1.0), PX, reg_nats=0.3, metric=metric, **knobs)
        run = {"steps": 30, "optimizer": optimizer, "progress": False}
        f = lambda params, x: scale * m.f(params, x)  # noqa: E731
        return fsmap.fit(objective, f, m.params, (x, scale * y), **run)[0].params

    plain = fitted()
    assert_close(fitted(root), plain, rtol=1e-9, atol=1e-12)
    assert_close(fitted(metric=1000 * torch.eye(y.shape[1])), plain, rtol=1e-9, atol=1e-12)
    assert max((p - m.params[n]).abs().max() for n, p in plain.items()) > 0.05
