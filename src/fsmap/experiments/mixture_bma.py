"""``mixture-bma`` (Fig. 5): which MAP function is nearer to the Bayesian model average."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.assess.model_average import ChainMean, PosteriorMean, interval, nuts_mean, posterior_mean
from fsmap.errors import MissingExtraError
from fsmap.experiments import mixture_model as mixture
from fsmap.experiments.experiment import Context, Experiment, Measured
from fsmap.experiments.mixture_model import CURVE, TRUE, MixtureConfig
from fsmap.experiments.panels import legend_above
from fsmap.objective.moments import Moments
from fsmap.report import figures, tables
from fsmap.report.interactive import Curve, Frame, Interactive
from fsmap.report.records import Claim, Row
from fsmap.train.descent import one_thread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRINTED = (1.2, 10.0, 20.0)
"""The values of α in the paper's figure; a Markov chain is run for these."""


@dataclasses.dataclass(frozen=True)
class Config(MixtureConfig):
    """Sizes.

    Attributes:
        prior_stds: α.
        panels: Panels of the quadrature in θ_R (a quarter of them in θ_L).
        chain: Draws of the Markov chain.
        chain_warmup: Its warm-up.
    """

    prior_stds: tuple[float, ...] = (0.5, 1.2, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 14.0, 20.0)
    panels: int = 160
    chain: int = 4_000
    chain_warmup: int = 500


