"""scikit-learn's own checks, and what users do with estimators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks

from fsmap.errors import InputError
from fsmap.integrations.sklearn import LMAPClassifier, LMAPRegressor

FAST = {"method": "l-map", "hidden": (16,), "steps": 80, "weight_decay": 1e-4, "reg_strength": 1e-3}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([LMAPRegressor(**FAST), LMAPClassifier(**FAST)])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.fixture
def prices():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 3)) * [1, 10, 100] + [0, 5, -50]
    return X, 1000 + 30 * X[:, 0] + 2 * X[:, 1] + rng.normal(size=150)


@pytest.fixture
def kinds():
    X = np.random.default_rng(0).normal(size=(150, 2))
    return X, np.where(X[:, 0] + X[:, 1] > 0, "up", "down")


def test_units_do_not_matter(prices):
    X, y = prices
    model = LMAPRegressor(**FAST, random_state=0).fit(X, y)
    Z = X * [2, 0.5, 8]
    scaled = LMAPRegressor(**FAST, random_state=0).fit(Z, 4 * y - 100)
    np.testing.assert_allclose(scaled.predict(Z), 4 * model.predict(X) - 100, rtol=1e-4)
    assert model.score(X, y) > 0.8


def test_auto_chooses_the_best_on_held_out_rows(prices):
    X, y = prices
    model = LMAPRegressor(hidden=8, steps=10, random_state=0).fit(X, y)
    assert set(model.losses_) == {"linear", "ps-map", "l-map"}
    best = min(model.search_, key=lambda line: line["value"])
    assert model.method_ == best["method"] == "linear"  # as the truth is
    assert model.weight_decay_ == best["weight_decay"]
    assert model.reg_strength_ == best["reg_strength"] == 0
    assert model.losses_["linear"] == best["value"]
    assert model.score(X, y) > 0.99


def test_a_population_is_an_ensemble(prices):
    X, y = prices
    model = LMAPRegressor(**FAST, random_state=0).fit(X, y)
    assert len(model.module_.members) == 4
    x = torch.from_numpy(model.scaler_.transform(X))
    with torch.no_grad():
        out = torch.stack([member(x) for member in model.module_.members]).mean(0)
    np.testing.assert_allclose(model.target_scaler_.inverse_transform(out)[:, 0], model.predict(X))
    assert len(LMAPRegressor(**FAST, ensemble=1, random_state=0).fit(X, y).module_.members) == 1


def test_intervals_and_quantiles(prices):
    X, y = prices
    X, y = np.tile(X, (4, 1)), np.tile(y, 4) + np.random.default_rng(1).normal(0, 5, 600)
    model = LMAPRegressor(method="linear", random_state=0).fit(X, y)
    low, high = model.predict_interval(X)
    assert 0.85 < np.mean((low <= y) & (y <= high)) < 0.95
    found = model.predict_quantiles(X, (0.1, 0.5, 0.9))
    assert found.shape == (600, 3)
    np.testing.assert_array_equal(model.predict_quantiles(X, 0.5), found[:, 1:2])
    assert (np.diff(found, axis=1) > 0).all()
    for coverage in (90, -0.1, float("nan")):
        with pytest.raises(InputError, match="coverage"):
            model.predict_interval(X, coverage)
    with pytest.raises(InputError, match="quantiles"):
        model.predict_quantiles(X, (0.5, 1.5))
    positive = LMAPRegressor(method="linear", random_state=0).fit(X, np.exp(X[:, 0]))
    assert positive.predict_interval(X)[0].min() == positive.predict(X).min() == 0


def test_more_columns_than_rows():
    X = np.random.default_rng(0).normal(size=(40, 120))
    model = LMAPRegressor(method="linear", weight_decay=1e-6, random_state=0).fit(X, X[:, 0])
    np.testing.assert_allclose(model.predict(X), X[:, 0], atol=1e-2)


def test_a_strength_in_nats(prices):
    options = {**FAST, "reg_strength": "auto", "random_state": 0}
    weak, strong = (LMAPRegressor(**options, reg_nats=c).fit(*prices) for c in (0.01, 1.0))
    assert 0 < weak.reg_strength_ < strong.reg_strength_
    assert np.std(strong.predict(prices[0])) < 0.9 * np.std(weak.predict(prices[0]))
    none, plain = (
        LMAPRegressor(**{**options, **given}).fit(*prices).predict(prices[0])
        for given in ({"reg_nats": 0.0}, {"method": "ps-map"})
    )
    np.testing.assert_array_equal(none, plain)


def test_pipeline_grid_search_and_clone(prices):
    X, y = prices
    model = make_pipeline(PolynomialFeatures(2, include_bias=False), LMAPRegressor(**FAST))
    search = GridSearchCV(model, {"lmapregressor__reg_strength": [1e-4, 10.0]}, cv=2).fit(X, y)
    assert search.best_params_ == {"lmapregressor__reg_strength": 1e-4}  # 10 makes it a constant
    assert clone(search.best_estimator_[-1]).get_params()["reg_strength"] == 1e-4
    assert cross_val_score(LMAPRegressor(**FAST, random_state=0), X, y, cv=2).min() > 0.5


@pytest.mark.parametrize("hidden", [np.int64(4), np.array([4])])
def test_numpy_numbers(prices, hidden):
    options = {"reg_strength": np.int64(0), "weight_decay": np.float32(0.5), "steps": np.int64(5)}
    model = LMAPRegressor(method="l-map", hidden=hidden, **options).fit(*prices)
    assert (model.weight_decay_, model.module_.members[0].sizes) == (0.5, (3, 4, 1))


@pytest.mark.parametrize("rows", [2, 5])
def test_few_rows(prices, kinds, rows):
    X, y = prices
    assert np.isfinite(LMAPRegressor(hidden=4, steps=5).fit(X[:rows], y[:rows]).predict(X)).all()
    y = np.arange(rows) % 2
    assert np.isfinite(LMAPClassifier(hidden=4, steps=5).fit(X[:rows], y).predict_proba(X)).all()


def test_one_class_and_no_fit(prices, kinds):
    with pytest.raises(InputError, match="only one class, 'same'"):
        LMAPClassifier(**FAST).fit(kinds[0], ["same"] * 150)
    with pytest.raises(NotFittedError):
        LMAPRegressor().predict(prices[0])
