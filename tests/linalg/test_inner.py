"""AAᵀ by blocks: value, first and second derivatives, forward mode, vmap."""

from __future__ import annotations

import pytest
import torch
from torch.func import jvp, vmap

from fsmap.linalg import jacobian as module
from fsmap.linalg.jacobian import inner


def matrix(n, p, seed=0):
    return torch.randn(n, p, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)
    monkeypatch.setattr(module, "LEAST", 1)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 12, 15])
@pytest.mark.parametrize("p", [1, 4, 9])
def test_value_and_derivatives(n, p):
    rows = matrix(n, p).requires_grad_()
    torch.testing.assert_close(inner(rows), rows @ rows.mT)
    weight = matrix(n, n, 1)  # not symmetric
    (found,) = torch.autograd.grad((weight * inner(rows).sin()).sum(), rows, create_graph=True)
    (wanted,) = torch.autograd.grad(
        (weight * (rows @ rows.mT).sin()).sum(), rows, create_graph=True
    )
    torch.testing.assert_close(found, wanted)
    again = [torch.autograd.grad(g.cos().sum(), rows)[0] for g in (found, wanted)]
    torch.testing.assert_close(again[0], again[1])


def test_forward_mode_and_vmap():
    rows, tangent = matrix(9, 5), matrix(9, 5, 1)
    found = jvp(inner, (rows,), (tangent,))[1]
    torch.testing.assert_close(found, tangent @ rows.mT + rows @ tangent.mT)
    stacked = torch.stack([rows, tangent]).requires_grad_()
    torch.testing.assert_close(vmap(inner)(stacked), stacked @ stacked.mT)
    leaf = rows.clone().requires_grad_()
    along = jvp(inner, (leaf,), (tangent,))[1].square().sum()
    (found,) = torch.autograd.grad(along, leaf)
    (wanted,) = torch.autograd.grad((tangent @ leaf.mT + leaf @ tangent.mT).square().sum(), leaf)
    torch.testing.assert_close(found, wanted)
