"""The estimators of ``fsmap.tables`` beside scikit-learn's, and CPU seconds of their fits.

    python -m benchmarks.tables            measure what is missing, append it, print the table
    python -m benchmarks.tables --show     print the table of the committed rows

Seven regressions and two classifications, five folds, at most 2,000 rows of a set; 20 minutes on a
CPU. The defaults of the estimators were chosen on other sets: yacht, energy, kin8nm, diabetes, iris
and digits. ``mlp-tuned`` is the best of 8 draws of layers, alpha and learning rate on 15 % held
out.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from fsmap import metrics
from fsmap.data import uci
from fsmap.files import circumstances

RESULTS = Path(__file__).parent / "results" / "tables.jsonl"
OURS = {"fsmap": "auto", "l-map": "l-map", "ps-map": "ps-map"}
METHODS = (*OURS, "mlp-tuned", "mlp", "boosting", "forest", "linear")
REGRESSIONS = ("boston", "concrete", "winered", "winewhite", "power", "naval", "protein")
CLASSES = ("wine", "breast_cancer")
SIZES = ("1000x20", "100000x50", "1000x5000")  # rows and columns of made-up tables, to be timed
SHOWN = ("rmse", "log_loss", "ece", "cpu_seconds", "coverage", "lowest decile", "highest decile")
MOST_ROWS, FOLDS, DECILES = 2_000, 5, 10
GRID = {
    "hidden_layer_sizes": [(64, 64), (128, 128), (256,), (64, 64, 64)],
    "alpha": [1e-5, 1e-3, 1e-2, 1e-1, 1.0],
    "learning_rate_init": [1e-3, 3e-3, 1e-2],
}
Row = dict[str, Any]


def read(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows and targets of a set, at most ``MOST_ROWS`` of them."""
    if name in CLASSES:
        from sklearn import datasets

        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    else:
        table = uci.read_table(name)
        x, y = table.x, table.y[:, 0]
    rows = np.random.default_rng(0).permutation(len(y))[:MOST_ROWS]
    return x[rows], y[rows]


def estimator(method: str, classes: bool, seed: int) -> Any:
    """A new estimator of fsmap or of scikit-learn."""
    from sklearn import compose, ensemble, linear_model, model_selection, neural_network
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from fsmap.integrations.sklearn import LMAPClassifier, LMAPRegressor

    end = "Classifier" if classes else "Regressor"
    if method in OURS:
        ours = LMAPClassifier if classes else LMAPRegressor
        return ours(method=OURS[method], random_state=seed)
    if method in ("boosting", "forest"):
        name = {"boosting": "HistGradientBoosting", "forest": "RandomForest"}[method]
        return getattr(ensemble, name + end)(random_state=seed)
    if method == "linear":
        options = {"scoring": "neg_log_loss", "l1_ratios": (0.0,), "use_legacy_attributes": False}
        logistic = linear_model.LogisticRegressionCV(Cs=7, max_iter=2_000, **options)
        ridge = linear_model.RidgeCV(np.logspace(-4, 4, 17))
        return make_pipeline(StandardScaler(), logistic if classes else ridge)
    kind = getattr(neural_network, f"MLP{end}")
    model = kind(random_state=seed)
    if method == "mlp-tuned":
        model = model_selection.RandomizedSearchCV(
            kind(max_iter=300, random_state=seed),
            GRID,
            n_iter=8,
            cv=model_selection.ShuffleSplit(1, test_size=0.15, random_state=seed),
            scoring="neg_log_loss" if classes else "neg_mean_squared_error",
            random_state=seed,
        )
    model = make_pipeline(StandardScaler(), model)
    scaler = StandardScaler()
    return model if classes else compose.TransformedTargetRegressor(model, transformer=scaler)


