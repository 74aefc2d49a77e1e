"""Products, Lanczos and the Gram matrix against the dense Jacobian."""

from __future__ import annotations

import time

import pytest
import torch
from torch.testing import assert_close

from cases import case
from fsmap.assess import matrix_free
from fsmap.assess.matrix_free import Products, bounds, lanczos
from fsmap.errors import UnsupportedModuleError
from oracles import jacobian_slow


def rows(c):
    jac = jacobian_slow(c.f, c.params, c.x)
    return jac.flatten(0, 1) / len(jac) ** 0.5


def detached(c):
    return {name: p.detach() for name, p in c.params.items()}


@pytest.mark.parametrize("name", ["wide", "relu", "sequence", "batchnorm_train"])
def test_products(name, generator):
    c = case(name)
    A = rows(c)
    u = torch.randn(len(A), generator=generator)
    products = Products(c.f, detached(c), c.x, None)
    assert_close(products.transpose(u), A.mT @ u)
    assert_close(products.gram(u), A @ (A.mT @ u))


def test_products_without_forward_mode(monkeypatch, generator):
    c = case("wide")
    A = rows(c)

    def missing(*args):
        message = "no forward mode"
        raise UnsupportedModuleError(message)

    monkeypatch.setattr(matrix_free, "jvp", missing)
    u = torch.randn(len(A), generator=generator)
    assert_close(Products(c.f, detached(c), c.x, None).gram(u), A @ (A.mT @ u))


def test_random_combinations_have_the_right_covariance(monkeypatch, generator):
    monkeypatch.setattr(matrix_free, "PROBES", 4000)
    c = case("tanh_mlp")
    A = rows(c)
    G = Products(c.f, detached(c), c.x, None).random(generator)
    assert_close(G.mT @ G / 4000, A.mT @ A, rtol=0.2, atol=0.1)


def test_lanczos_run_to_the_end_has_all_eigenvalues(generator):
    M = torch.randn(9, 9, generator=generator)
    M = M @ M.mT
    start = torch.randn(9, generator=generator)
    basis, T, norm = lanczos(lambda v: M @ v, start, time.perf_counter() + 60)
    assert_close(basis @ basis.mT, torch.eye(9))
    assert_close(torch.linalg.eigvalsh(T), torch.linalg.eigvalsh(M))
    assert_close(basis @ M @ basis.mT, T)
    assert float(norm) < 1e-6


def test_lanczos_stops_in_time_and_bounds_from_below(generator):
    M = torch.diag(torch.linspace(0.01, 1, 50))
    start = torch.randn(50, generator=generator)
    basis, T, norm = lanczos(lambda v: M @ v, start, 0.0)
    assert len(basis) == matrix_free.STEPS[0]
    assert float(torch.linalg.eigvalsh(T)[-1]) <= 1
    assert float(norm) > 0


def test_where_time_is_short_fewer_points_are_used(monkeypatch):
    c = case("relu")
    monkeypatch.setattr(matrix_free, "_points_of_gram", lambda *args, **kwargs: 0)
    found = bounds(c.f, detached(c), c.x, None, 1e-9)
    assert found.points == 1
    assert found.eigenvalues is None


def test_a_gram_matrix_of_some_points(monkeypatch):
    c = case("relu")
    monkeypatch.setattr(matrix_free, "_points_of_gram", lambda *args, **kwargs: 3)
    found = bounds(c.f, detached(c), c.x, None, 1.0)
    jac = jacobian_slow(c.f, c.params, c.x[:3]).flatten(0, 1) / 3**0.5
    assert found.points == 3
    assert_close(found.eigenvalues, torch.linalg.svdvals(jac).square(), rtol=1e-9, atol=1e-14)
    assert_close(found.trace.value, jac.square().sum())
