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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from fsmap.paper.experiment import Context, Experiment, Measured, Plots, exact, judge_all, log_ratio
from fsmap.paper.networks.clouds import color_bar, eigenvalues, jitter_text, jitter_title, square
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import Frame, Interactive, legend_above
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.paper.solvers import one_thread
from fsmap.px import Lattice, generator
from fsmap.train.grid import Grid
from fsmap.train.optim import adam
from fsmap.train.population import fit_population
from fsmap.types import Batch, ModelFn, Params

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PRIOR_STD = 1.0
"""The paper does not say; N(0, I)."""

METHODS = ("ps-map", "fs-map", "l-map")


@dataclasses.dataclass(frozen=True)
class MoonsConfig:
    steps: int = 10_000  # steps of Adam, all data on each
    lr: float = 1e-3  # learning rate
    grid: int = 40  # points of p_X along each side
    lap_points: int = 400  # points a step for L-MAP, with one ψ
    det_points: int = 64  # points a step for FS-MAP
    seeds: int = 2  # runs; a seed decides the first values, the points and ψ

    def deviations(self, method: str) -> tuple[str, ...]:
        """Where the protocol of these sizes departs from the paper's."""
        found = [] if method == "ps-map" else ["fresh points of p_X at every step, not all 1600"]
        if self.steps != 10_000:
            found.append(f"{self.steps} steps at learning rate {self.lr:g}")
        return tuple(found)

    def px(self) -> Lattice:
        """The evaluation distribution."""
        return square(self.grid)

    def objective(self, method: str, num_data: int, jitter: Tensor | None = None) -> Objective:
        """The objective of a method at a jitter (PS-MAP: without one)."""
        terms, px = (Categorical(), Normal(PRIOR_STD)), self.px()
        if jitter is None:
            return ps_map(*terms, num_data=num_data)
        points = min(self.det_points if method == "fs-map" else self.lap_points, len(px))
        sizes: dict[str, Any] = {"num_points": points, "jitter": jitter, "num_data": num_data}
        if method == "fs-map":
            return fs_map(*terms, px, **sizes)
        return l_map(*terms, px, estimator="fd", **sizes)


def network(seed: int) -> MLP:
    """The network with the first values of a seed, as ``nn.Linear`` draws them, in float64."""
    model = MLP([2, 16, 16, 2], "tanh", generator=generator("moons", seed))
    return model.double()


class Fitted(NamedTuple):
    """One trained member."""

    member: dict[str, Any]  # jitter (absent for PS-MAP) and seed
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
    advance: Callable[[float], None],
    *,
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
        yield Fitted(member, f, states.member(index).params, data)