def measure(fitted: Any, x: np.ndarray, y: np.ndarray, classes: bool) -> dict[str, float]:
    """Test metrics; coverage of 90 % intervals by decile of the prediction where there are any."""
    if classes:
        logits = torch.from_numpy(np.log(np.clip(fitted.predict_proba(x), 1e-12, 1)))
        labels = torch.from_numpy(np.searchsorted(fitted.classes_, y))
        known = {"log_loss": metrics.nll, "ece": metrics.ece, "accuracy": metrics.accuracy}
        return {name: float(metric(logits, labels)) for name, metric in known.items()}
    guess = fitted.predict(x)
    found = {"rmse": float(np.sqrt(np.mean((guess - y) ** 2)))}
    if hasattr(fitted, "predict_interval"):
        low, high = fitted.predict_interval(x)
        inside = (low <= y) & (y <= high)
        parts = np.array_split(inside[np.argsort(guess)], DECILES)
        found["coverage"] = float(inside.mean())
        found |= {f"coverage_decile_{k}": float(part.mean()) for k, part in enumerate(parts)}
    return found


def fold(dataset: str, method: str, number: int) -> Row:
    """Fit on all folds but one and measure on that one."""
    from sklearn.model_selection import KFold, StratifiedKFold

    (x, y), classes = read(dataset), dataset in CLASSES
    kind = StratifiedKFold if classes else KFold
    train, test = list(kind(FOLDS, shuffle=True, random_state=0).split(x, y))[number]
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = estimator(method, classes, number).fit(x[train], y[train])
    found = {"rows": len(train), "columns": x.shape[1], "cpu_seconds": time.process_time() - start}
    if method in OURS:
        found["chosen"] = fitted.method_
    return found | measure(fitted, x[test], y[test], classes)


def timed(size: str) -> Row:
    """CPU seconds of a fit of the default regressor to made-up rows: the least within 30 s."""
    num_rows, columns = map(int, size.split("x"))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, columns))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=num_rows)
    estimator("fsmap", False, 0).set_params(steps=2).fit(x[:100, :3], y[:100])  # imports
    found: list[float] = []
    while sum(found) < 30:
        start = time.process_time()
        estimator("fsmap", False, 0).fit(x, y)
        found.append(time.process_time() - start)
    return {"cpu_seconds": min(found)}


def mean(rows: list[Row], dataset: str, method: str, metric: str) -> float | None:
    """Mean over folds; of the deciles the lowest or highest mean."""
    if metric.endswith("decile"):
        names = [f"coverage_decile_{k}" for k in range(DECILES)]
        found = [m for name in names if (m := mean(rows, dataset, method, name)) is not None]
        return (min if metric.startswith("lowest") else max)(found, default=None)
    mine = [r for r in rows if (r["dataset"], r["method"]) == (dataset, method) and metric in r]
    return fmean(r[metric] for r in mine) if mine else None


def table(rows: list[Row]) -> str:
    """A line for each metric and set, a column for each method."""
    lines = [["metric", "set", *METHODS]]
    for metric in SHOWN:
        for dataset in dict.fromkeys(row["dataset"] for row in rows):
            found = [mean(rows, dataset, method, metric) for method in METHODS]
            if any(value is not None for value in found):
                values = ["" if value is None else f"{value:.4g}" for value in found]
                lines.append([metric.replace("_", " "), dataset, *values])
    return "\n".join("  ".join(f"{cell:>14}" for cell in line) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {(row["dataset"], row["method"], row["fold"]) for row in rows}
    todo = [(d, m, k) for d in (*REGRESSIONS, *CLASSES) for m in METHODS for k in range(FOLDS)]
    todo += [(size, "fsmap", 0) for size in SIZES]
    for dataset, method, number in [] if given.show else todo:
        if (dataset, method, number) not in done:
            found = timed(dataset) if dataset in SIZES else fold(dataset, method, number)
            where = {"dataset": dataset, "method": method, "fold": number}
            rows.append(where | found | circumstances("cpu"))
            with given.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(dataset, method, number, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
