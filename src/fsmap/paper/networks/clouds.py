r"""``logdet-mc``, ``laplacian-vs-logdet`` (Figs. A.2, A.3): two estimates of the log-determinant.

Both look at the same networks: a tanh perceptron with 898 parameters, first values N(0, 1/fan-in)
and zero biases (authors' code), all multiplied by s ~ loguniform(0.1, 10), on a 40 × 40 grid of
[-5, 5]². A row holds a list with a number for each network of its unit.

From S of the M points of $p_X$ (appendix B.9): the log-determinant of a mean of S outer products is
below that of the full mean. How far depends on how many eigenvalues of $\mathcal J$ are above
$\epsilon$, compared with the S·K rows of the sample; so the effective dimension
$d = \sum_i \lambda_i/(\lambda_i + \epsilon)$ is measured too.

In first order of 1/ε (``eq:first-order``):

$$\log\det(\mathcal J + \epsilon I) - P\log\epsilon = \sum_i \log(1 + \lambda_i/\epsilon)
  = \mathrm{Tr}\,\mathcal J/\epsilon + O((\max_i\lambda_i/\epsilon)^2)$$

Both axes show the same quantity, so that the diagonal is the truth. (The caption of the paper's
figure prints $1/(2\epsilon\beta^2)$; the ½ belongs to the objective, not to the approximation.)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fsmap.functional import count, functional
from fsmap.linalg.estimators import trace
from fsmap.linalg.jacobian import Site
from fsmap.linalg.logdet import evaluate, whitened_rows
from fsmap.models.mlp import MLP
from fsmap.paper.experiment import Context, Experiment, Measured, Plots, exact, judge_all
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import log_scale, power
from fsmap.paper.report.tables import Mean
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.paper.solvers import one_thread
from fsmap.px import Lattice, generator
from fsmap.types import ModelFn, Params

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALLEST, LARGEST = 0.1, 10.0
"""Ends of the distribution of s."""
MODERATE = 1.0
"""Networks with s up to this one are those that an initializer makes, or smaller ones."""


@dataclasses.dataclass(frozen=True)
class CloudConfig:
    draws: int = 300  # random networks
    block: int = 25  # networks per resumable unit
    width: int = 16  # units of each of the four hidden layers
    grid: int = 40  # points of p_X along each side


def square(side: int, half_width: float = 5.0, dimensions: int = 2) -> Lattice:
    """The evaluation distribution of appendix B.9: a grid of [-5, 5]², in float64."""
    corner = torch.full((dimensions,), half_width, dtype=torch.float64)
    return Lattice(-corner, corner, side)


def eigenvalues(f: ModelFn, params: Params, x: Tensor) -> Tensor:
    """All eigenvalues of 𝒥 on these points, ``[P]``; what rounding made negative is zero."""
    with torch.no_grad(), one_thread():
        rows = whitened_rows(f, params, x)  # [S·K, P]
        found: Tensor = torch.linalg.eigvalsh(rows.mT @ rows)
    return found.clamp(min=0)


class ScaledNetwork(NamedTuple):
    """One random network."""

    draw: int  # which one
    scale: float  # s
    f: ModelFn
    params: Params


def draw_network(index: int, width: int = 16) -> ScaledNetwork:
    """A random network times s ~ loguniform(0.1, 10); it depends on its index only."""
    source = generator("scaled-network", index)
    model = MLP([2, width, width, width, width, 2], "tanh", init="lecun", generator=source)
    f, params = functional(model.double())
    share = float(torch.rand((), generator=source, dtype=torch.float64))
    scale = SMALLEST * (LARGEST / SMALLEST) ** share
    return ScaledNetwork(index, scale, f, {n: scale * p.detach() for n, p in params.items()})


class CloudExperiment(Experiment):
    """Numbers of random networks; units are blocks of them."""

    group = "networks"

    def units(self, config: Any) -> list[Unit]:
        return [{"first": first} for first in range(0, config.draws, config.block)]

    def run(self, config: Any, unit: Unit, context: Context) -> Iterator[Measured]:
        x = square(config.grid).all()
        columns: dict[tuple[str, tuple[tuple[str, Any], ...]], list[float]] = {}
        scales = []
        for index in range(unit["first"], min(unit["first"] + config.block, config.draws)):
            network = draw_network(index, config.width)
            scales.append(network.scale)
            with one_thread():  # a second thread only waits, and spins while it does
                for metric, value, where in self.numbers(config, network, x):
                    key = metric, tuple(where.items())
                    columns.setdefault(key, []).append(float(value))
            context.advance(len(scales) / config.block)
        for (metric, items), values in columns.items():
            about = {**unit, **dict(items)}
            if about.get("exact"):
                about["scale"] = scales
            yield Measured(metric, values, config=about)

    def numbers(
        self, config: Any, network: ScaledNetwork, x: Tensor
    ) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Metric, value and what varies, for one network."""
        raise NotImplementedError


