"""Metrics: each is resolved into maps that reproduce g."""

from __future__ import annotations

import pytest
import torch

import cases
import oracles
from fsmap import metric as m
from fsmap.linalg.jacobian import resolve

S, K = 4, 3


OUT = torch.randn(S, K, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
METRICS = {
    "none": lambda: (None, torch.eye(S * K)),
    **{name: lambda name=name: cases.metric(name, S, K) for name in cases.METRICS},
    "weights_of_x": lambda: (
        m.Weights(lambda x: x[:, 0]),
        oracles.full_metric(torch.arange(1.0, S + 1), S, K),
    ),
    "weights_per_output": lambda: positions(torch.tensor([[1.0, 0.0, 2.0]] * 3 + [[5.0] * 3])),
    "weights_per_position": lambda: positions(torch.tensor([[1.0], [0.0], [2.0], [1.0]])),
    "factor": lambda: factor(OUT.mT[:, :2]),
    "factor_per_point": lambda: factor(
        torch.randn(S, K, 5, generator=torch.Generator().manual_seed(1))
    ),
    "softmax_fisher": lambda: (
        m.SoftmaxFisher(),
        oracles.full_metric(oracles.softmax_fisher_slow(OUT), S, K),
    ),
    "rank_one_general": lambda: (torch.ones(S * K, S * K), torch.ones(S * K, S * K)),
}


def positions(w):
    """Weights [S, T] with T a divisor of K: each counts for K/T outputs in a row."""
    per_output = w.repeat_interleave(K // w.shape[1], dim=1)
    return m.Weights(w), oracles.full_metric(torch.diag_embed(per_output), S, K)


def factor(matrix):
    return m.Output(factor=matrix), oracles.full_metric(matrix @ matrix.mT, S, K)


@pytest.mark.parametrize("name", METRICS)
def test_maps_reproduce_the_metric(name):
    metric, matrix = METRICS[name]()
    g = matrix.reshape(S * K, S * K) / S
    x = torch.arange(1.0, S + 1)[:, None]
    whiten = resolve(metric, x, OUT)
    rows = whiten.rows(torch.eye(S * K).reshape(S, K, S * K))  # [Q, SK]
    assert rows.shape == (whiten.size, S * K)
    torch.testing.assert_close(rows.mT @ rows, g, rtol=1e-12, atol=1e-12)
    u = torch.arange(1.0, S * K + 1).sin()
    v = torch.arange(whiten.size).to(u).cos()
    left, right = whiten.rows(u.reshape(S, K)) @ v, u @ whiten.adjoint(v).flatten()
    torch.testing.assert_close(left, right)
    torch.testing.assert_close(whiten.quadratic(u.reshape(S, K)), u @ g @ u)
    single = resolve(metric, x.float(), OUT.float()).quadratic(u.reshape(S, K).float())
    assert abs(float(single) - float(u @ g @ u)) < 1e-6 * float(u.abs() @ g.abs() @ u.abs())


def test_softmax_fisher_survives_certainty():
    logits = torch.tensor([[800.0, 0.0, -800.0]]).requires_grad_()
    value = m.SoftmaxFisher().at(None, logits).quadratic(torch.ones(1, 3))
    (grad,) = torch.autograd.grad(value, logits)
    assert value == 0
    assert torch.isfinite(grad).all()