class MixtureBMA(Experiment):
    """Distances of PS-MAP and FS-MAP to the model average as the prior widens."""

    id = "mixture-bma"
    label = "Fig. 5"
    title = "Which MAP function is nearer to the model average"
    see = (
        "With a narrow prior PS-MAP is nearer to the Bayesian model average, with a wide one "
        "FS-MAP is. Two-dimensional quadrature and NUTS give the same average."
    )
    cost = "2 min"
    protocol = (
        "true objective in log space. BMA by 2-d Gauss-Legendre quadrature, by NUTS (pyro), and by "
        "the authors' grid over θ_R with θ_L at its MAP value"
    )
    config = Config()
    quick = Config(
        prior_stds=(1.2, 3.0, 10.0, 20.0), panels=160, chain=250, chain_warmup=120, seeds=3
    )

    def units(self, config: Config) -> list[dict[str, Any]]:
        """One unit per α."""
        return [{"prior_std": alpha} for alpha in config.prior_stds]

    def run(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """MAP solutions of all data sets, then their averages."""
        alpha, where = unit["prior_std"], dict(unit)
        design, data = mixture.build().design(CURVE), mixture.draw_data(config)
        statistics = mixture.moments(data)
        solutions = {
            s.method: s.theta
            for s in mixture.solve(config, data, alpha, lambda done: context.advance(done / 2))
            if s.objective in ("none", TRUE)
        }
        averages = []
        for seed in range(len(data)):
            average = quadrature(config, statistics, seed, alpha, solutions["ps-map"][seed])
            averages.append(average.mean)
            yield Measured("quadrature_error", average.error, seed=seed, config=where)
            yield Measured("quadrature_edge", average.edge, seed=seed, config=where)
            grid = authors_grid(config, statistics, seed, alpha, solutions["ps-map"][seed])
            gap = mixture.distance(grid, average.mean)
            yield Measured("distance_of_grid", gap, seed=seed, config=where)
        for method, theta in solutions.items():
            gaps = mixture.distance(theta.exp(), torch.stack(averages))
            for seed, gap in enumerate(gaps.tolist()):
                yield Measured("distance", gap, method, seed, where)
            yield Measured("function", design @ theta[0].exp(), method, 0, where)
        yield Measured("average", design @ averages[0], seed=0, config=where)
        yield Measured("data", torch.stack([data[0].x, data[0].y]), seed=0, config=where)
        if alpha in PRINTED:
            yield from _by_chain(config, statistics, alpha, averages[0], design)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Distances to the average by α, and what the other two ways of averaging differ by."""
        names = ("distance", "distance_of_grid", "distance_of_chain")
        chosen = [row for name in names for row in tables.select(rows, metric=name)]
        return tables.summarize(chosen, "metric", "prior_std", "method")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Which is nearer where, and that the averages agree."""
        ps, fs = _distances(rows, "ps-map"), _distances(rows, "fs-map")
        claims = []
        for alpha, nearer, other in ((1.2, "ps-map", "fs-map"), (20.0, "fs-map", "ps-map")):
            near, far = _distances(rows, nearer), _distances(rows, other)
            pair = near.get(alpha, math.nan), far.get(alpha, math.nan)
            claims.append(
                Claim(
                    f"{figures.NAMES[nearer]} is nearer to the BMA at α = {alpha:g}",
                    pair[0] < pair[1],
                    f"L2 distance {pair[0]:.4f} against {pair[1]:.4f}",
                    f"{figures.NAMES[nearer]} nearer",
                )
            )
        wide = [alpha for alpha in fs if alpha >= 10]
        claims.append(
            Claim(
                "FS-MAP is nearer at every larger α (10 and more)",
                bool(wide) and all(fs[alpha] < ps[alpha] for alpha in wide),
                ", ".join(f"{fs[alpha] / ps[alpha]:.2f} (α = {alpha:g})" for alpha in wide),
                "nearer",
            )
        )
        return [*claims, _chain_agrees(rows), _grid_agrees(rows)]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """The functions at the paper's α, and the distances along α."""
        shown = [
            alpha for alpha in PRINTED if tables.select(rows, metric="average", prior_std=alpha)
        ]
        figure, panels = figures.axes(len(shown) or 1, panel=(2.9, 2.6), sharey=True, squeeze=False)
        for ax, alpha in zip(panels[0], shown, strict=True):
            for curve in _curves(rows, alpha):
                look: dict[str, Any] = {"linestyle": "--" if curve.style == "dashed" else "-"}
                if curve.style == "points":
                    look = {"linestyle": "", "marker": "o", "markersize": 4}
                color = figures.COLORS[curve.method or "truth"]
                ax.plot(curve.x, curve.y, color=color, label=curve.name, **look)
            ax.set(xlabel="$x$", title=rf"$\alpha = {alpha:g}$")
        panels[0][0].set_ylabel("$f(x)$")
        legend_above(figure, panels[0][0])
        return {"mixture-bma": figure, "mixture-bma-distance": _draw_distances(rows)}

    def interactive(self, rows: Sequence[Row]) -> Interactive | None:
        """A slider over α."""
        ps, fs = _distances(rows, "ps-map"), _distances(rows, "fs-map")
        frames = [
            Frame(
                f"α = {alpha:g}",
                _curves(rows, alpha),
                note=f"L2 distance to the BMA: PS-MAP {ps[alpha]:.4f}, FS-MAP {fs[alpha]:.4f}",
            )
            for alpha in sorted(ps)
        ]
        title = "Widen the prior N(0, α²): the average leaves PS-MAP and joins FS-MAP"
        return Interactive(title, "α", frames, "x", "f(x)") if frames else None


def quadrature(
    config: Config, statistics: Moments, seed: int, alpha: float, peak: Tensor
) -> PosteriorMean:
    """E[exp θ] over both parameters. θ_L is pinned by the data, θ_R ends where the prior does."""
    posterior = mixture.log_density(statistics, seed, config.noise_std, alpha)
    pull = float(statistics.square[seed, 0, 0].sqrt() * peak[0].exp()) / config.noise_std
    left = interval(float(peak[0]) - 14 / pull, float(peak[0]) + 14 / pull, config.panels // 4)
    return posterior_mean(posterior, torch.exp, left, interval(-9 * alpha, 5.0, config.panels))


def authors_grid(
    config: Config, statistics: Moments, seed: int, alpha: float, peak: Tensor
) -> Tensor:
    """E[exp θ] as in the notebook: a sum over 1,000 values of θ_R, θ_L at its MAP value."""
    low, high = (-1_000.0, 5.0) if alpha > 2 else (-10.0, 1.0)
    right = torch.linspace(low, high, 1_000, dtype=torch.float64)
    theta = torch.stack([peak[0].expand_as(right), right], dim=-1)
    posterior = mixture.log_density(statistics, seed, config.noise_std, alpha)
    return posterior(theta).softmax(0) @ theta.exp()


def by_nuts(config: Config, statistics: Moments, alpha: float) -> ChainMean:
    r"""E[exp θ] by NUTS, in coordinates z where the posterior is easy to walk in.

    $\theta = z - (\alpha - 1)\,\mathrm{softplus}(-z)$ has slope 1 at the wall that the likelihood
    puts up at the right and slope α on the plateau at the left. A posterior expectation does not
    depend on coordinates, other than a MAP solution.

    Args:
        config: Sizes.
        statistics: The data; the first data set is used.
        alpha: Prior standard deviation.

    Returns:
        The mean with its Monte Carlo error.
    """
    posterior = mixture.log_density(statistics, 0, config.noise_std, alpha)
    softplus = torch.nn.functional.softplus

    def theta_of(z: Tensor) -> Tensor:
        return z - (alpha - 1) * softplus(-z)

    def log_density(z: Tensor) -> Tensor:
        log_slope = torch.log1p((alpha - 1) * torch.sigmoid(-z))
        return posterior(theta_of(z)) + log_slope.sum(-1)

    def coefficients(z: Tensor) -> Tensor:
        return theta_of(z).exp()

    start = torch.zeros(2, dtype=torch.float64)
    sizes = {"num_samples": config.chain, "num_warmup": config.chain_warmup}
    with one_thread():
        return nuts_mean(log_density, coefficients, start, seed=0, **sizes)


def _by_chain(
    config: Config, statistics: Moments, alpha: float, average: Tensor, design: Tensor
) -> Iterator[Measured]:
    where = {"prior_std": alpha}
    try:
        chain = by_nuts(config, statistics, alpha)
    except MissingExtraError as error:
        note = f"no Markov chain: {error}"
        yield Measured("chain_z", math.nan, seed=0, config=where, deviations=(note,))
        return
    z = ((chain.mean - average) / chain.stderr).abs().max()
    yield Measured("chain_z", z, seed=0, config=where)
    yield Measured("chain_divergences", chain.divergences, seed=0, config=where)
    gap = mixture.distance(chain.mean, average)
    yield Measured("distance_of_chain", gap, seed=0, config=where)
    yield Measured("average_by_chain", design @ chain.mean, seed=0, config=where)


def _chain_agrees(rows: Sequence[Row]) -> Claim:
    scores = {row.config["prior_std"]: row.value for row in tables.select(rows, metric="chain_z")}
    errors = [row.value for row in tables.select(rows, metric="quadrature_error")]
    fine = bool(errors) and max(errors) < 1e-6
    ran = bool(scores) and all(map(math.isfinite, scores.values()))
    notes = {note for row in tables.select(rows, metric="chain_z") for note in row.deviations}
    said = ", ".join(f"{z:.1f} (α = {alpha:g})" for alpha, z in scores.items())
    return Claim(
        "Quadrature in 2-d and NUTS agree on the model average, within 4 Monte Carlo errors",
        fine and ran and max(scores.values()) < 4,
        f"standard errors apart: {said}" if ran else "; ".join(sorted(notes)) or "not run",
        None,
    )


def _grid_agrees(rows: Sequence[Row]) -> Claim:
    grid = tables.line(tables.select(rows, metric="distance_of_grid"), "prior_std")
    nearest = {
        alpha: min(_distances(rows, "ps-map")[alpha], _distances(rows, "fs-map")[alpha])
        for alpha in grid.x
        if alpha in PRINTED
    }
    shares = {a: gap / nearest[a] for a, gap in zip(grid.x, grid.mean, strict=True) if a in nearest}
    return Claim(
        "The authors' grid over θ_R alone gives the same average (share of the nearer distance)",
        bool(shares) and max(shares.values()) < 0.2,
        ", ".join(f"{share:.1%} (α = {alpha:g})" for alpha, share in shares.items()),
        None,
    )


def _distances(rows: Sequence[Row], method: str) -> dict[float, float]:
    line = tables.line(tables.select(rows, metric="distance", method=method), "prior_std")
    return dict(zip(line.x, line.mean, strict=True))


def _curves(rows: Sequence[Row], alpha: float) -> list[Curve]:
    here, x = tables.select(rows, prior_std=alpha, seed=0), CURVE.tolist()
    curves = []
    for row in tables.select(here, metric="function"):
        name = figures.NAMES[str(row.method)]
        curves.append(
            Curve(name, x, row.value, row.method, "dashed" if name == "PS-MAP" else "line")
        )
    curves += [Curve("BMA", x, row.value, "bma") for row in tables.select(here, metric="average")]
    for row in tables.select(here, metric="data"):
        xs, ys = row.value
        curves.append(Curve("data", xs, ys, None, "points"))
    return curves


def _draw_distances(rows: Sequence[Row]) -> Figure:
    figure, ax = figures.axes(panel=(4.2, 2.9))
    for method in ("ps-map", "fs-map"):
        line = tables.line(tables.select(rows, metric="distance", method=method), "prior_std")
        figures.plot_mean(ax, *line, method)
    ax.set(xlabel=r"prior std $\alpha$", ylabel=r"$\|f - f_\mathrm{BMA}\|$ in $L_2(p_X)$")
    ax.legend()
    return figure
