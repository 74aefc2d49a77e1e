"""What a user would pick instead, on the same splits: three estimators of scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from fsmap.data import uci
from fsmap.errors import require
from fsmap.paper.experiment import Context, Measured
from fsmap.paper.uci.protocol import BASELINES, FAIR, METRICS, POWERS, SCALING, Config

MLP, BOOSTING, RIDGE = "sklearn-mlp", "boosting", "ridge"
NAMES = {
    MLP: "MLPRegressor",
    BOOSTING: "HistGradientBoostingRegressor",
    RIDGE: "Ridge",
}
RIDGE_ALPHAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)


class Baseline(NamedTuple):
    """An estimator and the values of what is tuned.

    Attributes:
        make: From a value and a seed to an estimator.
        tuned: Name of what is tuned; empty for nothing.
        values: What it is tuned over.
    """

    make: Callable[[float, int], Any]
    tuned: str = ""
    values: tuple[float, ...] = (0.0,)


def baselines(config: Config) -> dict[str, Baseline]:
    """The three estimators.

    Args:
        config: Sizes: the network has the same hidden layers as ours.

    Returns:
        Estimators by name; otherwise scikit-learn's defaults.
    """
    networks = require("sklearn.neural_network", extra="data")
    ensembles = require("sklearn.ensemble", extra="data")
    linear = require("sklearn.linear_model", extra="data")
    layers = (config.width,) * 3

    def network(alpha: float, seed: int) -> Any:
        return networks.MLPRegressor(
            hidden_layer_sizes=layers,
            alpha=alpha,
            max_iter=config.epochs,
            early_stopping=True,
            random_state=seed,
        )

    return {
        MLP: Baseline(network, "alpha", POWERS),
        BOOSTING: Baseline(
            lambda _, seed: ensembles.HistGradientBoostingRegressor(random_state=seed)
        ),
        RIDGE: Baseline(lambda alpha, _: linear.Ridge(alpha), "alpha", RIDGE_ALPHAS),
    }


def run_baseline(config: Config, dataset: str, method: str, context: Context) -> Iterator[Measured]:
    """Fit one estimator with every value of what is tuned, on every split.

    Args:
        config: Sizes.
        dataset: The table.
        method: Which estimator.
        context: Where the data is.

    Yields:
        Validation and test errors, a list over the splits.
    """
    joblib = require("joblib", extra="data")
    table = uci.read_table(dataset, context.data_dir)
    splits = range(config.baseline_splits if method == MLP else config.fair_splits)
    baseline = baselines(config)[method]
    tasks = [(value, split) for value in baseline.values for split in splits]
    # at full size a process per core; what a fit draws depends on its own seed alone
    errors = joblib.Parallel(n_jobs=-1 if context.size == "full" else 1)(
        joblib.delayed(fit_one)(config, table, method, value, split) for value, split in tasks
    )
    for number, value in enumerate(baseline.values):
        found: dict[str, Any] = {"dataset": dataset, "protocol": BASELINES, "stage": "all"}
        found["split"] = list(splits)
        if baseline.tuned:
            found[baseline.tuned] = value
        mine = errors[number * len(splits) : (number + 1) * len(splits)]
        for name, column in zip(METRICS, zip(*mine, strict=True), strict=True):
            yield Measured(name, list(column), method, config=found)


def fit_one(
    config: Config, table: uci.Table, method: str, value: float, split: int
) -> tuple[float, float]:
    """Fit an estimator on one split.

    Args:
        config: Sizes.
        table: The data.
        method: Which estimator.
        value: Of what is tuned.
        split: Which split; also the estimator's seed.

    Returns:
        Its validation and test error.
    """
    parts = uci.split(table, split, scaling=SCALING[FAIR], max_rows=config.max_rows)
    return _errors(baselines(config)[method].make(value, split), parts)


def _errors(estimator: Any, parts: uci.Split) -> tuple[float, float]:
    """Validation and test error of a fitted estimator."""
    x, y = (t.double().numpy() for t in parts.train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a network that stops at max_iter says so
        estimator.fit(x, y[:, 0])
    found = []
    for part in (parts.valid, parts.test):
        x, y = (t.double().numpy() for t in part)
        found.append(float(np.sqrt(np.mean((estimator.predict(x) - y[:, 0]) ** 2))))
    return found[0], found[1]
