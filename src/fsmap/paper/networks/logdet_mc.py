r"""``logdet-mc`` (Fig. A.2): $\log\det(\mathcal J + \epsilon I)$ from S of the M points of $p_X$.

Tr and log det commute with no average: the log-determinant of a mean of S outer products is below
that of the full mean (appendix B.9). How far below depends on how many eigenvalues of $\mathcal J$
rise above $\epsilon$, compared with the S·K rows of the sample; so the effective dimension
$d = \sum_i \lambda_i/(\lambda_i + \epsilon)$ is measured too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fsmap.linalg.jacobian import Site
from fsmap.linalg.logdet import evaluate
from fsmap.paper.descent import one_thread
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.networks.scaled_networks import (
    LARGEST,
    SMALLEST,
    CloudConfig,
    ScaledNetwork,
    jitter_text,
    plot_diagonal,
    spearman,
)
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import log_scale
from fsmap.paper.rows import Claim, Row
from fsmap.px import generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODERATE = 1.0
"""Networks with s up to this one are those that an initializer makes, or smaller ones."""


@dataclasses.dataclass(frozen=True)
class LogDetConfig(CloudConfig):
    """Sizes."""

    samples: tuple[int, ...] = (800, 400, 200)  # S
    # ε. The smallest is that of the figure: the default of the authors' code, because the paper
    # does not print one
    jitters: tuple[float, ...] = (1e-6, 1e-3, 1.0)


class Cloud(NamedTuple):
    """Estimates against exact values, one point per network."""

    scale: list[float]
    exact: list[float]
    estimate: list[float]

    @property
    def span(self) -> float:
        """Range of the exact values."""
        return max(self.exact) - min(self.exact)

    def errors(self, largest: float = math.inf) -> Tensor:
        """Estimate − exact in percent of the range, for networks with s up to ``largest``."""
        triples = zip(self.scale, self.exact, self.estimate, strict=True)
        kept = [100 * (b - a) / self.span for s, a, b in triples if s <= largest]
        return torch.tensor(kept, dtype=torch.float64)

    @property
    def rho(self) -> float:
        """Spearman's ρ."""
        return spearman(self.exact, self.estimate)


def log_dets(network: ScaledNetwork, x: Tensor, jitters: Tensor) -> Tensor:
    """The log-determinant on these points for every ε, from one Jacobian, ``[k]``."""
    site = Site(network.f, network.params, x)
    with torch.no_grad():
        values: Tensor = vmap(lambda jitter: evaluate(site, jitter).value)(jitters)
    return values


def cloud(rows: Sequence[Row], samples: int, jitter: float) -> Cloud:
    """The points of one panel."""
    chosen = tables.select(rows, metric="log_det", jitter=jitter)
    exact = {r.config["draw"]: r for r in chosen if r.config["exact"]}
    estimates = tables.select(chosen, points=samples, exact=False)
    return Cloud(
        [r.config["scale"] for r in estimates],
        [exact[r.config["draw"]].value for r in estimates],
        [r.value for r in estimates],
    )


