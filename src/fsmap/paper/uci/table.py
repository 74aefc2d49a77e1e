r"""``uci-table`` (Table 1): training by two protocols, baselines, cells, claims and the picture.

The paper's loss is mean squared error $+\; w\|\theta\|^2 + \lambda R$. In our scale that is
Gaussian noise with $\sigma^2 = 1/2$, a Normal prior with $\alpha^2 = 1/(2wN)$, and
``reg_strength`` λ; the constants of the log-densities drop out of the gradient. PS-MAP is the
configuration λ = 0. Networks are trained as one population per table and protocol.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fsmap
from fsmap.data import uci
from fsmap.errors import require
from fsmap.models.mlp import MLP
from fsmap.objective.objective import Objective
from fsmap.paper.experiment import Context, Experiment, Measured, Plots, exact
from fsmap.paper.report import figures, tables
from fsmap.paper.report.tables import Mean
from fsmap.paper.rows import Claim, Row, Rows, Unit, not_tested
from fsmap.paper.solvers import one_thread
from fsmap.train.grid import measure_members
from fsmap.train.optim import adam

POWERS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
RIDGE_ALPHAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
PAPER, FAIR, BASELINES = "paper", "fair", "baselines"
SCALING = {PAPER: "authors", FAIR: "train"}
METRICS = ("valid_rmse", "test_rmse")
METHODS = ("ps-map", "l-map")
DIFFERENCE = "l-map \u2212 ps-map"
MLP_METHOD, BOOSTING, RIDGE = "sklearn-mlp", "boosting", "ridge"
NAMES = {
    MLP_METHOD: "MLPRegressor",
    BOOSTING: "HistGradientBoostingRegressor",
    RIDGE: "Ridge",
}

NOTES = {
    PAPER: (
        "first weights N(0, 1/fan-in), not truncated at two standard deviations",
        "naval: two constant columns dropped",
    ),
    FAIR: ("not the paper's protocol: every configuration on every split",),
}

SYMBOLS = {"weight_decay": "w", "reg_strength": "λ", "alpha": "α"}
"""What was tuned."""

PRINTED = {
    "boston": ((0.329, 0.033), (0.352, 0.040)),
    "concrete": ((0.272, 0.016), (0.261, 0.013)),
    "energy": ((0.042, 0.003), (0.041, 0.002)),
    "naval": ((0.032, 0.005), (0.018, 0.002)),
    "power": ((0.219, 0.006), (0.218, 0.005)),
    "protein": ((0.584, 0.005), (0.580, 0.005)),
    "winered": ((0.851, 0.029), (0.792, 0.031)),
    "winewhite": ((0.758, 0.013), (0.714, 0.017)),
}
"""Table 1 of the paper: (mean, standard error) of PS-MAP and L-MAP."""


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
    best = [choose(tuned, method) for method in METHODS]
    finals = [b._replace(split=split) for b in best for split in range(config.seeds)]
    for result in train(config, dataset, PAPER, finals, context):
        yield from _rows(dataset, PAPER, "final", [result])


def run_fair(
    config: Config, dataset: str, splits: Sequence[int], context: Context
) -> Iterator[Measured]:
    """Train every configuration on some of the splits."""
    by_config: dict[tuple[float, float], list[Result]] = {}
    for result in train(config, dataset, FAIR, grid(config, splits), context):
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
    config: Config, dataset: str, protocol: str, settings: Sequence[Setting], context: Context
) -> list[Result]:
    """Train settings as one population."""
    table = uci.read_table(dataset, context.data_dir)
    parts = {
        split: uci.split(table, split, scaling=SCALING[protocol], max_rows=config.max_rows)
        for split in dict.fromkeys(s.split for s in settings)
    }
    data = {split: part.train for split, part in parts.items()}
    features, num_data = table.x.shape[1], len(next(iter(data.values())).y)
    # The authors start all runs from the same weights; in `fair` every split has its own.
    shared = protocol == PAPER
    with one_thread():
        states, _ = fsmap.fit_population(
            lambda decay, strength: objective(config, features, num_data, decay, strength),
            fsmap.Grid([{**s._asdict(), "seed": s.split} for s in settings]),
            fsmap.functional(network(config, features, 0, context.device))[0],
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
            measure_members(
                states, on={k: getattr(p, name) for k, p in parts.items()}, by=fsmap.metrics.rmse
            )
            for name in ("valid", "test")
        ]
    return [Result(s, float(a), float(b)) for s, a, b in zip(settings, *errors, strict=True)]


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


def _rows(dataset: str, protocol: str, stage: str, results: Sequence[Result]) -> Iterator[Measured]:
    """Both errors of one configuration; a list where there are several splits."""
    setting, several = results[0].setting, stage == "all"
    config = {
        **{"dataset": dataset, "protocol": protocol, "stage": stage},
        **{"weight_decay": setting.decay, "reg_strength": setting.strength},
        "split": [r.setting.split for r in results] if several else setting.split,
    }
    seed = None if several else setting.split
    for name, *values in zip(METRICS, *(r[1:] for r in results), strict=True):
        value = values if several else values[0]
        yield Measured(name, value, setting.method, seed, config, NOTES[protocol])


class Baseline(NamedTuple):
    """An estimator and the values of what is tuned."""

    make: Callable[[Any, int], Any]  # from a value of α and a seed to an estimator
    alphas: tuple[float | None, ...]  # what it is tuned over; None: nothing


def baselines(config: Config) -> dict[str, Baseline]:
    """The three estimators."""
    networks = require("sklearn.neural_network", extra="data")
    ensembles = require("sklearn.ensemble", extra="data")
    linear = require("sklearn.linear_model", extra="data")

    def network(alpha: float, seed: int) -> Any:
        return networks.MLPRegressor(
            hidden_layer_sizes=(config.width,) * 3,
            alpha=alpha,
            max_iter=config.epochs,
            early_stopping=True,
            random_state=seed,
        )

    def boosting(_: Any, seed: int) -> Any:
        return ensembles.HistGradientBoostingRegressor(random_state=seed)

    return {
        MLP_METHOD: Baseline(network, POWERS),
        BOOSTING: Baseline(boosting, (None,)),
        RIDGE: Baseline(lambda alpha, _: linear.Ridge(alpha), RIDGE_ALPHAS),
    }


def run_baseline(config: Config, dataset: str, method: str, context: Context) -> Iterator[Measured]:
    """Fit one estimator with every value of what is tuned, on every split."""
    joblib = require("joblib", extra="data")
    table = uci.read_table(dataset, context.data_dir)
    splits = range(config.baseline_splits if method == MLP_METHOD else config.fair_splits)
    # at full size a process per core; what a fit draws depends on its own seed alone
    parallel = joblib.Parallel(n_jobs=-1 if context.size == "full" else 1)
    for alpha in baselines(config)[method].alphas:
        errors = parallel(
            joblib.delayed(_fit_baseline)(config, table, method, alpha, split) for split in splits
        )
        found: dict[str, Any] = {"dataset": dataset, "protocol": BASELINES, "stage": "all"}
        found["split"] = list(splits)
        if alpha is not None:
            found["alpha"] = alpha
        for name, *column in zip(METRICS, *errors, strict=True):
            yield Measured(name, column, method, config=found)


def _fit_baseline(
    config: Config, table: uci.Table, method: str, alpha: float | None, split: int
) -> list[float]:
    """Validation and test error of an estimator on one split."""
    parts = uci.split(table, split, scaling=SCALING[FAIR], max_rows=config.max_rows)
    estimator = baselines(config)[method].make(alpha, split)
    x, y = (t.double().numpy() for t in parts.train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a network that stops at max_iter says so
        estimator.fit(x, y[:, 0])
    found = []
    for part in (parts.valid, parts.test):
        x, y = (t.double().numpy() for t in part)
        found.append(float(np.sqrt(np.mean((estimator.predict(x) - y[:, 0]) ** 2))))
    return found


class Cell(NamedTuple):
    """One number of the table."""

    dataset: str  # the table
    method: str  # whose error
    protocol: str  # how it was chosen and tested
    values: dict[int, float]  # test errors (or differences) by split
    config: dict[str, float]  # the configuration that was chosen
    # which of its numbers are the largest (↑) or smallest (↓) that were tried
    edges: tuple[str, ...] = ()

    @property
    def mean(self) -> Mean:
        """Mean and standard error over splits."""
        return tables.mean(self.values.values())

    @property
    def printed(self) -> tuple[float, float] | None:
        """What the paper prints, where it prints something."""
        if self.method not in METHODS or self.dataset not in PRINTED:
            return None
        return PRINTED[self.dataset][METHODS.index(self.method)]

    @property
    def excess(self) -> float:
        """How much worse than the paper, in combined standard errors; nan where nobody can say."""
        if self.printed is None or self.mean.n < 2:
            return math.nan
        paper, spread = self.printed
        return (self.mean.mean - paper) / math.hypot(self.mean.stderr, spread)

    def line(self) -> dict[str, Any]:
        """A line of the table."""
        paper, spread = self.printed or (None, None)
        return {
            "dataset": self.dataset,
            "method": self.method,
            "protocol": FAIR if self.protocol == BASELINES else self.protocol,
            "ours": self.mean.mean,
            "stderr": self.mean.stderr,
            "paper": paper,
            "paper_stderr": spread,
            "runs": self.mean.n,
            **self.config,
            "edge": " ".join(self.edges) or None,
        }


def cells(rows: Rows) -> list[Cell]:
    """The table: protocols, tables and methods in order; after ``fair``, the paired differences."""
    found: list[Cell] = []
    for protocol, names in ((PAPER, METHODS), (FAIR, METHODS), (BASELINES, tuple(NAMES))):
        for (dataset,), members in tables.group(
            tables.select(rows, protocol=protocol), "dataset"
        ).items():
            mine = [_cell(dataset, protocol, m, tables.select(members, method=m)) for m in names]
            found += [cell for cell in mine if cell is not None]
            if protocol == FAIR and all(mine):
                found.append(_difference(*mine))
    return found


def _cell(dataset: str, protocol: str, method: str, rows: Rows) -> Cell | None:
    """The chosen configuration and its test errors; None where nothing was run."""
    if protocol == PAPER:
        final = tables.select(rows, metric="test_rmse", stage="final")
        if not final:
            return None
        values = {int(row.config["split"]): float(row.value) for row in final}
        tried = [_knobs(row) for row in tables.select(rows, metric="valid_rmse", stage="tune")]
        chosen = _knobs(final[0])
        return Cell(dataset, method, protocol, values, chosen, _edges(chosen, tried))
    valid = _by_config(tables.select(rows, metric="valid_rmse"))
    test = _by_config(tables.select(rows, metric="test_rmse"))
    if not valid:
        return None
    splits = set.intersection(*(set(column) for column in valid.values()))
    best = min(valid, key=lambda key: _mean_over(valid[key], splits))
    values = {split: test[best][split] for split in sorted(splits)}
    chosen = dict(best)
    return Cell(dataset, method, protocol, values, chosen, _edges(chosen, [*map(dict, valid)]))


def _edges(chosen: dict[str, float], tried: Sequence[dict[str, float]]) -> tuple[str, ...]:
    """``w↑`` where the chosen w is the largest of three or more, ``λ↓`` for the smallest λ."""
    found = []
    for name, value in chosen.items():
        values = sorted({config[name] for config in tried})
        if len(values) >= 3 and value in (values[0], values[-1]):
            found.append(SYMBOLS[name] + ("↑" if value == values[-1] else "↓"))
    return tuple(found)


def _by_config(rows: Rows) -> dict[tuple[tuple[str, float], ...], dict[int, float]]:
    """Values by split, by configuration; pieces of the run joined."""
    found: dict[tuple[tuple[str, float], ...], dict[int, float]] = {}
    for row in rows:
        column = found.setdefault(tuple(_knobs(row).items()), {})
        column.update(zip(row.config["split"], row.value, strict=True))
    return found


def _knobs(row: Row) -> dict[str, float]:
    return {name: row.config[name] for name in SYMBOLS if name in row.config}


def _mean_over(column: dict[int, float], splits: set[int]) -> float:
    total = sum(column[split] for split in splits) / len(splits)
    return math.inf if math.isnan(total) else total


def _difference(ps: Cell, lm: Cell) -> Cell:
    values = {split: lm.values[split] - ps.values[split] for split in ps.values}
    return Cell(ps.dataset, DIFFERENCE, FAIR, values, {})


def claims(rows: Rows) -> Iterator[Claim]:
    """The paper's cells and its count of wins; the fair comparison; the baselines."""
    table = cells(rows)
    paper = [cell for cell in table if cell.protocol == PAPER]
    known = {f"{c.dataset} {c.method}": c.excess for c in paper if not math.isnan(c.excess)}
    worse = ", ".join(f"{name} by {x:.1f}" for name, x in known.items() if x > 2) or "none"
    splits = max((cell.mean.n for cell in paper), default=0)
    yield exact("At most 2 of the paper's 16 cells are worse by more than two combined standard "
                "errors, none by more than three", sum(x > 2 for x in known.values()) <= 2
                and all(x <= 3 for x in known.values()), f"worse: {worse}, of {len(known)} cells",
                "the cells themselves", seeds=splits if known else 0)  # fmt: skip
    yield on_most("L-MAP's test error is below PS-MAP's on 7 of 8 tables (paper's protocol)",
                  _against(table, PAPER, "l-map", "ps-map"), 7 / 8, paper="7 of 8")  # fmt: skip
    yield on_most("L-MAP's test error is below PS-MAP's on most tables (fair protocol)",
                  _against(table, FAIR, "l-map", "ps-map"), 5 / 8)  # fmt: skip
    for method, name in NAMES.items():
        yield on_most(f"L-MAP's test error (fair) is below that of scikit-learn's {name} on most "
                      "tables", _against(table, FAIR, "l-map", method), 5 / 8)  # fmt: skip


