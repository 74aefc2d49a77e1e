"""Tables: fsmap's estimators beside scikit-learn's, five folds, CPU seconds by process_time.

    python -m benchmarks.tables --sets other --models baselines --out rows.jsonl
    python -m benchmarks.tables --show benchmarks/results/tables.jsonl

Defaults of ``fsmap.tables`` were chosen on the sets ``DEFAULTS`` alone; ``OTHER`` were run once
after that. A set with more than ``MOST_ROWS`` rows is cut to a random part.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.metrics import log_loss, root_mean_squared_error
from sklearn.model_selection import KFold, RandomizedSearchCV, ShuffleSplit, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fsmap import metrics
from fsmap.data.uci import read_table
from fsmap.paper.rows import circumstances

DEFAULTS = ("yacht", "energy", "kin8nm", "diabetes", "iris", "digits")
OTHER = (
    *("boston", "concrete", "winered", "winewhite", "power", "naval", "protein"),
    *("wine", "breast_cancer"),
)
LOADERS = {
    "diabetes": load_diabetes,
    "iris": load_iris,
    "digits": load_digits,
    "wine": load_wine,
    "breast_cancer": load_breast_cancer,
}
MOST_ROWS, FOLDS, TRIES = 2_000, 5, 8
GRID = {
    "hidden_layer_sizes": [(64, 64), (128, 128), (256,), (64, 64, 64)],
    "alpha": [1e-5, 1e-3, 1e-2, 1e-1, 1.0],
    "learning_rate_init": [1e-3, 3e-3, 1e-2],
}


def read(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows and targets of a set, at most ``MOST_ROWS`` of them."""
    if name in LOADERS:
        x, y = LOADERS[name](return_X_y=True)
    else:
        table = read_table(name)
        x, y = table.x, table.y[:, 0]
    rows = np.random.default_rng(0).permutation(len(y))[:MOST_ROWS]
    return x[rows], y[rows]


def baselines(classes: bool) -> dict[str, Callable[[int], Any]]:
    """scikit-learn's models by name, each a function of a seed."""

    def network(seed: int, tuned: bool) -> Any:
        kind = MLPClassifier if classes else MLPRegressor
        model: Any = kind(random_state=seed)
        if tuned:
            split = ShuffleSplit(1, test_size=0.15, random_state=seed)
            scoring = "neg_log_loss" if classes else "neg_mean_squared_error"
            model = RandomizedSearchCV(
                kind(max_iter=300, random_state=seed),
                GRID,
                n_iter=TRIES,
                cv=split,
                scoring=scoring,
                random_state=seed,
            )
        scaled = make_pipeline(StandardScaler(), model)
        return (
            scaled if classes else TransformedTargetRegressor(scaled, transformer=StandardScaler())
        )

    boosting = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    forest = RandomForestClassifier if classes else RandomForestRegressor
    linear = (
        LogisticRegressionCV(
            Cs=7,
            scoring="neg_log_loss",
            max_iter=2_000,
            l1_ratios=(0.0,),
            use_legacy_attributes=False,
        )
        if classes
        else RidgeCV(np.logspace(-4, 4, 17))
    )
    return {
        "linear": lambda seed: make_pipeline(StandardScaler(), linear),
        "boosting": lambda seed: boosting(random_state=seed),
        "forest": lambda seed: forest(random_state=seed),
        "mlp": lambda seed: network(seed, tuned=False),
        "mlp-tuned": lambda seed: network(seed, tuned=True),
    }


def ours(classes: bool) -> dict[str, Callable[[int], Any]]:
    """Fsmap's estimators at their defaults."""
    from fsmap.tables.sklearn import LMAPClassifier, LMAPRegressor

    kind = LMAPClassifier if classes else LMAPRegressor
    return {
        "fsmap": lambda seed: kind(random_state=seed),
        "fsmap-l-map": lambda seed: kind(method="l-map", random_state=seed),
        "fsmap-ps-map": lambda seed: kind(method="ps-map", random_state=seed),
    }