class LogDetMC(Experiment):
    """The S-sample estimate of the log-determinant against the exact one."""

    id = "logdet-mc"
    label = "Fig. A.2"
    title = "Log-determinant from a sample of points"
    see = (
        "Half of the points give the exact value for networks of ordinary size. Fewer points give "
        "less, but in the same order. Where large weights saturate tanh, 𝒥 has almost as many "
        "eigenvalues above ε as the sample has rows, and even S = 800 falls short."
    )
    cost = "3 min"
    protocol = (
        "log det(𝒥 + εI) in float64; exact: all 1600 points of p_X; estimate: S of them without "
        "replacement. The figure has ε = 1e-6, the default of the authors' code"
    )
    group = "networks"
    config = LogDetConfig()
    quick = LogDetConfig(draws=16, block=8)

    def units(self, config: LogDetConfig) -> list[dict[str, Any]]:
        """Blocks of networks."""
        return config.units()

    def run(
        self, config: LogDetConfig, unit: dict[str, Any], context: Context
    ) -> Iterator[Measured]:
        """Exact value, estimates and effective dimension of each network of a block."""
        x = config.points()
        for done, network in enumerate(config.networks(unit), start=1):
            with one_thread():  # a second thread only waits, and spins while it does
                measured = list(self._measure(config, network, x))
            yield from measured
            context.advance(done / config.block)

    @staticmethod
    def _measure(config: LogDetConfig, network: ScaledNetwork, x: Tensor) -> Iterator[Measured]:
        jitters = torch.tensor(config.jitters, dtype=torch.float64)
        about = {"draw": network.draw, "scale": network.scale}
        eigenvalues = network.eigenvalues(x)  # [P]
        shifted = eigenvalues + jitters[:, None]  # [k, P]
        values = {len(x): shifted.log().sum(1)}
        order = torch.randperm(len(x), generator=generator("logdet-mc", network.draw))
        for size in config.samples:
            values[size] = log_dets(network, x[order[:size]], jitters)
        for size, found in values.items():
            for jitter, value in zip(config.jitters, found, strict=True):
                where = {**about, "points": size, "exact": size == len(x), "jitter": jitter}
                yield Measured("log_det", value, config=where)
        dimensions = (eigenvalues / shifted).sum(1)  # [k]
        for jitter, dimension in zip(config.jitters, dimensions, strict=True):
            yield Measured("dimension", dimension, config={**about, "jitter": jitter})

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Rank correlation and bias for each S and ε."""
        lines = []
        for jitter, samples in _settings(rows):
            found = cloud(rows, samples, jitter)
            errors = found.errors()
            lines.append(
                {
                    "jitter": jitter,
                    "S": samples,
                    "metric": "mean bias, % of the range",
                    "ours": float(errors.mean()),
                    "stderr": float(errors.std() / math.sqrt(len(errors))),
                    "median distance, %": float(errors.abs().median()),
                    "mean bias, s ≤ 1, %": float(found.errors(MODERATE).mean()),
                    "Spearman ρ": found.rho,
                    "range, nats": found.span,
                    "networks": len(found.exact),
                }
            )
        return lines

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """On the diagonal at the largest S; below it, but in the same order, at the others."""
        jitter, clouds = _main_clouds(rows)
        most, *fewer = clouds
        errors = clouds[most].errors()
        moderate = clouds[most].errors(MODERATE)
        at = f"({jitter_text(jitter)})"
        claims = [
            Claim(f"S = {most} is on the diagonal: median distance below 1 % of the range {at}",
                  bool(errors.abs().median() < 1), f"{errors.abs().median():.2f} %",
                  "almost perfect"),
            Claim(f"S = {most} is on the diagonal: mean bias below 1 % of the range {at}",
                  bool(errors.mean().abs() < 1), f"{errors.mean():.2f} %", "almost perfect"),
            Claim(f"… for networks with s ≤ {MODERATE:g}: mean bias below 1 % of the range {at}",
                  bool(moderate.mean().abs() < 1), f"{moderate.mean():.2f} %", "almost perfect"),
        ]  # fmt: skip
        for samples in fewer:
            found = clouds[samples]
            bias = float(found.errors().mean())
            below = bias < float(errors.mean()) and bias < 0
            claims.append(
                Claim(f"S = {samples} is below the diagonal, but monotone (ρ above 0.95) {at}",
                      below and found.rho > 0.95, f"ρ = {found.rho:.3f}, bias {bias:.1f} %",
                      "underestimates, strong correlation")
            )  # fmt: skip
        return claims

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """One panel per S, and the bias against s."""
        jitter, clouds = _main_clouds(rows)
        figure, grid = figures.axes(len(clouds), panel=(2.75, 2.9), sharey=True, squeeze=False)
        axes = grid[0]
        low = min(min(c.exact + c.estimate) for c in clouds.values()) / 1e3
        high = max(max(c.exact + c.estimate) for c in clouds.values()) / 1e3
        colors = _scale_colors()
        for ax, (samples, found) in zip(axes, clouds.items(), strict=True):
            plot_diagonal(ax, low, high)
            dots = ax.scatter(
                _thousands(found.exact),
                _thousands(found.estimate),
                c=found.scale,
                label=f"$S = {samples}$",
                **colors,
            )
            ax.set(title=f"$S = {samples}$", xlabel=r"exact $\log\det$ / 1000", aspect="equal")
            text = f"$\\rho = {found.rho:.3f}$\nmean bias {float(found.errors().mean()):.1f} %"
            ax.annotate(text.replace("-", "\u2212"), (0.97, 0.04), xycoords="axes fraction",
                        ha="right", va="bottom", fontsize=9)  # fmt: skip
        axes[0].set_ylabel(r"estimated $\log\det$ / 1000")
        bar = figure.colorbar(dots, ax=axes, shrink=0.8, pad=0.02)
        _label_scale(bar)
        return {"logdet-mc": figure, "logdet-mc-bias": _draw_bias(rows, jitter, clouds)}


def _draw_bias(rows: Sequence[Row], jitter: float, clouds: dict[int, Cloud]) -> Figure:
    figure, (left, right) = figures.axes(2, panel=(3.5, 2.8), sharey=True)
    ordered = tables.select(rows, metric="dimension", jitter=jitter)
    dimension = [r.value for r in sorted(ordered, key=lambda r: r.config["draw"])]
    looks = zip(clouds.items(), ("truth", "bma", "data"), strict=False)
    for (samples, found), name in looks:
        look = {"s": 11, "linewidth": 0, "color": figures.COLORS[name], "label": f"$S = {samples}$"}
        order = sorted(range(len(found.scale)), key=lambda i: found.scale[i])
        left.scatter([found.scale[i] for i in order], found.errors()[order].tolist(), **look)
        if len(dimension) == len(found.scale):
            right.scatter(dimension, found.errors().tolist(), **look)
    log_scale(left, "x")
    left.set(xlabel="scale $s$ of the parameters", ylabel="error, % of the range")
    right.set(xlabel=r"effective dimension $\sum_i \lambda_i/(\lambda_i + \epsilon)$")
    left.legend(loc="lower left")
    return figure


def _main_clouds(rows: Sequence[Row]) -> tuple[float, dict[int, Cloud]]:
    """The smallest jitter, and its clouds from the largest sample to the smallest."""
    settings = _settings(rows)
    main = min(jitter for jitter, _ in settings)
    sizes = sorted({samples for jitter, samples in settings if jitter == main}, reverse=True)
    return main, {samples: cloud(rows, samples, main) for samples in sizes}


def _settings(rows: Sequence[Row]) -> list[tuple[float, int]]:
    estimates = tables.select(rows, metric="log_det", exact=False)
    return [(jitter, points) for jitter, points in tables.group(estimates, "jitter", "points")]


def _thousands(values: list[float]) -> list[float]:
    return [value / 1e3 for value in values]


def _scale_colors() -> dict[str, Any]:
    from matplotlib.colors import LogNorm

    return {"norm": LogNorm(SMALLEST, LARGEST), "cmap": "cividis", "s": 11, "linewidth": 0}


def _label_scale(bar: Any) -> None:
    bar.set_label("scale $s$")
    bar.set_ticks([0.1, 1.0, 10.0], labels=["0.1", "1", "10"])
    bar.outline.set_visible(False)
