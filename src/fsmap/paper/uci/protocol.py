r"""How the networks of Table 1 are trained: one population per table and protocol.

The paper's loss is mean squared error $+\; w\|\theta\|^2 + \lambda R$. In our scale that is
Gaussian noise with $\sigma^2 = 1/2$, a Normal prior with $\alpha^2 = 1/(2wN)$, and
``reg_strength`` λ; the constants of the log-densities drop out of the gradient. PS-MAP is the
configuration λ = 0.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fsmap
from fsmap.data import uci
from fsmap.errors import require
from fsmap.models.mlp import MLP
from fsmap.objective.objective import Objective
from fsmap.paper.experiment import Context, Measured
from fsmap.paper.solvers import one_thread
from fsmap.train.grid import measure_members
from fsmap.train.optim import adam
from fsmap.types import Batch

POWERS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
PAPER, FAIR, BASELINES = "paper", "fair", "baselines"
SCALING = {PAPER: "authors", FAIR: "train"}
METRICS = ("valid_rmse", "test_rmse")

NOTES = {
    PAPER: (
        "first weights N(0, 1/fan-in), not truncated at two standard deviations",
        "naval: two constant columns dropped",
    ),
    FAIR: ("not the paper's protocol: every configuration on every split",),
}


@dataclasses.dataclass(frozen=True)
class Config:
    datasets: tuple[str, ...] = uci.NAMES  # tables
    protocols: tuple[str, ...] = (PAPER, FAIR, BASELINES)  # paper, fair, baselines
    decays: tuple[float, ...] = POWERS  # weight decays w
    strengths: tuple[float, ...] = POWERS  # strengths λ of L-MAP
    seeds: int = 6  # splits of the final runs of paper
    fair_splits: int = 20  # splits of fair
    chunk: int = 5  # splits of fair that are trained, and can be resumed, together
    baseline_splits: int = 5  # splits on which scikit-learn's slow network is tuned and tested
    steps: int = 10_000  # adam steps
    batch: int = 512  # B
    points: int = 512  # S
    width: int = 256  # units of each of the three hidden layers
    lr: float = 1e-3  # learning rate
    beta: float = 1e-3  # β
    max_rows: int | None = None  # rows of a table that are used; None is all
    epochs: int = 200  # most epochs of scikit-learn's network


class Setting(NamedTuple):
    """One configuration on one split."""

    decay: float
    strength: float
    split: int

    @property
    def method(self) -> str:
        """PS-MAP or L-MAP."""
        return "l-map" if self.strength else "ps-map"


class Result(NamedTuple):
    """Root mean squared errors of one setting; nan where training diverged."""

    setting: Setting
    valid: float
    test: float


def run_paper(config: Config, dataset: str, context: Context) -> Iterator[Measured]:
    """Tune on split 0, then train the best of each method on all splits."""
    tuned = train(config, dataset, PAPER, grid(config, [0]), context)
    for result in tuned:
        yield from _rows(dataset, PAPER, "tune", [result])
    context.advance(0.7)
    best = [choose(tuned, method) for method in ("ps-map", "l-map")]
    finals = [b._replace(split=split) for b in best for split in range(config.seeds)]
    for result in train(config, dataset, PAPER, finals, context):
        yield from _rows(dataset, PAPER, "final", [result])


def run_fair(
    config: Config, dataset: str, splits: Sequence[int], context: Context
) -> Iterator[Measured]:
    """Train every configuration on some of the splits."""
    results = train(config, dataset, FAIR, grid(config, splits), context)
    by_config: dict[tuple[float, float], list[Result]] = {}
    for result in results:
        by_config.setdefault(result.setting[:2], []).append(result)
    for found in by_config.values():
        yield from _rows(dataset, FAIR, "all", found)


def grid(config: Config, splits: Sequence[int]) -> list[Setting]:
    """Every configuration of both methods on every split."""
    strengths = (0.0, *config.strengths)
    return [Setting(w, s, split) for split in splits for w in config.decays for s in strengths]


def choose(results: Sequence[Result], method: str) -> Setting:
    """The configuration of a method with the lowest validation error."""
    mine = [r for r in results if r.setting.method == method]
    return min(mine, key=lambda r: math.inf if math.isnan(r.valid) else r.valid).setting


def train(
    config: Config,
    dataset: str,
    protocol: str,
    settings: Sequence[Setting],
    context: Context,
) -> list[Result]:
    """Train settings as one population."""
    table = uci.read_table(dataset, context.data_dir)
    parts = {
        split: uci.split(table, split, scaling=SCALING[protocol], max_rows=config.max_rows)
        for split in dict.fromkeys(s.split for s in settings)
    }
    data = {split: part.train for split, part in parts.items()}
    features, num_data = table.x.shape[1], len(next(iter(data.values())).y)
    f, _ = fsmap.functional(network(config, features, 0, context.device))

    def build(decay: Tensor, strength: Tensor) -> Objective:
        return objective(config, features, num_data, decay, strength)

    members = fsmap.Grid(
        [
            {"decay": s.decay, "strength": s.strength, "seed": s.split, "split": s.split}
            for s in settings
        ]
    )
    # The authors start all runs from the same weights; in `fair` every split has its own.
    shared = protocol == PAPER
    with one_thread():
        states, _ = fsmap.fit_population(
            build,
            members,
            f,
            data,
            steps=config.steps,
            init=lambda seed: network(config, features, 0 if shared else seed, context.device),
            optimizer=adam(config.lr),
            batch_size=config.batch,
            replace=True,
            log_every=100,
            compile=context.device.type == "cuda",
            progress=False,
        )
        errors = [
            _errors(states, {k: getattr(p, name) for k, p in parts.items()})
            for name in ("valid", "test")
        ]
    return [Result(s, *pair) for s, *pair in zip(settings, *errors, strict=True)]


def network(config: Config, features: int, seed: int, device: torch.device) -> MLP:
    """The paper's network: three hidden layers, ReLU."""
    sizes = [features, config.width, config.width, config.width, 1]
    generator = torch.Generator().manual_seed(seed)
    return MLP(sizes, "relu", init="lecun", generator=generator).to(device, torch.float32)


