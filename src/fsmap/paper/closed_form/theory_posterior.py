r"""``theory-any-parameter``, ``theory-large-data``: two statements about the posterior of Fig. 1.

Any parameter (abstract, appendix A): in $\theta' = (\theta - \theta_0)^3$ the prior density is
$p(\theta)\,|d\theta/d\theta'|$ with $|d\theta/d\theta'| = \prod_i 1/(3(\theta_i -
\theta_{0i})^2)$: infinite at $\theta_0$, whatever the data, so PS-MAP returns $\theta_0$.

Large data (section 4.3): the model is linear in the heights $h = e^\theta$, and FS-MAP is the mode
of $p(h|D)$ while the average is its mean. For a posterior of width s mode and mean differ by
$O(s^4)$, so like $N^{-2}$; PS-MAP is the mode of another density, $O(s^2)$ away, like $N^{-1}$.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsmap.assess.model_average import Interval, PosteriorMean, posterior_mean
from fsmap.data import synthetic
from fsmap.models.basis import EXP
from fsmap.objective.closed_form import Invertible
from fsmap.objective.prior import Normal
from fsmap.paper.closed_form import mixture
from fsmap.paper.closed_form.mixture import MixtureConfig
from fsmap.paper.experiment import Context, Experiment, Measured, Plots, exact
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import legend_once, log_scale
from fsmap.paper.report.tables import largest, smallest
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.paper.solvers import log_density, maximize, objective_of, one_thread
from fsmap.types import Batch

TARGETS = ((-1.0, 1.0), (1.0, 0.5), (-2.0, -2.5))
"""Values of θ₀ that PS-MAP is made to return."""
NEAR = 1e-4
"""One start is this near to θ₀: the peak is narrow, and other starts may end in a lesser one."""
METHODS = ("ps-map", "fs-map")


@dataclasses.dataclass(frozen=True)
class AnyConfig(MixtureConfig):
    prior_std: float = 1.2  # α
    starts: int = 7  # starting points per axis
    steps: int = 2_000
    lr: float = 0.5
    seeds: int = 4


class TheoryAnyParameter(Experiment):
    id = "theory-any-parameter"
    label = "Abstract, App. A"
    title = "PS-MAP can be made to return anything"
    see = "Where the best solution of each method is if the model is written in (θ − θ₀)³."
    cost = "15 s"
    protocol = (
        "true objective, ε = 0; Adam from a grid of starts and one next to θ₀, the best one counts"
    )
    group = "theory"
    config = AnyConfig()
    quick = AnyConfig(starts=4, steps=800, seeds=3)

    def run(self, config: AnyConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        data = mixture.draw_data(config)
        task = Task(data, mixture.log_det_form(config), config)
        found = mixture.solve(MixtureConfig(), data, config.prior_std)
        plain = dict(zip(METHODS, found.values(), strict=False))
        for number, method in enumerate(METHODS):
            found_theta, log_offset = task.solve(method)  # [targets, seeds, 2]
            for target, thetas, offsets in zip(TARGETS, found_theta, log_offset, strict=True):
                where = {"target": list(target)}
                for seed, theta in enumerate(thetas):
                    gap = offsets[seed].exp().max()
                    yield Measured("distance_to_target", gap, method, seed, where)
                    moved = mixture.distance(theta.exp(), plain[method][seed].exp())
                    yield Measured("moved", moved, method, seed, where)
                    yield Measured("theta", theta, method, seed, where)
            for seed, theta in enumerate(plain[method]):
                yield Measured("theta", theta, method, seed, {"target": None})
            context.advance((number + 1) / 2)

    def table(self, rows: Rows) -> list[dict[str, Any]]:
        chosen = tables.select(rows, metric=("distance_to_target", "moved"))
        named = [r._replace(config={"target": str(tuple(r.config["target"]))}) for r in chosen]
        return tables.summarize(named, "metric", "method", "target")

    def claims(self, rows: Rows) -> list[Claim]:
        near, far = (
            tables.values(rows, metric="distance_to_target", method=method) for method in METHODS
        )
        moved = largest(tables.values(rows, metric="moved", method="fs-map"))
        seeds = len({row.seed for row in rows})
        return [
            exact("PS-MAP in θ' = (θ − θ₀)³ returns θ₀ whatever the data", largest(near) < 0.01,
                  f"largest distance to θ₀: {largest(near):.0e}", "arbitrary θ₀", seeds=seeds),
            exact("FS-MAP does not, and finds the same function as in θ",
                  moved < 1e-3 and smallest(far) > 0.1, f"its function moves by {moved:.0e}; it "
                  f"stays {smallest(far):.2f} or more from θ₀", "invariant", seeds=seeds),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, panels = figures.axes(2, panel=(3.4, 3.1), sharex=True, sharey=True)
        targets = {tuple(row.config["target"]) for row in tables.select(rows, metric="moved")}
        for ax, method in zip(panels, METHODS, strict=True):
            for x, y in sorted(targets):
                ax.plot(x, y, "x", color=figures.INK, markersize=9, markeredgewidth=1.6)
                ax.annotate(r"$\theta_0$", (x, y), xytext=(6, 4), textcoords="offset points")
            for row in tables.select(rows, metric="theta", method=method):
                plain = row.config["target"] is None
                look = {"markersize": 10, "alpha": 0.3} if plain else {"markersize": 4.5}
                label = r"optimum in $\theta$" if plain else r"optimum in $(\theta - \theta_0)^3$"
                name = f"{figures.NAMES[method]}, {label}"
                ax.plot(*row.value, "o", color=figures.COLORS[method], label=name, **look)
            ax.set(xlabel=r"$\theta_L$", xlim=(-2.5, 1.6), ylim=(-3, 1.6))
            legend_once(ax, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        panels[0].set_ylabel(r"$\theta_R$")
        return {"theory-any-parameter": figure}


class Task:
    r"""Objectives in $\theta' = (\theta - \theta_0)^3$ for all θ₀, data sets and starts.

    They are maximized over $u = \log|\theta - \theta_0|$ (the sign is the start's): there the peak
    at θ₀, which is infinitely high and thinner than a float, is a slope that can be walked up. Each
    member has its own θ₀ and signs, which a model function of ``fit_population`` cannot have: this
    is Adam on the stack of all of them.
    """

    def __init__(self, data: Sequence[Batch], form: Invertible, config: AnyConfig) -> None:
        designs = [mixture.build().design(batch.x) for batch in data]
        targets = [batch.y for batch in data]
        self.square = torch.stack([a.mT @ a for a in designs])  # [seeds, 2, 2]
        self.cross = torch.stack([a.mT @ y for a, y in zip(designs, targets, strict=True)])
        self.power = torch.stack([y @ y for y in targets])
        self.num, self.form, self.config = len(targets[0]), form, config
        self.target = torch.tensor(TARGETS, dtype=torch.float64)[:, None, None]  # [T, 1, 1, 2]

    def log_posterior(self, method: str, log_offset: Tensor, sign: Tensor) -> Tensor:
        """Log-density with respect to θ', ``[T, starts, seeds, 2]`` to ``[T, starts, seeds]``."""
        theta = self.target + sign * log_offset.exp()
        log_slope = -math.log(3) - 2 * log_offset  # log dθ/dθ'
        prior = -theta.square().sum(-1) / (2 * self.config.prior_std**2) + log_slope.sum(-1)
        height = theta.exp()
        pulled = torch.einsum("...qp,qpr->...qr", height, self.square)
        misfit = (height * (pulled - self.cross - self.cross)).sum(-1) + self.power
        value = -misfit / (2 * self.config.noise_std**2) + prior
        if method == "fs-map":
            value = value - 0.5 * self.form.value(theta + log_slope)
        return value

    def solve(self, method: str) -> tuple[Tensor, Tensor]:
        """The best of all starts: θ and log|θ − θ₀|, ``[T, seeds, 2]``."""
        axis = torch.linspace(-3.3, 2.2, self.config.starts, dtype=torch.float64)
        grid = torch.cartesian_prod(axis, axis)[None] - self.target[:, 0]  # [T, starts, 2]
        offset = torch.cat([grid, torch.full_like(grid[:, :1], NEAR)], dim=1)[:, :, None]
        offset = offset.expand(-1, -1, len(self.power), -1)  # [T, starts, seeds, 2]
        sign, u = offset.sign(), offset.abs().log().requires_grad_()
        with one_thread():
            for share in (1.0, 0.03):  # a smaller rate at the end
                adam = torch.optim.Adam([u], lr=self.config.lr * share, fused=True)
                for _ in range(self.config.steps // 2):
                    loss = -self.log_posterior(method, u, sign) / self.num
                    (u.grad,) = torch.autograd.grad(loss.sum(), u)
                    adam.step()
        u = u.detach()
        best = self.log_posterior(method, u, sign).argmax(1)  # [T, seeds]
        index = best[:, None, :, None].expand(-1, 1, -1, 2)
        chosen, side = u.gather(1, index)[:, 0], sign.gather(1, index)[:, 0]  # [T, seeds, 2]
        return self.target[:, 0] + side * chosen.exp(), chosen


HEIGHTS = (1.0, 0.6)
"""Of the true bumps."""


@dataclasses.dataclass(frozen=True)
class LargeConfig:
    # numbers N of training points
    sizes: tuple[int, ...] = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
    prior_std: float = 1.2  # α
    noise_std: float = 0.3  # σ
    panels: int = 40  # panels of the quadrature in each parameter
    seeds: int = 10  # data sets


class TheoryLargeData(Experiment):
    id = "theory-large-data"
    label = "Sec. 4.3"
    title = "With much data FS-MAP becomes the model average"
    see = "Distances of both MAP functions to the Bayesian model average as N grows."
    cost = "30 s"
    protocol = "true objective, ε = 0, optima by Newton's method, average by 2-d quadrature"
    group = "theory"
    metrics = ("distance",)
    columns = ("n_train", "method")
    config = LargeConfig()
    quick = LargeConfig(sizes=(20, 100, 500, 2_000), panels=14, seeds=3)

    def units(self, config: LargeConfig) -> list[Unit]:
        return [{"n_train": n} for n in config.sizes]

    def run(self, config: LargeConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        for seed in range(config.seeds):
            data = _draw(config, unit["n_train"], seed)
            found = {method: _mode(config, data, method) for method in METHODS}
            average = _average(config, data, found["ps-map"])
            yield Measured("quadrature_error", average.error, seed=seed, config=unit)
            for method, theta in found.items():
                gap = mixture.distance(theta.exp(), average.mean)
                yield Measured("distance", gap, method, seed, unit)
            context.advance((seed + 1) / config.seeds)

    def claims(self, rows: Rows) -> list[Claim]:
        error = largest(tables.values(rows, metric="quadrature_error"))
        lines = {m: _line(rows, m) for m in METHODS}
        fs, ps = (_rate(lines[m]) for m in ("fs-map", "ps-map"))
        last = [lines[m].mean[-1] if lines[m].x else math.nan for m in ("fs-map", "ps-map")]
        seeds = len({row.seed for row in rows})
        return [
            exact("FS-MAP's function approaches the model average as N grows, faster than N^−1.5",
                  fs < -1.5 and error < 1e-6, f"distance like N^{fs:.2f}", "equal in the limit",
                  seeds=seeds),
            exact("… faster than PS-MAP's, because f is not linear in θ",
                  fs < ps - 0.5 and last[0] < 0.1 * last[1],
                  f"PS-MAP: N^{ps:.2f}; FS-MAP's distance is {last[0] / last[1]:.1e} of PS-MAP's "
                  "at the largest N", "PS-MAP generally differs", seeds=seeds),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, ax = figures.axes(panel=(4.4, 3.0))
        for method in METHODS:
            figures.plot_mean(ax, *_line(rows, method), method)
        ax.set(xlabel="training points $N$", ylabel=r"$\|f - f_\mathrm{BMA}\|$ in $L_2(p_X)$")
        ax.set_yscale("log")
        log_scale(ax, "x")
        ax.legend()
        return {"theory-large-data": figure}


def _mode(config: LargeConfig, data: Batch, method: str) -> Tensor:
    """PS-MAP or FS-MAP by Newton's method, ``[2]``."""
    model = mixture.build()
    rows = Batch(model.design(data.x), data.y)
    gram = model.uniform_gram(-1.0, 1.0)
    form = Invertible.from_gram(gram) if method == "fs-map" else None
    objective = objective_of(EXP, config.noise_std, Normal(config.prior_std), form, len(data.y))
    start = model.theta.detach()
    return maximize(lambda theta: log_density(objective, EXP, theta, rows), start)


def _draw(config: LargeConfig, size: int, seed: int) -> Batch:
    model = mixture.build()
    heights = torch.tensor(HEIGHTS, dtype=torch.float64) / model.scale
    draw: dict[str, Any] = {"noise_std": config.noise_std, "dtype": torch.float64}
    draw["generator"] = torch.Generator().manual_seed(seed)
    return synthetic.regression(lambda x: model.design(x) @ heights, size, **draw)


def _average(config: LargeConfig, data: Batch, peak: Tensor) -> PosteriorMean:
    """The average by panels that are narrow around the peak and reach to the ends of the prior."""
    sides = []
    widths = mixture.pulls(data, peak, config.noise_std)
    for place, pull in zip(peak.tolist(), widths.tolist(), strict=True):
        wide = np.linspace(-9 * config.prior_std, 5, config.panels + 1)
        width = 10 * min(1 / max(pull, 1e-9), config.prior_std)
        fine = place + width * np.linspace(-1, 1, config.panels + 1)
        cuts = np.union1d(wide[(wide < fine[0]) | (wide > fine[-1])], fine)
        sides.append(Interval(tuple(cuts.tolist())))
    posterior = mixture.log_density(data, config.noise_std, config.prior_std)
    with one_thread():
        return posterior_mean(posterior, torch.exp, *sides)


def _line(rows: Rows, method: str) -> tables.Line:
    return tables.line(tables.select(rows, metric="distance", method=method), "n_train")


def _rate(line: tables.Line) -> float:
    """Exponent of N, from the upper half of the sizes."""
    half = len(line.x) // 2
    if len(line.x) - half < 2:
        return math.nan
    return math.log(line.mean[-1] / line.mean[half]) / math.log(line.x[-1] / line.x[half])