def joined(rows: Rows, **where: Any) -> list[float]:
    """Values of all units, in the order of the networks."""
    chosen = sorted(tables.select(rows, **where), key=lambda row: row.config["first"])
    return [value for row in chosen for value in row.value]


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation ρ: 1 if y grows with x, whatever the shape of the curve."""
    ranks = torch.tensor([x, y], dtype=torch.float64).argsort().argsort().double()  # [2, n]
    return float(torch.corrcoef(ranks)[0, 1]) if len(x) > 1 else math.nan


def jitter_text(jitter: float) -> str:
    """A jitter in words, such as ``ε = 10`` or ``ε = 1e−6``."""
    return f"ε = {tables.number(float(jitter), 3)}"


def jitter_title(jitter: float) -> str:
    r"""A jitter as a panel's title, such as ``$\epsilon = 10$`` or ``$\epsilon = 10^{-3}$``."""
    return rf"$\epsilon = {jitter:g}$" if 0.1 <= jitter <= 10 else power(jitter)


def color_bar(figure: Figure, image: Any, axes: Any, label: str, **options: Any) -> Any:
    """A color bar without a frame."""
    bar = figure.colorbar(image, ax=axes, **options)
    bar.set_label(label)
    bar.outline.set_visible(False)
    return bar


def _diagonal(ax: Axes, low: float, high: float) -> None:
    ax.plot([low, high], [low, high], linestyle=(0, (4, 3)), color=figures.MUTED, linewidth=1.0,
            label="$x = y$", zorder=3)  # fmt: skip


def _corner(ax: Axes, text: str) -> None:
    ax.annotate(text.replace("-", "\u2212"), (0.97, 0.04), xycoords="axes fraction", ha="right",
                va="bottom", fontsize=9)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LogDetConfig(CloudConfig):
    samples: tuple[int, ...] = (800, 400, 200)  # S
    # ε. The smallest is that of the figure: the default of the authors' code, because the paper
    # does not print one
    jitters: tuple[float, ...] = (1e-6, 1e-3, 1.0)


class Cloud(NamedTuple):
    """Estimates from S points against exact values, one point per network."""

    scale: list[float]
    exact: list[float]
    estimate: list[float]

    @classmethod
    def of(cls, rows: Rows, samples: int, jitter: float) -> Cloud:
        """The points of one panel."""
        here = tables.select(rows, metric="log_det", jitter=jitter)
        truth = tables.select(here, exact=True)
        scale = joined([row._replace(value=row.config["scale"]) for row in truth])
        return cls(scale, joined(truth), joined(here, points=samples))

    def errors(self, largest: float = math.inf) -> Tensor:
        """Estimate − exact in percent of the range, for networks with s up to ``largest``."""
        span = max(self.exact) - min(self.exact)
        kept = [100 * (b - a) / span for s, a, b in zip(*self, strict=True) if s <= largest]
        return torch.tensor(kept, dtype=torch.float64)

    @property
    def bias(self) -> Mean:
        """Mean error, in percent of the range."""
        return tables.mean(self.errors().tolist())

    @property
    def rho(self) -> float:
        """Spearman's ρ."""
        return spearman(self.exact, self.estimate)


