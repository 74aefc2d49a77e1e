"""``mixture-posterior`` (Fig. 1): likeliest functions are not those of the likeliest parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.paper.closed_form import mixture_model as mixture
from fsmap.paper.closed_form.mixture_model import CURVE, DOUBLED, TRUE, MixtureConfig
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report import figures, tables
from fsmap.paper.report.panels import LINES, legend_above
from fsmap.paper.report.records import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = torch.linspace(-8, 3, 2_201, dtype=torch.float64)
"""θ_R along which densities are drawn."""


@dataclasses.dataclass(frozen=True)
class Config(MixtureConfig):
    """Sizes.

    Attributes:
        prior_std: α.
    """

    prior_std: float = 1.2


class MixturePosterior(Experiment):
    """Posterior densities of the right bump's weight, and the functions at their peaks."""

    id = "mixture-posterior"
    label = "Fig. 1 a, b"
    title = "Most likely functions or parameters"
    see = (
        "The two densities peak at different θ_R, so that FS-MAP's right bump, which one data "
        "point supports, is visibly lower than PS-MAP's."
    )
    cost = "5 s"
    protocol = (
        "true objective in log space; the authors' notebook doubles the log-determinant, shown as "
        "a marked comparison only"
    )
    config = Config()
    quick = Config(seeds=3)

    def run(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Solve all data sets at once, then walk along θ_R."""
        model, data = mixture.build(), mixture.draw_data(config)
        solutions = mixture.solve(config, data, config.prior_std, context.advance)
        design = model.design(CURVE)
        for method, objective, theta in solutions:
            where = {"objective": objective, "prior_std": config.prior_std}
            said = (
                ("true log-determinant; the notebook's is twice it",) if objective == TRUE else ()
            )
            for seed, (left, right) in enumerate((model.scale * theta.exp()).tolist()):
                yield Measured("left_height", left, method, seed, where, said)
                yield Measured("right_height", right, method, seed, where, said)
            yield Measured("function", design @ theta[0].exp(), method, 0, where)
            densities = _densities(config, data, solutions[0].theta, method, objective)
            for seed, density in enumerate(densities):
                yield Measured("peak", GRID[density.argmax()], method, seed, where, said)
            yield Measured("density", densities[0], method, 0, where)
        yield Measured("data", torch.stack([data[0].x, data[0].y]), seed=0)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Peaks and heights."""
        chosen = tables.select(rows, metric=("peak", "right_height", "left_height"))
        return tables.summarize(chosen, "metric", "method", "objective")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Different peaks, a lower bump."""
        peak = {m: _values(rows, "peak", m, o) for m, o in (("ps-map", "none"), ("fs-map", TRUE))}
        gaps = [abs(peak["ps-map"][seed] - peak["fs-map"][seed]) for seed in peak["fs-map"]]
        heights = {
            m: _values(rows, "right_height", m, o)
            for m, o in (("ps-map", "none"), ("fs-map", TRUE))
        }
        ratios = [heights["fs-map"][s] / heights["ps-map"][s] for s in heights["fs-map"]]
        ps, fs = peak["ps-map"].get(0, math.nan), peak["fs-map"].get(0, math.nan)
        return [
            Claim(
                "p(θ_R|D) and p(f_θ|D) peak at different θ_R",
                bool(gaps) and min(gaps) > 0.25,
                f"θ_R = {ps:.2f} and {fs:.2f}",
                "different",
            ),
            Claim(
                "FS-MAP's right bump is visibly lower than PS-MAP's",
                bool(ratios) and max(ratios) < 0.75,
                f"{max(ratios, default=math.nan):.2f} of its height or less",
                "lower",
            ),
        ]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """Densities on the left, functions on the right."""
        figure, (left, right) = figures.axes(2, panel=(3.9, 2.9))
        for row in tables.select(rows, metric="density"):
            left.plot(GRID.tolist(), row.value, **_look(row))
        left.set(xlabel=r"$\theta_R$", ylabel="density", xlim=(-6.5, 2), ylim=(0, None))
        left.set_title("Distinct posterior densities")
        for row in tables.select(rows, metric="function"):
            right.plot(CURVE.tolist(), row.value, **_look(row))
        for row in tables.select(rows, metric="data"):
            right.plot(*row.value, "o", color=figures.COLORS["truth"], label="data", markersize=4)
        right.set(xlabel="$x$", ylabel="$f(x)$", title="Distinct learned functions")
        legend_above(figure, right)
        return {"mixture-posterior": figure}


def _densities(
    config: Config, data: Sequence[Any], map_theta: Tensor, method: str, objective: str
) -> list[Tensor]:
    """Density along θ_R with θ_L at its PS-MAP value, area 1, for each data set."""
    statistics = mixture.moments(data)
    weight = mixture.WEIGHTS[method][objective]
    form = mixture.log_det_form(config)
    densities = []
    for number in range(len(data)):
        left = map_theta[number, 0].expand_as(GRID)
        theta = torch.stack([left, GRID], dim=-1)  # [n, 2]
        posterior = mixture.log_density(statistics, number, config.noise_std, config.prior_std)
        log_p = posterior(theta) - weight * form.value(theta)
        densities.append(log_p.softmax(0) / (GRID[1] - GRID[0]))
    return densities


def _values(rows: Sequence[Row], metric: str, method: str, objective: str) -> dict[int, float]:
    chosen = tables.select(rows, metric=metric, method=method, objective=objective)
    return {int(row.seed or 0): float(row.value) for row in chosen}


def _look(row: Row) -> dict[str, Any]:
    if row.config["objective"] == DOUBLED:
        label = "FS-MAP, doubled log det (notebook)"
        return {"color": figures.MUTED, "linestyle": LINES[2]["linestyle"], "label": label}
    labels = {
        "ps-map": r"PS-MAP, $p(\theta\,|\,\mathcal{D})$",
        "fs-map": r"FS-MAP, $p(f_\theta\,|\,\mathcal{D})$",
    }
    method = str(row.method)
    dashed = "--" if method == "ps-map" else "-"
    return {"color": figures.COLORS[method], "linestyle": dashed, "label": labels[method]}
