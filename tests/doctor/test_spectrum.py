"""Rank, null space, eigenvalues and names of null vectors against brute force in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from cases import MODELS, case
from fsmap.doctor import spectrum as module
from fsmap.doctor.spectrum import describe, from_rows, sparse_basis
from fsmap.functional import num_points, ravel
from oracles import eigenvalues_slow, jacobian_slow


def rows_slow(f, params, x):
    jac = jacobian_slow(f, params, x)
    return jac.flatten(0, 1) / len(jac) ** 0.5


@pytest.mark.parametrize("name", MODELS)
def test_rank_null_space_and_eigenvalues(name):
    c = case(name)
    A = rows_slow(c.f, c.params, c.x)
    found = module.spectrum(c.f, c.params, c.x)
    tolerance = max(A.shape) * torch.finfo(A.dtype).eps
    assert found.rank == int(torch.linalg.matrix_rank(A, rtol=tolerance))
    assert (found.rows, found.parameters, found.points) == (*A.shape, num_points(c.x))
    if found.null is not None:
        assert_close(found.null @ found.null.mT, torch.eye(found.parameters - found.rank))
        assert (A @ found.null.mT).norm() < 1e-12 * torch.linalg.matrix_norm(A, 2)
    expected = eigenvalues_slow(c.f, c.params, c.x).flip(0)
    some, scale = expected[: len(found.eigenvalues)], float(expected[0])
    assert_close(found.eigenvalues, some, rtol=1e-9, atol=1e-13 * scale)
    assert_close(found.trace.value, expected.sum(), rtol=1e-12, atol=0)
    assert_close(found.largest.value, expected[0], rtol=1e-12, atol=0)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12), st.integers(0, 10**6))
def test_rank_of_a_matrix_made_with_that_rank(Q, P, rank, seed):
    rank = min(rank, Q, P)
    g = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(Q, Q, generator=g)).Q[:, :rank]
    right = torch.linalg.qr(torch.randn(P, P, generator=g)).Q[:, :rank]
    values = 10.0 ** (4 * torch.rand(rank, generator=g) - 2)
    found = from_rows(left * values @ right.mT, Q, 1e-12)
    assert found.rank == rank
    if found.null is not None:
        assert len(found.null) == P - rank
        assert float((found.null @ right).abs().sum()) < 1e-9


def test_a_wide_gap_and_no_gap():
    sharp = from_rows(torch.diag(torch.tensor([1.0, 0.1, 1e-17])), 3, 1e-12)
    smooth = from_rows(torch.diag(10.0 ** -torch.arange(20.0)), 20, 1e-12)
    assert (sharp.rank, smooth.rank) == (2, 12)
    assert sharp.gap > 1e20
    assert 50 < smooth.gap < 200  # eigenvalues: two decades a step
    assert from_rows(torch.eye(3), 3, 1e-12).gap is None


def test_growth_of_the_rank_with_points(generator):
    A = torch.randn(40, 6, generator=generator)
    A[:, 5] = 0.0
    A[30, 5] = 1.0  # one point, in the second half, depends on the sixth parameter
    assert from_rows(A, 40, 1e-12).grows() is True
    assert from_rows(A[:, :5], 40, 1e-12).grows() is False
    assert from_rows(A[:8, :5], 8, 1e-12).grows() is None


def test_many_points_of_a_small_model_are_cut(monkeypatch):
    c = case("tanh_mlp")
    monkeypatch.setattr(module, "LARGEST_FACTOR", 2.0 * 10**2 * 11)  # eleven rows of ten
    found = module.spectrum(c.f, c.params, c.x)
    assert (found.method, found.points, found.rows) == ("svd", 11, 11)
    expected = torch.linalg.svdvals(rows_slow(c.f, c.params, c.x[:11])).square()
    assert_close(found.eigenvalues, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", ["wide", "relu", "cnn", "batchnorm_train", "sequence"])
def test_power_iteration_bounds_the_largest_eigenvalue_and_estimates_the_trace(monkeypatch, name):
    c = case(name)
    exact = module.spectrum(c.f, c.params, c.x)
    monkeypatch.setattr(module, "LARGEST_SVD", 0)
    monkeypatch.setattr(module, "LARGEST_ROWS", 0)
    monkeypatch.setattr(module, "SECONDS", 60.0)
    found = module.spectrum(c.f, c.params, c.x)
    low, room = (float(t) for t in found.largest)
    assert (found.method, found.points) == ("power", num_points(c.x))
    assert low <= float(exact.largest.value) * (1 + 1e-9)
    assert float(exact.largest.value) <= (low + room) * (1 + 1e-6)
    distance = abs(float(found.trace.value - exact.trace.value))
    assert distance <= 5 * float(found.trace.stderr) + 1e-9 * float(exact.trace.value)
    if name == "relu":  # fewer points if time is short
        monkeypatch.setattr(module, "SECONDS", 1e-9)
        assert module.spectrum(c.f, c.params, c.x).points == 1


PARAMS = {"0.weight": torch.zeros(4, 3), "0.bias": torch.zeros(4), "2.weight": torch.zeros(2, 4)}


def test_null_vectors_in_words():
    v = {name: torch.zeros_like(p) for name, p in PARAMS.items()}
    v["0.bias"][0], v["0.bias"][2] = 1.0, -1.0
    assert describe(ravel(v), PARAMS) == "0.bias[0] and 0.bias[2], with opposite signs"
    v["0.weight"][:, 2] = 2.0
    assert describe(ravel(v), PARAMS) == "0.weight[:, 2], 0.bias[0] and 0.bias[2]"
    assert "3 more" in describe(torch.ones(9), {f"{i}.bias": torch.zeros(1) for i in range(9)})


@given(st.integers(2, 6), st.integers(0, 10**6))
def test_a_sparse_basis_separates_supports(d, seed):
    g = torch.Generator().manual_seed(seed)
    pairs = torch.zeros(d, 4 * d)
    for i in range(d):
        pairs[i, 4 * i], pairs[i, 4 * i + 2] = 1.0, -1.0
    mixed = torch.linalg.qr((torch.randn(d, d, generator=g) @ pairs).mT).Q.mT
    basis = sparse_basis(mixed)
    assert (basis != 0).sum(1).tolist() == [2] * d
    assert torch.linalg.matrix_rank(torch.cat([basis, pairs])) == d
