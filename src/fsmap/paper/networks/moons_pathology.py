r"""``moons-pathology`` (Theorems 1, 2): without jitter FS-MAP has useless, infinitely good optima.

As two hidden units merge (or one dies), $\mathcal J$ becomes singular and
$-\tfrac12\log\det\mathcal J$ grows without bound, whatever the data say: along a straight path,
and by an optimizer that is let go. With jitter the objective cannot exceed
$\max\log p(D\,|\,\theta) + \max\log p(\theta) - \tfrac{P}{2}\log\epsilon$. Near the singularity
small eigenvalues drown in the rounding of $\mathcal J$, so the objective without jitter is computed
from singular values of the Jacobian.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fsmap.data.synthetic import moons
from fsmap.errors import DivergedWarning
from fsmap.functional import functional
from fsmap.linalg.logdet import whitened_rows
from fsmap.models.mlp import MLP
from fsmap.objective.likelihood import Bernoulli, Gaussian, Likelihood
from fsmap.objective.objective import Objective, fs_map
from fsmap.objective.prior import Normal
from fsmap.paper.experiment import Context, Experiment, Measured, Plots, exact
from fsmap.paper.networks.clouds import jitter_text, square
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import LINES, legend_above, power
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.paper.solvers import one_thread
from fsmap.px import Lattice, Stream, generator
from fsmap.train.grid import Grid
from fsmap.train.optim import adam
from fsmap.train.population import fit_population
from fsmap.types import Batch, ModelFn, Params

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IN, OUT = "layers.0.", "layers.1.weight"
"""Parameters of hidden units: what comes in (first dimension: the unit), what goes out (last)."""


PER_DECADE = 8
ROUNDING = 1e-30
"""Ratios of eigenvalues below this one are rounding: singular values have errors of 1e-16 of the
largest, in float64."""

TITLES = {
    "1-2-1": "1-2-1, four parameters (appendix B.6)",
    "2-4-1": "2-4-1 on two moons, 17 parameters",
}


@dataclasses.dataclass(frozen=True)
class PathologyConfig:
    jitters: tuple[float, ...] = (1e-8, 1e-4, 1e-2)  # ε > 0 that are compared with ε = 0
    decades: int = 4  # how near the path comes to the merged units: 10^-decades
    seeds: int = 5  # first values for the optimizer
    steps: int = 300  # steps per stage
    stages: int = 4  # stages, each with a tenth of the learning rate of the one before
    lr: float = 0.03  # learning rate of the first stage

    def distances(self) -> list[float]:
        """Where the path is looked at, from afar to near."""
        return [10.0 ** (-k / PER_DECADE) for k in range(self.decades * PER_DECADE + 1)]


class Problem(NamedTuple):
    """A small network with data."""

    sizes: tuple[int, ...]
    bias: bool
    data: Batch
    likelihood: Likelihood
    px: Lattice

    def network(self, seed: int) -> MLP:
        """The network with the first values of a seed, in float64."""
        source = generator("singular-paths", self.sizes, seed)
        model = MLP(self.sizes, "tanh", bias=self.bias, init="lecun", generator=source)
        return model.double()

    def objective(self, jitter: float) -> Objective:
        """FS-MAP on all points of p_X; without jitter from singular values."""
        return fs_map(
            self.likelihood,
            Normal(1.0),
            self.px,
            num_points=len(self.px),
            jitter=jitter,
            num_data=len(self.data.y),
            method="dense" if jitter else "svd_clip",  # with ε = 0 nothing is clipped
        )

    def log_density(self, objective: Objective, f: ModelFn, params: Params) -> Tensor:
        """The objective in nats."""
        with torch.no_grad():
            draws = objective.draw(f, params, Stream(0, 0))
            return -objective.loss(f, params, self.data, draws)[0] * objective.num_data


def four_parameters() -> Problem:
    """The network of appendix B.6, w₂ᵀ tanh(w₁x), on noisy values of one with unequal units."""
    x = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]
    noise = torch.randn(20, 1, generator=generator("four-parameters"), dtype=torch.float64)
    y = torch.tanh(2 * x) - 0.5 * torch.tanh(0.5 * x) + 0.3 * noise
    return Problem((1, 2, 1), False, Batch(x, y), Gaussian(0.3), square(41, 3.0, 1))


def two_moons() -> Problem:
    """A 2-4-1 network with one logit on the two moons."""
    data = moons(dtype=torch.float64)
    batch = Batch(data.x, data.y[:, None].double())
    return Problem((2, 4, 1), True, batch, Bernoulli(), square(12))


PROBLEMS: dict[str, Callable[[], Problem]] = {"1-2-1": four_parameters, "2-4-1": two_moons}


def merged(params: Params) -> Params:
    """The same network with its first two hidden units replaced by their mean."""
    result = {name: p.clone() for name, p in params.items()}
    for name, p in result.items():
        if name.startswith(IN):
            p[:2] = p[:2].mean(0, keepdim=True)
    result[OUT][:, :2] = result[OUT][:, :2].mean(1, keepdim=True)
    return result


def between(start: Params, end: Params, t: float) -> Params:
    """The point of a straight path that is ``t`` away from its end, in units of its length."""
    return {name: end[name] + t * (start[name] - end[name]) for name in start}


def path(problem: Problem, jitter: float, distances: list[float]) -> Tensor:
    """The objective on the way from a random network to the one with two units merged."""
    f, params = functional(problem.network(0))
    start = {name: p.detach() for name, p in params.items()}
    end, objective = merged(start), problem.objective(jitter)
    values = [problem.log_density(objective, f, between(start, end, t)) for t in distances]
    return torch.stack(values)


class Climb(NamedTuple):
    """What an optimizer did, at the recorded steps."""

    step: Tensor  # [T]
    objective: Tensor  # [T, M]  nats
    ratio: Tensor  # [T, M]  smallest eigenvalue of 𝒥 over the largest


def climb(
    problem: Problem, jitter: float, config: PathologyConfig, advance: Callable[[float], None]
) -> Climb:
    """Maximize the objective with Adam, in stages of ten times smaller steps.

    Adam's steps have the size of the learning rate, however steep the objective is. So the distance
    to a singularity that it can keep is about one learning rate, and each stage shows what a
    tenth of the distance is worth.
    """
    steps, every = config.steps, max(1, config.steps // 10)
    f, x = functional(problem.network(0))[0], problem.px.all()
    current = {
        seed: {name: p.detach() for name, p in problem.network(seed).named_parameters()}
        for seed in range(config.seeds)
    }
    records: list[tuple[int, Tensor, Tensor]] = []
    objective = problem.objective(jitter)
    for stage in range(config.stages):

        def record(step: int, stacked: Params, before: int = stage * steps) -> None:
            advance((before + step) / (steps * config.stages))
            if step % every:
                return
            for seed in current:
                one = {name: p.detach()[seed].clone() for name, p in stacked.items()}
                if all(torch.isfinite(p).all() for p in one.values()):
                    current[seed] = one
            values = [problem.log_density(objective, f, p) for p in current.values()]
            ratios = [_ratio(f, p, x) for p in current.values()]
            records.append((before + step, torch.stack(values), torch.stack(ratios)))

        with one_thread(), warnings.catch_warnings():
            # to reach an infinite objective is what is asked for
            warnings.simplefilter("ignore", DivergedWarning)
            fit_population(
                lambda: objective,
                Grid(seed=list(current)),
                f,
                problem.data,
                steps=steps,
                init=current.__getitem__,
                optimizer=adam(config.lr * 0.1**stage),
                callback=record,
                log_every=steps,
                progress=False,
            )
    step, values, ratios = zip(*records, strict=True)
    return Climb(torch.tensor(step), torch.stack(values), torch.stack(ratios))


def _ratio(f: ModelFn, params: Params, x: Tensor) -> Tensor:
    with torch.no_grad():
        rows = whitened_rows(f, params, x)
    singular: Tensor = torch.linalg.svdvals(rows)
    return (singular[-1] / singular[0]).square()


class MoonsPathology(Experiment):
    id = "moons-pathology"
    label = "Theorems 1, 2"
    title = "Pathological optima without jitter"
    see = (
        "The objective on a straight path to two equal units, and as an optimizer climbs it, "
        "without jitter and with it."
    )
    cost = "2 min"
    protocol = (
        "true objective, float64; ε = 0: log det 𝒥 from singular values of the Jacobian; ε > 0: "
        "log det(𝒥 + εI). Adam in stages of ten times smaller learning rates"
    )
    group = "networks"
    config = PathologyConfig()
    quick = PathologyConfig(jitters=(1e-8, 1e-4), seeds=2, steps=50)

    def units(self, config: PathologyConfig) -> list[Unit]:
        jitters = (0.0, *config.jitters)
        return [{"network": name, "jitter": jitter} for name in PROBLEMS for jitter in jitters]

    def run(self, config: PathologyConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        problem, jitter = PROBLEMS[unit["network"]](), unit["jitter"]
        distances = config.distances()
        yield Measured("distance", distances, config=unit)
        yield Measured("path", path(problem, jitter, distances), "fs-map", config=unit)
        climbed = climb(problem, jitter, config, context.advance)
        where = {**unit, "stages": config.stages}
        yield Measured("step", climbed.step, config=where)
        for seed in range(config.seeds):
            yield Measured("objective", climbed.objective[:, seed], "fs-map", seed, where)
            yield Measured("eigenvalue_ratio", climbed.ratio[:, seed], "fs-map", seed, where)

    def table(self, rows: Rows) -> list[dict[str, Any]]:
        return [
            {
                "network": network,
                "jitter": jitter,
                "metric": "nats gained in the last decade of the path",
                "ours": last_decades(rows, network, jitter)[-1],
                "objective after each stage": [round(v, 2) for v in stages(rows, network, jitter)],
                "smallest / largest eigenvalue": final_ratio(rows, network, jitter),
            }
            for network, jitter in _settings(rows)
        ]

    def claims(self, rows: Rows) -> list[Claim]:
        free, bounded = {}, {}
        for network, jitter in _settings(rows):
            before, last = [math.nan, *last_decades(rows, network, jitter)][-2:]
            gains = _gains(stages(rows, network, jitter))
            if jitter == 0:
                free[network] = before, last, gains, final_ratio(rows, network, 0.0)
            else:
                bounded[f"{network}, {jitter_text(jitter)}"] = network, last, gains[-1]
        seeds = len({row.seed for row in tables.select(rows, metric="objective")})

        def shown(numbers: Mapping[str, str]) -> str:
            return "; ".join(f"{text} ({place})" for place, text in numbers.items())

        return [
            exact("Without jitter the objective has no bound on the way to equal units: the last "
                  "tenfold step gains more than 1 nat and at least 0.9 of the one before",
                  all(last > max(0.9 * before, 1.0) for before, last, *_ in free.values()),
                  shown({k: f"{v[0]:.2f}, then {v[1]:.2f} nats" for k, v in free.items()}),
                  "infinite density", seeds=len(free)),
            exact("… the optimizer goes there: every run ends with a ratio of eigenvalues below "
                  "1e−10", all(ratio < 1e-10 for *_, ratio in free.values()),
                  shown({k: f"{v[3]:.0e}" for k, v in free.items()}), "pathological optima",
                  seeds=seeds),
            exact("… and every stage of smaller steps gains more than 1 nat",
                  all(min(gains) > 1 for _, _, gains, _ in free.values()),
                  shown({k: f"{min(v[2]):.1f} nats or more" for k, v in free.items()}),
                  "no finite optimum", seeds=seeds),
            exact("With jitter it is bounded: path and optimizer, in the end, gain less than a "
                  "tenth of what they gain without",
                  all(last < 0.1 * free[network][1] and gain < 0.1 * free[network][2][-1]
                      for network, last, gain in bounded.values()),
                  shown({k: f"{v[1]:.2f} and {v[2]:.2f} nats" for k, v in bounded.items()}),
                  "no pathological optima", seeds=seeds if bounded else 0),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        networks = list(dict.fromkeys(network for network, _ in _settings(rows)))
        figure, axes = figures.axes(3, len(networks), panel=(3.1, 2.5), squeeze=False)
        for line, network in zip(axes, networks, strict=True):
            jitters = [jitter for name, jitter in _settings(rows) if name == network]
            for jitter, style in zip(
                jitters, ("-", *(look["linestyle"] for look in LINES)), strict=False
            ):
                color = figures.COLORS["fs-map" if jitter else "ps-map"]
                label = power(jitter) if jitter else "no jitter"
                look = {"color": color, "label": label, "linestyle": style}
                _draw_setting(line, rows, network, jitter, look)
            line[0].set(xscale="log", xlabel="distance to equal units", ylabel="objective, nats")
            line[0].invert_xaxis()
            line[0].set_title(TITLES.get(network, network), loc="left")
            line[1].set(xlabel="step of Adam", ylabel="objective, nats")
            line[1].set_ylim(bottom=_floor(rows, network))
            line[2].set(
                xlabel="step of Adam", yscale="log", ylabel=r"$\lambda_{\min}/\lambda_{\max}$"
            )
            line[2].axhline(ROUNDING, color=figures.MUTED, linewidth=0.8, linestyle=":")
            for ax in line[1:]:
                _mark_stages(ax, rows, network)
        legend_above(figure, axes[0, 0])
        return {"moons-pathology": figure}


def last_decades(rows: Rows, network: str, jitter: float) -> list[float]:
    """Nats that the objective gains in each decade of the path."""
    values = _value(rows, "path", network, jitter)[::PER_DECADE]
    gains: list[float] = (values[1:] - values[:-1]).tolist()
    return gains


def stages(rows: Rows, network: str, jitter: float) -> list[float]:
    """Objective of each stage: median over seeds and over the second half of its records."""
    chosen = tables.select(rows, metric="objective", network=network, jitter=jitter)
    values = torch.tensor([row.value for row in chosen], dtype=torch.float64)  # [M, T]
    parts = values.tensor_split(chosen[0].config["stages"], dim=1)
    return [float(part[:, part.shape[1] // 2 :].median()) for part in parts]


def final_ratio(rows: Rows, network: str, jitter: float) -> float:
    """The ratio of eigenvalues at the end: that of the seed farthest from singular."""
    chosen = tables.select(rows, metric="eigenvalue_ratio", network=network, jitter=jitter)
    return max(float(row.value[-1]) for row in chosen)


def _gains(values: list[float]) -> list[float]:
    """What each stage gains; nan where there is only one."""
    return [b - a for a, b in zip(values, values[1:], strict=False)] or [math.nan]


def _settings(rows: Rows) -> list[tuple[str, float]]:
    found = tables.group(tables.select(rows, metric="path"), "network", "jitter")
    return [(network, jitter) for network, jitter in found]


def _value(rows: Rows, metric: str, network: str, jitter: float) -> Tensor:
    (row,) = tables.select(rows, metric=metric, network=network, jitter=jitter)
    return torch.tensor(row.value, dtype=torch.float64)


def _draw_setting(
    axes: Sequence[Axes], rows: Rows, network: str, jitter: float, look: dict[str, Any]
) -> None:
    distances = _value(rows, "distance", network, jitter)
    axes[0].plot(distances, _value(rows, "path", network, jitter), **look)
    step = _value(rows, "step", network, jitter)
    for ax, metric in zip(axes[1:], ("objective", "eigenvalue_ratio"), strict=True):
        chosen = tables.select(rows, metric=metric, network=network, jitter=jitter)
        values = torch.tensor([row.value for row in chosen], dtype=torch.float64)  # [M, T]
        if metric == "eigenvalue_ratio":
            values = values.clamp(min=ROUNDING)
        ax.fill_between(step, values.amin(0), values.amax(0), color=look["color"], alpha=0.12,
                        linewidth=0)  # fmt: skip
        ax.plot(step, values.median(0).values, **look)


def _floor(rows: Rows, network: str) -> float:
    """Lower end of the axis: the first steps, from random values, are left out."""
    chosen = tables.select(rows, metric="objective", network=network)
    values = torch.tensor([row.value for row in chosen], dtype=torch.float64)  # [runs, T]
    later = values[:, values.shape[1] // 10 :]
    return float(later.min() - 0.05 * (later.max() - later.min()))


def _mark_stages(ax: Axes, rows: Rows, network: str) -> None:
    row = tables.select(rows, metric="step", network=network)[0]
    length = max(row.value) / row.config["stages"]
    for stage in range(1, row.config["stages"]):
        ax.axvline(stage * length, color=figures.GRID, linewidth=0.8)
    ax.grid(visible=False, axis="x")
    ax.set_xticks([math.floor(stage * length) for stage in range(row.config["stages"] + 1)])
