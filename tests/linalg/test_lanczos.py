"""Lanczos on matrices with a known spectrum."""

from __future__ import annotations

import pytest
import torch

from fsmap.linalg import slq as module
from fsmap.linalg.slq import lanczos


def matrix(eigenvalues, seed=0):
    """A symmetric matrix with these eigenvalues."""
    n = len(eigenvalues)
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator))
    return q @ torch.diag(torch.as_tensor(eigenvalues)) @ q.mT


def vectors(num, n, seed=1):
    return torch.randn(num, n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", [1, 3, 20, 150])
@pytest.mark.parametrize("eps", [1e-4, 1.0])
def test_quadrature_and_roots(n, eps):
    M = matrix(torch.logspace(-3, 2, n))
    z = vectors(3, n)
    found = lanczos(lambda V: V @ M, z, torch.tensor(eps), complete=n <= 20)
    values, basis = torch.linalg.eigh(M)
    exact = ((z @ basis).square() * torch.log1p(values / eps)).sum(1)
    spread = exact.std() / 3**0.5
    assert ((found.values - exact).abs() <= 0.2 * spread + 1e-8 * exact).all()
    roots = z @ basis @ torch.diag((values + eps).rsqrt()) @ basis.mT
    if n <= 20:  # run to the end: exact
        torch.testing.assert_close(found.values, exact, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.roots, roots, rtol=1e-5, atol=1e-5)
    assert (found.truncation >= 0).all()


def test_a_few_distinct_eigenvalues_end_it_early():
    M, calls = matrix([1.0] * 30 + [5.0] * 30 + [0.0] * 40), []

    def matvec(V):
        calls.append(1)
        return V @ M

    z = vectors(4, 100)
    found = lanczos(matvec, z, torch.tensor(0.1))
    values, basis = torch.linalg.eigh(M)
    exact = ((z @ basis).square() * torch.log1p(values.clamp_min(0) / 0.1)).sum(1)
    torch.testing.assert_close(found.values, exact, rtol=1e-9, atol=0)
    assert len(calls) <= 8  # three would do; it looks every eight steps
    roots = z @ basis @ torch.diag((values + 0.1).rsqrt()) @ basis.mT
    torch.testing.assert_close(found.roots, roots, rtol=1e-7, atol=1e-7)


def test_a_zero_matrix():
    found = lanczos(lambda V: 0 * V, vectors(2, 10), torch.tensor(0.5))
    assert (found.values == 0).all()
    torch.testing.assert_close(found.roots, 2**0.5 * vectors(2, 10))


def test_an_eigenvalue_below_minus_eps_gives_nan():
    M = matrix([-1.0, 1.0, 2.0])
    assert torch.isnan(lanczos(lambda V: V @ M, vectors(2, 3), torch.tensor(0.5)).values).all()


def test_one_probe_stops_by_its_own_value():
    M, calls = matrix(torch.logspace(-2, 1, 400)), []

    def matvec(V):
        calls.append(1)
        return V @ M

    z = vectors(1, 400)
    found = lanczos(matvec, z, torch.tensor(0.1))
    values, basis = torch.linalg.eigh(M)
    exact = ((z @ basis).square() * torch.log1p(values / 0.1)).sum(1)
    torch.testing.assert_close(found.values, exact, rtol=1e-3, atol=0)
    assert len(calls) < 100


def test_room_grows(monkeypatch):
    monkeypatch.setattr(module, "OF_SPREAD", 0.0)  # until nothing changes any more
    M = matrix(torch.logspace(-4, 4, 200))
    z = vectors(2, 200)
    found = lanczos(lambda V: V @ M, z, torch.tensor(1e-3))
    values, basis = torch.linalg.eigh(M)
    exact = ((z @ basis).square() * torch.log1p(values / 1e-3)).sum(1)
    torch.testing.assert_close(found.values, exact, rtol=1e-8, atol=0)
