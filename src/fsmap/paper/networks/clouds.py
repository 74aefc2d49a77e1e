r"""``logdet-mc``, ``laplacian-vs-logdet`` (Figs. A.2, A.3): two estimates of the log-determinant.

Both use the same networks: a tanh perceptron with 898 parameters, initialized N(0, 1/fan-in)
and zero biases (authors' code), all multiplied by s ~ loguniform(0.1, 10), on a 40 × 40 grid of
[-5, 5]². A row holds a list with a number for each network of its unit.

From S of the M points of $p_X$ (appendix B.9): the log-determinant of a mean of S outer products is
below that of the full mean; how far depends on the effective dimension
$d = \sum_i \lambda_i/(\lambda_i + \epsilon)$, compared with the S·K rows of the sample.

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
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fsmap.functional import count, functional
from fsmap.linalg.estimators import trace
from fsmap.linalg.logdet import log_det, whitened_rows
from fsmap.models.mlp import MLP
from fsmap.paper.engine import Context, Experiment, Measured, Plots, exact, judge_all
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import power
from fsmap.paper.report.tables import epsilon
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.px import Lattice, generator
from fsmap.types import ModelFn, Params

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = Iterator[tuple[str, Any, dict[str, Any]]]  # metric, value and what varies
MODERATE = 1.0  # largest s of networks that an initializer makes


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
    with torch.no_grad():
        rows = whitened_rows(f, params, x)  # [S·K, P]
        return torch.linalg.eigvalsh(rows.mT @ rows).clamp(min=0)


class ScaledNetwork(NamedTuple):
    draw: int  # which one
    scale: float  # s
    f: ModelFn
    params: Params


def draw_network(index: int, width: int = 16) -> ScaledNetwork:
    """A random network times s ~ loguniform(0.1, 10); it depends on its index only."""
    source = generator("scaled-network", index)
    model = MLP([2, width, width, width, width, 2], "tanh", init="lecun", generator=source)
    f, params = functional(model.double())
    scale = 0.1 * 100 ** float(torch.rand((), generator=source, dtype=torch.float64))
    return ScaledNetwork(index, scale, f, {n: scale * p.detach() for n, p in params.items()})


class CloudExperiment(Experiment):
    """Numbers of random networks; units are blocks of them."""

    group = "networks"

    def units(self, config: Any) -> list[Unit]:
        return [{"first": first} for first in range(0, config.draws, config.block)]

    def run(self, config: Any, unit: Unit, context: Context) -> Iterator[Measured]:
        x = square(config.grid).all()
        columns: dict[Any, list[float]] = {}  # by metric and what varies
        scales = []
        for index in range(unit["first"], min(unit["first"] + config.block, config.draws)):
            network = draw_network(index, config.width)
            scales.append(network.scale)
            for metric, value, where in self.numbers(config, network, x):
                key = metric, tuple(where.items())
                columns.setdefault(key, []).append(float(value))
            context.advance(len(scales) / config.block)
        for (metric, items), values in columns.items():
            about = {**unit, **dict(items)}
            if about.get("exact"):
                about["scale"] = scales
            yield Measured(metric, values, config=about)

    def numbers(self, config: Any, network: ScaledNetwork, x: Tensor) -> Numbers:
        """Metrics of one network, with their values and what varies."""
        raise NotImplementedError


def joined(rows: Rows, **where: Any) -> list[float]:
    """Values of all units, in the order of the networks."""
    chosen = sorted(tables.select(rows, **where), key=lambda row: row.config["first"])
    return [value for row in chosen for value in row.value]


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation ρ: 1 if y grows with x, whatever the shape of the curve."""
    ranks = torch.tensor([x, y], dtype=torch.float64).argsort().argsort().double()  # [2, n]
    return float(torch.corrcoef(ranks)[0, 1]) if len(x) > 1 else math.nan


class Cloud(NamedTuple):
    """Estimates against exact values, one point per network."""

    exact: list[float]
    estimate: list[float]
    color: list[float]

    @property
    def rho(self) -> float:
        return spearman(self.exact, self.estimate)


