r"""``theory-large-data`` (section 4.3): with much data FS-MAP's function becomes the model average.

The model of Fig. 1 is linear in the heights $h = e^\theta$, and FS-MAP is the mode of $p(h|D)$
while the average is its mean. For a posterior of width s mode and mean differ by $O(s^4)$, so like
$N^{-2}$; PS-MAP is the mode of another density, a distance of $O(s^2)$ away, like $N^{-1}$.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fsmap.assess.model_average import Interval, PosteriorMean, posterior_mean
from fsmap.data import synthetic
from fsmap.models.basis import EXP
from fsmap.objective.closed_form import Invertible, Moments
from fsmap.objective.prior import Normal
from fsmap.paper.closed_form import mixture
from fsmap.paper.closed_form.fits import log_density, objective_of
from fsmap.paper.descent import one_thread
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.newton import maximize
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import log_scale
from fsmap.paper.rows import Claim, Row
from fsmap.types import Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEIGHTS = (1.0, 0.6)
"""Of the true bumps."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes."""

    # numbers N of training points
    sizes: tuple[int, ...] = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
    prior_std: float = 1.2  # α
    noise_std: float = 0.3  # σ
    panels: int = 40  # panels of the quadrature in each parameter
    seeds: int = 10  # data sets


class TheoryLargeData(Experiment):
    """Distances of both MAP functions to the model average as N grows."""

    id = "theory-large-data"
    label = "Sec. 4.3"
    title = "With much data FS-MAP becomes the model average"
    see = (
        "Both distances to the Bayesian model average vanish as N grows, FS-MAP's like 1/N², "
        "PS-MAP's like 1/N."
    )
    cost = "30 s"
    protocol = "true objective, ε = 0, optima by Newton's method, average by 2-d quadrature"
    group = "theory"
    config = Config()
    quick = Config(sizes=(20, 100, 500, 2_000), panels=14, seeds=3)

    def units(self, config: Config) -> list[dict[str, Any]]:
        """One unit per size."""
        return [{"n_train": n} for n in config.sizes]

    def run(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Both optima and the average, data set by data set."""
        for seed in range(config.seeds):
            # One data set at a time: Newton's method adapts its step to each.
            data = _draw(config, unit["n_train"], seed)
            statistics = mixture.moments([data])
            posterior = mixture.log_density(statistics, 0, config.noise_std, config.prior_std)
            found = {method: _mode(config, data, method) for method in ("ps-map", "fs-map")}
            average = _average(config, posterior, statistics, found["ps-map"])
            yield Measured("quadrature_error", average.error, seed=seed, config=unit)
            for method, theta in found.items():
                gap = mixture.distance(theta.exp(), average.mean)
                yield Measured("distance", gap, method, seed, unit)
            context.advance((seed + 1) / config.seeds)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Distances by size."""
        chosen = tables.select(rows, metric="distance")
        return tables.summarize(chosen, "n_train", "method")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Both vanish, FS-MAP faster."""
        error = tables.largest(tables.values(rows, metric="quadrature_error"))
        lines = {m: _line(rows, m) for m in ("ps-map", "fs-map")}
        rates = {m: _rate(line) for m, line in lines.items()}
        last = [lines[m].mean[-1] if lines[m].x else math.nan for m in ("fs-map", "ps-map")]
        ratio = last[0] / last[1]
        return [
            Claim(
                "FS-MAP's function approaches the model average as N grows",
                rates["fs-map"] < -1.5 and error < 1e-6,
                f"distance like N^{rates['fs-map']:.2f}",
                "equal in the limit",
            ),
            Claim(
                "… faster than PS-MAP's, where f is not linear in θ",
                rates["fs-map"] < rates["ps-map"] - 0.5 and ratio < 0.1,
                f"PS-MAP: N^{rates['ps-map']:.2f}; FS-MAP's distance is {ratio:.1e} of PS-MAP's "
                "at the largest N",
                "PS-MAP generally differs",
            ),
        ]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """Distances against N."""
        figure, ax = figures.axes(panel=(4.4, 3.0))
        for method in ("ps-map", "fs-map"):
            line = _line(rows, method)
            figures.plot_mean(ax, *line, method)
        ax.set(xlabel="training points $N$", ylabel=r"$\|f - f_\mathrm{BMA}\|$ in $L_2(p_X)$")
        ax.set_yscale("log")
        log_scale(ax, "x")
        ax.legend()
        return {"theory-large-data": figure}


def _mode(config: Config, data: Batch, method: str) -> Tensor:
    """PS-MAP or FS-MAP by Newton's method, ``[2]``."""
    model = mixture.build()
    rows = Batch(model.design(data.x), data.y)
    form = None
    if method == "fs-map":
        form = Invertible.from_gram(model.uniform_gram(-1.0, 1.0))
    prior = Normal(config.prior_std)
    objective = objective_of(EXP, config.noise_std, prior, form, len(data.y))
    start = model.theta.detach()
    return maximize(lambda theta: log_density(objective, EXP, theta, rows), start)


def _draw(config: Config, size: int, seed: int) -> Batch:
    model = mixture.build()
    heights = torch.tensor(HEIGHTS, dtype=torch.float64) / model.scale
    return synthetic.regression(
        lambda x: model.design(x) @ heights,
        size,
        noise_std=config.noise_std,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )


def _average(
    config: Config, posterior: Callable[[Tensor], Tensor], statistics: Moments, peak: Tensor
) -> PosteriorMean:
    """The average by panels that are narrow around the peak and reach to the ends of the prior."""
    pulls = statistics.square[0].diagonal().sqrt() * peak.exp() / config.noise_std
    sides = []
    for place, pull in zip(peak.tolist(), pulls.tolist(), strict=True):
        wide = np.linspace(-9 * config.prior_std, 5, config.panels + 1)
        width = 10 * min(1 / max(pull, 1e-9), config.prior_std)
        fine = place + width * np.linspace(-1, 1, config.panels + 1)
        cuts = np.union1d(wide[(wide < fine[0]) | (wide > fine[-1])], fine)
        sides.append(Interval(tuple(cuts.tolist())))
    with one_thread():
        return posterior_mean(posterior, torch.exp, *sides)


def _line(rows: Sequence[Row], method: str) -> tables.Line:
    return tables.line(tables.select(rows, metric="distance", method=method), "n_train")


def _rate(line: tables.Line) -> float:
    """Exponent of N, from the upper half of the sizes."""
    half = len(line.x) // 2
    if len(line.x) - half < 2:
        return math.nan
    return math.log(line.mean[-1] / line.mean[half]) / math.log(line.x[-1] / line.x[half])