def _wide_table(
    rows: Rows, by: Sequence[str], name: str, metric: str, *more: str
) -> list[dict[str, Any]]:
    """A line for each value of ``by``: a metric with its error, and means of others beside it."""
    lines = []
    for key, members in tables.group(tables.select(rows, metric=(metric, *more)), *by).items():
        ours = tables.mean(tables.values(members, metric=metric))
        line = {**dict(zip(by, key, strict=True)), "metric": name}
        line |= {"ours": ours.mean, "stderr": ours.stderr, "runs": ours.n}
        lines.append(line | {other: tables.mean_of(members, metric=other) for other in more})
    return lines


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
    config = EigsConfig()
    quick = EigsConfig(
        steps=500, lr=1e-2, lap_points=100, det_points=48, seeds=1, jitters=(1e-10, 1e-4, 1.0, 1e2)
    )

    def units(self, config: EigsConfig) -> list[Unit]:
        seeds = range(config.seeds)
        return [{"method": method, "seed": seed} for method in METHODS for seed in seeds]

    def run(self, config: EigsConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        method, seed = unit["method"], unit["seed"]
        x = config.px().all()
        deviations = config.deviations(method)
        for fitted in train(config, method, config.jitters, seed, context.advance):
            where = {k: v for k, v in fitted.member.items() if k == "jitter"}
            spectrum = eigenvalues(fitted.f, fitted.params, x)
            found = {
                "eigenvalue_sum": spectrum.sum(),
                "largest_eigenvalue": spectrum.max(),
                "train_accuracy": fitted.accuracy(),
                "train_nll": fitted.nll(),
            }
            for metric, value in found.items():
                yield Measured(metric, value, method, seed, where, deviations)

    def table(self, rows: Rows) -> list[dict[str, Any]]:
        more = ("largest_eigenvalue", "train_accuracy", "train_nll")
        name = "sum of eigenvalues"
        return _wide_table(rows, ("method", "jitter"), name, "eigenvalue_sum", *more)

    def claims(self, rows: Rows) -> list[Claim]:
        sums = tables.select(rows, metric="eigenvalue_sum")
        jitters = sorted({row.config["jitter"] for row in sums if row.method != "ps-map"})
        low, high = (jitters or [math.nan])[0], (jitters or [math.nan])[-1]
        base = tables.values_by(sums, "seed", method="ps-map")
        small, large = (
            {figures.NAMES[method]: log_ratio(
                tables.values_by(sums, "seed", method=method, jitter=jitter), base)
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
        figure, (left, right) = figures.axes(2, panel=(3.6, 2.9))
        _draw_lines(left, tables.select(rows, metric="eigenvalue_sum"))
        left.set(xscale="log", yscale="log", xlabel=r"jitter $\epsilon$")
        left.set(ylabel=r"sum of eigenvalues of $\mathcal{J}$")
        left.legend(loc="lower right")
        _draw_lines(right, tables.select(rows, metric="train_nll"))
        right.set(xscale="log", xlabel=r"jitter $\epsilon$", ylabel="train NLL, nats")
        return {"moons-eigs": figure}


def _draw_ps_map(ax: Axes, rows: Rows, jitters: Iterable[float]) -> None:
    """PS-MAP, which has no ε, as a line across."""
    ends, base = sorted(jitters), tables.mean_of(rows, method="ps-map")
    look = figures.method_style("ps-map", marker="", linestyle=(0, (4, 2)))
    ax.plot([ends[0], ends[-1]], [base, base], **look)


def _draw_lines(ax: Axes, rows: Rows) -> None:
    _draw_ps_map(ax, rows, {row.config["jitter"] for row in rows if "jitter" in row.config})
    for method in ("fs-map", "l-map"):
        figures.plot_mean(ax, *tables.line(tables.select(rows, method=method), "jitter"), method)


SMOOTH = 144
"""Pixels of a picture along each side."""

LOW, HIGH = (-2.2, -1.7), (3.2, 2.2)
"""Corners of the picture: the data with some room around them."""

PATH = {
    "train_nll": "train NLL, nats",
    "spread": "spread of probabilities",
    "eigenvalue_sum": r"sum of eigenvalues of $\mathcal{J}$",
}
"""What is drawn against ε, and its name."""


def axes_of(pixels: int) -> list[Tensor]:
    """Coordinates of the picture's columns and rows, ``[pixels]`` each."""
    ends = zip(LOW, HIGH, strict=True)
    return [torch.linspace(a, b, pixels, dtype=torch.float64) for a, b in ends]


def points(pixels: int) -> Tensor:
    """Points of the picture, row by row from below, ``[pixels², 2]``."""
    x, y = axes_of(pixels)
    return torch.cartesian_prod(y, x).flip(-1)


def _draw_functions(
    figure: Figure, axes: Sequence[Axes], rows: Rows, jitters: Sequence[float]
) -> None:
    """Probabilities of L-MAP at each ε, with the data, and one color bar."""
    from matplotlib.colors import LinearSegmentedColormap

    # paler than the points that lie on it
    colors = LinearSegmentedColormap.from_list("moons", ["#86addb", "#f4f2ee", "#e8a88f"])
    look = {"origin": "lower", "aspect": "auto", "interpolation": "none", "vmin": 0, "vmax": 1}
    where = {"metric": "probability", "method": "l-map", "start": "random", "seed": 0}
    inputs, labels = (torch.tensor(tables.values(rows, metric=m)[0]) for m in ("inputs", "labels"))
    for ax, jitter in zip(axes, jitters, strict=True):
        (row,) = tables.select(rows, jitter=jitter, **where)
        pixels = math.isqrt(len(row.value))
        coarse = torch.tensor(row.value, dtype=torch.float64).reshape(1, 1, pixels, pixels)
        size = {"size": (SMOOTH, SMOOTH), "mode": "bilinear", "align_corners": True}
        field = torch.nn.functional.interpolate(coarse, **size)[0, 0].numpy()
        box = (LOW[0], HIGH[0], LOW[1], HIGH[1])
        image = ax.imshow(field, extent=box, cmap=colors, **look)
        if field.min() < 0.45 and field.max() > 0.55:  # the boundary of a constant is an accident
            ax.contour(*axes_of(SMOOTH), field, [0.5], colors=[figures.BLACK], linewidths=1.2)
        for label, color in ((0, figures.COLORS["ps-map"]), (1, figures.COLORS["fs-map"])):
            chosen = inputs[labels == label]
            ax.scatter(chosen[:, 0], chosen[:, 1], s=9, color=color, edgecolor=figures.WHITE,
                       linewidth=0.4, label=f"class {label}")  # fmt: skip
        ax.set(xlabel="$x_1$", xlim=(LOW[0], HIGH[0]), ylim=(LOW[1], HIGH[1]))
        ax.grid(visible=False)
    axes[0].set_ylabel("$x_2$")
    bar = {"shrink": 0.9, "pad": 0.02, "ticks": [0, 0.5, 1]}
    color_bar(figure, image, axes, "probability of class 1", **bar)


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
            where = {k: v for k, v in fitted.member.items() if k == "jitter"}
            where["start"] = unit["start"]
            for metric, value in _look(config, fitted).items():
                yield Measured(metric, value, method, seed, where, config.deviations(method))
        if method == "ps-map" and seed == 0:
            yield Measured("inputs", fitted.data.x)
            yield Measured("labels", fitted.data.y)

    def table(self, rows: Rows) -> list[dict[str, Any]]:
        more = ("train_accuracy", "spread", "eigenvalue_sum")
        by = ("method", "start", "jitter")
        return _wide_table(rows, by, "train NLL, nats", "train_nll", *more)

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
        for ax, jitter in zip(axes[0], shown, strict=True):
            ax.set_title(jitter_title(jitter))
        return {"moons-solutions": figure, "moons-solutions-path": _path(rows)}

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


def _path(rows: Rows) -> Figure:
    """Numbers against ε, from both starts."""
    figure, axes = figures.axes(3, panel=(2.9, 2.6))
    dotted = {"linestyle": (0, (1, 1.2)), "marker": "v"}
    looks: dict[str, dict[str, Any]] = {
        RANDOM: {"label": "L-MAP, from random values"},
        CHAIN: {"label": "L-MAP, from the next larger ε", **dotted},
    }
    for ax, (metric, label) in zip(axes, PATH.items(), strict=True):
        for start, look in looks.items():
            values = by_jitter(rows, metric, start)
            ax.plot(list(values), list(values.values()), **figures.method_style("l-map", **look))
        _draw_ps_map(ax, tables.select(rows, metric=metric), values)
        ax.set(xscale="log", xlabel=r"$\epsilon$", ylabel=label)
    axes[2].set_yscale("log")
    legend_above(figure, axes[0])
    return figure


def chain(
    config: SolutionsConfig,
    method: str,
    jitters: Sequence[float],
    seed: int,
    advance: Callable[[float], None],
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
    picture = torch.sigmoid(fitted.logit(points(config.pixels)))
    return {
        "train_accuracy": fitted.accuracy(),
        "train_nll": fitted.nll(),
        "eigenvalue_sum": eigenvalues(fitted.f, fitted.params, x).sum(),
        "spread": probability.max() - probability.min(),
        "probability": [round(p, 4) for p in picture.tolist()],
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
