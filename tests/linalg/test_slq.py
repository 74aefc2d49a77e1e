"""Stochastic Lanczos quadrature: exact when complete, unbiased, with an error that it knows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import cases
import fsmap
import oracles
from fsmap.linalg import slq as module
from fsmap.linalg.jacobian import Site
from fsmap.linalg.slq import by_passes, explicit, lanczos, slq

EPS = torch.tensor(1e-2, dtype=torch.float64)
KINDS = [explicit, by_passes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", cases.MODELS)
def test_exact_with_complete_probes(name, kind):
    """Value, gradient and zero error, from the matrix and from passes through the model."""
    case = cases.case(name)
    site = Site(*case[:3])
    found = slq(site, EPS, probes=10**9, operator=kind(site))
    expected = oracles.logdet_slow(case.f, case.params, case.x, 1e-2)
    torch.testing.assert_close(found.value.detach(), expected, rtol=1e-9, atol=0)
    assert found.stderr < 1e-9
    slow = lambda p: oracles.logdet_slow(case.f, p, case.x, 1e-2)  # noqa: E731
    for slope, right in cases.slopes(found.value, slow, case.params, num=1):
        assert slope == pytest.approx(right, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("eps", [1e-6, 1e-8, 1e-10])
def test_complete_probes_know_their_rounding(eps, generator):
    """A Jacobian of half rank: the zeros of JJᵀ are rounding."""
    left, right = (torch.randn(*n, generator=generator) for n in ((40, 20), (20, 60)))
    J = left @ right
    z, eps = math.sqrt(40) * torch.eye(40), torch.tensor(eps)
    found = lanczos(lambda V: V @ (J @ J.mT), z, eps, complete=True)
    exact = torch.log1p(torch.linalg.svdvals(J).square() * (torch.arange(40) < 20) / eps).sum()
    assert abs(found.values.mean() - exact) <= found.error.mean()
    assert found.error.mean() < 100 * 1e-10 / eps


@pytest.fixture(scope="module")
def larger():
    """A network with S·K = 120 rows and P = 675 parameters, and what dual makes of it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 15), nn.Tanh()).double()
    net.append(nn.Linear(15, 3).double())
    x = torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    f, params = fsmap.functional(net)
    value = fsmap.log_det(f, params, x, jitter=1e-3, method="dual")
    gradient = torch.autograd.grad(value, params.values(), materialize_grads=True)
    return f, params, x, value.detach(), gradient


def test_the_matrix_and_the_passes_agree_probe_by_probe(larger, monkeypatch):
    f, params, x, _, _ = larger
    z = torch.randn(5, 120, generator=torch.Generator().manual_seed(0)).sign()
    for size in (module.PROBE_BYTES, 2 * 8 * 675):  # all at a time, and two
        monkeypatch.setattr(module, "PROBE_BYTES", size)
        site = Site(f, params, x)
        first, other = (slq(site, EPS, probes=z, operator=kind(site)) for kind in KINDS)
        torch.testing.assert_close(other.value, first.value)
        torch.testing.assert_close(other.stderr, first.stderr)


@pytest.mark.parametrize("kind", KINDS)
def test_functorch_gradient_is_autograds(larger, kind):
    f, params, x, _, _ = larger
    z = torch.randn(4, 120, generator=torch.Generator().manual_seed(0)).sign()

    def value(p):
        site = Site(f, p, x)
        return slq(site, EPS, probes=z, operator=kind(site)).value

    grads = torch.autograd.grad(value(params), params.values(), materialize_grads=True)
    func = torch.func.grad(value)({n: p.detach() for n, p in params.items()})
    for ours, name in zip(grads, params, strict=True):
        torch.testing.assert_close(func[name], ours)


def test_one_probe_cannot_tell_its_error(larger):
    f, params, x, truth, _ = larger
    with torch.no_grad():
        source = torch.Generator().manual_seed(0)
        found = slq(Site(f, params, x), torch.tensor(1e-3), probes=1, generator=source)
    assert not found.value.requires_grad
    assert torch.isnan(found.stderr)
    assert abs(found.value.detach() - truth) < 0.05 * abs(truth)


