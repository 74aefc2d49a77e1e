"""The linear model of a table is at the minimum, whatever the number of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

from fsmap.train.linear import WEIGHT_DECAYS, learn_linear
from fsmap.train.tabular import held_out_loss


@pytest.fixture
def rows(generator):
    x = torch.randn(40, 5, generator=generator)
    noise = 0.1 * torch.randn(40, 1, generator=generator)
    return x, x[:, :1] - 2 * x[:, 1:2] + noise + 0.3, torch.arange(40) >= 30


def gradient(net, x, y, decay, loss):
    """Largest entry of the gradient of mean loss + w/2 ‖θ‖²."""
    net.zero_grad()
    total = loss(net(x.double()), y) + decay / 2 * sum(p.square().sum() for p in net.parameters())
    total.backward()
    return max(float(p.grad.abs().max()) for p in net.parameters())


def test_numbers_are_solved(rows):
    x, y, held = rows
    net, found = learn_linear(x, y, held)
    square = lambda out, t: (out - t).square().sum(1).mean()  # noqa: E731
    assert gradient(net, x[~held], y[~held].double(), found.config.weight_decay, square) < 1e-10
    out = net(x[held].double()).detach()
    assert found.value == pytest.approx(float(held_out_loss(out, y[held].double(), False)))
    assert found.value == min(line["value"] for line in found.search)
    assert [line["weight_decay"] for line in found.search] == list(WEIGHT_DECAYS)
    assert found.value < 0.2  # early stopping used to end far from here


def test_numbers_are_ridge_s(rows):
    """With the constant as a column that is penalized like the others."""
    x, y, held = rows
    net, found = learn_linear(x, y, held)
    ones = np.c_[x.numpy(), np.ones(len(x))][:30]
    alpha = 30 * found.config.weight_decay / 2  # mean of squares + w/2 ‖θ‖²
    ridge = Ridge(alpha, fit_intercept=False).fit(ones, y[:30, 0].numpy())
    theta = torch.cat([net.layers[0].weight[0], net.layers[0].bias]).detach()
    np.testing.assert_allclose(theta.numpy(), ridge.coef_, rtol=1e-6)


def test_classes_are_at_the_minimum(rows):
    x, _, held = rows
    y = (x[:, 0] + 0.5 * torch.roll(x[:, 2], 3) > 0).long() + (x[:, 1] > 1).long()
    net, found = learn_linear(x, y, held)
    loss = torch.nn.functional.cross_entropy
    assert gradient(net, x[~held], y[~held], found.config.weight_decay, loss) < 1e-6
    assert found.step < 500
    assert net.sizes == (5, 3)


def test_two_classes_are_logistic_regression_s(rows):
    """Two logits ±z cost half the penalty of one; the constant is a column here too."""
    x, _, held = rows
    y = (x[:, 0] + 0.5 * torch.roll(x[:, 2], 3) > 0).long()
    net, found = learn_linear(x, y, held)
    ones = np.c_[x.numpy(), np.ones(len(x))]
    C = 2 / (30 * found.config.weight_decay)
    other = LogisticRegression(C=C, fit_intercept=False, tol=1e-10, max_iter=10_000)
    other.fit(ones[:30], y[:30].numpy())
    chance = net(x.double()).softmax(1).detach().numpy()
    np.testing.assert_allclose(chance, other.predict_proba(ones), atol=1e-5)