def draw_clouds(clouds: Mapping[str, Cloud], color: str) -> tuple[Figure, Any]:
    """A panel for each cloud, by title, with the diagonal and one color bar."""
    from matplotlib.colors import LogNorm

    colors = [value for cloud in clouds.values() for value in cloud.color]
    figure, axes = figures.axes(len(clouds), panel=(2.7, 2.9), squeeze=False)
    for ax, (title, cloud) in zip(axes[0], clouds.items(), strict=True):
        ends = min(cloud.exact), max(cloud.exact)
        ax.plot(ends, ends, linestyle=(0, (4, 3)), color=figures.MUTED, linewidth=1.0)
        dots = ax.scatter(cloud.exact, cloud.estimate, s=11, linewidth=0, c=cloud.color,
                          norm=LogNorm(min(colors), max(colors)), cmap="cividis")  # fmt: skip
        ax.set_title(rf"{title}, $\rho = {cloud.rho:.3f}$")
    figure.colorbar(dots, ax=axes, label=color, shrink=0.85, pad=0.02)
    return figure, axes[0]


@dataclasses.dataclass(frozen=True)
class LogDetConfig(CloudConfig):
    samples: tuple[int, ...] = (800, 400, 200)  # S
    jitters: tuple[float, ...] = (1e-6, 1e-3, 1.0)  # ε; the figure has the first


def _errors(cloud: Cloud, largest: float = math.inf) -> list[float]:
    """Estimate − exact in percent of the range, for networks with s up to ``largest``."""
    span = max(cloud.exact) - min(cloud.exact)
    return [100 * (b - a) / span for a, b, s in zip(*cloud, strict=True) if s <= largest]


class LogDetMC(CloudExperiment):
    id = "logdet-mc"
    label = "Fig. A.2"
    title = "Log-determinant from a sample of points"
    see = "Estimates from S of the 1600 points against the exact value, by the scale of parameters."
    cost = "3 min"
    protocol = "all 1600 points of p_X, or S of them; the figure has ε = 1e-6 (authors' code)"
    config = LogDetConfig()
    quick = LogDetConfig(draws=16, block=8)

    def numbers(self, config: LogDetConfig, network: ScaledNetwork, x: Tensor) -> Numbers:
        jitters = torch.tensor(config.jitters, dtype=torch.float64)
        spectrum = eigenvalues(network.f, network.params, x)  # [P]
        shifted = spectrum + jitters[:, None]  # [k, P]
        values: dict[int, Any] = {len(x): shifted.log().sum(1)}
        order = torch.randperm(len(x), generator=generator("logdet-mc", network.draw))
        for size in config.samples:
            at = network.f, network.params, x[order[:size]]
            with torch.no_grad():
                values[size] = [log_det(*at, jitter=jitter) for jitter in config.jitters]
        for k, jitter in enumerate(config.jitters):
            for size, found in values.items():
                where = {"points": size, "exact": size == len(x), "jitter": jitter}
                yield "log_det", found[k], where
            yield "dimension", (spectrum / shifted[k]).sum(), {"jitter": jitter}

    def table(self, rows: Rows) -> list[dict[str, Any]]:
        lines = []
        for jitter, clouds in _clouds(rows).items():
            for samples, cloud in clouds.items():
                line = {"jitter": jitter, "S": samples, "metric": "mean bias, % of the range"}
                bias, stderr, _ = tables.mean(_errors(cloud))
                lines.append(line | {"ours": bias, "stderr": stderr, "Spearman ρ": cloud.rho})
        return lines

    def claims(self, rows: Rows) -> list[Claim]:
        jitter, clouds = min(_clouds(rows).items(), default=(1e-6, {}))
        biases = {f"S = {s}": tables.mean(_errors(cloud)) for s, cloud in clouds.items()}
        most = next(iter(biases), "S = 800")
        first = next(iter(clouds.values()), None)
        moderate = _errors(first, MODERATE) if first else []
        rhos = {f"S = {s}": c.rho for s, c in list(clouds.items())[1:]}
        fewer = {place: mean for place, mean in biases.items() if place != most}
        at = f"({epsilon(jitter)}; % of the range)"
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
        _, clouds = min(_clouds(rows).items())
        figure, axes = draw_clouds({f"$S = {s}$": c for s, c in clouds.items()}, "scale $s$")
        for ax in axes:
            ax.set(xlabel=r"exact $\log\det$", ylabel=r"estimated $\log\det$")
        return {"logdet-mc": figure}


