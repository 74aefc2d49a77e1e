"""``tables-bench``: the default estimators of :mod:`fsmap.tables` beside scikit-learn's.

The defaults were chosen on yacht, energy, kin8nm, diabetes, iris and digits. The sets of
:class:`Config` were not used for that.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fsmap import metrics
from fsmap.data import uci
from fsmap.errors import require
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report import figures, tables
from fsmap.paper.rows import Claim, Row, judge, not_tested

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = {"fsmap": "auto", "l-map": "l-map", "ps-map": "ps-map"}
RIVALS = ("mlp-tuned", "mlp", "boosting", "forest", "linear")
NAMES = {
    **{"fsmap": "fsmap (default)", "l-map": "L-MAP × 4", "ps-map": "PS-MAP × 4"},
    **{"mlp-tuned": "MLP, tuned", "mlp": "MLP", "boosting": "boosting"},
    **{"forest": "random forest", "linear": "linear"},
}
CLASSES = {"wine": "load_wine", "breast_cancer": "load_breast_cancer"}
LIMITS = {"1000x20": 10.0, "100000x50": 120.0, "1000x5000": 60.0}  # CPU seconds by size
ENOUGH_SECONDS = 30.0  # of fits of one size
ENOUGH = 5  # sets without which nothing is said about the share of sets
LOSSES = ("rmse", "log_loss")
DECILES = 10
ENDS = ("lowest decile", "highest decile")
TRIES = 8  # configurations of the tuned MLP, tried on 15 % held out
GRID = {
    "hidden_layer_sizes": [(64, 64), (128, 128), (256,), (64, 64, 64)],
    "alpha": [1e-5, 1e-3, 1e-2, 1e-1, 1.0],
    "learning_rate_init": [1e-3, 3e-3, 1e-2],
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes."""

    datasets: tuple[str, ...] = (
        *("boston", "concrete", "winered", "winewhite", "power", "naval", "protein"),
        *CLASSES,
    )
    methods: tuple[str, ...] = (*OURS, *RIVALS)
    sizes: tuple[str, ...] = tuple(LIMITS)  # rows and columns of made-up tables, which are timed
    folds: int = 5  # of which each is the test set once
    measured_folds: int = 5
    most_rows: int = 2_000  # of a larger set, so many at random


