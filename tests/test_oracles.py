"""The slow definitions against closed forms: a wrong oracle would make everything wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fsmap
import oracles


@pytest.fixture
def linear(seeded):
    """F(x) = Wx + b with K = 2: its Jacobian is known."""
    f, params = fsmap.functional(nn.Linear(3, 2))
    return f, params, torch.randn(5, 3)


def known_gram(x):
    """𝒥 of Linear(3, 2): the same block E[xxᵀ] for each output, E[x] between weight and bias."""
    second, first = x.mT @ x / len(x), x.mean(0)
    weight = torch.block_diag(second, second)  # [6, 6]
    cross = torch.block_diag(first[:, None], first[:, None])  # [6, 2]
    return torch.cat([torch.cat([weight, cross], 1), torch.cat([cross.mT, torch.eye(2)], 1)])


def test_jacobian_of_a_linear_model(linear):
    f, params, x = linear
    jac = oracles.jacobian_slow(f, params, x)
    assert jac.shape == (5, 2, 8)
    torch.testing.assert_close(jac[3, 0], torch.cat([x[3], torch.zeros(3), torch.tensor([1.0, 0])]))
    torch.testing.assert_close(jac[3, 1], torch.cat([torch.zeros(3), x[3], torch.tensor([0, 1.0])]))


def test_gram_trace_and_log_det_of_a_linear_model(linear):
    f, params, x = linear
    gram = known_gram(x)
    torch.testing.assert_close(oracles.gram_slow(f, params, x), gram)
    torch.testing.assert_close(oracles.trace_slow(f, params, x), gram.trace())
    expected = torch.logdet(gram + 0.1 * torch.eye(8))
    torch.testing.assert_close(oracles.logdet_slow(f, params, x, 0.1), expected)


def test_gram_with_a_metric_is_the_double_sum(linear):
    f, params, x = linear
    g = torch.randn(10, 10)
    jac = oracles.jacobian_slow(f, params, x).reshape(10, 8)
    expected = jac.mT @ g @ jac / 5
    torch.testing.assert_close(oracles.gram_slow(f, params, x, g.reshape(5, 2, 5, 2)), expected)


def test_variants_count_small_eigenvalues_as_they_say(linear):
    f, params, _ = linear
    x = torch.eye(3)[:2]  # 𝒥: twice [[½, 0, ½], [0, ½, ½], [½, ½, 1]], whose values are 0, ½, 3/2
    values = oracles.eigenvalues_slow(f, params, x)
    torch.testing.assert_close(values, torch.tensor([0.0, 0, 0, 0, 0.5, 0.5, 1.5, 1.5]))
    assert math.isclose(oracles.pseudo_slow(f, params, x, 1e-9), 2 * math.log(0.75), rel_tol=1e-12)
    clipped = oracles.svd_clip_slow(f, params, x, 0.6)
    assert math.isclose(clipped, 6 * math.log(0.6) + 2 * math.log(1.5), rel_tol=1e-12)


def test_gradients_of_a_known_function():
    params = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor(0.5)}

    def value(p):
        return (p["a"] ** 3).sum() * p["b"].exp()

    scale = math.exp(0.5)
    expected = torch.tensor([3 * scale, 12 * scale, -7 * scale])
    torch.testing.assert_close(
        oracles.gradient_slow(value, params), expected, rtol=1e-10, atol=1e-10
    )
    direction = {"a": torch.tensor([0.0, 2.0]), "b": torch.tensor(1.0)}
    slope = oracles.directional_slow(value, params, direction)
    assert math.isclose(slope, float(2 * expected[1] + expected[2]), rel_tol=1e-9)


def test_full_metric_places_blocks_on_the_diagonal():
    weights, block = torch.tensor([1.0, -2.0]), torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    full = oracles.full_metric(weights, 2, 2).reshape(4, 4)
    torch.testing.assert_close(full, torch.diag(torch.tensor([1.0, 1, -2, -2])))
    full = oracles.full_metric(block, 2, 2).reshape(4, 4)
    torch.testing.assert_close(full, torch.block_diag(block, block))
    full = oracles.full_metric(torch.stack([block, -block]), 2, 2).reshape(4, 4)
    torch.testing.assert_close(full, torch.block_diag(block, -block))


def test_statistics_follow_a_known_change(seeded):
    layer = nn.BatchNorm1d(2, eps=0.0)
    layer.running_mean.copy_(torch.tensor([1.0, -1.0]))
    layer.running_var.copy_(torch.tensor([4.0, 9.0]))
    x = torch.randn(7, 2)
    reference = oracles.follow_slow(layer, x)
    torch.testing.assert_close(layer.running_mean, torch.tensor([1.0, -1.0]))
    oracles.follow_slow(layer, 3 * x + 5, reference)  # their points scaled and shifted: so are they
    torch.testing.assert_close(layer.running_mean, torch.tensor([8.0, 2.0]))
    torch.testing.assert_close(layer.running_var, torch.tensor([36.0, 81.0]))
    assert layer.training