def measure(name: str, model: str, make: Callable[[int], Any], fold: int) -> list[dict[str, Any]]:
    """Fit on four folds, measure on the fifth."""
    x, y = read(name)
    classes = len(np.unique(y)) <= 10 and name in LOADERS
    split: Any = (StratifiedKFold if classes else KFold)(FOLDS, shuffle=True, random_state=0)
    train, test = list(split.split(x, y))[fold]
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = make(fold).fit(x[train], y[train])
    seconds = time.process_time() - start
    found: dict[str, float] = {"cpu_seconds": seconds}
    if classes:
        chance = fitted.predict_proba(x[test])
        labels = np.searchsorted(np.unique(y), y[test])
        logits = torch.from_numpy(np.log(np.clip(chance, 1e-12, 1)))
        found |= {
            "log_loss": float(log_loss(labels, chance)),
            "ece": metrics.ece(logits, torch.from_numpy(labels)),
            "accuracy": float((chance.argmax(1) == labels).mean()),
        }
    else:
        found["rmse"] = float(root_mean_squared_error(y[test], fitted.predict(x[test])))
        if hasattr(fitted, "predict_interval"):
            guess = fitted.predict(x[test])
            low, high = fitted.predict_interval(x[test])
            inside = (low <= y[test]) & (y[test] <= high)
            found["coverage"] = float(inside.mean())
            parts = np.array_split(inside[np.argsort(guess)], 10)
            found |= {f"coverage_decile_{k}": float(p.mean()) for k, p in enumerate(parts)}
    config = {"set": name, "fold": fold, "rows": len(train), "columns": x.shape[1]}
    if hasattr(fitted, "method_"):
        config["chosen"] = fitted.method_
    return [
        {"experiment": "tables", "metric": m, "value": v, "method": model, "config": config}
        for m, v in found.items()
    ]


def show(path: Path) -> None:
    """Means over folds, a line a set; the best in each is marked."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    sets = dict.fromkeys(row["config"]["set"] for row in rows)
    models = list(dict.fromkeys(row["method"] for row in rows))
    for metric in ("rmse", "log_loss", "ece", "coverage", "cpu_seconds"):
        print(f"\n| {metric} | " + " | ".join(models) + " |\n|" + "---|" * (len(models) + 1))
        for name in sets:
            mean = {}
            for model in models:
                values = [
                    r["value"]
                    for r in rows
                    if (r["config"]["set"], r["method"], r["metric"]) == (name, model, metric)
                ]
                if values:
                    mean[model] = float(np.mean(values))
            if mean:
                best = min(mean.values())
                cells = [
                    ""
                    if m not in mean
                    else f"**{mean[m]:.4g}**"
                    if mean[m] == best
                    else f"{mean[m]:.4g}"
                    for m in models
                ]
                print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Run or show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", default="defaults", help="defaults, other, or names with commas")
    parser.add_argument("--models", default="ours", help="baselines, ours, or names with commas")
    parser.add_argument("--folds", type=int, default=FOLDS)
    parser.add_argument("--out", type=Path, default=Path("tables.jsonl"))
    parser.add_argument("--show", type=Path)
    arguments = parser.parse_args()
    if arguments.show:
        show(arguments.show)
        return
    here = circumstances("cpu")
    origin = {"commit": here.commit, "torch": here.torch, "sklearn": sklearn.__version__}
    sets = {"defaults": DEFAULTS, "other": OTHER}.get(arguments.sets, arguments.sets.split(","))
    for name in sets:
        classes = name in LOADERS and name != "diabetes"
        table = baselines(classes) if arguments.models == "baselines" else {**ours(classes)}
        if arguments.models not in ("baselines", "ours"):
            wanted = arguments.models.split(",")
            table = {
                k: v for k, v in {**baselines(classes), **ours(classes)}.items() if k in wanted
            }
        for model, make in table.items():
            for fold in range(arguments.folds):
                rows = [{**row, **origin} for row in measure(name, model, make, fold)]
                with arguments.out.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
