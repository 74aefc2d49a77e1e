r"""Optimizing the same objective in θ and in $\theta' = \sinh\theta$: what stays, what moves.

The reparametrized model is a model of its own: another squashing function
$\sigma \circ \mathrm{arsinh}$, another prior $p(\theta)\,|d\theta/d\theta'|$, another Jacobian.
Nothing is cancelled by hand; that FS-MAP is the same function is for the numbers to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fsmap.data import synthetic
from fsmap.experiments.experiment import Measured
from fsmap.models.basis import FourierBasis
from fsmap.models.squash import TANH, Squash
from fsmap.objective.closed_form import Invertible
from fsmap.objective.moments import Moments
from fsmap.report import figures, tables
from fsmap.report.records import Claim, Row
from fsmap.train.descent import descend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRIOR_STD, NOISE_STD, NUM_TRAIN, FREQUENCIES = 0.65, 1.0, 20, 5
CURVE = torch.linspace(-1, 1, 201, dtype=torch.float64)
METRICS = ("function_gap", "gradient_gap", "value_gap")


class Chart(NamedTuple):
    """Coordinates of the parameters.

    Attributes:
        name: Of the coordinates.
        squash: σ as a function of them.
        to_theta: Back to θ.
        log_slope: log |dθ/dθ'|, element by element.
    """

    name: str
    squash: Squash
    to_theta: Callable[[Tensor], Tensor]
    log_slope: Callable[[Tensor], Tensor]


def _sinh_chart() -> Chart:
    def log_slope(t: Tensor) -> Tensor:  # d arsinh(t)/dt = 1/√(1 + t²)
        return -0.5 * torch.log1p(t.square())

    squash = Squash(
        "tanh∘arsinh",
        lambda t: torch.tanh(torch.asinh(t)),
        lambda t: TANH.log_slope(torch.asinh(t)) + log_slope(t),
    )
    return Chart("sinh θ", squash, torch.asinh, log_slope)


CHARTS = (Chart("θ", TANH, lambda t: t, torch.zeros_like), _sinh_chart())


class Task(NamedTuple):
    """A small, well-conditioned model and its data, one per seed."""

    model: FourierBasis
    moments: Moments
    form: Invertible

    def log_posterior(self, chart: Chart, method: str, t: Tensor) -> Tensor:
        """Log p(t|D) or log p(f|D) in the chart's coordinates, ``[seeds, P]`` to ``[seeds]``."""
        theta = chart.to_theta(t)
        prior = -theta.square().sum(-1) / (2 * PRIOR_STD**2) + chart.log_slope(t).sum(-1)
        value = self.moments.log_likelihood(chart.squash.value(t), NOISE_STD) + prior
        if method == "fs-map":
            value = value - 0.5 * self.form.value(chart.squash.log_slope(t))
        return value


def build(seeds: int) -> Task:
    """Ten Fourier features with tanh weights; a prior narrow enough for one interior optimum.

    Args:
        seeds: Data sets.

    Returns:
        The task.
    """
    model = FourierBasis(FREQUENCIES, "tanh", scale=1.0, dtype=torch.float64)
    problems = []
    for seed in range(seeds):
        draw: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed)}
        draw["dtype"] = torch.float64
        weights = torch.randn(2 * FREQUENCIES, **draw).tanh()
        data = synthetic.regression(
            lambda x, w=weights: model.design(x) @ w,  # type: ignore[misc]
            NUM_TRAIN,
            noise_std=NOISE_STD,
            **draw,
        )
        problems.append((model.design(data.x), data.y))
    return Task(model, Moments.of(problems), Invertible.from_gram(model.uniform_gram(-1.0, 1.0)))


