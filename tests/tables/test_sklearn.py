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
from torch import nn

from fsmap.errors import ConstantTargetWarning, InputError
from fsmap.integrations.sklearn import LMAPClassifier, LMAPRegressor

FAST = {"method": "l-map", "hidden": (16,), "steps": 40, "learning_rate": 0.02}
FAST |= {"weight_decay": 1e-4, "reg_strength": 1e-3}
REASON = (
    "rows are held out and put into batches by their number, so a row of weight 2 and two equal "
    "rows are not held out together"
)
EXPECTED = {
    f"check_sample_weight_equivalence_on_{kind}_data": REASON for kind in ("dense", "sparse")
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [LMAPRegressor(**FAST), LMAPClassifier(**FAST)],
    expected_failed_checks=lambda estimator: EXPECTED,
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.fixture
def prices():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 3)) * [1, 10, 100] + [0, 5, -50]
    y = 1000 + 30 * X[:, 0] + 2 * X[:, 1] + rng.normal(size=150)
    return X, y


@pytest.fixture
def kinds():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 2))
    return X, np.where(X[:, 0] + X[:, 1] > 0, "up", "down")


def test_units_do_not_matter(prices):
    X, y = prices
    model = LMAPRegressor(**FAST, random_state=0).fit(X, y)
    scaled = LMAPRegressor(**FAST, random_state=0).fit(X * [2, 0.5, 8], 4 * y - 100)
    np.testing.assert_allclose(
        scaled.predict(X * [2, 0.5, 8]), 4 * model.predict(X) - 100, rtol=1e-4
    )
    assert model.score(X, y) > 0.8
    assert model.noise_std_.shape == (1,)
    assert 0.5 < model.noise_std_[0] < np.std(y)


def test_auto_chooses_the_best_on_held_out_rows(prices):
    X, y = prices
    model = LMAPRegressor(hidden=8, steps=10, random_state=0).fit(X, y)
    assert set(model.losses_) == {"linear", "ps-map", "l-map"}
    best = min(model.search_, key=lambda line: line["value"])
    assert model.method_ == best["method"] == "linear"  # as the truth is
    assert model.weight_decay_ == best["weight_decay"]
    assert model.reg_strength_ == best["reg_strength"] == 0
    assert model.validation_loss_ == best["value"]
    assert model.score(X, y) > 0.99


@pytest.mark.parametrize("method", ["ps-map", "fs-map", "linear"])
def test_other_methods(kinds, method):
    model = LMAPClassifier(method=method, ensemble=2, hidden=4, steps=6, num_points=4).fit(*kinds)
    assert model.method_ == method
    assert (model.reg_strength_ == 0) == (method != "fs-map")


def test_a_population_is_an_ensemble(prices):
    X, y = prices
    model = LMAPRegressor(**FAST, random_state=0).fit(X, y)
    assert len(model.module_.members) == 4
    x = torch.from_numpy(model.scaler_.transform(X))
    with torch.no_grad():
        out = torch.stack([member(x) for member in model.module_.members]).mean(0)
    np.testing.assert_allclose(model.target_scaler_.inverse_transform(out)[:, 0], model.predict(X))
    single = LMAPRegressor(**FAST, ensemble=1, random_state=0).fit(X, y)
    assert len(single.module_.members) == 1


def test_intervals_and_quantiles(prices):
    X, y = prices
    X, y = np.tile(X, (4, 1)), np.tile(y, 4) + np.random.default_rng(1).normal(0, 5, 600)
    model = LMAPRegressor(method="linear", random_state=0).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert 4 < std.mean() < 6
    low, high = model.predict_interval(X)
    assert 0.85 < np.mean((low <= y) & (y <= high)) < 0.95
    found = model.predict_quantiles(X, (0.1, 0.5, 0.9))
    assert found.shape == (600, 3)
    assert (np.diff(found, axis=1) > 0).all()
    positive = LMAPRegressor(method="linear", random_state=0).fit(X, np.exp(X[:, 0]))
    assert positive.predict_interval(X)[0].min() >= 0
    bare = LMAPRegressor(**FAST, early_stopping=False).fit(X[:50], y[:50])
    with pytest.raises(InputError, match="held-out rows"):
        bare.predict(X, return_std=True)


def test_sparse_rows_and_class_weights(kinds):
    scipy_sparse = pytest.importorskip("scipy.sparse")
    X, y = kinds
    dense = LMAPClassifier(**FAST, random_state=0).fit(X, y)
    sparse = LMAPClassifier(**FAST, random_state=0).fit(scipy_sparse.csr_array(X), y)
    np.testing.assert_allclose(
        dense.predict_log_proba(X), sparse.predict_log_proba(scipy_sparse.csr_array(X)), atol=1e-6
    )
    heavy = LMAPClassifier(**FAST, class_weight={"up": 50, "down": 1}, random_state=0).fit(X, y)
    assert (heavy.predict(X) == "up").mean() > (dense.predict(X) == "up").mean()


def test_more_columns_than_rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 120))
    model = LMAPRegressor(method="linear", weight_decay=1e-6, random_state=0).fit(X, X[:, 0])
    np.testing.assert_allclose(model.predict(X), X[:, 0], atol=1e-2)


