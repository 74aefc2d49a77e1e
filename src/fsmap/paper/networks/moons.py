r"""``moons-eigs``, ``moons-solutions`` (Figs. A.4, A.5): the two moons as ε grows.

200 points of scikit-learn's two moons, an MLP 2-16-16-2 with tanh and two logits, prior N(0, I),
p_X = 1600 points of a 40 × 40 grid on [-5, 5]². All jitters of one method and seed are trained as
one population.

Eigenvalues: $\mathrm{Tr}\,\mathcal J = \sum_i \lambda_i$ on all points of $p_X$ after training,
against $\epsilon$. L-MAP penalizes this very sum. FS-MAP penalizes $\sum_i \log(\lambda_i +
\epsilon)$, which a few large eigenvalues hardly change.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fsmap.data.synthetic import moons
from fsmap.functional import functional
from fsmap.models.mlp import MLP
from fsmap.objective.likelihood import Categorical
from fsmap.objective.objective import Objective, fs_map, l_map, ps_map
from fsmap.objective.prior import Normal
from fsmap.paper.experiment import Context, Experiment, Measured, Plots, compare, exact, judge_all
from fsmap.paper.networks.clouds import eigenvalues, jitter_text, square
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import Frame, Interactive
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.paper.solvers import Advance, one_thread
from fsmap.px import Lattice, generator
from fsmap.train.grid import Grid
from fsmap.train.optim import adam
from fsmap.train.population import fit_population
from fsmap.types import Batch, ModelFn, Params

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHODS = ("ps-map", "fs-map", "l-map")
FRESH = "fresh points of p_X at every step, not all 1600"


@dataclasses.dataclass(frozen=True)
class MoonsConfig:
    steps: int = 10_000  # steps of Adam, all data on each
    lr: float = 1e-3  # learning rate
    grid: int = 40  # points of p_X along each side
    lap_points: int = 400  # points a step for L-MAP, with one ψ
    det_points: int = 64  # points a step for FS-MAP
    seeds: int = 2  # runs; a seed decides the first values, the points and ψ

    def px(self) -> Lattice:
        """The evaluation distribution."""
        return square(self.grid)

    def objective(self, method: str, num_data: int, jitter: Tensor | None = None) -> Objective:
        """The objective of a method at a jitter; the paper does not print the prior."""
        terms, px = (Categorical(), Normal(1.0)), self.px()
        sizes: dict[str, Any] = {"jitter": jitter, "num_data": num_data}
        if method == "ps-map":
            return ps_map(*terms, num_data=num_data)
        if method == "fs-map":
            return fs_map(*terms, px, num_points=min(self.det_points, len(px)), **sizes)
        points = min(self.lap_points, len(px))
        return l_map(*terms, px, num_points=points, estimator="fd", **sizes)


def network(seed: int) -> MLP:
    """The network with the first values of a seed, as ``nn.Linear`` draws them, in float64."""
    model = MLP([2, 16, 16, 2], "tanh", generator=generator("moons", seed))
    return model.double()


class Fitted(NamedTuple):
    """One trained member."""

    where: dict[str, float]  # jitter; nothing for PS-MAP
    f: ModelFn
    params: Params
    data: Batch

    def logit(self, x: Tensor) -> Tensor:
        """Logit of class 1, ``[S]``."""
        with torch.no_grad():
            out = self.f(self.params, x)  # [S, 2]
        return out[:, 1] - out[:, 0]

    def accuracy(self) -> float:
        """Share of training points on the right side."""
        right = (self.logit(self.data.x) > 0) == (self.data.y == 1)
        return float(right.double().mean())

    def nll(self) -> float:
        """Mean negative log-likelihood of the training points, in nats."""
        sign = 2.0 * self.data.y - 1
        return float(torch.nn.functional.softplus(-sign * self.logit(self.data.x)).mean())


def train(
    config: MoonsConfig,
    method: str,
    jitters: Sequence[float],
    seed: int,
    advance: Advance,
    start: Params | None = None,
) -> Iterator[Fitted]:
    """Train all jitters of a method as one population."""
    data = moons(dtype=torch.float64)
    f, params = functional(network(seed))
    axes: dict[str, Sequence[Any]] = {} if method == "ps-map" else {"jitter": list(jitters)}
    grid = Grid(**axes, seed=[seed])
    with one_thread():
        states, _ = fit_population(
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
    see = (
        "The sum of the eigenvalues of 𝒥 after training, against ε. L-MAP penalizes this sum, "
        "FS-MAP the sum of logarithms."
    )
    cost = "15 min"
    protocol = (
        "jittered objective, prior N(0, I), first values as nn.Linear draws them; FS-MAP: "
        "log det(𝒥 + εI) of det_points fresh points a step; L-MAP: forward differences (β = 1e-3), "
        "one ψ and lap_points fresh points a step; eigenvalues on all 1600 points"
    )
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
            spectrum = eigenvalues(fitted.f, fitted.params, config.px().all())
            found = {
                "eigenvalue_sum": spectrum.sum(),
                "largest_eigenvalue": spectrum.max(),
                "train_accuracy": fitted.accuracy(),
                "train_nll": fitted.nll(),
            }
            for metric, value in found.items():
                yield Measured(metric, value, method, seed, fitted.where)

    def claims(self, rows: Rows) -> list[Claim]:
        sums = tables.select(rows, metric="eigenvalue_sum")
        jitters = sorted({row.config["jitter"] for row in sums if row.method != "ps-map"})
        low, high = (jitters or [math.nan])[0], (jitters or [math.nan])[-1]
        small, large = (
            {figures.NAMES[method]: compare(sums, {"method": method, "jitter": jitter},
                                            {"method": "ps-map"}, ratio=True)
             for method in ("fs-map", "l-map")}
            for jitter in (low, high)
        )  # fmt: skip
        return [
            judge_all(f"At {jitter_text(low)} the sum is below a tenth of PS-MAP's, for FS-MAP and "
                      "L-MAP", small, ratio=True, below=0.1, paper="significantly reduced"),
            judge_all(f"At {jitter_text(high)} it is that of PS-MAP to a factor of 2", large,
                      ratio=True, within=2, source="ours"),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, ax = figures.axes(panel=(4.2, 3.0))
        sums = tables.select(rows, metric="eigenvalue_sum")
        for method in ("fs-map", "l-map"):
            line = tables.line(tables.select(sums, method=method), "jitter")
            figures.plot_mean(ax, *line, method)
        base = tables.mean_of(sums, method="ps-map")
        ax.axhline(base, **figures.method_style("ps-map", marker=""))
        ax.set(xscale="log", yscale="log", xlabel=r"jitter $\epsilon$")
        ax.set_ylabel(r"sum of eigenvalues of $\mathcal{J}$")
        ax.legend()
        return {"moons-eigs": figure}


LOW, HIGH = (-2.2, -1.7), (3.2, 2.2)
"""Corners of the picture: the data with some room around them."""


def axes_of(pixels: int) -> list[Tensor]:
    """Coordinates of the picture's columns and rows, ``[pixels]`` each."""
    ends = zip(LOW, HIGH, strict=True)
    return [torch.linspace(a, b, pixels, dtype=torch.float64) for a, b in ends]