def measure(
    steps: int, seeds: int, advance: Callable[[float], None] | None = None
) -> Iterator[Measured]:
    """Optimize both methods in both coordinates, and compare functions, values and gradients.

    Args:
        steps: Of Adam.
        seeds: Data sets.
        advance: Told the fraction that is done.

    Yields:
        The measured values.
    """
    task = build(seeds)
    design = task.model.design(CURVE)
    for number, method in enumerate(("ps-map", "fs-map")):
        curves = []
        for chart in CHARTS:
            t = _ascend(task, chart, method, steps, seeds)
            curves.append(chart.squash.value(t) @ design.mT)  # [seeds, grid]
            where = {"part": "sinh", "parameters": chart.name}
            yield Measured("function", curves[-1][0], method, 0, where)
        gaps = (curves[0] - curves[1]).square().mean(-1).sqrt()
        spread = curves[0].square().mean(-1).sqrt()
        for seed, gap in enumerate((gaps / spread).tolist()):
            yield Measured("function_gap", gap, method, seed, {"part": "sinh"})
        for metric, value in _covariance(task, method, seeds).items():
            yield Measured(metric, value, method, config={"part": "sinh"})
        if advance is not None:
            advance((number + 1) / 2)


def _ascend(task: Task, chart: Chart, method: str, steps: int, seeds: int) -> Tensor:
    """Adam, then with a hundredth of its rate: the optimum to many digits."""
    t = torch.zeros(seeds, len(task.model.theta), dtype=torch.float64)
    for lr in (0.03, 0.0003):
        t = descend(
            lambda t: -task.log_posterior(chart, method, t) / NUM_TRAIN, t, lr=lr, steps=steps // 2
        )
    return t


def _covariance(task: Task, method: str, seeds: int) -> dict[str, float]:
    """Does the value stay, and does the gradient pull back, between the charts, at random θ?"""
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(seeds, len(task.model.theta), generator=generator, dtype=torch.float64)
    values, gradients = [], []
    for chart in CHARTS:
        t = (theta.sinh() if chart is CHARTS[1] else theta).requires_grad_()
        value = task.log_posterior(chart, method, t)
        (gradient,) = torch.autograd.grad(value.sum(), t)
        values.append(value.detach())
        gradients.append(gradient / chart.log_slope(t.detach()).exp())  # in units of θ
    value_gap = (values[0] - values[1]).abs().max()
    gradient_gap = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    return {"value_gap": float(value_gap), "gradient_gap": float(gradient_gap)}


def claims(rows: Sequence[Row]) -> list[Claim]:
    """FS-MAP is covariant, PS-MAP is not.

    Args:
        rows: All rows.

    Returns:
        The claims.
    """

    def largest(metric: str, method: str) -> float:
        found = tables.select(rows, metric=metric, method=method)
        return max((float(row.value) for row in found), default=math.nan)

    return [
        Claim(
            "The gradient of the FS-MAP objective transforms covariantly under θ' = sinh θ",
            largest("gradient_gap", "fs-map") < 1e-10 < largest("gradient_gap", "ps-map"),
            f"relative gap {largest('gradient_gap', 'fs-map'):.0e} "
            f"(PS-MAP: {largest('gradient_gap', 'ps-map'):.2f})",
            None,
        ),
        Claim(
            "Optimized in sinh θ, FS-MAP reaches the same function; PS-MAP does not",
            largest("function_gap", "fs-map") < 1e-4
            and largest("function_gap", "ps-map") > 100 * largest("function_gap", "fs-map"),
            f"relative distance of the functions {largest('function_gap', 'fs-map'):.0e} "
            f"(PS-MAP: {largest('function_gap', 'ps-map'):.3f})",
            "invariant",
        ),
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Functions found in both coordinates, by method.

    Args:
        rows: All rows.

    Returns:
        The figure.
    """
    figure, panels = figures.axes(2, panel=(3.9, 2.9), sharey=True)
    for ax, method in zip(panels, ("ps-map", "fs-map"), strict=True):
        for row in tables.select(rows, metric="function", method=method, part="sinh"):
            second = row.config["parameters"] != "θ"
            dotted = {"color": figures.INK, "linestyle": (0, (1, 1.5))}
            look: dict[str, Any] = dotted if second else {"linewidth": 2.2}
            name = r"$\sinh\theta$" if second else r"$\theta$"
            color = {"color": figures.COLORS[method], **look}
            ax.plot(CURVE.tolist(), row.value, label=f"optimized in {name}", **color)
        ax.set(title=figures.NAMES[method], xlabel="$x$")
    panels[0].set_ylabel("$f(x)$")
    for ax in panels:
        ax.legend()
    return figure
