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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fsmap
from fsmap.data import uci
from fsmap.errors import require
from fsmap.models.mlp import MLP
from fsmap.objective.objective import Objective
from fsmap.paper.engine import Context, Experiment, Measured, Plots, exact
from fsmap.paper.report import figures, tables
from fsmap.paper.report.tables import Mean
from fsmap.paper.rows import Claim, Rows, Unit, not_tested, t95
from fsmap.train.loop import adam
from fsmap.train.select import measure_members

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POWERS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
PAPER, FAIR, BASELINES = "paper", "fair", "baselines"
SCALING = {PAPER: "authors", FAIR: "train"}
METRICS = ("valid_rmse", "test_rmse")
METHODS = ("ps-map", "l-map")
DIFFERENCE = "l-map \u2212 ps-map"
MLP_METHOD, BOOSTING, RIDGE = "sklearn-mlp", "boosting", "ridge"
NAMES = {MLP_METHOD: "MLPRegressor", BOOSTING: "HistGradientBoostingRegressor", RIDGE: "Ridge"}
ALPHAS: dict[str, tuple[float | None, ...]] = {
    MLP_METHOD: POWERS,
    BOOSTING: (None,),
    RIDGE: (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0),
}

NOTES = {
    PAPER: (
        "first weights N(0, 1/fan-in), not truncated at two standard deviations",
        "naval: two constant columns dropped",
    ),
    FAIR: ("not the paper's protocol: every configuration on every split",),
}

TUNED = ("weight_decay", "reg_strength", "alpha")
Knobs = tuple[tuple[str, float], ...]  # a configuration: names and values of what was tuned

_PRINTED = {
    "boston": ((0.329, 0.033), (0.352, 0.040)),
    "concrete": ((0.272, 0.016), (0.261, 0.013)),
    "energy": ((0.042, 0.003), (0.041, 0.002)),
    "naval": ((0.032, 0.005), (0.018, 0.002)),
    "power": ((0.219, 0.006), (0.218, 0.005)),
    "protein": ((0.584, 0.005), (0.580, 0.005)),
    "winered": ((0.851, 0.029), (0.792, 0.031)),
    "winewhite": ((0.758, 0.013), (0.714, 0.017)),
}
PRINTED = {
    (dataset, method): cell
    for dataset, cells in _PRINTED.items()
    for method, cell in zip(METHODS, cells, strict=True)
}
"""Table 1 of the paper: (mean, standard error) by data set and method."""


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


class Run(NamedTuple):
    """A configuration on a split, and its root mean squared errors (nan: it diverged)."""

    decay: float
    strength: float
    split: int
    valid: float = math.nan
    test: float = math.nan

    @property
    def method(self) -> str:
        return "l-map" if self.strength else "ps-map"


def run_paper(config: Config, dataset: str, context: Context) -> Iterator[Measured]:
    """Tune on split 0, then train the best of each method on all splits."""
    tuned = train(config, dataset, PAPER, grid(config, [0]), context)
    for run in tuned:
        yield from _rows(dataset, PAPER, "tune", [run])
    context.advance(0.7)
    best = [choose(tuned, method) for method in METHODS]
    finals = [run._replace(split=split) for run in best for split in range(config.seeds)]
    for run in train(config, dataset, PAPER, finals, context):
        yield from _rows(dataset, PAPER, "final", [run])


def run_fair(
    config: Config, dataset: str, splits: Sequence[int], context: Context
) -> Iterator[Measured]:
    """Train every configuration on some of the splits."""
    by_config: dict[tuple[float, float], list[Run]] = {}
    for run in train(config, dataset, FAIR, grid(config, splits), context):
        by_config.setdefault((run.decay, run.strength), []).append(run)
    for runs in by_config.values():
        yield from _rows(dataset, FAIR, "all", runs)


def grid(config: Config, splits: Sequence[int]) -> list[Run]:
    """Every configuration of both methods on every split."""
    strengths = (0.0, *config.strengths)
    return [Run(w, s, split) for split in splits for w in config.decays for s in strengths]


def choose(runs: Sequence[Run], method: str) -> Run:
    """The configuration of a method with the lowest validation error."""
    mine = [run for run in runs if run.method == method]
    return min(mine, key=lambda run: math.inf if math.isnan(run.valid) else run.valid)