def _draw_functions(
    figure: Figure, axes: Sequence[Axes], rows: Rows, jitters: Sequence[float]
) -> None:
    """Probabilities of L-MAP at each ε, with the data, and one color bar."""
    where = {"metric": "probability", "method": "l-map", "start": RANDOM, "seed": 0}
    look = {"cmap": "coolwarm", "alpha": 0.6, "vmin": 0, "vmax": 1, "shading": "gouraud"}
    inputs, labels = (torch.tensor(tables.values(rows, metric=m)[0]) for m in ("inputs", "labels"))
    for ax, jitter in zip(axes, jitters, strict=True):
        (row,) = tables.select(rows, jitter=jitter, **where)
        pixels = math.isqrt(len(row.value))
        field = torch.tensor(row.value).reshape(pixels, pixels).numpy()
        x, y = (axis.numpy() for axis in axes_of(pixels))
        image = ax.pcolormesh(x, y, field, **look)
        if field.min() < 0.45 and field.max() > 0.55:  # the boundary of a constant is an accident
            ax.contour(x, y, field, [0.5], colors=[figures.BLACK], linewidths=1.2)
        for label, method in ((0, "ps-map"), (1, "fs-map")):
            ax.scatter(*inputs[labels == label].mT, s=9, color=figures.COLORS[method],
                       edgecolor=figures.WHITE, linewidth=0.4)  # fmt: skip
        ax.set(xlabel="$x_1$", title=jitter_text(jitter))
        ax.grid(visible=False)
    axes[0].set_ylabel("$x_2$")
    figure.colorbar(image, ax=axes, label="probability of class 1", ticks=[0, 0.5, 1])


