"""log det(𝒥 + εI): all methods against eigenvalues of the written-out matrix, and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, jvp, vmap

import cases
import fsmap
import oracles
from fsmap.functional import count
from fsmap.linalg import logdet

ORACLES = {
    "dense": oracles.logdet_slow,
    "dual": oracles.logdet_slow,
    "slq": oracles.logdet_slow,
    "auto": oracles.logdet_slow,
    "svd_clip": oracles.svd_clip_slow,
    "pseudo": oracles.pseudo_slow,
    "first_order": lambda f, p, x, eps, g=None: (
        count(p) * math.log(eps) + oracles.trace_slow(f, p, x, g) / eps
    ),
}
ALL = 10**9  # as many probes of slq as there are directions: no randomness is left


def slope(value, params, seed):
    """Derivative of a value along a direction."""
    grads = torch.autograd.grad(value, params.values(), retain_graph=True, materialize_grads=True)
    direction = cases.direction(params, seed)
    return sum(float((g * d).sum()) for g, d in zip(grads, direction.values(), strict=True))


@pytest.mark.parametrize("name", cases.MODELS)
@pytest.mark.parametrize("method", ORACLES)
def test_value_and_gradient(name, method):
    case = cases.case(name)
    value = fsmap.log_det(case.f, case.params, case.x, jitter=1e-2, method=method, probes=ALL)
    expected = ORACLES[method](case.f, case.params, case.x, 1e-2)
    torch.testing.assert_close(value.detach(), expected, rtol=1e-9, atol=0)
    if ORACLES[method] is oracles.logdet_slow:
        assert value < 0  # as log-determinants mostly are
    if not value.requires_grad:
        assert name in ("linear", "frozen")  # linear in what is trained: 𝒥 is a constant
        return
    for seed in range(2):
        wanted = oracles.directional_slow(
            lambda p: ORACLES[method](case.f, p, case.x, 1e-2),
            case.params,
            cases.direction(case.params, seed),
        )
        assert slope(value, case.params, seed) == pytest.approx(wanted, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("method", ["dense", "dual", "slq", "svd_clip", "first_order"])
def test_gradient_in_jitter(method):
    case = cases.case("wide")
    eps = torch.tensor(0.05, requires_grad=True)
    value = fsmap.log_det(case.f, case.params, case.x, jitter=eps, method=method, probes=ALL)
    (found,) = torch.autograd.grad(value, eps)
    wanted = oracles.directional_slow(
        lambda e: ORACLES[method](case.f, case.params, case.x, float(e["eps"])),
        {"eps": eps},
        {"eps": torch.tensor(1.0)},
        step=1e-5,
    )
    assert float(found) == pytest.approx(wanted, rel=1e-7)


@pytest.mark.parametrize("method", ["dense", "dual", "slq"])
@pytest.mark.parametrize("name", ["tanh_mlp", "wide", "sequence"])
def test_large_jitter_is_first_order_with_factor_one(method, name):
    case = cases.case(name)
    eps = 1e6
    value = fsmap.log_det(case.f, case.params, case.x, jitter=eps, method=method, probes=ALL)
    excess = float(value.detach()) - count(case.params) * math.log(eps)
    trace = float(oracles.trace_slow(case.f, case.params, case.x))
    assert excess == pytest.approx(trace / eps, rel=1e-3)
    first = fsmap.log_det(case.f, case.params, case.x, jitter=eps, method="first_order")
    assert float(first.detach()) == pytest.approx(float(value.detach()), rel=1e-10)


@pytest.mark.parametrize("method", ["dense", "dual", "svd_clip", "pseudo", "slq"])
def test_small_eigenvalues_are_kept(method):
    """A column of size 1e-6 makes an eigenvalue of 1e-12; in single precision it would be gone."""
    params = {"w": torch.ones(2, dtype=torch.float32)}
    x = torch.tensor([[1.0, 0.0], [0.0, 1e-6]], dtype=torch.float32)
    value = fsmap.log_det(
        lambda p, x: x @ p["w"], params, x, jitter=1e-14, method=method, probes=ALL
    )
    expected = math.log(0.5) + math.log(0.5e-12)
    assert value.dtype == torch.float64
    assert float(value) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("method", ["dense", "dual", "slq"])
@pytest.mark.parametrize("name", ["wide", "cnn", "sequence", "layernorm"])
def test_single_precision_model(method, name):
    case = cases.case(name)
    double = fsmap.log_det(case.f, case.params, case.x, jitter=1e-2, method=method, probes=ALL)
    case.module.float()
    params = dict(case.module.named_parameters())
    single = fsmap.log_det(case.f, params, case.x.float(), jitter=1e-2, method=method, probes=ALL)
    assert float(single.detach()) == pytest.approx(float(double.detach()), rel=1e-5)
    grads = torch.autograd.grad(single, params.values(), materialize_grads=True)
    assert all(g.dtype == torch.float32 for g in grads)


def test_jitter_zero_where_points_suffice():
    case = cases.case("linear")
    for method in ("auto", "dense"):
        value = fsmap.log_det(case.f, case.params, case.x, jitter=0.0, method=method)
        expected = oracles.logdet_slow(case.f, case.params, case.x, 0.0)
        torch.testing.assert_close(value.detach(), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", ["dense", "dual", "svd_clip", "first_order"])
def test_vmaps_over_jitter_and_members(method):
    case = cases.case("wide")
    eps = torch.tensor([1e-2, 1.0, 10.0])
    together = vmap(lambda e: fsmap.log_det(case.f, case.params, case.x, jitter=e, method=method))(
        eps
    )
    members = {n: torch.stack([p.detach(), 2 * p.detach()]) for n, p in case.params.items()}

    def member(p):
        return logdet.evaluate(case.f, p, case.x, eps[0], method=method).value

    values = vmap(member)(members)
    gradients = vmap(grad(member))(members)
    for k in range(3):
        alone = fsmap.log_det(case.f, case.params, case.x, jitter=float(eps[k]), method=method)
        torch.testing.assert_close(together[k], alone)
    for m in range(2):
        one = {n: p[m] for n, p in members.items()}
        torch.testing.assert_close(values[m], member(one))
        for name, g in grad(member)(one).items():
            torch.testing.assert_close(gradients[name][m], g)


@pytest.mark.parametrize("method", ["dense", "dual"])
def test_second_derivative_and_forward_mode(method):
    case = cases.case("wide")
    params = {n: p.detach() for n, p in case.params.items()}
    direction = cases.direction(params)

    def value(p):
        return logdet.evaluate(case.f, p, case.x, torch.tensor(0.1), method=method).value

    slope = jvp(value, (params,), (direction,))[1]
    gradient = grad(value)(params)
    torch.testing.assert_close(slope, sum((gradient[n] * d).sum() for n, d in direction.items()))
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    first = torch.autograd.grad(
        value(leaves), leaves.values(), create_graph=True, materialize_grads=True
    )
    along = sum((g * d).sum() for g, d in zip(first, direction.values(), strict=True))
    second = torch.autograd.grad(along, leaves.values(), materialize_grads=True)
    curvature = sum((s * d).sum() for s, d in zip(second, direction.values(), strict=True))

    def slope_at(p):
        g = grad(value)(p)
        return sum((g[n] * d).sum() for n, d in direction.items())

    wanted = oracles.directional_slow(slope_at, params, direction)
    assert float(curvature) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", ["wide", "sequence", "batchnorm_train"])
def test_chunks_change_nothing(name):
    case = cases.case(name)
    options = {"jitter": 0.1, "method": "dual"}
    whole = fsmap.log_det(case.f, case.params, case.x, **options)
    for chunk in (1, 2):
        part = fsmap.log_det(case.f, case.params, case.x, chunk=chunk, **options)
        torch.testing.assert_close(part, whole)


def test_estimate_has_no_error_where_there_is_none():
    case = cases.case("wide")
    for method in ("dense", "dual", "svd_clip", "pseudo", "first_order"):
        found = fsmap.log_det(
            case.f, case.params, case.x, jitter=0.1, method=method, return_estimate=True
        )
        assert found.stderr == 0
