"""Recommended ε, and what an ε does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsmap
from cases import case
from fsmap.assess.jitter import recommended, rounding, row
from fsmap.assess.spectrum import from_rows, spectrum


def made(eigenvalues, P=None):
    sigma = torch.as_tensor(eigenvalues, dtype=torch.float64).sqrt()
    A = torch.zeros(len(sigma), P or len(sigma))
    A[:, : len(sigma)] = torch.diag(sigma)
    return from_rows(A, None, len(sigma), 1e-12)


@pytest.mark.parametrize("name", ["tanh_mlp", "wide", "cnn"])
@pytest.mark.parametrize("jitter", [1e-3, 1.0, 1e3])
def test_a_row_says_what_log_det_says(name, jitter):
    c = case(name)
    found = row(spectrum(c.f, c.params, c.x), "given", jitter, None)
    P = sum(p.numel() for p in c.params.values())
    exact = fsmap.log_det(c.f, c.params, c.x, jitter=jitter).item() - P * math.log(jitter)
    first = fsmap.log_det(c.f, c.params, c.x, jitter=jitter, method="first_order").item()
    assert found.log_det == pytest.approx(exact, rel=1e-9)
    assert found.first_order == pytest.approx(first - P * math.log(jitter), rel=1e-9)
    assert found.error == pytest.approx((found.first_order - exact) / exact, rel=1e-6)
    assert found.lam is None


@given(st.lists(st.floats(1e-8, 1e4), min_size=1, max_size=8), st.floats(1e-6, 1e6))
def test_the_bound_from_the_largest_eigenvalue_holds(eigenvalues, jitter):
    found = row(made(eigenvalues), "given", jitter, None)
    assert -1e-12 <= found.error <= found.error_bound * (1 + 1e-9) + 1e-7
    assert 0 <= found.effective <= len(eigenvalues)


def test_lambda_is_one_over_two_epsilon_n():
    assert row(made([1.0]), "given", 0.5, 100).lam == pytest.approx(1 / (2 * 0.5 * 100))


def test_l_map_keeps_the_first_order_form_within_five_percent():
    s = made([3.0, 1.0, 0.1])
    jitter = recommended(s, torch.float32)["l-map"]
    assert jitter == 30.0
    assert row(s, "l-map", jitter, None).error < 0.05


def test_fs_map_leaves_nine_in_ten_eigenvalues_alone():
    eigenvalues = torch.logspace(-4, 1, 40)
    s = made(eigenvalues)
    jitter = recommended(s, torch.float64)["fs-map"]
    changed = (eigenvalues + jitter).log() - eigenvalues.log()
    assert float((changed <= 0.1).double().mean()) >= 0.9
    assert jitter >= 10 * rounding(s, torch.float64)


def test_fs_map_never_goes_below_rounding():
    s = made(torch.logspace(-20, 0, 40))
    single, double = (recommended(s, dtype)["fs-map"] for dtype in (torch.float32, torch.float64))
    assert double >= 9 * 40 * 2.2e-16
    assert single >= double


def test_rounding_is_the_size_of_what_should_be_zero(seeded):
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).float()
    x = torch.randn(200, 2, dtype=torch.float32)
    f, params = fsmap.functional(net)
    s = spectrum(f, params, x, tolerance=1e-5)  # eight zero eigenvalues: scale of ReLU
    assert s.rank <= 33 - 8
    zeros = s.eigenvalues[-8:]
    assert float(zeros.max()) <= rounding(s, torch.float32)


def test_no_advice_for_a_zero_matrix():
    assert recommended(made([0.0, 0.0]), torch.float64) == {}