def train(
    config: Config, dataset: str, protocol: str, runs: Sequence[Run], context: Context
) -> list[Run]:
    """Train runs as one population, and measure them."""
    table = uci.read_table(dataset, context.data_dir)
    parts = {
        split: uci.split(table, split, scaling=SCALING[protocol], max_rows=config.max_rows)
        for split in dict.fromkeys(run.split for run in runs)
    }
    data = {split: part.train for split, part in parts.items()}
    features, num_data = table.x.shape[1], len(next(iter(data.values())).y)
    members = [
        {"decay": r.decay, "strength": r.strength, "split": r.split, "seed": r.split} for r in runs
    ]
    # The authors start all runs from the same weights; in `fair` every split has its own.
    shared = protocol == PAPER
    states, _ = fsmap.fit_population(
        lambda decay, strength: objective(config, features, num_data, decay, strength),
        fsmap.Grid(members),
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
    sets = [{k: getattr(p, name) for k, p in parts.items()} for name in ("valid", "test")]
    errors = [measure_members(states, on=on, by=fsmap.metrics.rmse).tolist() for on in sets]
    return [run._replace(valid=a, test=b) for run, a, b in zip(runs, *errors, strict=True)]


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


def _rows(dataset: str, protocol: str, stage: str, runs: Sequence[Run]) -> Iterator[Measured]:
    """Both errors of one configuration; a list where there are several splits."""
    first, several = runs[0], stage == "all"
    config: dict[str, Any] = {"dataset": dataset, "protocol": protocol, "stage": stage}
    config |= {"weight_decay": first.decay, "reg_strength": first.strength}
    config["split"] = [run.split for run in runs] if several else first.split
    seed = None if several else first.split
    for name, *errors in zip(METRICS, *((run.valid, run.test) for run in runs), strict=True):
        value = errors if several else errors[0]
        yield Measured(name, value, first.method, seed, config, NOTES[protocol])


def estimator(config: Config, method: str, alpha: float | None, seed: int) -> Any:
    """A scikit-learn estimator with a value of its tuned parameter."""
    if method == RIDGE:
        return require("sklearn.linear_model", extra="data").Ridge(alpha)
    if method == BOOSTING:
        ensembles = require("sklearn.ensemble", extra="data")
        return ensembles.HistGradientBoostingRegressor(random_state=seed)
    sizes = {"hidden_layer_sizes": (config.width,) * 3, "max_iter": config.epochs}
    networks = require("sklearn.neural_network", extra="data")
    return networks.MLPRegressor(alpha=alpha, early_stopping=True, random_state=seed, **sizes)


def run_baseline(config: Config, dataset: str, method: str, context: Context) -> Iterator[Measured]:
    """Fit one estimator with every value of its tuned parameter, on every split."""
    joblib = require("joblib", extra="data")
    table = uci.read_table(dataset, context.data_dir)
    splits = range(config.baseline_splits if method == MLP_METHOD else config.fair_splits)
    # at full size a process per core; what a fit draws depends on its own seed alone
    parallel = joblib.Parallel(n_jobs=-1 if context.size == "full" else 1)
    one = joblib.delayed(_fit_baseline)
    for alpha in ALPHAS[method]:
        errors = parallel(one(config, table, method, alpha, split) for split in splits)
        found: dict[str, Any] = {"dataset": dataset, "protocol": BASELINES, "stage": "all"}
        found |= {"split": list(splits)} | ({} if alpha is None else {"alpha": alpha})
        for name, *column in zip(METRICS, *errors, strict=True):
            yield Measured(name, column, method, config=found)


def _fit_baseline(
    config: Config, table: uci.Table, method: str, alpha: float | None, split: int
) -> list[float]:
    """Validation and test error of an estimator on one split."""
    parts = uci.split(table, split, scaling=SCALING[FAIR], max_rows=config.max_rows)
    fitted = estimator(config, method, alpha, split)
    x, y = (t.double().numpy() for t in parts.train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a network that stops at max_iter says so
        fitted.fit(x, y[:, 0])
    found = []
    for part in (parts.valid, parts.test):
        x, y = (t.double().numpy() for t in part)
        found.append(float(np.sqrt(np.mean((fitted.predict(x) - y[:, 0]) ** 2))))
    return found


class Cell(NamedTuple):
    """One number of the table."""

    dataset: str
    method: str
    protocol: str
    values: dict[int, float]  # test errors (or differences) by split
    config: dict[str, float]  # the configuration that was chosen

    @property
    def mean(self) -> Mean:
        return tables.mean(self.values.values())

    def line(self) -> dict[str, Any]:
        paper, spread = PRINTED.get((self.dataset, self.method), (None, None))
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
        }


def cells(rows: Rows) -> list[Cell]:
    """The table: protocols, tables and methods in order; after ``fair``, the paired differences."""
    found: list[Cell] = []
    measured = tables.select(rows, stage=("final", "all"))
    for protocol, names in ((PAPER, METHODS), (FAIR, METHODS), (BASELINES, tuple(NAMES))):
        mine = tables.select(measured, protocol=protocol)
        for (dataset,), members in tables.group(mine, "dataset").items():
            by_method = tables.group(members, "method")
            some = [_cell(dataset, protocol, m, by_method[m,]) for m in names if (m,) in by_method]
            found += some
            if protocol == FAIR and len(some) == 2:
                ps, lm = (cell.values for cell in some)
                values = {split: lm[split] - ps[split] for split in ps}
                found.append(Cell(dataset, DIFFERENCE, FAIR, values, {}))
    return found


def _cell(dataset: str, protocol: str, method: str, rows: Rows) -> Cell:
    """The configuration with the lowest mean validation error, and its test errors."""
    valid, test = (_by_config(tables.select(rows, metric=name)) for name in METRICS)
    splits = sorted(set.intersection(*map(set, valid.values())))

    def error(key: Knobs) -> float:
        mean = sum(valid[key][split] for split in splits) / len(splits)
        return math.inf if math.isnan(mean) else mean

    best = min(valid, key=error)
    return Cell(dataset, method, protocol, {s: test[best][s] for s in splits}, dict(best))


def _by_config(rows: Rows) -> dict[Knobs, dict[int, float]]:
    """Values by split, by configuration; pieces of the run joined."""
    found: dict[Knobs, dict[int, float]] = {}
    for row in rows:
        about, value, split = row.config, row.value, row.config["split"]
        knobs = tuple((name, about[name]) for name in TUNED if name in about)
        pairs = {split: value} if isinstance(value, float) else zip(split, value, strict=True)
        found.setdefault(knobs, {}).update(pairs)
    return found


def excess(cell: Cell) -> float:
    """How much worse than the paper, in combined errors: inf if it diverged, nan if not known."""
    if cell.mean.n < 2:
        return math.nan
    if not math.isfinite(cell.mean.mean):
        return math.inf
    paper, spread = PRINTED.get((cell.dataset, cell.method), (math.nan, math.nan))
    return (cell.mean.mean - paper) / math.hypot(cell.mean.stderr, spread)


def on_most(claim: str, pairs: dict[str, Mean], share: float, paper: str | None = None) -> Claim:
    """A claim on how many differences are negative; undecided if 95 % intervals leave both open."""
    source: Any = "paper" if paper else "ours"
    if not pairs:
        return not_tested(claim, "fsmap run uci-table --resume", paper, source)
    better, higher = (
        [d for d, m in pairs.items() if m.stderr > 0 and sign * m.mean > t95(m.n) * m.stderr]
        for sign in (-1, 1)
    )
    needed = share * len(pairs)
    lower = sum(m.mean < 0 for m in pairs.values())
    ours = (
        f"mean lower on {lower} of {len(pairs)}; beyond its 95 % interval on "
        f"{', '.join(better) or 'none'}, higher beyond it on {', '.join(higher) or 'none'}"
    )
    holds, reason = None, "most 95 % intervals contain zero"
    if len(better) >= needed or len(pairs) - len(higher) < needed:
        holds, reason = len(better) >= needed, ""
    splits = min(m.n for m in pairs.values())
    return Claim(claim, holds, ours, paper, seeds=splits, source=source, reason=reason)


def _against(table: Sequence[Cell], protocol: str, other: str) -> dict[str, Mean]:
    """L-MAP's test error minus another's by table, on the splits that both were run on."""
    mine = {c.dataset: c.values for c in table if (c.protocol, c.method) == (protocol, "l-map")}
    found = {}
    for cell in table:
        if cell.method == other and cell.protocol in (protocol, BASELINES) and cell.dataset in mine:
            ours, theirs = mine[cell.dataset], cell.values
            found[cell.dataset] = tables.mean(ours[s] - theirs[s] for s in ours if s in theirs)
    return {d: found[d] for d in mine if d in found and found[d].n}


def _draw_errors(ax: Axes, table: Sequence[Cell], names: Sequence[str]) -> None:
    """Errors of the paper's protocol as multiples of the paper's PS-MAP; the paper's are hollow."""
    for k, method in enumerate(METHODS):
        look = figures.method_style(method, linestyle="", elinewidth=0.9)
        hollow = {"markerfacecolor": "none", "markeredgecolor": look["color"], "mew": 0.9}
        hollow["label"] = f"{look['label']}, paper"
        mine = [c for c in table if (c.protocol, c.method) == (PAPER, method)]
        unit = [PRINTED[c.dataset, "ps-map"][0] for c in mine]
        printed = [PRINTED[c.dataset, method] for c in mine]
        for j, pairs in enumerate(([c.mean[:2] for c in mine], printed)):
            x = [names.index(c.dataset) - 0.18 + 0.3 * k + 0.1 * j for c in mine]
            y, error = ([pair[i] / u for pair, u in zip(pairs, unit, strict=True)] for i in (0, 1))
            ax.errorbar(x, y, yerr=error, **(look | hollow if j else look))
    ax.set(title="Test RMSE against the paper's", ylabel="RMSE / paper's PS-MAP")
    ax.axhline(1.0, **figures.GUIDE)


class UCITable(Experiment):
    id = "uci-table"
    label = "Table 1"
    title = "UCI regression"
    see = (
        "Test errors by the paper's protocol, and paired differences over 20 splits by the fair "
        "one, beside scikit-learn's estimators."
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
    departures = (
        "fair: the 20 splits overlap; by the correction of Nadeau and Bengio (2003) the standard "
        "errors of paired differences are 1.8 times as large",
    )
    selecting = ("datasets", "protocols")
    config = Config()
    quick = Config(datasets=("boston", "winered"), decays=(1e-4, 1e-2), strengths=(1e-4, 1e-2),
                   seeds=2, fair_splits=2, chunk=2, baseline_splits=2, steps=400, batch=64,
                   points=64, width=32, lr=3e-3, epochs=40)  # fmt: skip

    def units(self, config: Config) -> list[Unit]:
        pieces = range(0, config.fair_splits, config.chunk)
        units: dict[str, list[dict[str, Any]]] = {
            PAPER: [{"dataset": d} for d in config.datasets],
            FAIR: [{"dataset": d, "first_split": k} for k in pieces for d in config.datasets],
            BASELINES: [{"dataset": d, "method": m} for m in NAMES for d in config.datasets],
        }
        chosen = [protocol for protocol in units if protocol in config.protocols]
        return [{"protocol": p, **unit} for p in chosen for unit in units[p]]

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
        table = cells(rows)
        paper = [cell for cell in table if cell.protocol == PAPER]
        known = {f"{c.dataset} {c.method}": x for c in paper if not math.isnan(x := excess(c))}
        worse = ", ".join(f"{name} by {x:.1f}" for name, x in known.items() if x > 2) or "none"
        few = sum(x > 2 for x in known.values()) <= 2 and all(x <= 3 for x in known.values())
        splits = max((cell.mean.n for cell in paper), default=0) if known else 0
        near = exact("At most 2 of the paper's 16 cells are worse by more than two combined "
                     "standard errors, none by more than three", few,
                     f"worse: {worse}, of {len(known)} cells", "the cells themselves",
                     seeds=splits)  # fmt: skip
        if few and 0 < len(known) < len(PRINTED):
            near = near._replace(holds=None, reason="fsmap run uci-table --resume")
        return [
            near,
            on_most("L-MAP's test error is below PS-MAP's on 7 of 8 tables (paper's protocol)",
                    _against(table, PAPER, "ps-map"), 7 / 8, "7 of 8"),
            on_most("L-MAP's test error is below PS-MAP's on most tables (fair protocol)",
                    _against(table, FAIR, "ps-map"), 5 / 8),
            *(on_most(f"L-MAP's test error (fair) is below that of scikit-learn's {name} on most "
                      "tables", _against(table, FAIR, method), 5 / 8)
              for method, name in NAMES.items()),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        table = cells(rows)
        names = list(dict.fromkeys(cell.dataset for cell in table))
        figure, (left, right) = figures.axes(2, panel=(5.2, 3.2))
        _draw_errors(left, table, names)
        for cell in table:
            mean = cell.mean
            if cell.method == DIFFERENCE and mean.n > 1 and mean.stderr > 0:
                color = figures.COLORS["l-map" if mean.mean < 0 else "ps-map"]
                right.bar(names.index(cell.dataset), mean.mean / mean.stderr, 0.6, color=color)
        right.axhline(0.0, **figures.GUIDE)
        title = "L-MAP − PS-MAP, fair protocol, paired"
        right.set(title=title, ylabel="difference / standard error")
        for ax in (left, right):
            ax.set_xticks(range(len(names)), names, rotation=35, ha="right")
        figures.legend_above(figure, left)
        return {self.id: figure}