class TablesBench(Experiment):
    """Five folds, test loss, calibration, intervals and CPU seconds."""

    id = "tables-bench"
    label = "Tables"
    title = "Tables beside scikit-learn"
    see = (
        "The default estimator, an ensemble of four networks, is better than a tuned MLP on most "
        "sets; trees are better on most of the regressions. L-MAP and PS-MAP are ensembles too."
    )
    cost = "20 min"
    protocol = (
        "defaults chosen on other sets; 5 folds; at most 2,000 rows. MLP, tuned: the best of 8 "
        "draws of layers, alpha and learning rate on 15 % held out. CPU seconds of a fit"
    )
    group = "tables"
    selecting = ("datasets", "methods", "sizes")
    config = Config()
    quick = Config(
        datasets=("boston", "wine"),
        methods=("fsmap", "mlp-tuned", "boosting", "forest", "linear"),
        sizes=(),
        measured_folds=1,
        most_rows=150,
    )

    def units(self, config: Config) -> list[dict[str, Any]]:
        """A method on a set; then sizes."""
        found = [{"dataset": d, "method": m} for d in config.datasets for m in config.methods]
        return found + [{"size": size} for size in config.sizes]

    def run(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Fit on four folds and measure on the fifth; or measure the time of one fit."""
        if "size" in unit:
            yield Measured("cpu_seconds", timed(unit["size"]), "fsmap", 0, {"size": unit["size"]})
            return
        name, method = unit["dataset"], unit["method"]
        x, y = read(name, config.most_rows, context)
        selection = _sklearn("model_selection")
        kind = selection.StratifiedKFold if name in CLASSES else selection.KFold
        splits = list(kind(config.folds, shuffle=True, random_state=0).split(x, y))
        for fold, (train, test) in enumerate(splits[: config.measured_folds]):
            start = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fitted = estimator(method, name in CLASSES, fold).fit(x[train], y[train])
            seconds = time.process_time() - start
            where = {"dataset": name, "fold": fold, "rows": len(train), "columns": x.shape[1]}
            if method in OURS:
                where["chosen"] = fitted.method_
            measure = _classification if name in CLASSES else _regression
            found = {**measure(fitted, x[test], y[test]), "cpu_seconds": seconds}
            for metric, value in found.items():
                yield Measured(metric, value, method, fold, where)
            context.advance((fold + 1) / config.measured_folds)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """A line for each set and metric, a column for each method."""
        found: list[dict[str, Any]] = []
        for metric in (*LOSSES, "ece", "cpu_seconds", "coverage", *ENDS):
            for dataset in _datasets(rows):
                means = _means(rows, dataset, metric)
                if means:
                    line = {NAMES[m]: means[m] for m in NAMES if m in means}
                    found.append({"metric": metric.replace("_", " "), "dataset": dataset, **line})
        for row in _timings(rows):
            size = row.config["size"].replace("x", " × ")
            found.append({"metric": "cpu seconds", "dataset": size, NAMES["fsmap"]: row.value})
        return found

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """How often the default is better, close to the best, and how often intervals hold."""
        return list(_claims(rows))

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """Test losses as multiples of the best of each set."""
        figure, ax = figures.axes(panel=(6.6, 3.4))
        names = _datasets(rows)
        losses = {d: _losses(rows, d) for d in names}
        styles = {
            **{"fsmap": ("fs-map", "s"), "mlp-tuned": ("bma", "D"), "boosting": ("ps-map", "o")},
            **{"forest": ("ps-map", "^"), "linear": ("data", "x")},
        }
        for method, (color, marker) in styles.items():
            at = [k for k, d in enumerate(names) if method in losses[d]]
            y = [losses[names[k]][method] / min(losses[names[k]].values()) for k in at]
            look = {"marker": marker, "linestyle": "none", "markeredgewidth": 1.2}
            ax.plot(at, y, color=figures.COLORS[color], label=NAMES[method], **look)
        ax.axhline(1.02, color=figures.MUTED, linewidth=0.8, linestyle=":")
        ax.set(ylabel="test loss / best of the set", yscale="log")
        ax.set_yticks([1, 1.5, 2, 3, 5], ["1", "1.5", "2", "3", "5"], minor=False)
        ax.yaxis.minorticks_off()
        ax.set_xticks(range(len(names)), names, rotation=35, ha="right")
        figures.legend_above(figure, ax, 5)
        return {"tables-bench": figure}


def read(name: str, most_rows: int, context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Rows and targets of a set, at most so many of them."""
    if name in CLASSES:
        x, y = getattr(_sklearn("datasets"), CLASSES[name])(return_X_y=True)
    else:
        table = uci.read_table(name, context.data_dir)
        x, y = table.x, table.y[:, 0]
    rows = np.random.default_rng(0).permutation(len(y))[:most_rows]
    return x[rows], y[rows]


def _sklearn(name: str) -> Any:
    return require(f"sklearn.{name}", extra="data")


def estimator(method: str, classes: bool, seed: int) -> Any:
    """A new estimator of fsmap or of scikit-learn."""
    if method in OURS:
        from fsmap.tables.sklearn import LMAPClassifier, LMAPRegressor

        ours = LMAPClassifier if classes else LMAPRegressor
        return ours(method=OURS[method], random_state=seed)
    end = "Classifier" if classes else "Regressor"
    if method in ("boosting", "forest"):
        name = {"boosting": "HistGradientBoosting", "forest": "RandomForest"}[method]
        return getattr(_sklearn("ensemble"), name + end)(random_state=seed)
    if method == "linear":
        return _scaled(_linear(classes))
    kind = getattr(_sklearn("neural_network"), f"MLP{end}")
    model = kind(random_state=seed)
    if method == "mlp-tuned":
        selection = _sklearn("model_selection")
        model = selection.RandomizedSearchCV(
            kind(max_iter=300, random_state=seed),
            GRID,
            n_iter=TRIES,
            cv=selection.ShuffleSplit(1, test_size=0.15, random_state=seed),
            scoring="neg_log_loss" if classes else "neg_mean_squared_error",
            random_state=seed,
        )
    if classes:
        return _scaled(model)
    scaler = _sklearn("preprocessing").StandardScaler()
    return _sklearn("compose").TransformedTargetRegressor(_scaled(model), transformer=scaler)


def _scaled(model: Any) -> Any:
    scaler = _sklearn("preprocessing").StandardScaler()
    return _sklearn("pipeline").make_pipeline(scaler, model)


def _linear(classes: bool) -> Any:
    linear = _sklearn("linear_model")
    if not classes:
        return linear.RidgeCV(np.logspace(-4, 4, 17))
    options = {"scoring": "neg_log_loss", "l1_ratios": (0.0,), "use_legacy_attributes": False}
    return linear.LogisticRegressionCV(Cs=7, max_iter=2_000, **options)


def _classification(fitted: Any, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    logits = torch.from_numpy(np.log(np.clip(fitted.predict_proba(x), 1e-12, 1)))
    labels = torch.from_numpy(np.searchsorted(fitted.classes_, y))
    measures = {"log_loss": metrics.nll, "ece": metrics.ece, "accuracy": metrics.accuracy}
    return {name: float(measure(logits, labels)) for name, measure in measures.items()}


def _regression(fitted: Any, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    guess = fitted.predict(x)
    found = {"rmse": float(np.sqrt(np.mean((guess - y) ** 2)))}
    if hasattr(fitted, "predict_interval"):
        low, high = fitted.predict_interval(x)
        inside = (low <= y) & (y <= high)
        parts = np.array_split(inside[np.argsort(guess)], DECILES)
        found["coverage"] = float(inside.mean())
        found |= {f"coverage_decile_{k}": float(part.mean()) for k, part in enumerate(parts)}
    return found


def timed(size: str) -> float:
    """CPU seconds of a fit of the default regressor to made-up rows, imports not included.

    The least of several fits, if they are short: other work on the machine only adds to it.
    """
    num_rows, columns = map(int, size.split("x"))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, columns))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=num_rows)
    estimator("fsmap", False, 0).set_params(steps=2).fit(x[:100, :3], y[:100])
    found: list[float] = []
    while sum(found) < ENOUGH_SECONDS:
        start = time.process_time()
        estimator("fsmap", False, 0).fit(x, y)
        found.append(time.process_time() - start)
    return min(found)


