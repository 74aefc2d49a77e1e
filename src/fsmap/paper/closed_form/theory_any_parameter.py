r"""``theory-any-parameter`` (abstract, appendix A): PS-MAP can be made to return any parameters.

In $\theta' = (\theta - \theta_0)^3$ the prior density is $p(\theta)\,|d\theta/d\theta'|$ with
$|d\theta/d\theta'| = \prod_i 1/(3(\theta_i - \theta_{0i})^2)$: infinite at $\theta_0$, whatever
the data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.objective.closed_form import Invertible, Moments
from fsmap.paper.closed_form import mixture
from fsmap.paper.closed_form.mixture import MixtureConfig
from fsmap.paper.descent import descend
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import legend_once
from fsmap.paper.report.tables import largest, smallest
from fsmap.paper.rows import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGETS = ((-1.0, 1.0), (1.0, 0.5), (-2.0, -2.5))
"""Values of θ₀ that PS-MAP is made to return."""

NEAR = 1e-4
"""One start is this near to θ₀: the peak is narrow, and other starts may end in a lesser one."""


@dataclasses.dataclass(frozen=True)
class Config(MixtureConfig):
    """Sizes."""

    prior_std: float = 1.2  # α
    starts: int = 7  # starting points per axis
    steps: int = 2_000
    lr: float = 0.5
    seeds: int = 4


class TheoryAnyParameter(Experiment):
    """The mixture model of Fig. 1 in θ' = (θ − θ₀)³, for several θ₀ and data sets."""

    id = "theory-any-parameter"
    label = "Abstract, App. A"
    title = "PS-MAP can be made to return anything"
    see = (
        "Written in (θ − θ₀)³, PS-MAP's best solution is θ₀, for every θ₀ and every data set; "
        "FS-MAP's stays where it was."
    )
    cost = "15 s"
    protocol = (
        "true objective, ε = 0; Adam from a grid of starts and one next to θ₀, the best one counts"
    )
    group = "theory"
    config = Config()
    quick = Config(starts=4, steps=800, seeds=3)

    def run(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """All θ₀, data sets and starts as one stack per method."""
        data = mixture.draw_data(config)
        task = Task(mixture.moments(data), mixture.log_det_form(config), config)
        plain = {s.method: s.theta for s in mixture.solve(MixtureConfig(), data, config.prior_std)
                 if s.objective != mixture.DOUBLED}  # fmt: skip
        for number, method in enumerate(("ps-map", "fs-map")):
            found, log_offset = task.solve(method)  # [targets, seeds, 2]
            for target, thetas, offsets in zip(TARGETS, found, log_offset, strict=True):
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

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Distances."""
        chosen = tables.select(rows, metric=("distance_to_target", "moved"))
        lines = tables.summarize(
            [r._replace(config={"target": str(tuple(r.config["target"]))}) for r in chosen],
            *("metric", "method", "target"),
        )
        return lines

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """PS-MAP returns θ₀, FS-MAP does not move."""
        near, far = (
            tables.values(rows, metric="distance_to_target", method=method)
            for method in ("ps-map", "fs-map")
        )
        moved = largest(tables.values(rows, metric="moved", method="fs-map"))
        return [
            Claim(
                "PS-MAP in θ' = (θ − θ₀)³ returns θ₀ whatever the data",
                largest(near) < 0.01,
                f"largest distance to θ₀: {largest(near):.0e}",
                "arbitrary θ₀",
            ),
            Claim(
                "FS-MAP does not, and finds the same function as in θ",
                moved < 1e-3 and smallest(far) > 0.1,
                f"its function moves by {moved:.0e}; it stays {smallest(far):.2f} or more from θ₀",
                "invariant",
            ),
        ]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """The plane (θ_L, θ_R): targets, and where each method ends."""
        figure, panels = figures.axes(2, panel=(3.4, 3.1), sharex=True, sharey=True)
        targets = {tuple(row.config["target"]) for row in tables.select(rows, metric="moved")}
        for ax, method in zip(panels, ("ps-map", "fs-map"), strict=True):
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
    at θ₀, which is infinitely high and thinner than a float, is a slope that can be walked up.
    """

    def __init__(self, moments: Moments, form: Invertible, config: Config) -> None:
        self.moments, self.form, self.config = moments, form, config
        self.target = torch.tensor(TARGETS, dtype=torch.float64)[:, None, None]  # [T, 1, 1, 2]

    def log_posterior(self, method: str, log_offset: Tensor, sign: Tensor) -> Tensor:
        """Log-density with respect to θ', ``[T, starts, seeds, 2]`` to ``[T, starts, seeds]``."""
        theta = self.target + sign * log_offset.exp()
        log_slope = -math.log(3) - 2 * log_offset  # log dθ/dθ'
        prior = -theta.square().sum(-1) / (2 * self.config.prior_std**2) + log_slope.sum(-1)
        value = self.moments.log_likelihood(theta.exp(), self.config.noise_std) + prior
        if method == "fs-map":
            value = value - 0.5 * self.form.value(theta + log_slope)
        return value

    def solve(self, method: str) -> tuple[Tensor, Tensor]:
        """The best of all starts."""
        axis = torch.linspace(-3.3, 2.2, self.config.starts, dtype=torch.float64)
        grid = torch.cartesian_prod(axis, axis)[None] - self.target[:, 0]  # [T, starts, 2]
        offset = torch.cat([grid, torch.full_like(grid[:, :1], NEAR)], dim=1)[:, :, None]
        offset = offset.expand(-1, -1, len(self.moments.num), -1)  # [T, starts, seeds, 2]
        sign, u = offset.sign(), offset.abs().log()
        for share in (1.0, 0.03):  # a smaller rate at the end
            u = descend(
                lambda u: -self.log_posterior(method, u, sign) / self.moments.num,
                u,
                lr=self.config.lr * share,
                steps=self.config.steps // 2,
            )
        best = self.log_posterior(method, u, sign).argmax(1)  # [T, seeds]
        index = best[:, None, :, None].expand(-1, 1, -1, 2)
        chosen, side = u.gather(1, index)[:, 0], sign.gather(1, index)[:, 0]  # [T, seeds, 2]
        return self.target[:, 0] + side * chosen.exp(), chosen