class LogDetMC(CloudExperiment):
    id = "logdet-mc"
    label = "Fig. A.2"
    title = "Log-determinant from a sample of points"
    see = (
        "Estimates from S of the 1600 points against the exact value; the error against the scale "
        "of the parameters, and against the number of eigenvalues above ε."
    )
    cost = "3 min"
    protocol = (
        "log det(𝒥 + εI) in float64; exact: all 1600 points of p_X; estimate: S of them without "
        "replacement. The figure has ε = 1e-6, the default of the authors' code"
    )
    config = LogDetConfig()
    quick = LogDetConfig(draws=16, block=8)

    def numbers(
        self, config: LogDetConfig, network: ScaledNetwork, x: Tensor
    ) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Exact value, estimates and effective dimension at every ε."""
        jitters = torch.tensor(config.jitters, dtype=torch.float64)
        spectrum = eigenvalues(network.f, network.params, x)  # [P]
        shifted = spectrum + jitters[:, None]  # [k, P]
        values = {len(x): shifted.log().sum(1)}
        order = torch.randperm(len(x), generator=generator("logdet-mc", network.draw))
        for size in config.samples:
            values[size] = log_dets(network, x[order[:size]], jitters)
        for k, jitter in enumerate(config.jitters):
            for size, found in values.items():
                where = {"points": size, "exact": size == len(x), "jitter": jitter}
                yield "log_det", found[k], where
            yield "dimension", (spectrum / shifted[k]).sum(), {"jitter": jitter}

    def table(self, rows: Rows) -> list[dict[str, Any]]:
        return [
            {
                "jitter": jitter,
                "S": samples,
                "metric": "mean bias, % of the range",
                "ours": found.bias.mean,
                "stderr": found.bias.stderr,
                "median distance, %": float(found.errors().abs().median()),
                "mean bias, s ≤ 1, %": float(found.errors(MODERATE).mean()),
                "Spearman ρ": found.rho,
                "range, nats": max(found.exact) - min(found.exact),
                "networks": found.bias.n,
            }
            for jitter, samples in _settings(rows)
            for found in [Cloud.of(rows, samples, jitter)]
        ]

    def claims(self, rows: Rows) -> list[Claim]:
        jitter, clouds = _main_clouds(rows)
        biases = {f"S = {s}": cloud.bias for s, cloud in clouds.items()}
        most = next(iter(biases), "S = 800")
        first = next(iter(clouds.values()), None)
        moderate = [] if first is None else first.errors(MODERATE).tolist()
        rhos = {f"S = {s}": c.rho for s, c in list(clouds.items())[1:]}
        fewer = {place: mean for place, mean in biases.items() if place != most}
        at = f"({jitter_text(jitter)}; % of the range)"
        return [
            judge_all(f"{most} is on the diagonal: mean bias within 1 {at}",
                      {most: biases[most]} if biases else {}, within=1, paper="almost perfect"),
            judge_all(f"… for networks with s ≤ {MODERATE:g}", {most: tables.mean(moderate)},
                      within=1, source="ours"),
            judge_all(f"Fewer points give less: the mean bias is below 0 {at}", fewer, below=0,
                      paper="underestimates"),
            exact("… in the same order: ρ above 0.95", min(rhos.values(), default=0.0) > 0.95,
                  ", ".join(f"{rho:.3f} ({place})" for place, rho in rhos.items()),
                  "strong correlation", seeds=len(first.exact) if first and rhos else 0),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        from matplotlib.colors import LogNorm

        jitter, clouds = _main_clouds(rows)
        figure, grid = figures.axes(len(clouds), panel=(2.75, 2.9), sharey=True, squeeze=False)
        thousands = {
            s: [[v / 1e3 for v in side] for side in (c.exact, c.estimate)]
            for s, c in clouds.items()
        }
        ends = [v for pair in thousands.values() for side in pair for v in side]
        colors = {"norm": LogNorm(SMALLEST, LARGEST), "cmap": "cividis", "s": 11, "linewidth": 0}
        for ax, (samples, found) in zip(grid[0], clouds.items(), strict=True):
            _diagonal(ax, min(ends), max(ends))
            name = f"$S = {samples}$"
            dots = ax.scatter(*thousands[samples], c=found.scale, label=name, **colors)
            ax.set(title=name, xlabel=r"exact $\log\det$ / 1000", aspect="equal")
            _corner(ax, f"$\\rho = {found.rho:.3f}$\nmean bias {found.bias.mean:.1f} %")
        grid[0][0].set_ylabel(r"estimated $\log\det$ / 1000")
        bar = color_bar(figure, dots, grid[0], "scale $s$", shrink=0.8, pad=0.02)
        bar.set_ticks([0.1, 1.0, 10.0], labels=["0.1", "1", "10"])
        return {"logdet-mc": figure, "logdet-mc-bias": _draw_bias(rows, jitter, clouds)}


def log_dets(network: ScaledNetwork, x: Tensor, jitters: Tensor) -> Tensor:
    """The log-determinant on these points for every ε, from one Jacobian, ``[k]``."""
    site = Site(network.f, network.params, x)
    with torch.no_grad():
        values: Tensor = vmap(lambda jitter: evaluate(site, jitter).value)(jitters)
    return values


def _draw_bias(rows: Rows, jitter: float, clouds: dict[int, Cloud]) -> Figure:
    figure, (left, right) = figures.axes(2, panel=(3.5, 2.8), sharey=True)
    dimension = joined(rows, metric="dimension", jitter=jitter)
    for (samples, found), name in zip(clouds.items(), ("truth", "bma", "data"), strict=False):
        look = {"s": 11, "linewidth": 0, "color": figures.COLORS[name], "label": f"$S = {samples}$"}
        left.scatter(found.scale, found.errors().tolist(), **look)
        right.scatter(dimension, found.errors().tolist(), **look)
    log_scale(left, "x")
    left.set(xlabel="scale $s$ of the parameters", ylabel="error, % of the range")
    right.set(xlabel=r"effective dimension $\sum_i \lambda_i/(\lambda_i + \epsilon)$")
    left.legend(loc="lower left")
    return figure


def _main_clouds(rows: Rows) -> tuple[float, dict[int, Cloud]]:
    """The smallest jitter, and its clouds from the largest sample to the smallest."""
    settings = _settings(rows)
    main = min((jitter for jitter, _ in settings), default=1e-6)
    sizes = sorted({samples for jitter, samples in settings if jitter == main}, reverse=True)
    return main, {samples: Cloud.of(rows, samples, main) for samples in sizes}


def _settings(rows: Rows) -> list[tuple[float, int]]:
    estimates = tables.select(rows, metric="log_det", exact=False)
    return [(jitter, points) for jitter, points in tables.group(estimates, "jitter", "points")]


@dataclasses.dataclass(frozen=True)
class LaplacianConfig(CloudConfig):
    jitters: tuple[float, ...] = (1e-3, 1.0, 10.0, 1e3)  # ε
    probes: int = 10  # draws of ψ per network
    beta: float = 1e-3  # β, the standard deviation of a perturbation


class FirstOrder(NamedTuple):
    """First order against the log-determinant, one point per network."""

    log_det: list[float]  # log det(𝒥 + εI) − P log ε
    estimate: list[float]  # Tr 𝒥/ε, the trace from a few draws of ψ
    exact: list[float]  # Tr 𝒥/ε, the trace exact
    color: list[float]  # mean eigenvalue/ε

    @classmethod
    def of(cls, rows: Rows, jitter: float) -> FirstOrder:
        """The points of one panel."""
        log_det = joined(rows, metric="log_det", jitter=jitter)
        estimate, exact_trace, number = (
            joined(rows, metric=m) for m in ("trace_estimate", "trace", "parameters")
        )
        first = [value / jitter for value in exact_trace]
        color = [value / n for value, n in zip(first, number, strict=True)]
        return cls(log_det, [value / jitter for value in estimate], first, color)

    def ratio(self, *, exact: bool = False) -> float:
        """Median of estimate/log det; with the exact trace without the noise of ψ."""
        above = self.exact if exact else self.estimate
        return median_low(y / x for x, y in zip(self.log_det, above, strict=True))

    @property
    def rho(self) -> float:
        """Spearman's ρ."""
        return spearman(self.log_det, self.estimate)