def _datasets(rows: Sequence[Row]) -> list[str]:
    return [d for (d,) in tables.group(rows, "dataset") if d is not None]


def _timings(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "size" in row.config]


def _means(rows: Sequence[Row], dataset: str, metric: str) -> dict[str, float]:
    """Means over folds by method; of the deciles the lowest or highest mean."""
    if metric in ENDS:
        deciles = [_means(rows, dataset, f"coverage_decile_{k}") for k in range(DECILES)]
        pick = min if metric == ENDS[0] else max
        return {m: pick(d[m] for d in deciles) for m in deciles[0]}
    mine = tables.group(tables.select(rows, dataset=dataset, metric=metric), "method")
    return {method: tables.mean(r.value for r in own).mean for (method,), own in mine.items()}


def _losses(rows: Sequence[Row], dataset: str) -> dict[str, float]:
    return next(filter(None, (_means(rows, dataset, metric) for metric in LOSSES)), {})


def _claims(rows: Sequence[Row]) -> Iterator[Claim]:
    losses = {d: _losses(rows, d) for d in _datasets(rows)}
    both = {d: found for d, found in losses.items() if {"fsmap", "mlp-tuned"} <= set(found)}
    yield _counted(
        "the default is better than scikit-learn's tuned MLP on three quarters of the sets",
        {d: found["fsmap"] < found["mlp-tuned"] for d, found in both.items()},
        3 / 4 * len(both),
    )
    yield _counted(
        "the default is within 2 % of the best of all methods, or ahead, on half of the sets",
        {d: found["fsmap"] <= 1.02 * min(found.values()) for d, found in both.items()},
        len(both) / 2,
    )
    held = {}
    for dataset in losses:
        overall = _means(rows, dataset, "coverage").get("fsmap")
        if overall is not None:
            low, high = (_means(rows, dataset, end)["fsmap"] for end in ENDS)
            held[dataset] = 0.87 <= overall <= 0.93 and 0.8 <= low <= high <= 0.97
    yield _counted(
        "90 % intervals hold 87 to 93 % of new targets, 80 to 97 % in every decile of the "
        "prediction, on five sets",
        held,
        5,
    )
    pairs = [f["l-map"] / f["ps-map"] for f in losses.values() if {"l-map", "ps-map"} <= set(f)]
    ratio = tables.mean(np.log(pairs).tolist())
    yield judge(
        "an ensemble of L-MAP has a lower test loss than one of PS-MAP (mean over sets of the "
        "logarithm of the ratio)",
        ratio.mean,
        ratio.stderr,
        len(pairs),
        below=0.0,
        source="ours",
    )
    for row in _timings(rows):
        size, most = row.config["size"], LIMITS[row.config["size"]]
        yield Claim(
            f"a fit to {size.replace('x', ' × ')} takes at most {most:.0f} CPU seconds",
            row.value <= most,
            f"{row.value:.1f} s",
            effect=row.value - most,
            seeds=1,
            source="ours",
        )


def _counted(text: str, sets: dict[str, bool], fewest: float) -> Claim:
    """A claim that something holds on at least so many sets."""
    if len(sets) < ENOUGH:
        return not_tested(text, f"fsmap run {TablesBench.id}", source="ours")
    good = [d for d, holds in sets.items() if holds]
    shown = f"{len(good)} of {len(sets)}: {', '.join(good) or 'none'}"
    return Claim(text, len(good) >= fewest, shown, seeds=len(sets), source="ours")