def on_most(claim: str, pairs: dict[str, Mean], share: float, paper: str | None = None) -> Claim:
    """A claim about the number of tables with a negative difference, each known to its error.

    It is undecided if the tables within two standard errors could make it true or false.
    """
    source: Any = "paper" if paper else "ours"
    if not pairs:
        return not_tested(claim, "fsmap run uci-table --resume", paper, source)
    score = {d: m.mean / m.stderr if m.stderr > 0 else math.nan for d, m in pairs.items()}
    better, higher = ([d for d, z in score.items() if sign * z > 2] for sign in (-1, 1))
    least, most = len(better), len(pairs) - len(higher)
    needed = share * len(pairs)
    lower = sum(m.mean < 0 for m in pairs.values())
    ours = (
        f"mean lower on {lower} of {len(pairs)}; by more than two paired errors on "
        f"{', '.join(better) or 'none'}, higher by as much on {', '.join(higher) or 'none'}"
    )
    holds = True if least >= needed else False if most < needed else None
    reason = "" if holds is not None else "most differences are within two standard errors"
    splits = min(m.n for m in pairs.values())
    return Claim(claim, holds, ours, paper, seeds=splits, source=source, reason=reason)


def _against(table: Sequence[Cell], protocol: str, one: str, other: str) -> dict[str, Mean]:
    """Paired differences of the test error by table, on the splits that both were run on."""
    mine, theirs = (
        {c.dataset: c for c in table if c.method == m and c.protocol in (protocol, alternative)}
        for m, alternative in ((one, protocol), (other, BASELINES))
    )
    found = {}
    for d in mine:
        if d in theirs:
            a, b = mine[d].values, theirs[d].values
            found[d] = tables.mean(a[s] - b[s] for s in a if s in b)
    return {d: m for d, m in found.items() if m.n}


