"""log det with metrics, signed ones included, against the double sum over points."""

from __future__ import annotations

import pytest
import torch

import cases
import fsmap
import oracles
from cases import symmetric
from fsmap import metric as m
from fsmap.errors import InputError, SingularGeometryError

ALL = 10**9
METRICS = {
    "weights": lambda S, K: torch.linspace(0.5, 2, S),
    "weights_with_zeros": lambda S, K: torch.linspace(0, 2, S).relu(),
    "signed_weights": lambda S, K: torch.linspace(-1, 2, S),
    "output": lambda S, K: symmetric(K, K, definite=True),
    "signed_output": lambda S, K: symmetric(S, K, K),
    "general": lambda S, K: symmetric(S * K, S * K, definite=True),
    "signed_general": lambda S, K: symmetric(S * K, S * K).reshape(S, K, S, K),
}
METHODS = {
    "dense": oracles.logdet_slow,
    "dual": oracles.logdet_slow,
    "slq": oracles.logdet_slow,
    "svd_clip": oracles.svd_clip_slow,
    "pseudo": oracles.pseudo_slow,
}


def full(name, g, S, K):
    """The metric written out: [S, K, S, K]."""
    return g.reshape(S, K, S, K) if "general" in name else oracles.full_metric(g, S, K)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["wide", "batchnorm_train", "shared"])
def test_value_and_gradient(metric, method, name):
    case = cases.case(name)
    S, K = case.f(case.params, case.x).shape
    g = METRICS[metric](S, K)
    written = full(metric, g, S, K)
    eps = 1e-2
    if "signed" in metric:  # ε has to lift the negative eigenvalues
        eps -= 1.5 * float(oracles.eigenvalues_slow(case.f, case.params, case.x, written)[0])
    options = {"jitter": eps, "method": method, "metric": g, "probes": ALL}
    if "signed" in metric and method in ("svd_clip", "pseudo"):
        with pytest.raises(InputError, match=f"{method} needs a metric without negative eigenval"):
            fsmap.log_det(case.f, case.params, case.x, **options)
        return
    value = fsmap.log_det(case.f, case.params, case.x, **options)
    expected = METHODS[method](case.f, case.params, case.x, eps, written)
    torch.testing.assert_close(value.detach(), expected, rtol=1e-9, atol=1e-9)
    grads = torch.autograd.grad(value, case.params.values(), materialize_grads=True)
    direction = cases.direction(case.params)
    found = sum(float((g * d).sum()) for g, d in zip(grads, direction.values(), strict=True))
    wanted = oracles.directional_slow(
        lambda p: METHODS[method](case.f, p, case.x, eps, written), case.params, direction
    )
    assert found == pytest.approx(wanted, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("method", ["dense", "dual", "slq"])
def test_softmax_fisher_depends_on_the_parameters(method, detach):
    case = cases.case("wide")
    value = fsmap.log_det(
        case.f,
        case.params,
        case.x,
        jitter=1e-2,
        method=method,
        metric=m.SoftmaxFisher(detach),
        probes=ALL,
    )
    held = oracles.softmax_fisher_slow(case.f(case.params, case.x)).detach()

    def slow(p):
        g = held if detach else oracles.softmax_fisher_slow(case.f(p, case.x)).detach()
        return oracles.logdet_slow(case.f, p, case.x, 1e-2, oracles.full_metric(g, 5, 3))

    torch.testing.assert_close(value.detach(), slow(case.params), rtol=1e-9, atol=0)
    grads = torch.autograd.grad(value, case.params.values(), materialize_grads=True)
    found = torch.cat([g.reshape(-1) for g in grads])
    wanted = oracles.gradient_slow(slow, case.params)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)


def test_factors_of_a_metric_are_differentiated():
    case = cases.case("wide")
    factor = symmetric(3, 3).requires_grad_()

    def value(L):
        metric = m.Output(factor=L)
        return fsmap.log_det(case.f, case.params, case.x, jitter=0.1, metric=metric)

    (found,) = torch.autograd.grad(value(factor), factor)
    direction = {"L": symmetric(3, 3, seed=1)}
    wanted = oracles.directional_slow(lambda p: value(p["L"]).detach(), {"L": factor}, direction)
    assert float((found * direction["L"]).sum()) == pytest.approx(wanted, rel=1e-7)


@pytest.mark.parametrize("method", ["dense", "dual", "slq"])
@pytest.mark.parametrize("num", [1, 2])
def test_an_indefinite_matrix_is_refused_by_all_methods(method, num):
    """Two negative eigenvalues make a positive determinant: a sign alone would not tell."""
    params = {"w": torch.ones(4)}
    x = 2 * torch.eye(4)  # 𝒥 = diag(weights)
    weights = torch.tensor([-1.0, -1.0, 1.0, 1.0]) if num == 2 else torch.tensor([-1.0, 1, 1, 1])
    options = {"jitter": 0.5, "method": method, "metric": weights, "probes": ALL}
    with pytest.raises(SingularGeometryError, match=r"0\.5 I is not .*negative eigenvalues, and"):
        fsmap.log_det(lambda p, x: x @ p["w"], params, x, **options)


def test_weights_of_the_points_vmap():
    """One set of points per member, as in a population: signs cannot be looked at."""
    case = cases.case("wide")
    sets = torch.stack([case.x, case.x.flip(0) + 0.5])
    metric = m.Weights(lambda x: x.square().sum(1))

    def value(x):
        return fsmap.linalg.logdet.evaluate(
            case.f, case.params, x, torch.tensor(0.1), metric=metric
        ).value

    together = torch.func.vmap(value)(sets)
    for k in range(2):
        torch.testing.assert_close(together[k], value(sets[k]))