def _clouds(rows: Rows) -> dict[float, dict[int, Cloud]]:
    """By jitter, then by S from the largest sample to the smallest."""
    found: dict[float, dict[int, Cloud]] = {}
    estimates = tables.group(rows, "jitter", "points", metric="log_det", exact=False)
    for (jitter, samples), members in sorted(estimates.items(), key=lambda item: -item[0][1]):
        truth = tables.select(rows, metric="log_det", jitter=jitter, exact=True)
        scale = joined([row._replace(value=row.config["scale"]) for row in truth])
        found.setdefault(jitter, {})[samples] = Cloud(joined(truth), joined(members), scale)
    return found


@dataclasses.dataclass(frozen=True)
class LaplacianConfig(CloudConfig):
    jitters: tuple[float, ...] = (1e-3, 1.0, 10.0, 1e3)  # ε
    probes: int = 10  # draws of ψ per network
    beta: float = 1e-3  # β, the standard deviation of a perturbation


class LaplacianVsLogDet(CloudExperiment):
    id = "laplacian-vs-logdet"
    label = "Fig. A.3"
    title = "First-order form of the log-determinant"
    see = "The Laplacian estimate against what it stands for, from small ε to large."
    cost = "2 min"
    protocol = "y: Tr 𝒥/ε by forward differences (β = 1e-3), 10 draws of ψ; no ½ on either axis"
    config = LaplacianConfig()
    quick = LaplacianConfig(draws=16, block=8)

    def numbers(self, config: LaplacianConfig, network: ScaledNetwork, x: Tensor) -> Numbers:
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
                "ours": _ratio(cloud),
                "… with the exact trace": _ratio(cloud, _first_order(rows, "trace", jitter)),
                "Spearman ρ": cloud.rho,
            }
            for jitter, cloud in _panels(rows).items()
        ]

    def claims(self, rows: Rows) -> list[Claim]:
        clouds = _panels(rows)
        if not clouds:
            text = "The first-order form is accurate for large ε and monotone for small ε"
            return [exact(text, False, None, seeds=0)]
        jitters, found = list(clouds), list(clouds.values())
        small, large, n = found[0], _ratio(found[-1]), len(found[0].exact)
        ratios = [_ratio(cloud, _first_order(rows, "trace", j)) for j, cloud in clouds.items()]
        falling = all(a > b for a, b in itertools.pairwise(ratios))
        return [
            exact(f"On the diagonal at {epsilon(jitters[-1])}: median ratio within 10 % of 1",
                  abs(large - 1) < 0.1, large, "accurate", seeds=n),
            exact(f"Monotone at {epsilon(jitters[0])}, far from the diagonal: ρ above 0.95",
                  small.rho > 0.95 and _ratio(small) > 2,
                  f"ρ = {small.rho:.3f}, median ratio {_ratio(small):.0f}", "monotonic relation",
                  seeds=n),
            exact("The approximation gets better as ε grows (median ratio, exact trace)",
                  falling and ratios[-1] >= 1, ", ".join(f"{r:.3g}" for r in ratios),
                  "more accurate", seeds=n),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        clouds = {power(jitter): cloud for jitter, cloud in _panels(rows).items()}
        figure, axes = draw_clouds(clouds, r"$\bar\lambda/\epsilon$")
        for ax in axes:
            ax.set(xscale="log", yscale="log")
        figure.supxlabel(r"$\log\det(\mathcal{J} + \epsilon I) - P\log\epsilon$", fontsize=11)
        axes[0].set_ylabel(r"Laplacian estimate of $\mathrm{Tr}\,\mathcal{J}/\epsilon$")
        return {"laplacian-vs-logdet": figure}


def _first_order(rows: Rows, metric: str, jitter: float) -> list[float]:
    """Tr 𝒥/ε of every network."""
    return [value / jitter for value in joined(rows, metric=metric)]


def _panels(rows: Rows) -> dict[float, Cloud]:
    """Tr 𝒥/ε by a few draws of ψ against log det(𝒥 + εI) − P log ε, by jitter."""
    found = {}
    for jitter in sorted({row.config["jitter"] for row in tables.select(rows, metric="log_det")}):
        number, trace = joined(rows, metric="parameters"), _first_order(rows, "trace", jitter)
        color = [value / n for value, n in zip(trace, number, strict=True)]  # mean eigenvalue/ε
        log_det = joined(rows, metric="log_det", jitter=jitter)
        found[jitter] = Cloud(log_det, _first_order(rows, "trace_estimate", jitter), color)
    return found


def _ratio(cloud: Cloud, estimate: Sequence[float] | None = None) -> float:
    """Median of estimate/log det."""
    return median_low(y / x for x, y in zip(cloud.exact, estimate or cloud.estimate, strict=True))