def test_a_strength_in_nats(prices, kinds):
    options = {**FAST, "reg_strength": "auto", "random_state": 0}
    weak, strong = (LMAPRegressor(**options, reg_nats=c).fit(*prices) for c in (0.01, 1.0))
    assert 0 < weak.reg_strength_ < strong.reg_strength_
    assert np.std(strong.predict(prices[0])) < 0.9 * np.std(weak.predict(prices[0]))
    assert [line["reg_nats"] for line in weak.search_] == [0.01]
    none, plain = (
        LMAPRegressor(**{**options, **given}).fit(*prices).predict(prices[0])
        for given in ({"reg_nats": 0.0}, {"method": "ps-map"})
    )
    np.testing.assert_array_equal(none, plain)
    quick = {"method": "l-map", "hidden": (4,), "steps": 6, "reg_nats": 0.05}
    model = LMAPClassifier(**quick, random_state=0).fit(*kinds)
    assert len(model.search_) == 2  # weight decays
    assert clone(model).get_params()["reg_nats"] == 0.05
    LMAPRegressor(**options, reg_nats=0.05, early_stopping=False).fit(*prices)


def test_pipeline_grid_search_and_clone(prices):
    X, y = prices
    model = make_pipeline(PolynomialFeatures(2, include_bias=False), LMAPRegressor(**FAST))
    grid = {"lmapregressor__reg_strength": [1e-4, 10.0]}
    search = GridSearchCV(model, grid, cv=2).fit(X, y)
    assert search.best_params_ == {"lmapregressor__reg_strength": 1e-4}  # 10 makes it a constant
    assert clone(search.best_estimator_[-1]).get_params()["reg_strength"] == 1e-4
    assert cross_val_score(LMAPRegressor(**FAST, random_state=0), X, y, cv=2).min() > 0.5


@pytest.mark.parametrize("kind", [LMAPRegressor, LMAPClassifier])
def test_weights_are_repetitions_where_no_rows_are_held_out(prices, kinds, kind):
    X, y = prices if kind is LMAPRegressor else kinds
    weight = np.random.default_rng(1).integers(0, 3, len(X))
    options = {**FAST, "early_stopping": False, "batch_size": 1_000, "random_state": 0}
    weighted = kind(**options).fit(X, y, sample_weight=weight)
    rows = np.repeat(np.arange(len(X)), weight)
    repeated = kind(**options).fit(X[rows], y[rows])
    outputs = [
        m.predict if kind is LMAPRegressor else m.predict_proba for m in (weighted, repeated)
    ]
    np.testing.assert_allclose(outputs[0](X), outputs[1](X), rtol=2e-3)  # float32, 40 steps


def test_several_targets(prices):
    X, y = prices
    model = LMAPRegressor(**FAST, random_state=0).fit(X, np.stack([y, -5 * y], axis=1))
    found = model.predict(X)
    assert found.shape == (150, 2)
    assert model.score(X, np.stack([y, -5 * y], axis=1)) > 0.5
    assert model.noise_std_.shape == (2,)


def test_another_network(kinds):
    def factory(inputs, outputs):
        return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))

    model = LMAPClassifier(**{**FAST, "hidden": "auto"}, module=factory, random_state=0).fit(*kinds)
    assert isinstance(model.module_.members[0], nn.Sequential)
    scaled = torch.from_numpy(model.scaler_.transform(kinds[0]))
    expected = model.module_(scaled).exp().detach().numpy()
    np.testing.assert_allclose(model.predict_proba(kinds[0]), expected)


def test_early_stopping_keeps_the_best_of_the_curve(prices):
    model = LMAPRegressor(**{**FAST, "learning_rate": 0.3}, random_state=0).fit(*prices)
    steps, values = zip(*model.validation_curve_, strict=True)
    assert model.validation_loss_ == min(values)
    assert model.n_iter_ == steps[np.argmin(values)]
    whole = LMAPRegressor(**FAST, early_stopping=False, random_state=0).fit(*prices)
    assert whole.n_iter_ == 40
    assert whole.noise_std_ is None


def test_few_rows_train_without_choosing(prices):
    X, y = prices
    model = LMAPRegressor(hidden=(4,), steps=5).fit(X[:8], y[:8])
    assert len(model.search_) == 1
    assert model.validation_curve_ == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early_stopping": False}, "choose on held-out rows, so they need early_stopping=True"),
        ({"validation_fraction": 1.5}, r"validation_fraction must lie in \(0, 1\), got 1.5"),
        ({**FAST, "method": "map"}, "method must be .* got 'map'"),
        ({**FAST, "steps": 0}, "steps must be at least 1, got 0"),
        ({**FAST, "reg_strength": 0.1, "reg_nats": 0.1}, "reg_strength or reg_nats"),
        ({**FAST, "reg_strength": "auto", "reg_nats": 0.1, "method": "fs-map"}, "method='fs-map'"),
        ({**FAST, "reg_strength": "auto", "reg_nats": -1}, "finite number"),
        ({"px": "grid", **FAST}, "px must be 'normal', 'train' or a distribution"),
    ],
)
def test_refusals(prices, options, message):
    with pytest.raises(InputError, match=message):
        LMAPRegressor(**options).fit(*prices)


def test_targets_and_weights_that_teach_nothing(prices, kinds):
    with pytest.raises(InputError, match="only one class, 'same'"):
        LMAPClassifier(**FAST).fit(kinds[0], ["same"] * 150)
    weight = np.eye(150)[0]
    with pytest.raises(InputError, match="sample_weight is positive for 1 rows; at least 2"):
        LMAPRegressor(**FAST).fit(*prices, sample_weight=weight)
    with pytest.raises(NotFittedError):
        LMAPRegressor().predict(prices[0])


def test_a_constant_target(prices):
    X, y = prices
    with pytest.warns(ConstantTargetWarning, match="the model will be that constant"):
        model = LMAPRegressor(**{**FAST, "steps": 300}, random_state=0).fit(X, np.full(len(y), 7.0))
    np.testing.assert_allclose(model.predict(X), 7.0, atol=0.5)