def objective(
    config: Config, features: int, num_data: int, decay: Tensor, strength: Tensor
) -> Objective:
    """Mean squared error + w‖θ‖² + λR, as an objective."""
    return fsmap.l_map(
        fsmap.Gaussian(math.sqrt(0.5)),
        fsmap.Normal((2 * decay * num_data) ** -0.5),
        fsmap.px.Normal(shape=features),
        num_points=config.points,
        num_data=num_data,
        reg_strength=strength,
        estimator="fd",
        beta=config.beta,
    )


def _errors(states: Any, sets: Mapping[int, Batch]) -> list[float]:
    found = measure_members(states, on=dict(sets), by=fsmap.metrics.rmse)
    return [float(v) for v in found]


def _rows(dataset: str, protocol: str, stage: str, results: Sequence[Result]) -> Iterator[Measured]:
    """Both errors of one configuration; a list where there are several splits."""
    setting = results[0].setting
    config: dict[str, Any] = {
        "dataset": dataset,
        "protocol": protocol,
        "stage": stage,
        "weight_decay": setting.decay,
        "reg_strength": setting.strength,
    }
    several = stage == "all"
    config["split"] = [r.setting.split for r in results] if several else setting.split
    for name, values in zip(
        METRICS, ([r.valid for r in results], [r.test for r in results]), strict=True
    ):
        value = values if several else values[0]
        seed = None if several else setting.split
        yield Measured(name, value, setting.method, seed, config, NOTES[protocol])


MLP_METHOD, BOOSTING, RIDGE = "sklearn-mlp", "boosting", "ridge"
NAMES = {
    MLP_METHOD: "MLPRegressor",
    BOOSTING: "HistGradientBoostingRegressor",
    RIDGE: "Ridge",
}
RIDGE_ALPHAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)


class Baseline(NamedTuple):
    """An estimator and the values of what is tuned."""

    make: Callable[[float, int], Any]  # from a value and a seed to an estimator
    tuned: str = ""  # name of what is tuned; empty for nothing
    values: tuple[float, ...] = (0.0,)  # what it is tuned over


def baselines(config: Config) -> dict[str, Baseline]:
    """The three estimators."""
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
        MLP_METHOD: Baseline(network, "alpha", POWERS),
        BOOSTING: Baseline(
            lambda _, seed: ensembles.HistGradientBoostingRegressor(random_state=seed)
        ),
        RIDGE: Baseline(lambda alpha, _: linear.Ridge(alpha), "alpha", RIDGE_ALPHAS),
    }


def run_baseline(config: Config, dataset: str, method: str, context: Context) -> Iterator[Measured]:
    """Fit one estimator with every value of what is tuned, on every split."""
    joblib = require("joblib", extra="data")
    table = uci.read_table(dataset, context.data_dir)
    splits = range(config.baseline_splits if method == MLP_METHOD else config.fair_splits)
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
    """Fit an estimator on one split."""
    parts = uci.split(table, split, scaling=SCALING[FAIR], max_rows=config.max_rows)
    return _baseline_errors(baselines(config)[method].make(value, split), parts)


def _baseline_errors(estimator: Any, parts: uci.Split) -> tuple[float, float]:
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
