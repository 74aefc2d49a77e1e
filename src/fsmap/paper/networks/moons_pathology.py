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
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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
from fsmap.paper.solvers import Advance, one_thread
from fsmap.px import Lattice, Stream, generator
from fsmap.train.grid import Grid
from fsmap.train.optim import adam
from fsmap.train.population import fit_population
from fsmap.types import Batch, ModelFn, Params

PER_DECADE = 8


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


def problem_of(name: str) -> Problem:
    """The network of appendix B.6, w₂ᵀ tanh(w₁x), or a 2-4-1 network with one logit on two moons.

    The data of the first are noisy values of one with unequal units.
    """
    if name == "1-2-1":
        x = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]
        noise = torch.randn(20, 1, generator=generator("four-parameters"), dtype=torch.float64)
        y = torch.tanh(2 * x) - 0.5 * torch.tanh(0.5 * x) + 0.3 * noise
        return Problem((1, 2, 1), False, Batch(x, y), Gaussian(0.3), square(41, 3.0, 1))
    data = moons(dtype=torch.float64)
    batch = Batch(data.x, data.y[:, None].double())
    return Problem((2, 4, 1), True, batch, Bernoulli(), square(12))


NETWORKS = {
    "1-2-1": "1-2-1, four parameters (appendix B.6)",
    "2-4-1": "2-4-1 on two moons, 17 parameters",
}


def merged(params: Params) -> Params:
    """The same network with its first two hidden units replaced by their mean."""
    result = {name: p.clone() for name, p in params.items()}
    for name, p in result.items():
        if name.startswith("layers.0."):  # what comes in: the first dimension is the unit
            p[:2] = p[:2].mean(0, keepdim=True)
    out = result["layers.1.weight"]
    out[:, :2] = out[:, :2].mean(1, keepdim=True)
    return result


def path(problem: Problem, jitter: float, distances: list[float]) -> Tensor:
    """The objective on the way from a random network to the one with two units merged."""
    f, params = functional(problem.network(0))
    start = {name: p.detach() for name, p in params.items()}
    end, objective = merged(start), problem.objective(jitter)
    places = [{n: end[n] + t * (start[n] - end[n]) for n in start} for t in distances]
    return torch.stack([problem.log_density(objective, f, params) for params in places])


