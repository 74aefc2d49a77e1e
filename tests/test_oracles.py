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


def test_gram_trace_and_log_det_of_a_linear_model(linear):
    f, params, x = linear
    gram = known_gram(x)
    torch.testing.assert_close(oracles.gram_slow(f, params, x), gram)
    torch.testing.assert_close(oracles.trace_slow(f, params, x), gram.trace())
    expected = torch.logdet(gram + 0.1 * torch.eye(8))
    torch.testing.assert_close(oracles.logdet_slow(f, params, x, 0.1), expected)


def test_variants_count_small_eigenvalues_as_they_say(linear):
    f, params, _ = linear
    x = torch.eye(3)[:2]  # 𝒥: twice [[½, 0, ½], [0, ½, ½], [½, ½, 1]], whose values are 0, ½, 3/2
    values = oracles.eigenvalues_slow(f, params, x)
    torch.testing.assert_close(values, torch.tensor([0.0, 0, 0, 0, 0.5, 0.5, 1.5, 1.5]))
    assert math.isclose(oracles.pseudo_slow(f, params, x, 1e-9), 2 * math.log(0.75), rel_tol=1e-12)
    clipped = oracles.svd_clip_slow(f, params, x, 0.6)
    assert math.isclose(clipped, 6 * math.log(0.6) + 2 * math.log(1.5), rel_tol=1e-12)


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
