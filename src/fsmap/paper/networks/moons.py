r"""``moons-eigs``, ``moons-solutions`` (Figs. A.4, A.5), ``moons-pathology`` (Theorems 1, 2).

200 points of scikit-learn's two moons, an MLP 2-16-16-2 with tanh and two logits, prior N(0, I),
p_X = 1600 points of a 40 × 40 grid on [-5, 5]². All jitters of one method and seed are trained as
one population.

Eigenvalues: L-MAP penalizes their sum, $\mathrm{Tr}\,\mathcal J = \sum_i \lambda_i$, FS-MAP
$\sum_i \log(\lambda_i + \epsilon)$, which a few large ones hardly change.

Pathology: as two hidden units merge (or one dies), $\mathcal J$ becomes singular and
$-\tfrac12\log\det\mathcal J$ grows without bound, whatever the data: along a straight path, and
under an optimizer. Near the singularity small eigenvalues are lost in the rounding of
$\mathcal J$, so the objective without jitter is computed from singular values of the Jacobian.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fsmap
from fsmap import metrics
from fsmap.errors import DivergedWarning, require
from fsmap.linalg.logdet import whitened_rows
from fsmap.models.mlp import MLP
from fsmap.objective.objective import Likelihood, Objective
from fsmap.paper.engine import Context, Experiment, Measured, Plots, exact, judge_all, paired_effect
from fsmap.paper.networks.clouds import eigenvalues, square
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import legend_above, power
from fsmap.paper.report.tables import epsilon
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.px import Lattice, Stream, generator
from fsmap.train.loop import adam
from fsmap.types import Batch, ModelFn, Params

METHODS = ("ps-map", "fs-map", "l-map")
FRESH = "fresh points of p_X at every step, not all 1600"


@dataclasses.dataclass(frozen=True)
class MoonsConfig:
    steps: int = 10_000  # steps of Adam, all data on each
    lr: float = 1e-3  # learning rate
    grid: int = 40  # points of p_X along each side
    lap_points: int = 400  # points a step for L-MAP, with one ψ
    det_points: int = 64  # points a step for FS-MAP
    seeds: int = 2  # runs; a seed decides the initial values, the points and ψ

    def objective(self, method: str, num_data: int, jitter: Tensor | None = None) -> Objective:
        """The objective of a method at a jitter; the paper does not print the prior."""
        terms, px = (fsmap.Categorical(), fsmap.Normal(1.0)), square(self.grid)
        sizes: dict[str, Any] = {"jitter": jitter, "num_data": num_data}
        if method == "ps-map":
            return fsmap.ps_map(*terms, num_data=num_data)
        if method == "fs-map":
            return fsmap.fs_map(*terms, px, num_points=min(self.det_points, len(px)), **sizes)
        points = min(self.lap_points, len(px))
        return fsmap.l_map(*terms, px, num_points=points, estimator="fd", **sizes)


def moons() -> Batch:
    """The paper's two moons in float64: inputs ``x [200, 2]``, labels ``y [200]`` 0 or 1."""
    datasets = require("sklearn.datasets", extra="data")
    x, y = datasets.make_moons(n_samples=200, shuffle=True, noise=0.2, random_state=0)
    return Batch(torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(y, dtype=torch.int64))


def network(seed: int) -> MLP:
    """The network with the initial values of a seed, as ``nn.Linear`` draws them, in float64."""
    return MLP([2, 16, 16, 2], "tanh", generator=generator("moons", seed)).double()


class Fitted(NamedTuple):
    where: dict[str, float]  # jitter; nothing for PS-MAP
    f: ModelFn
    params: Params
    data: Batch

    def logits(self, x: Tensor) -> Tensor:  # [S, 2]
        return self.f(self.params, x)

    def numbers(self, px: Lattice) -> dict[str, Any]:
        """How well the training points are fitted, and the eigenvalues of 𝒥."""
        logits, spectrum = self.logits(self.data.x), eigenvalues(self.f, self.params, px.all())
        return {
            "eigenvalue_sum": spectrum.sum(),
            "largest_eigenvalue": spectrum.max(),
            "train_accuracy": metrics.accuracy(logits, self.data.y),
            "train_nll": metrics.nll(logits, self.data.y),
        }