def draw(rows: Rows) -> Plots:
    """Errors beside the paper's, and the paired differences of the fair protocol."""
    table = cells(rows)
    figure, (left, right) = figures.axes(2, panel=(5.2, 3.2))
    names = list(dict.fromkeys(c.dataset for c in table))
    for cell in table:
        if cell.protocol == PAPER:
            _draw_cell(left, names.index(cell.dataset), cell)
        elif cell.method == DIFFERENCE:
            _draw_difference(right, names.index(cell.dataset), cell)
    left.set(title="Test RMSE against the paper's", ylabel="RMSE / paper's PS-MAP")
    left.axhline(1.0, color=figures.COLORS["data"], linewidth=0.8, linestyle=":")
    right.axhline(0.0, color=figures.COLORS["data"], linewidth=0.8, linestyle=":")
    right.set(title="L-MAP − PS-MAP, fair protocol, paired", ylabel="difference / standard error")
    for ax in (left, right):
        ax.set_xticks(range(len(names)), names, rotation=35, ha="right")
    looks = [_look(method, filled) for method in METHODS for filled in (True, False)]
    handles = [left.plot([], [], **look)[0] for look in looks]
    words = ["PS-MAP", "PS-MAP, paper", "L-MAP", "L-MAP, paper"]
    figure.legend(handles, words, ncols=4, loc="outside upper center")
    return {"uci-table": figure}