class LaplacianVsLogDet(CloudExperiment):
    id = "laplacian-vs-logdet"
    label = "Fig. A.3"
    title = "First-order form of the log-determinant"
    see = "The Laplacian estimate against what it stands for, from small ε to large."
    cost = "2 min"
    protocol = (
        "x: log det(𝒥 + εI) − P log ε from all eigenvalues, float64; y: Tr 𝒥/ε by forward "
        "differences (β = 1e-3) with 10 draws of ψ. No ½ on either axis"
    )
    config = LaplacianConfig()
    quick = LaplacianConfig(draws=16, block=8)

    def numbers(
        self, config: LaplacianConfig, network: ScaledNetwork, x: Tensor
    ) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Eigenvalues once per network; every ε from them."""
        f, params = network.f, network.params
        spectrum = eigenvalues(f, params, x)  # [P]
        for jitter in config.jitters:
            yield "log_det", torch.log1p(spectrum / jitter).sum(), {"jitter": jitter}
        how = {"method": "fd", "probes": config.probes, "beta": config.beta}
        with torch.no_grad():
            source = generator("laplacian-vs-logdet", network.draw)
            estimate = trace(f, params, x, generator=source, **how)
        yield "trace", spectrum.sum(), {}
        yield "trace_estimate", estimate.value, {}
        yield "parameters", count(params), {}

    def table(self, rows: Rows) -> list[dict[str, Any]]:
        return [
            {
                "jitter": jitter,
                "metric": "median of estimate / log det",
                "ours": found.ratio(),
                "… with the exact trace": found.ratio(exact=True),
                "Spearman ρ": found.rho,
                "median of mean eigenvalue / ε": median_low(found.color),
                "networks": len(found.log_det),
            }
            for jitter, found in _panels(rows).items()
        ]

    def claims(self, rows: Rows) -> list[Claim]:
        clouds = _panels(rows)
        if not clouds:
            text = "The first-order form is accurate for large ε and monotone for small ε"
            return [exact(text, False, None, seeds=0)]
        jitters, found = list(clouds), list(clouds.values())
        small, large, n = found[0], found[-1], len(found[0].log_det)
        ratios = [cloud.ratio(exact=True) for cloud in found]
        falling = all(a > b for a, b in itertools.pairwise(ratios))
        return [
            exact(f"On the diagonal at {jitter_text(jitters[-1])}: median ratio within 10 % of 1",
                  abs(large.ratio() - 1) < 0.1, large.ratio(), "accurate", seeds=n),
            exact(f"Monotone at {jitter_text(jitters[0])}, far from the diagonal: ρ above 0.95",
                  small.rho > 0.95 and small.ratio() > 2,
                  f"ρ = {small.rho:.3f}, median ratio {small.ratio():.0f}", "monotonic relation",
                  seeds=n),
            exact("The approximation gets better as ε grows (median ratio, exact trace)",
                  falling and ratios[-1] >= 1, ", ".join(f"{r:.3g}" for r in ratios),
                  "more accurate", seeds=n),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        from matplotlib.colors import LogNorm

        clouds = _panels(rows)
        colors = [c for found in clouds.values() for c in found.color]
        norm = LogNorm(min(colors), max(colors))
        figure, axes = figures.axes(len(clouds), panel=(2.5, 2.9), squeeze=False)
        for ax, (jitter, found) in zip(axes[0], clouds.items(), strict=True):
            both = found.log_det + found.estimate
            _diagonal(ax, min(both) * 0.7, max(both) * 1.4)
            dots = ax.scatter(found.log_det, found.estimate, s=11, linewidth=0, c=found.color,
                              norm=norm, cmap="cividis", label=jitter_text(jitter))  # fmt: skip
            ax.set(xscale="log", yscale="log", title=jitter_title(jitter))
            _corner(ax, f"$\\rho = {found.rho:.3f}$")
        figure.supxlabel(r"$\log\det(\mathcal{J} + \epsilon I) - P\log\epsilon$", fontsize=11)
        axes[0, 0].set_ylabel(r"Laplacian estimate of $\mathrm{Tr}\,\mathcal{J}/\epsilon$")
        color_bar(figure, dots, axes, r"$\bar\lambda/\epsilon$", shrink=0.85, pad=0.015)
        return {"laplacian-vs-logdet": figure}


def _panels(rows: Rows) -> dict[float, FirstOrder]:
    """By jitter, from the smallest to the largest."""
    jitters = {row.config["jitter"] for row in tables.select(rows, metric="log_det")}
    return {jitter: FirstOrder.of(rows, jitter) for jitter in sorted(jitters)}