def train(
    config: MoonsConfig,
    method: str,
    jitters: Sequence[float],
    seed: int,
    advance: Callable[[float], None],
    start: Params | None = None,
) -> Iterator[Fitted]:
    """Train all jitters of a method as one population."""
    data = moons()
    f, params = fsmap.functional(network(seed))
    axes: dict[str, Sequence[Any]] = {} if method == "ps-map" else {"jitter": list(jitters)}
    grid = fsmap.Grid(**axes, seed=[seed])
    states, _ = fsmap.fit_population(
        partial(config.objective, method, len(data.y)),
        grid,
        f,
        data,
        steps=config.steps,
        init=params if start is None else start,
        optimizer=adam(config.lr),
        callback=lambda step, _: advance(step / config.steps),
        log_every=config.steps,
        progress=False,
    )
    for index, member in enumerate(grid):
        where = {"jitter": member["jitter"]} if axes else {}
        yield Fitted(where, f, states.member(index).params, data)


@dataclasses.dataclass(frozen=True)
class EigsConfig(MoonsConfig):
    jitters: tuple[float, ...] = (1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0, 1e2)  # ε


class MoonsEigs(Experiment):
    id = "moons-eigs"
    label = "Fig. A.4"
    title = "Eigenvalues after training on two moons"
    see = "Sum of the eigenvalues of 𝒥 against ε: L-MAP penalizes it, FS-MAP a sum of logarithms."
    cost = "15 min"
    protocol = "prior N(0, I); FS-MAP: det_points, L-MAP: one ψ and lap_points fresh points a step"
    group = "networks"
    departures = (FRESH,)
    metrics = ("eigenvalue_sum", "largest_eigenvalue", "train_accuracy", "train_nll")
    columns = ("metric", "method", "jitter")
    config = EigsConfig()
    quick = EigsConfig(
        steps=500, lr=1e-2, lap_points=100, det_points=48, seeds=1, jitters=(1e-10, 1e-4, 1.0, 1e2)
    )

    def units(self, config: EigsConfig) -> list[Unit]:
        seeds = range(config.seeds)
        return [{"method": method, "seed": seed} for method in METHODS for seed in seeds]

    def run(self, config: EigsConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        method, seed = unit["method"], unit["seed"]
        for fitted in train(config, method, config.jitters, seed, context.advance):
            for metric, value in fitted.numbers(square(config.grid)).items():
                yield Measured(metric, value, method, seed, fitted.where)

    def claims(self, rows: Rows) -> list[Claim]:
        sums = tables.select(rows, metric="eigenvalue_sum")
        jitters = [row.config["jitter"] for row in sums if row.method != "ps-map"]
        low, high = tables.smallest(jitters), tables.largest(jitters)
        small, large = (
            {tables.word(method): paired_effect(sums, {"method": method, "jitter": jitter},
                                            {"method": "ps-map"}, ratio=True)
             for method in ("fs-map", "l-map")}
            for jitter in (low, high)
        )  # fmt: skip
        return [
            judge_all(f"At {epsilon(low)} the sum is below a tenth of PS-MAP's, for FS-MAP and "
                      "L-MAP", small, ratio=True, below=0.1, paper="significantly reduced"),
            judge_all(f"At {epsilon(high)} it is that of PS-MAP to a factor of 2", large,
                      ratio=True, within=2, source="ours"),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, ax = figures.axes(panel=(4.2, 3.0))
        sums = tables.select(rows, metric="eigenvalue_sum")
        for method in ("fs-map", "l-map"):
            figures.plot_mean(ax, *tables.line(sums, "jitter", method=method), method)
        base = tables.mean_of(sums, method="ps-map")
        ax.axhline(base, **figures.method_style("ps-map", marker=""))
        ax.set(xscale="log", yscale="log", xlabel=r"jitter $\epsilon$")
        ax.set_ylabel(r"sum of eigenvalues of $\mathcal{J}$")
        figures.legend_above(figure, ax)
        return {"moons-eigs": figure}


LOW, HIGH = (-2.2, -1.7), (3.2, 2.2)  # corners of the picture


def axes_of(pixels: int) -> list[Tensor]:
    """Coordinates of the picture's columns and rows, ``[pixels]`` each."""
    ends = zip(LOW, HIGH, strict=True)
    return [torch.linspace(a, b, pixels, dtype=torch.float64) for a, b in ends]


PAPER_JITTERS = (1e-2, 1e-1, 1.0, 10.0)  # the four panels of the paper
RANDOM, CHAIN = "random", "chain"
"""Where training starts: random initial values (the paper), or the solution of the next larger
jitter, the first of all from PS-MAP's."""


@dataclasses.dataclass(frozen=True)
class SolutionsConfig(MoonsConfig):
    seeds: int = 1
    between: int = 3  # jitters between two of the paper's
    pixels: int = 32  # points of the picture along each side

    def jitters(self) -> list[float]:
        """The paper's four, with others between."""
        steps = 3 * (self.between + 1)
        return [float(f"{10 ** (3 * k / steps - 2):.3g}") for k in range(steps + 1)]


class MoonsSolutions(Experiment):
    id = "moons-solutions"
    label = "Fig. A.5"
    title = "L-MAP on two moons as ε grows"
    see = "Decision functions: ε sets how much a function may depend on its parameters."
    cost = "5 min"
    protocol = "prior N(0, I); forward differences, one ψ and lap_points fresh points of p_X a step"
    group = "networks"
    departures = (FRESH,)
    metrics = ("train_nll", "train_accuracy", "spread")
    columns = ("metric", "method", "start", "jitter")
    config = SolutionsConfig()
    quick = SolutionsConfig(steps=400, lr=1e-2, lap_points=100, between=1, pixels=48)

    def units(self, config: SolutionsConfig) -> list[Unit]:
        kinds = [("ps-map", RANDOM), ("l-map", RANDOM), ("l-map", CHAIN)]
        pairs = itertools.product(range(config.seeds), kinds)
        return [{"method": method, "start": start, "seed": seed} for seed, (method, start) in pairs]

    def run(self, config: SolutionsConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        method, start, seed = unit["method"], unit["start"], unit["seed"]
        fits = train(config, method, config.jitters(), seed, context.advance)
        if start == CHAIN:
            fits = chain(config, seed, context.advance)
        for fitted in fits:
            where = {**fitted.where, "start": start}
            probability = fitted.logits(square(config.grid).all()).softmax(1)[:, 1]
            columns, lines = axes_of(config.pixels)
            pixels = torch.cartesian_prod(lines, columns).flip(-1)  # row by row from below
            found = fitted.numbers(square(config.grid))
            found["spread"] = probability.max() - probability.min()
            picture = fitted.logits(pixels).softmax(1)[:, 1].tolist()
            found["probability"] = [round(p, 4) for p in picture]
            del found["largest_eigenvalue"]
            for metric, value in found.items():
                yield Measured(metric, value, method, seed, where)
        if method == "ps-map" and seed == 0:
            yield Measured("inputs", fitted.data.x)
            yield Measured("labels", fitted.data.y)

    def claims(self, rows: Rows) -> list[Claim]:
        fits = "train_nll", "train_accuracy"
        spread, nll, accuracy = (by_jitter(rows, metric) for metric in ("spread", *fits))
        held = by_jitter(rows, "spread", CHAIN)
        if not (spread and held and tables.select(rows, method="ps-map")):
            text = "L-MAP goes from a near-constant function to a perfect fit as ε grows"
            return [exact(text, False, None, seeds=0)]
        low, high = min(spread), max(spread)
        ps_nll, ps_accuracy = (tables.mean_of(rows, metric=m, method="ps-map") for m in fits)
        rise = max(b - a for a, b in itertools.pairwise(nll.values()))
        (jump, place), (smooth, there) = (largest_jump(rows, start) for start in (RANDOM, CHAIN))
        both = [j for j in spread if spread[j] < 0.05 and held.get(j, 0.0) > 0.3]
        seeds = len({row.seed for row in tables.select(rows, metric="spread")})
        found = [
            exact(f"Near-constant at {epsilon(low)}: probabilities differ by less than 0.05",
                  spread[low] < 0.05, spread[low], "near-zero function, severe underfit",
                  seeds=seeds),
            exact(f"As good as PS-MAP at {epsilon(high)}: accuracy within 1 %, NLL within 0.02",
                  accuracy[high] > ps_accuracy - 0.01 and nll[high] < ps_nll + 0.02,
                  f"{accuracy[high]:.3f}, {nll[high]:.3f} (PS-MAP {ps_accuracy:.3f}, {ps_nll:.3f})",
                  "fits the data perfectly", seeds=seeds),
            exact("The fit gets better all the way: from one ε to the next NLL never rises by 0.01",
                  rise < 0.01, rise, "evolves from one to the other", seeds=seeds),
            exact("No jump, each ε from random values: no step to the next ε is half of the way",
                  jump < 0.5, f"{jump:.2f} of the way, at ε = {place:.3g}", "varies smoothly",
                  seeds=seeds),
            exact("No jump, each ε from the next larger one: no step is half of the way",
                  smooth < 0.5, f"{smooth:.2f} of the way, at ε = {there:.3g}", source="ours",
                  seeds=seeds),
            exact("Some ε has two optima (constant from random values, spread above 0.3 from the "
                  "next larger ε)", bool(both), ", ".join(f"{j:.3g}" for j in both) or "none",
                  source="ours", seeds=seeds),
        ]  # fmt: skip
        alone: dict[str, Any] = {"holds": None, "reason": "one seed: the error is not known"}
        return found if seeds > 1 else [claim._replace(**alone) for claim in found]

    def draw(self, rows: Rows) -> Plots:
        figure, axes = figures.axes(len(PAPER_JITTERS), panel=(2.6, 2.5), sharey=True)
        where = {"metric": "probability", "method": "l-map", "start": RANDOM, "seed": 0}
        look = {"cmap": "coolwarm", "alpha": 0.5, "vmin": 0, "vmax": 1, "interpolation": "bilinear"}
        look |= {"origin": "lower", "aspect": "auto", "extent": (LOW[0], HIGH[0], LOW[1], HIGH[1])}
        if not (tables.select(rows, **where) and tables.select(rows, metric="inputs")):
            return {}
        x, y = (torch.tensor(tables.values(rows, metric=m)[0]) for m in ("inputs", "labels"))
        for ax, jitter in zip(axes, PAPER_JITTERS, strict=True):
            (values,) = tables.values(rows, jitter=jitter, **where)
            pixels = math.isqrt(len(values))
            field = torch.tensor(values).reshape(pixels, pixels).numpy()
            image = ax.imshow(field, **look)
            if field.min() < 0.45 and field.max() > 0.55:  # the contour of a constant is arbitrary
                columns, lines = (axis.numpy() for axis in axes_of(pixels))
                ax.contour(columns, lines, field, [0.5], colors=[figures.BLACK], linewidths=1.2)
            for label, method in ((0, "ps-map"), (1, "fs-map")):
                ax.scatter(*x[y == label].mT, s=9, color=figures.COLORS[method],
                           edgecolor=figures.WHITE, linewidth=0.4)  # fmt: skip
            ax.set(xlabel="$x_1$", title=epsilon(jitter))
            ax.grid(visible=False)
        axes[0].set_ylabel("$x_2$")
        figure.colorbar(image, ax=axes, label="probability of class 1", ticks=[0, 0.5, 1])
        return {"moons-solutions": figure}


def chain(config: SolutionsConfig, seed: int, advance: Callable[[float], None]) -> Iterator[Fitted]:
    """Train L-MAP at one jitter after another, from the largest down, each from the one before."""
    (fitted,) = train(config, "ps-map", (), seed, lambda _: None)
    link = dataclasses.replace(config, steps=max(1, config.steps // 5))  # starts near the solution
    jitters = sorted(config.jitters(), reverse=True)
    for done, jitter in enumerate(jitters, start=1):
        (fitted,) = train(link, "l-map", [jitter], seed, lambda _: None, fitted.params)
        yield fitted
        advance(done / len(jitters))


def largest_jump(rows: Rows, start: str) -> tuple[float, float]:
    """The largest change of the function between neighbors, of any seed, and the ε at its end."""
    found = []
    where = {"metric": "probability", "method": "l-map", "start": start}
    for some in tables.group(rows, "seed", **where).values():
        ordered = sorted(some, key=lambda row: row.config["jitter"])
        fields = torch.tensor([row.value for row in ordered], dtype=torch.float64)  # [k, n]
        share = (fields[1:] - fields[:-1]).abs().mean(1) / (fields[-1] - 0.5).abs().mean()
        place = int(share.argmax())
        found.append((float(share[place]), float(ordered[place + 1].config["jitter"])))
    return max(found)


def by_jitter(rows: Rows, metric: str, start: str = RANDOM) -> dict[float, float]:
    """A metric of L-MAP, mean over seeds, in the order of ε."""
    return tables.means_by(rows, "jitter", metric=metric, method="l-map", start=start)


PER_DECADE = 8


@dataclasses.dataclass(frozen=True)
class PathologyConfig:
    jitters: tuple[float, ...] = (1e-8, 1e-4, 1e-2)  # ε > 0 that are compared with ε = 0
    decades: int = 4  # how near the path comes to the merged units: 10^-decades
    seeds: int = 5  # initial values for the optimizer
    steps: int = 300  # steps per stage
    stages: int = 4  # stages, each with a tenth of the learning rate of the one before
    lr: float = 0.03  # learning rate of the first stage


class Problem(NamedTuple):
    """A small network, its data and likelihood, and p_X."""

    sizes: tuple[int, ...]
    bias: bool
    data: Batch
    likelihood: Likelihood
    px: Lattice

    def network(self, seed: int) -> MLP:
        source = generator("singular-paths", self.sizes, seed)
        options: dict[str, Any] = {"bias": self.bias, "init": "lecun", "generator": source}
        return MLP(self.sizes, "tanh", **options).double()

    def objective(self, jitter: float) -> Objective:
        """FS-MAP on all points of p_X; without jitter from singular values."""
        method = "dense" if jitter else "svd_clip"  # with ε = 0 nothing is clipped
        sizes: dict[str, Any] = {"num_points": len(self.px), "num_data": len(self.data.y)}
        terms = self.likelihood, fsmap.Normal(1.0), self.px
        return fsmap.fs_map(*terms, jitter=jitter, method=method, **sizes)

    def log_density(self, objective: Objective, f: ModelFn, params: Params) -> Tensor:
        with torch.no_grad():
            draws = objective.draw(f, params, Stream(0, 0))
            return -objective.loss(f, params, self.data, draws)[0] * objective.num_data


def problem_of(name: str) -> Problem:
    """The network of appendix B.6, w₂ᵀ tanh(w₁x), or 2-4-1 with one logit on two moons."""
    if name == "1-2-1":  # data: noisy values of such a network with unequal units
        x = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]
        noise = torch.randn(20, 1, generator=generator("four-parameters"), dtype=torch.float64)
        y = torch.tanh(2 * x) - 0.5 * torch.tanh(0.5 * x) + 0.3 * noise
        return Problem((1, 2, 1), False, Batch(x, y), fsmap.Gaussian(0.3), square(41, 3.0, 1))
    data = moons()
    batch = Batch(data.x, data.y[:, None].double())
    return Problem((2, 4, 1), True, batch, fsmap.Bernoulli(), square(12))


NETWORKS = {
    "1-2-1": "1-2-1, four parameters (appendix B.6)",
    "2-4-1": "2-4-1 on two moons, 17 parameters",
}


def merged(params: Params) -> Params:
    """The same network with its first two hidden units replaced by their mean."""
    result = {name: p.clone() for name, p in params.items()}
    for name, p in result.items():
        if name.startswith("layers.0."):  # incoming weights: the first dimension is the unit
            p[:2] = p[:2].mean(0, keepdim=True)
    out = result["layers.1.weight"]
    out[:, :2] = out[:, :2].mean(1, keepdim=True)
    return result


def path(problem: Problem, jitter: float, distances: list[float]) -> Tensor:
    """The objective on the way from a random network to the one with two units merged."""
    f, params = fsmap.functional(problem.network(0))
    start = {name: p.detach() for name, p in params.items()}
    end, objective = merged(start), problem.objective(jitter)
    places = [{n: end[n] + t * (start[n] - end[n]) for n in start} for t in distances]
    return torch.stack([problem.log_density(objective, f, params) for params in places])


def climb(
    problem: Problem, jitter: float, config: PathologyConfig, advance: Callable[[float], None]
) -> list[tuple[int, Tensor, Tensor]]:
    """Steps of Adam, objectives in nats, smallest eigenvalues over the largest, ``[M]`` (seeds)."""
    # in stages: Adam's steps are as long as the learning rate, each comes ten times nearer
    steps, every = config.steps, max(1, config.steps // 10)
    f, x = fsmap.functional(problem.network(0))[0], problem.px.all()
    starts = {seed: problem.network(seed).named_parameters() for seed in range(config.seeds)}
    current = {seed: {n: p.detach() for n, p in named} for seed, named in starts.items()}
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

        with warnings.catch_warnings():
            # divergence is expected: the objective is infinite
            warnings.simplefilter("ignore", DivergedWarning)
            fsmap.fit_population(
                lambda: objective,
                fsmap.Grid(seed=list(current)),
                f,
                problem.data,
                steps=steps,
                init=current.__getitem__,
                optimizer=adam(config.lr * 0.1**stage),
                callback=record,
                log_every=steps,
                progress=False,
            )
    return records


def _ratio(f: ModelFn, params: Params, x: Tensor) -> Tensor:
    with torch.no_grad():
        singular = torch.linalg.svdvals(whitened_rows(f, params, x))
    return (singular[-1] / singular[0]).square()


class MoonsPathology(Experiment):
    id = "moons-pathology"
    label = "Theorems 1, 2"
    title = "Pathological optima without jitter"
    see = "The objective on a straight path to two equal units, and as an optimizer climbs it."
    cost = "2 min"
    protocol = "ε = 0: log det 𝒥 from singular values; Adam in stages of ten times smaller rates"
    group = "networks"
    config = PathologyConfig()
    quick = PathologyConfig(jitters=(1e-8, 1e-4), seeds=2, steps=50)

    def units(self, config: PathologyConfig) -> list[Unit]:
        jitters = (0.0, *config.jitters)
        return [{"network": name, "jitter": jitter} for name in NETWORKS for jitter in jitters]

    def run(self, config: PathologyConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        problem, jitter = problem_of(unit["network"]), unit["jitter"]
        places = range(config.decades * PER_DECADE + 1)
        distances = [10.0 ** (-k / PER_DECADE) for k in places]  # from afar to near
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
        pairs = [one for one in found if one.jitter and one.network in free]
        bounded = {f"{one.network}, {epsilon(one.jitter)}": one for one in pairs}
        seeds = len({row.seed for row in tables.select(rows, metric="objective", jitter=0.0)})
        staged = seeds if all(len(one.gains) > 1 for one in free.values()) else 0

        def shown(numbers: Mapping[str, str]) -> str:
            return "; ".join(f"{text} ({place})" for place, text in numbers.items())

        return [
            exact("Without jitter the objective has no bound on the way to equal units: the last "
                  "tenfold step gains more than 1 nat and at least 0.9 of the one before",
                  all(one.decades[-1] > max(0.9 * one.decades[-2], 1.0) for one in free.values()),
                  shown({k: "{:.2f}, then {:.2f} nats".format(*v.decades[-2:])
                         for k, v in free.items()}),
                  "infinite density", seeds=len([v for v in free.values() if len(v.decades) > 2])),
            exact("… the optimizer goes there: every run ends with a ratio of eigenvalues below "
                  "1e−10", all(one.final_ratio < 1e-10 for one in free.values()),
                  shown({k: f"{v.final_ratio:.0e}" for k, v in free.items()}),
                  "pathological optima", seeds=seeds),
            exact("… and every stage of smaller steps gains more than 1 nat",
                  all(tables.smallest(one.gains[1:]) > 1 for one in free.values()),
                  shown({k: f"{tables.smallest(v.gains[1:]):.1f} nats or more"
                         for k, v in free.items()}),
                  "no finite optimum", seeds=staged),
            exact("With jitter it is bounded: path and optimizer, in the end, gain less than a "
                  "tenth of what they gain without",
                  all(one.decades[-1] < 0.1 * free[one.network].decades[-1]
                      and one.gains[-1] < 0.1 * free[one.network].gains[-1]
                      for one in bounded.values()),
                  shown({k: f"{v.decades[-1]:.2f} and {v.gains[-1]:.2f} nats"
                         for k, v in bounded.items()}),
                  "no pathological optima", seeds=staged if bounded else 0),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, axes = figures.axes(2, len(NETWORKS), panel=(3.6, 2.5))
        for (left, right), (network, title) in zip(axes, NETWORKS.items(), strict=True):
            mine = [one for one in settings(rows) if one.network == network]
            for one, style in zip(mine, ("-", "--", "-.", ":"), strict=False):
                color = figures.COLORS["fs-map"]
                label = power(one.jitter) if one.jitter else "no jitter"
                left.plot(one.distance, one.path, color=color, label=label, linestyle=style)
                values = one.objective[:, len(one.step) // 10 :]  # not the first steps, [M, T]
                step = one.step[-values.shape[1] :]
                ends = values.amin(0), values.amax(0)
                right.fill_between(step, *ends, color=color, alpha=0.12, linewidth=0)
                median = values.median(0).values
                right.plot(step, median, color=color, label=f"_{label}", linestyle=style)
            left.set(xscale="log", xlabel="distance to equal units", ylabel="objective, nats")
            left.invert_xaxis()
            left.set_title(title, loc="left")
            right.set(xlabel="step of Adam", ylabel="objective, nats")
        legend_above(figure, axes[0, 0])
        return {"moons-pathology": figure}


class Setting(NamedTuple):
    """Results of one network at one jitter."""

    network: str
    jitter: float
    distance: Tensor  # [k]  to equal units
    path: Tensor  # [k]  objective there
    step: Tensor  # [T]
    objective: Tensor  # [M, T]
    decades: list[float]  # nan, and nats that the objective gains in each decade of the path
    gains: list[float]  # nan, and nats that each further stage of the optimizer gains
    final_ratio: float  # of eigenvalues, at the end, of the seed farthest from singular


def settings(rows: Rows) -> list[Setting]:
    """Every network at every jitter, in the order of the rows."""
    found = []
    for network, jitter in tables.group(rows, "network", "jitter", metric="path"):
        here = tables.select(rows, network=network, jitter=jitter)
        distance, path, step, objective, ratio = (
            torch.tensor(tables.values(here, metric=metric), dtype=torch.float64)
            for metric in ("distance", "path", "step", "objective", "eigenvalue_ratio")
        )
        stages = tables.select(here, metric="objective")[0].config["stages"]
        # of each stage the median over seeds and over the second half of its records
        parts = objective.tensor_split(stages, dim=1)
        ends = [part[:, part.shape[1] // 2 :].median() for part in parts]
        gains = [math.nan, *torch.stack(ends).diff().tolist()]
        decades = [math.nan, *path[0, ::PER_DECADE].diff().tolist()]
        end = float(ratio[:, -1].max())
        about = network, jitter, distance[0], path[0], step[:1].ravel(), objective
        found.append(Setting(*about, decades, gains, end))
    return found