def _look(method: str, filled: bool) -> dict[str, Any]:
    look = figures.method_style(method, linestyle="", label=None)
    if filled:
        return look
    return {**look, "markerfacecolor": "none", "markeredgecolor": look["color"], "mew": 0.9}


def _draw_cell(ax: Any, place: int, cell: Cell) -> None:
    """Ours and the paper's, as multiples of the paper's PS-MAP."""
    if cell.printed is None:
        return
    unit = PRINTED[cell.dataset][0][0]
    shift = -0.18 if cell.method == "ps-map" else 0.12
    pairs = ((cell.mean.mean, cell.mean.stderr, True), (*cell.printed, False))
    for offset, (value, spread, filled) in zip((0.0, 0.1), pairs, strict=True):
        bar = None if math.isnan(spread) else spread / unit
        look = _look(cell.method, filled)
        ax.errorbar(place + shift + offset, value / unit, yerr=bar, elinewidth=0.9, **look)


def _draw_difference(ax: Any, place: int, cell: Cell) -> None:
    mean = cell.mean
    if mean.n > 1 and mean.stderr > 0:
        winner = "l-map" if mean.mean < 0 else "ps-map"
        ax.bar(place, mean.mean / mean.stderr, width=0.6, color=figures.COLORS[winner])


class UCITable(Experiment):
    id = "uci-table"
    label = "Table 1"
    title = "UCI regression"
    see = (
        "Test errors by the paper's protocol, and paired differences over 20 splits by the fair "
        "one. ↑ or ↓: the chosen w, λ or α is the largest or smallest that was tried."
    )
    device = "gpu"
    cost = "minutes on a GPU"
    protocol = (
        "mean squared error + w‖θ‖² + λR by one-sided differences, β = 1e-3; float32, in committed "
        "rows of a GPU products of pairs of bfloat16 (16 bits of mantissa, float32 sums). paper: "
        "authors' scaling, tuned on split 0, 6 splits; fair: scaled by training statistics, every "
        "configuration on 20 splits, chosen by mean validation error"
    )
    group = "uci"
    selecting = ("datasets", "protocols")
    config = Config()
    quick = Config(
        datasets=("boston", "winered"),
        decays=(1e-4, 1e-2),
        strengths=(1e-4, 1e-2),
        seeds=2,
        fair_splits=2,
        chunk=2,
        baseline_splits=2,
        steps=400,
        batch=64,
        points=64,
        width=32,
        lr=3e-3,
        epochs=40,
    )

    def units(self, config: Config) -> list[Unit]:
        pieces = range(0, config.fair_splits, config.chunk)
        units: dict[str, list[dict[str, Any]]] = {
            PAPER: [{"dataset": d} for d in config.datasets],
            FAIR: [{"dataset": d, "first_split": k} for k in pieces for d in config.datasets],
            BASELINES: [{"dataset": d, "method": m} for m in NAMES for d in config.datasets],
        }
        return [
            {"protocol": protocol, **unit}
            for protocol, some in units.items()
            if protocol in config.protocols
            for unit in some
        ]

    def run(self, config: Config, unit: Unit, context: Context) -> Iterator[Measured]:
        dataset = unit["dataset"]
        if unit["protocol"] == PAPER:
            return run_paper(config, dataset, context)
        if unit["protocol"] == BASELINES:
            return run_baseline(config, dataset, unit["method"], context)
        first = unit["first_split"]
        splits = range(first, min(first + config.chunk, config.fair_splits))
        return run_fair(config, dataset, splits, context)

    def table(self, rows: Rows) -> list[dict[str, Any]]:
        return [cell.line() for cell in cells(rows)]

    def claims(self, rows: Rows) -> list[Claim]:
        return list(claims(rows))

    def draw(self, rows: Rows) -> Plots:
        return draw(rows)