def climb(
    problem: Problem, jitter: float, config: PathologyConfig, advance: Advance
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Maximize the objective with Adam, in stages of ten times smaller steps.

    Adam's steps have the size of the learning rate, however steep the objective is. So the distance
    to a singularity that it can keep is about one learning rate, and each stage shows what a
    tenth of the distance is worth. Records are a step, and for each seed the objective in nats and
    the smallest eigenvalue of 𝒥 over the largest, ``[M]``.
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
    yield from records


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
        return [{"network": name, "jitter": jitter} for name in NETWORKS for jitter in jitters]

    def run(self, config: PathologyConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        problem, jitter = problem_of(unit["network"]), unit["jitter"]
        distances = config.distances()
        yield Measured("distance", distances, config=unit)
        yield Measured("path", path(problem, jitter, distances), "fs-map", config=unit)
        step, objective, ratio = zip(*climb(problem, jitter, config, context.advance), strict=True)
        where = {**unit, "stages": config.stages}
        yield Measured("step", step, config=where)
        for seed in range(config.seeds):
            yield Measured("objective", torch.stack(objective)[:, seed], "fs-map", seed, where)
            yield Measured("eigenvalue_ratio", torch.stack(ratio)[:, seed], "fs-map", seed, where)

    def table(self, rows: Rows) -> list[dict[str, Any]]:
        text = "nats gained in the last decade of the path"
        return [
            {"network": s.network, "jitter": s.jitter, "metric": text, "ours": s.decades[-1]}
            for s in settings(rows)
        ]

    def claims(self, rows: Rows) -> list[Claim]:
        found = settings(rows)
        free = {one.network: one for one in found if one.jitter == 0}
        bounded = {f"{one.network}, {jitter_text(one.jitter)}": one for one in found if one.jitter}
        seeds = len({row.seed for row in tables.select(rows, metric="objective")})

        def shown(numbers: Mapping[str, str]) -> str:
            return "; ".join(f"{text} ({place})" for place, text in numbers.items())

        def ends(one: Setting) -> tuple[float, float]:
            """What the last two decades of the path gain."""
            before, last = [math.nan, *one.decades][-2:]
            return before, last

        return [
            exact("Without jitter the objective has no bound on the way to equal units: the last "
                  "tenfold step gains more than 1 nat and at least 0.9 of the one before",
                  all(last > max(0.9 * before, 1.0) for before, last in map(ends, free.values())),
                  shown({k: "{:.2f}, then {:.2f} nats".format(*ends(v)) for k, v in free.items()}),
                  "infinite density", seeds=len(free)),
            exact("… the optimizer goes there: every run ends with a ratio of eigenvalues below "
                  "1e−10", all(one.final_ratio < 1e-10 for one in free.values()),
                  shown({k: f"{v.final_ratio:.0e}" for k, v in free.items()}),
                  "pathological optima", seeds=seeds),
            exact("… and every stage of smaller steps gains more than 1 nat",
                  all(min(one.gains) > 1 for one in free.values()),
                  shown({k: f"{min(v.gains):.1f} nats or more" for k, v in free.items()}),
                  "no finite optimum", seeds=seeds),
            exact("With jitter it is bounded: path and optimizer, in the end, gain less than a "
                  "tenth of what they gain without",
                  all(one.decades[-1] < 0.1 * free[one.network].decades[-1]
                      and one.gains[-1] < 0.1 * free[one.network].gains[-1]
                      for one in bounded.values()),
                  shown({k: f"{v.decades[-1]:.2f} and {v.gains[-1]:.2f} nats"
                         for k, v in bounded.items()}),
                  "no pathological optima", seeds=seeds if bounded else 0),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, axes = figures.axes(2, len(NETWORKS), panel=(3.6, 2.5))
        for (left, right), (network, title) in zip(axes, NETWORKS.items(), strict=True):
            mine = [one for one in settings(rows) if one.network == network]
            for one, style in zip(mine, ("-", *(x["linestyle"] for x in LINES)), strict=False):
                color = figures.COLORS["fs-map" if one.jitter else "ps-map"]
                label = power(one.jitter) if one.jitter else "no jitter"
                left.plot(one.distance, one.path, color=color, label=label, linestyle=style)
                values = one.objective[:, len(one.step) // 10 :]  # not the first steps, [M, T]
                step = one.step[-values.shape[1] :]
                ends = values.amin(0), values.amax(0)
                right.fill_between(step, *ends, color=color, alpha=0.12, linewidth=0)
                right.plot(step, values.median(0).values, color=color, linestyle=style)
            left.set(xscale="log", xlabel="distance to equal units", ylabel="objective, nats")
            left.invert_xaxis()
            left.set_title(title, loc="left")
            right.set(xlabel="step of Adam", ylabel="objective, nats")
        legend_above(figure, axes[0, 0])
        return {"moons-pathology": figure}


class Setting(NamedTuple):
    """What the rows say about one network at one jitter."""

    network: str
    jitter: float
    parts: int  # stages of the optimizer
    distance: Tensor  # [k]  to equal units
    path: Tensor  # [k]  objective there
    step: Tensor  # [T]
    objective: Tensor  # [M, T]
    ratio: Tensor  # [M, T]  smallest eigenvalue over the largest

    @property
    def decades(self) -> list[float]:
        """Nats that the objective gains in each decade of the path."""
        gains: list[float] = self.path[::PER_DECADE].diff().tolist()
        return gains

    @property
    def stages(self) -> list[float]:
        """Objective of each stage: median over seeds and over the second half of its records."""
        parts = self.objective.tensor_split(self.parts, dim=1)
        return [float(part[:, part.shape[1] // 2 :].median()) for part in parts]

    @property
    def gains(self) -> list[float]:
        """What each stage gains; nan where there is only one."""
        return [b - a for a, b in itertools.pairwise(self.stages)] or [math.nan]

    @property
    def final_ratio(self) -> float:
        """The ratio of eigenvalues at the end: that of the seed farthest from singular."""
        return float(self.ratio[:, -1].max())


def settings(rows: Rows) -> list[Setting]:
    """Every network at every jitter, in the order of the rows."""
    found = []
    for network, jitter in tables.group(tables.select(rows, metric="path"), "network", "jitter"):
        here = tables.select(rows, network=network, jitter=jitter)
        distance, path, step, objective, ratio = (
            torch.tensor(tables.values(here, metric=metric), dtype=torch.float64)
            for metric in ("distance", "path", "step", "objective", "eigenvalue_ratio")
        )
        parts = tables.select(here, metric="objective")[0].config["stages"]
        about = network, jitter, parts, distance[0], path[0], step[:1].ravel()
        found.append(Setting(*about, objective, ratio))
    return found
