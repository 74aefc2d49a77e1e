"""Numbers of a table's test rows: by hand and against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fsmap.assess import tables
from fsmap.data.target import Target

PRICE = Target("price", "regression", mean=10.0, std=2.0)
KIND = Target("kind", "classification", classes=("a", "b"))


@pytest.fixture
def rows(generator):
    y = torch.randn(400, 1, generator=generator)
    return y + 0.5 * torch.randn(400, 1, generator=generator), y


def test_spread_is_in_the_unit_of_the_target():
    out, y = torch.tensor([[0.0], [1.0], [0.0], [0.0]]), torch.zeros(4, 1)
    found = tables.spread(out, y, PRICE)
    assert found.noise_std == pytest.approx(1.0)  # √(2²/4)
    assert found.margin == 2.0
    assert found.errors == [0.0, 0.0, 0.0, 2.0]


def test_the_margin_is_the_conformal_rank():
    errors = np.arange(1.0, 20.0)  # 19 of them: rank ⌈0.9 · 20⌉ = 18
    assert tables.margin(errors, 0.9) == 18.0
    assert tables.margin(errors[:3], 0.9) == 3.0  # never beyond the largest


def test_regression_against_scikit_learn(rows):
    sklearn = pytest.importorskip("sklearn.metrics")
    out, y = rows
    held = tables.Spread(1.0, 1.5, [])
    found = tables.regression(out, y, PRICE, held)
    truth, guess = (10 + 2 * t[:, 0].numpy() for t in (y, out))
    assert found["rmse"] == pytest.approx(sklearn.root_mean_squared_error(truth, guess))
    assert found["mae"] == pytest.approx(sklearn.mean_absolute_error(truth, guess))
    assert found["r2"] == pytest.approx(sklearn.r2_score(truth, guess))
    normal = torch.distributions.Normal(torch.from_numpy(guess), 1.0)
    assert found["nll"] == pytest.approx(-normal.log_prob(torch.from_numpy(truth)).mean().item())
    assert found["coverage"] == np.mean(np.abs(truth - guess) <= 1.5)


def test_intervals_hold_as_often_as_they_should(rows):
    out, y = rows
    held = tables.spread(out[:200], y[:200], PRICE)
    found = tables.coverage_curve(out[200:], y[200:], PRICE, held)
    assert np.abs(np.array(found) - tables.LEVELS).max() < 0.12  # 200 rows: two to three s.e.


def test_classification_names_its_numbers(generator):
    out = torch.randn(50, 2, generator=generator)
    found = tables.classification(out, out.argmax(1))
    assert found["accuracy"] == 1.0
    assert found["temperature"] < 0.1  # right about everything: more confidence would be better
    assert set(found) == {"accuracy", "nll", "brier", "ece", "temperature"}


def test_differences_are_paired(rows):
    out, y = rows
    better, worse = 0.5 * out + 0.5 * y, out
    found = tables.difference(better, worse, y, PRICE)
    assert found.mean == pytest.approx(float((0.25 - 1) * (out - y).square().mean()))
    assert found.clear
    same = tables.difference(out, out, y, PRICE)
    assert (same.mean, same.stderr, same.clear) == (0.0, 0.0, False)


def test_differences_of_log_losses():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    y = torch.tensor([0, 1, 0])
    found = tables.difference(logits, torch.zeros(3, 2), y, KIND)
    rows = torch.nn.functional.cross_entropy(logits, y, reduction="none") - np.log(2)
    assert found.mean == pytest.approx(rows.mean().item())
    assert found.stderr == pytest.approx(rows.std().item() / 3**0.5)