PAPER_JITTERS = (1e-2, 1e-1, 1.0, 10.0)
"""The four panels of the paper."""

RANDOM, CHAIN = "random", "chain"
"""Where training starts: random first values (the paper's way), or the solution of the next larger
jitter, the first of all from PS-MAP's."""

CHAIN_SHARE = 5
"""A link of the chain takes a fifth of the steps: it has not far to go."""


@dataclasses.dataclass(frozen=True)
class SolutionsConfig(MoonsConfig):
    seeds: int = 1
    between: int = 3  # jitters between two of the paper's, for the slider
    pixels: int = 32  # points of the picture along each side

    def jitters(self) -> list[float]:
        """The paper's four, with others between."""
        first, last = math.log10(PAPER_JITTERS[0]), math.log10(PAPER_JITTERS[-1])
        steps = (len(PAPER_JITTERS) - 1) * (self.between + 1)
        powers = [first + (last - first) * k / steps for k in range(steps + 1)]
        return [float(f"{10**power:.3g}") for power in powers]


class MoonsSolutions(Experiment):
    id = "moons-solutions"
    label = "Fig. A.5"
    title = "L-MAP on two moons as ε grows"
    see = (
        "Decision functions as ε grows, from random first values and coming down from larger ε: "
        "ε is a dial for how much the function may react to its parameters."
    )
    cost = "5 min"
    protocol = (
        "L-MAP by forward differences (β = 1e-3), one ψ and lap_points fresh points of p_X a step; "
        "prior N(0, I). Panels and slider start from random values, as the paper does"
    )
    group = "networks"
    departures = (FRESH,)
    metrics = ("train_nll", "train_accuracy", "spread")
    columns = ("metric", "method", "start", "jitter")
    config = SolutionsConfig()
    quick = SolutionsConfig(steps=400, lr=1e-2, lap_points=100, between=1, pixels=48)

    def units(self, config: SolutionsConfig) -> list[Unit]:
        kinds = [("ps-map", RANDOM), ("l-map", RANDOM), ("l-map", CHAIN)]
        return [
            {"method": method, "start": start, "seed": seed}
            for seed in range(config.seeds)
            for method, start in kinds
        ]

    def run(self, config: SolutionsConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        method, seed = unit["method"], unit["seed"]
        way = chain if unit["start"] == CHAIN else train
        for fitted in way(config, method, config.jitters(), seed, context.advance):
            where = {**fitted.where, "start": unit["start"]}
            for metric, value in _look(config, fitted).items():
                yield Measured(metric, value, method, seed, where)
        if method == "ps-map" and seed == 0:
            yield Measured("inputs", fitted.data.x)
            yield Measured("labels", fitted.data.y)

    def claims(self, rows: Rows) -> list[Claim]:
        spread, nll, accuracy = (
            by_jitter(rows, metric) for metric in ("spread", "train_nll", "train_accuracy")
        )
        if not spread:
            text = "L-MAP goes from a near-constant function to a perfect fit as ε grows"
            return [exact(text, False, None, seeds=0)]
        low, high = min(spread), max(spread)
        ps_nll, ps_accuracy = (
            tables.mean_of(rows, metric=metric, method="ps-map")
            for metric in ("train_nll", "train_accuracy")
        )
        rise = max(b - a for a, b in itertools.pairwise(nll.values()))
        (jump, place), (smooth, there) = (largest_jump(rows, start) for start in (RANDOM, CHAIN))
        held = by_jitter(rows, "spread", CHAIN)
        both = [j for j in spread if spread[j] < 0.05 and held.get(j, 0.0) > 0.3]
        seeds = len({row.seed for row in tables.select(rows, metric="spread")})
        return [
            exact(f"Near-constant at {jitter_text(low)}: probabilities differ by less than 0.05",
                  spread[low] < 0.05, spread[low], "near-zero function, severe underfit",
                  seeds=seeds),
            exact(f"As good as PS-MAP at {jitter_text(high)}: accuracy within 1 %, NLL within 0.02",
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

    def draw(self, rows: Rows) -> Plots:
        found = by_jitter(rows, "spread")
        shown = [j for j in found if any(math.isclose(j, p, rel_tol=1e-6) for p in PAPER_JITTERS)]
        figure, axes = figures.axes(len(shown), panel=(2.6, 2.5), squeeze=False, sharey=True)
        _draw_functions(figure, list(axes[0]), rows, shown)
        return {"moons-solutions": figure}

    def interactive(self, rows: Rows) -> Interactive:
        accuracy, nll = by_jitter(rows, "train_accuracy"), by_jitter(rows, "train_nll")
        frames = []
        for jitter in accuracy:
            figure, ax = figures.axes(panel=(4.6, 3.4))
            _draw_functions(figure, [ax], rows, [jitter])
            note = f"train accuracy {accuracy[jitter]:.3f}, NLL {nll[jitter]:.3f} nats"
            frames.append(Frame(f"ε = {jitter:.3g}", figure=figure, note=note))
        away = [abs(math.log10(jitter)) for jitter in accuracy]
        title = "How much may the function react?"
        return Interactive(title, "ε", frames, start=away.index(min(away)))


def chain(
    config: SolutionsConfig,
    method: str,
    jitters: Sequence[float],
    seed: int,
    advance: Advance,
) -> Iterator[Fitted]:
    """Train one jitter after another, from the largest down, each from the one before."""
    (fitted,) = train(config, "ps-map", (), seed, lambda _: None)
    link = dataclasses.replace(config, steps=max(1, config.steps // CHAIN_SHARE))
    for done, jitter in enumerate(sorted(jitters, reverse=True), start=1):
        (fitted,) = train(link, method, [jitter], seed, lambda _: None, start=fitted.params)
        yield fitted
        advance(done / len(jitters))


def _look(config: SolutionsConfig, fitted: Fitted) -> dict[str, Any]:
    x = config.px().all()
    probability = torch.sigmoid(fitted.logit(x))
    columns, lines = axes_of(config.pixels)
    picture = torch.cartesian_prod(lines, columns).flip(-1)  # row by row from below
    return {
        "train_accuracy": fitted.accuracy(),
        "train_nll": fitted.nll(),
        "eigenvalue_sum": eigenvalues(fitted.f, fitted.params, x).sum(),
        "spread": probability.max() - probability.min(),
        "probability": [round(p, 4) for p in torch.sigmoid(fitted.logit(picture)).tolist()],
    }


def largest_jump(rows: Rows, start: str) -> tuple[float, float]:
    """The largest change of the function between neighbors, and the ε where it ends."""
    chosen = tables.select(rows, metric="probability", method="l-map", start=start, seed=0)
    ordered = sorted(chosen, key=lambda row: row.config["jitter"])
    fields: Tensor = torch.tensor([row.value for row in ordered], dtype=torch.float64)  # [k, n]
    steps = (fields[1:] - fields[:-1]).abs().mean(1)
    share = steps / (fields[-1] - 0.5).abs().mean()
    place = int(share.argmax())
    return float(share[place]), float(ordered[place + 1].config["jitter"])


def by_jitter(rows: Rows, metric: str, start: str = RANDOM) -> dict[float, float]:
    """A number of L-MAP, mean over seeds, in the order of ε."""
    return tables.means_by(rows, "jitter", metric=metric, method="l-map", start=start)
