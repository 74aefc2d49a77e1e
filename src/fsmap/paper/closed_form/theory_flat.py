r"""``theory-flat`` (section 3.3): where the model fits, the Hessian of the loss is $\mathcal{J}$.

For $L = \frac{1}{2N}\sum (f - y)^2$ the Gauss-Newton approximation is
$\nabla^2 L \approx \frac1N J^\top J = \mathcal{J}(\theta; p_X)$ with $p_X$ = the training inputs.
What it leaves out is proportional to the residuals, weighted by $\sigma''$; at an optimum the
residuals are orthogonal to the features but for the prior, and the difference falls like their
square.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.models.basis import TANH
from fsmap.paper.closed_form.fits import log_density
from fsmap.paper.closed_form.fourier import FourierConfig, draw_problem
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.newton import maximize
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import log_scale
from fsmap.paper.rows import Claim, Row
from fsmap.types import Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Config(FourierConfig):
    """Sizes."""

    num_frequencies: int = 50  # P/2
    prior_std: float = 1.0  # α, of the truth: small enough that tanh is not saturated
    n_train: int = 400  # N
    # noise of the data, which decides how well they are fitted
    noise_stds: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class TheoryFlat(Experiment):
    """Relative difference of Hessian and 𝒥 against the residual."""

    id = "theory-flat"
    label = "Sec. 3.3"
    title = "The geometry term is the curvature of the loss"
    see = (
        "The Hessian of the loss and 𝒥 at the training inputs become the same matrix as the "
        "residual vanishes, so FS-MAP's term is the curvature of a model that fits well."
    )
    cost = "30 s"
    protocol = "PS-MAP fits by Newton's method, Hessians by automatic differentiation in float64"
    group = "theory"
    config = Config()
    quick = Config(num_frequencies=20, n_train=200, noise_stds=(0.001, 0.01, 0.1, 1.0))

    def run(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Fit at every noise level, then compare the two matrices."""
        for number, noise in enumerate(config.noise_stds):
            drawn, where = dataclasses.replace(config, noise_std=noise), {"noise_std": noise}
            for seed in range(config.seeds):
                train = draw_problem(drawn, config.n_train, seed).train
                gap, residual = compare(drawn, _fit(drawn, train), train)
                yield Measured("relative_gap", gap, "ps-map", seed, where)
                yield Measured("residual", residual, "ps-map", seed, where)
            context.advance((number + 1) / len(config.noise_stds))

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Gap and residual by noise level."""
        chosen = tables.select(rows, metric=("relative_gap", "residual"))
        return tables.summarize(chosen, "metric", "noise_std")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Small where the fit is good, proportional to the residual."""
        gap, residual = _line(rows, "relative_gap"), _line(rows, "residual")
        slope = _slope(residual, gap)
        best = gap[0] if gap else math.nan
        return [
            Claim(
                "The Hessian of the loss is 𝒥 at the training inputs where the model fits well",
                best < 0.02,
                f"relative difference {best:.1e} at a residual of "
                f"{residual[0] if residual else math.nan:.1e}",
                "Gauss–Newton",
            ),
            Claim(
                "The difference vanishes with the residual",
                slope > 0.8,
                f"like residual^{slope:.2f}",
                None,
            ),
        ]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """Gap against residual."""
        figure, ax = figures.axes(panel=(4.4, 3.0))
        x, y = _line(rows, "residual"), _line(rows, "relative_gap")
        ax.plot(x, y, color=figures.COLORS["fs-map"], marker="s", label="measured")
        for power, line in ((1, "--"), (2, ":")):
            guide = [y[0] * (value / x[0]) ** power for value in x]
            label = "∝ residual" if power == 1 else "∝ residual²"
            ax.plot(x, guide, color=figures.MUTED, linestyle=line, label=label)
        ax.set(
            xlabel="training RMSE",
            ylabel=r"$\|\nabla^2 L - \mathcal{J}\|_F \,/\, \|\mathcal{J}\|_F$",
        )
        ax.set_yscale("log")
        log_scale(ax, "x")
        ax.legend()
        return {"theory-flat": figure}


def _fit(config: FourierConfig, train: Batch) -> Tensor:
    """PS-MAP to machine precision, ``[P]``."""
    rows, objective = config.rows(train), config.objective(None, len(train.y))
    start = config.model().theta.detach()
    return maximize(lambda theta: log_density(objective, TANH, theta, rows), start)


def compare(config: FourierConfig, theta: Tensor, train: Batch) -> tuple[Tensor, Tensor]:
    """Relative difference of the loss's Hessian and 𝒥, and the root mean squared residual."""
    model = config.model()
    design = model.design(train.x)

    def out(t: Tensor) -> Tensor:
        return design @ model.squash.value(t)

    def loss(t: Tensor) -> Tensor:
        return 0.5 * (out(t) - train.y).square().mean()

    hessian = torch.func.hessian(loss)(theta)
    jacobian = torch.func.jacrev(out)(theta)  # [N, P]
    gram = jacobian.mT @ jacobian / len(train.y)
    gap = (hessian - gram).norm() / gram.norm()
    return gap, (out(theta) - train.y).square().mean().sqrt()


def _line(rows: Sequence[Row], metric: str) -> list[float]:
    return tables.line(tables.select(rows, metric=metric), "noise_std").mean


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope in logarithms."""
    if len(x) < 2:
        return math.nan
    a, b = torch.tensor(x, dtype=torch.float64).log(), torch.tensor(y, dtype=torch.float64).log()
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a @ a))
