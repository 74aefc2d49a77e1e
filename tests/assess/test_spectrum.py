"""Rank, null space and eigenvalues against brute force in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import fsmap
from cases import MODELS, case
from fsmap.assess import spectrum as module
from fsmap.assess.spectrum import from_rows, grows_with_points, spectrum
from fsmap.errors import InputError
from fsmap.linalg import points
from oracles import gram_slow, jacobian_slow


def rows_slow(f, params, x):
    jac = jacobian_slow(f, params, x)
    return jac.flatten(0, 1) / len(jac) ** 0.5


@pytest.mark.parametrize("name", MODELS)
def test_rank_and_null_space_are_those_of_brute_force(name):
    c = case(name)
    A = rows_slow(c.f, c.params, c.x)
    found = spectrum(c.f, c.params, c.x)
    tolerance = max(A.shape) * torch.finfo(A.dtype).eps
    assert found.rank == int(torch.linalg.matrix_rank(A, rtol=tolerance))
    assert (found.rows, found.parameters) == tuple(A.shape)
    assert found.points == points.count(c.x)
    if found.null is not None:
        d = found.parameters - found.rank
        assert found.null.shape == (d, found.parameters)
        assert_close(found.null @ found.null.mT, torch.eye(d))
        assert (A @ found.null.mT).norm() < 1e-12 * torch.linalg.matrix_norm(A, 2)


@pytest.mark.parametrize("name", MODELS)
def test_eigenvalues_are_those_of_the_gram_matrix(name):
    c = case(name)
    found = spectrum(c.f, c.params, c.x)
    eigenvalues = torch.linalg.eigvalsh(gram_slow(c.f, c.params, c.x)).flip(0)
    k = len(found.eigenvalues)
    scale = float(eigenvalues[0])
    assert_close(found.eigenvalues, eigenvalues[:k], rtol=1e-9, atol=1e-13 * scale)
    assert_close(found.trace.value, eigenvalues.sum(), rtol=1e-12, atol=0)
    assert_close(found.largest.value, eigenvalues[0], rtol=1e-12, atol=0)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12), st.integers(0, 10**6))
def test_rank_of_a_matrix_made_with_that_rank(Q, P, rank, seed):
    rank = min(rank, Q, P)
    g = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(Q, Q, generator=g)).Q[:, :rank]
    right = torch.linalg.qr(torch.randn(P, P, generator=g)).Q[:, :rank]
    values = 10.0 ** (4 * torch.rand(rank, generator=g) - 2)
    A = left * values @ right.mT
    found = from_rows(A, None, Q, 1e-12)
    assert found.rank == rank
    if found.null is not None:
        assert len(found.null) == P - rank
        assert float((found.null @ right).abs().sum()) < 1e-9


def test_a_wide_gap_and_no_gap():
    sharp = from_rows(torch.diag(torch.tensor([1.0, 0.1, 1e-17])), None, 3, 1e-12)
    smooth = from_rows(torch.diag(10.0 ** -torch.arange(20.0)), None, 20, 1e-12)
    assert sharp.rank == 2
    assert sharp.gap > 1e20
    assert smooth.rank == 12
    assert 50 < smooth.gap < 200  # eigenvalues: two decades a step
    assert from_rows(torch.eye(3), None, 3, 1e-12).gap is None


def test_a_metric_is_part_of_the_matrix():
    c = case("tanh_mlp")
    weights = torch.rand(12, generator=torch.Generator().manual_seed(1)) + 0.5
    found = spectrum(c.f, c.params, c.x, metric=weights)
    full = torch.diag(weights).reshape(12, 1, 12, 1)
    expected = torch.linalg.eigvalsh(gram_slow(c.f, c.params, c.x, full)).flip(0)
    assert_close(found.eigenvalues, expected, rtol=1e-9, atol=1e-14)


def test_negative_weights_give_negative_eigenvalues():
    c = case("tanh_mlp")
    weights = torch.where(torch.arange(12) % 3 == 0, -1.0, 1.0)
    found = spectrum(c.f, c.params, c.x, metric=weights)
    full = torch.diag(weights).reshape(12, 1, 12, 1)
    expected = torch.linalg.eigvalsh(gram_slow(c.f, c.params, c.x, full))
    assert found.method == "eigh"
    assert float(found.eigenvalues.min()) < 0
    assert_close(found.eigenvalues.sort().values, expected, rtol=1e-9, atol=1e-13)


def test_negative_weights_on_many_parameters_are_refused(seeded):
    f, params = fsmap.functional(nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)))
    x = torch.randn(4, 40)
    with pytest.raises(InputError, match="at most 1500 parameters, and there are 1681"):
        spectrum(f, params, x, metric=torch.tensor([1.0, -1.0, 1.0, 1.0]))


def test_growth_of_the_rank_with_points(generator):
    A = torch.randn(40, 6, generator=generator)
    A[:, 5] = 0.0
    A[30, 5] = 1.0  # one point, in the second half, sees the sixth parameter
    assert grows_with_points(A, 1e-12, 6) is True
    assert grows_with_points(A[:, :5], 1e-12, 5) is False
    assert grows_with_points(A[:8], 1e-12, 5) is None


@pytest.mark.parametrize("name", ["wide", "relu", "cnn", "batchnorm_train", "sequence"])
def test_without_rows_largest_eigenvalue_and_trace_hold(monkeypatch, name):
    c = case(name)
    exact = spectrum(c.f, c.params, c.x)
    monkeypatch.setattr(module, "LARGEST_SVD", 0)
    monkeypatch.setattr(module, "LARGEST_ROWS", 0)
    found = spectrum(c.f, c.params, c.x, seconds=60.0)
    low, room = (float(t) for t in found.largest)
    assert found.method in ("gram", "lanczos")
    assert found.points == points.count(c.x)
    assert low <= float(exact.largest.value) * (1 + 1e-9)
    assert float(exact.largest.value) <= (low + room) * (1 + 1e-6)
    distance = abs(float(found.trace.value - exact.trace.value))
    assert distance <= 5 * float(found.trace.stderr) + 1e-9 * float(exact.trace.value)
    if found.method == "gram":
        top = exact.eigenvalues[: len(found.eigenvalues)]
        scale = float(top[0])
        assert_close(found.eigenvalues[: len(top)], top, rtol=1e-7, atol=1e-12 * scale)


def test_many_points_of_a_small_model_are_cut(monkeypatch):
    c = case("tanh_mlp")
    monkeypatch.setattr(module, "LARGEST_FACTOR", 2.0 * 10**2 * 11)  # eleven rows of ten
    found = spectrum(c.f, c.params, c.x)
    assert (found.method, found.points, found.rows) == ("svd", 11, 11)
    expected = torch.linalg.svdvals(rows_slow(c.f, c.params, c.x[:11])).square()
    assert_close(found.eigenvalues, expected, rtol=1e-9, atol=1e-14)
