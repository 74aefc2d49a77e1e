"""Uncertainty by laplace-torch where it is installed, and a command where it is not."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
import torch

from fsmap.errors import InputError, MissingExtraError
from fsmap.integrations.sklearn import LMAPClassifier, LMAPRegressor

FAST = {
    "hidden": (16,),
    "steps": 60,
    "learning_rate": 0.02,
    "weight_decay": 1e-3,
    "reg_strength": 1e-3,
    "random_state": 0,
}
needs_laplace = pytest.mark.skipif(
    importlib.util.find_spec("laplace") is None, reason="laplace-torch is not installed"
)


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2))
    return X, 100 + 5 * X[:, 0] + rng.normal(size=200)


@needs_laplace
def test_the_last_layer_is_bayesian_linear_regression(rows):
    """Against the closed form: features φ, precision ΦᵀΦ/σ² + wN I."""
    X, y = rows
    model = LMAPRegressor(laplace=True, **FAST).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_array_equal(mean, model.predict(X))
    x = torch.from_numpy(model.scaler_.transform(X))
    *hidden, last = model.module_.layers
    with torch.no_grad():
        features = torch.relu(hidden[0](x))
        phi = torch.cat([features, torch.ones(len(x), 1)], dim=1)  # [N, 17]
        kept = phi[~model._held_out]
        sigma = model.noise_std_[0] / model.target_scaler_.scale_[0]
        precision = kept.mT @ kept / sigma**2 + 1e-3 * len(kept) * torch.eye(17)
        variance = (phi @ torch.linalg.inv(precision) * phi).sum(1) + sigma**2
    expected = variance.sqrt().numpy() * model.target_scaler_.scale_[0]
    np.testing.assert_allclose(std, expected, rtol=1e-4)


@needs_laplace
def test_far_away_is_less_certain(rows):
    X, y = rows
    model = LMAPRegressor(laplace=True, **FAST).fit(X, y)
    near, far = (model.predict(scale * X, return_std=True)[1].mean() for scale in (1, 30))
    assert far > 2 * near
    labels = np.where(X[:, 0] > 0, "up", "down")
    plain = LMAPClassifier(**FAST).fit(X, labels)
    averaged = LMAPClassifier(laplace=True, **FAST).fit(X, labels)
    np.testing.assert_allclose(averaged.predict_proba(30 * X).sum(1), 1)
    confident = [model.predict_proba(30 * X).max(1).mean() for model in (plain, averaged)]
    assert confident[1] < confident[0]


@needs_laplace
def test_several_targets_have_several_deviations(rows):
    X, y = rows
    model = LMAPRegressor(laplace=True, **FAST).fit(X, np.stack([y, -7 * y], axis=1))
    mean, std = model.predict(X[:5], return_std=True)
    assert mean.shape == std.shape == (5, 2)
    np.testing.assert_allclose(std[:, 1] / std[:, 0], 7, rtol=1e-6)


@needs_laplace
def test_weights_are_refused(rows):
    with pytest.raises(InputError, match="laplace=True knows no sample weights"):
        LMAPRegressor(laplace=True, **FAST).fit(*rows, sample_weight=np.ones(200))


def test_where_it_is_missing_the_message_says_how_to_get_it(rows, monkeypatch):
    monkeypatch.setitem(sys.modules, "laplace", None)
    with pytest.raises(MissingExtraError, match="without its dependency on torchvision"):
        LMAPRegressor(laplace=True, **FAST).fit(*rows)


def test_a_deviation_must_have_been_learned(rows):
    model = LMAPRegressor(**FAST).fit(*rows)
    with pytest.raises(InputError, match="needs an estimator that was fitted with laplace=True"):
        model.predict(rows[0], return_std=True)
