"""Null vectors in words."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from fsmap.assess.naming import describe, outside, sparse_basis
from fsmap.functional import count, ravel

PARAMS = {"0.weight": torch.zeros(4, 3), "0.bias": torch.zeros(4), "2.weight": torch.zeros(2, 4)}


def text(v):
    return describe(v, PARAMS, 0.0).text


def test_single_entries_and_opposite_signs():
    one = torch.zeros(count(PARAMS))
    one[4] = 1.0
    assert text(one) == "0.weight[1, 1]"
    pair = torch.zeros(count(PARAMS))
    pair[12], pair[14] = 1.0, -1.0
    assert text(pair) == "0.bias[0] and 0.bias[2], with opposite signs"


def test_rows_and_columns():
    parts = {name: torch.zeros_like(p) for name, p in PARAMS.items()}
    parts["0.weight"][1] = 1.0
    parts["0.weight"][3] = -1.0
    assert text(ravel(parts)) == "0.weight[1, :] and 0.weight[3, :], with opposite signs"
    parts = {name: torch.zeros_like(p) for name, p in PARAMS.items()}
    parts["0.weight"][:, 2] = torch.tensor([1.0, 2.0, -1.0, 4.0])
    assert text(ravel(parts)) == "0.weight[:, 2]"


def test_shares_add_up_and_the_largest_comes_first():
    v = torch.arange(count(PARAMS), dtype=torch.float64)
    found = describe(v, PARAMS, 1e-15)
    shares = [part.share for part in found.parts]
    assert_close(sum(shares), 1.0)
    assert shares == sorted(shares, reverse=True)
    assert found.residual == 1e-15


def test_what_has_too_many_parts_is_summed_up(generator):
    params = {f"{i}.bias": torch.zeros(1) for i in range(9)}
    v = torch.ones(9)
    assert describe(v, params, 0.0).text.startswith("spread over 9 parameters: 0.bias 11 %")


@given(st.integers(2, 6), st.integers(0, 10**6))
def test_a_sparse_basis_finds_separate_supports(d, seed):
    g = torch.Generator().manual_seed(seed)
    P = 4 * d
    hidden = torch.zeros(d, P)
    for i in range(d):  # disjoint pairs
        hidden[i, 4 * i] = 1.0
        hidden[i, 4 * i + 2] = -1.0
    mixed = torch.linalg.qr((torch.randn(d, d, generator=g) @ hidden).mT).Q.mT
    basis = sparse_basis(mixed)
    assert (basis != 0).sum(1).tolist() == [2] * d
    assert torch.linalg.matrix_rank(torch.cat([basis, hidden])) == d


def test_outside_keeps_what_is_not_known():
    basis = torch.eye(5)[:3]
    known = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0], [1.0, -1.0, 0.0, 0.0, 0.0]])
    assert_close(outside(basis, known), basis[2:])
    assert_close(outside(basis, None), basis)
    assert len(outside(basis, torch.eye(5))) == 0