def test_dropout_has_the_same_mask_in_every_product(seeded):
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 1))
    f, params = fsmap.functional(net)
    x = torch.randn(5, 2)
    values = []
    for method in ("dual", "slq"):
        torch.manual_seed(7)
        values.append(fsmap.log_det(f, params, x, jitter=0.1, method=method, probes=10**9))
    torch.manual_seed(7)
    site = Site(f, params, x)
    values.append(slq(site, torch.tensor(0.1), probes=10**9, operator=by_passes(site)).value)
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(values[2], values[0])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, about LSTM in vmap
def test_models_without_forward_mode(seeded):
    net = nn.LSTM(2, 2, batch_first=True).float()
    f, params = fsmap.functional(net, forward=lambda m, x: m(x)[0][:, -1])
    x = torch.randn(3, 4, 2, dtype=torch.float32)
    truth = oracles.logdet_slow(f, params, x, 0.1)
    for kind in KINDS:
        with torch.no_grad():
            operator = kind(Site(f, params, x))
            found = slq(Site(f, params, x), torch.tensor(0.1), 10**9, operator=operator).value
        assert float(found) == pytest.approx(float(truth), rel=1e-4)


def matrix(eigenvalues, seed=0):
    """A symmetric matrix with these eigenvalues."""
    n = len(eigenvalues)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed)))
    return q @ torch.diag(torch.as_tensor(eigenvalues, dtype=q.dtype)) @ q.mT


def vectors(num, n, seed=1):
    return torch.randn(num, n, generator=torch.Generator().manual_seed(seed))


def exact_quadrature(M, z, eps):
    """zᵀ log(I + M/ε) z and (M + εI)^(−½) z by eigenvalues."""
    values, basis = torch.linalg.eigh(M)
    logs = ((z @ basis).square() * torch.log1p(values.clamp_min(0) / eps)).sum(1)
    return logs, z @ basis @ torch.diag((values + eps).rsqrt()) @ basis.mT


@pytest.mark.parametrize("n", [1, 3, 20, 150])
@pytest.mark.parametrize("eps", [1e-4, 1.0])
def test_quadrature_and_roots(n, eps):
    M, z = matrix(torch.logspace(-3, 2, n)), vectors(3, n)
    exact, roots = exact_quadrature(M, z, eps)
    found = lanczos(lambda V: V @ M, z, torch.tensor(eps), complete=True)  # until nothing changes
    torch.testing.assert_close(found.values, exact, rtol=1e-8, atol=1e-8)
    if n <= 20:  # all steps
        torch.testing.assert_close(found.roots, roots, rtol=1e-5, atol=1e-5)
    assert (found.error >= 0).all()
    found = lanczos(lambda V: V @ M, z, torch.tensor(eps))
    assert ((found.values - exact).abs() <= 0.2 * exact.std() / 3**0.5 + 1e-8 * exact).all()


@pytest.mark.parametrize(
    ("eigenvalues", "num", "eps", "tolerance", "most"),
    [
        ([1.0] * 30 + [5.0] * 30 + [0.0] * 40, 4, 0.1, 1e-9, 8),  # three distinct ones
        (torch.logspace(-2, 1, 400), 1, 0.1, 1e-3, 99),  # one probe: by its own value
        ([0.0] * 10, 2, 0.5, 1e-9, 4),
    ],
)
def test_it_ends_early(eigenvalues, num, eps, tolerance, most):
    M, calls = matrix(eigenvalues), []
    z = vectors(num, len(M))
    found = lanczos(lambda V: calls.append(1) or V @ M, z, torch.tensor(eps))
    exact, roots = exact_quadrature(M, z, eps)
    torch.testing.assert_close(found.values, exact, rtol=tolerance, atol=0)
    if num > 1:
        torch.testing.assert_close(found.roots, roots, rtol=1e-7, atol=1e-7)
    assert len(calls) <= most


@pytest.mark.parametrize("kind", KINDS)
def test_unbiased_with_the_reported_error(larger, kind):
    f, params, x, truth, gradient = larger
    slow = sum(
        float((g * d).sum())
        for g, d in zip(gradient, cases.direction(params).values(), strict=True)
    )
    deviations, slopes = [], []
    for seed in range(40):
        source = torch.Generator().manual_seed(seed)
        site, probes = Site(f, params, x), None if seed < 8 else 8
        found = slq(site, torch.tensor(1e-3), probes, source, operator=kind(site))
        if seed < 8:
            deviations.append(float((found.value.detach() - truth) / found.stderr))
            assert abs(deviations[-1]) < 5
            assert found.stderr < 0.01 * abs(truth)
        slopes += [found for found, _ in cases.slopes(found.value, lambda p: 0.0, params, num=1)]
    assert 0.2 < sum(d**2 for d in deviations) / 8 < 5  # and the error is not exaggerated
    mean, sem = oracles.mean_and_sem(slopes)
    assert abs(mean - slow) < 5 * sem
