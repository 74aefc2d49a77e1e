r"""Optimizing the same objective in θ and in $\theta' = \sinh\theta$: what stays, what moves.

The reparametrized model is a model of its own: another squashing function
$\sigma \circ \mathrm{arsinh}$, another prior $p(\theta)\,|d\theta/d\theta'|$, another Jacobian.
Nothing is cancelled by hand; that FS-MAP is the same function is for the numbers to say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fsmap.data import synthetic
from fsmap.models.basis import FourierBasis, RBFBasis
from fsmap.models.squash import TANH, Squash
from fsmap.objective.basis import Invertible
from fsmap.objective.moments import Moments
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import legend_above
from fsmap.paper.rows import Claim, Row
from fsmap.train.descent import descend
from fsmap.types import Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRIOR_STD, NOISE_STD, NUM_TRAIN, FREQUENCIES = 0.65, 1.0, 20, 5
SMALL_CURVE = torch.linspace(-1, 1, 201, dtype=torch.float64)
SINH_METRICS = ("function_gap", "gradient_gap", "value_gap")


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
    """Ten Fourier features with tanh weights; a prior narrow enough for one interior optimum."""
    model = FourierBasis(FREQUENCIES, "tanh", scale=1.0, dtype=torch.float64)
    problems = []
    for seed in range(seeds):
        draw_sinh: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed)}
        draw_sinh["dtype"] = torch.float64
        weights = torch.randn(2 * FREQUENCIES, **draw_sinh).tanh()
        data = synthetic.regression(
            lambda x, w=weights: model.design(x) @ w,  # type: ignore[misc]
            NUM_TRAIN,
            noise_std=NOISE_STD,
            **draw_sinh,
        )
        problems.append((model.design(data.x), data.y))
    return Task(model, Moments.of(problems), Invertible.from_gram(model.uniform_gram(-1.0, 1.0)))


def measure_sinh(
    steps: int, seeds: int, advance: Callable[[float], None] | None = None
) -> Iterator[Measured]:
    """Optimize both methods in both coordinates, and compare functions, values and gradients."""
    task = build(seeds)
    design = task.model.design(SMALL_CURVE)
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


def sinh_claims(rows: Sequence[Row]) -> list[Claim]:
    """FS-MAP is covariant, PS-MAP is not."""

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


def draw_sinh(rows: Sequence[Row]) -> Figure:
    """Functions found in both coordinates, by method."""
    figure, panels = figures.axes(2, panel=(3.9, 2.9), sharey=True)
    for ax, method in zip(panels, ("ps-map", "fs-map"), strict=True):
        for row in tables.select(rows, metric="function", method=method, part="sinh"):
            second = row.config["parameters"] != "θ"
            dotted = {"color": figures.INK, "linestyle": (0, (1, 1.5))}
            look: dict[str, Any] = dotted if second else {"linewidth": 2.2}
            name = r"$\sinh\theta$" if second else r"$\theta$"
            color = {"color": figures.COLORS[method], **look}
            ax.plot(SMALL_CURVE.tolist(), row.value, label=f"optimized in {name}", **color)
        ax.set(title=figures.NAMES[method], xlabel="$x$")
    panels[0].set_ylabel("$f(x)$")
    for ax in panels:
        ax.legend()
    return figure


CURVE = torch.linspace(0, 1, 501, dtype=torch.float64)
ORIGINAL, INVERTED = "θ", "1/θ"


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes.

    Attributes:
        num_centers: Radial basis functions.
        num_train: N.
        num_frequencies: Of the target.
        lr: Of Adam.
        steps: Of Adam, full batch.
        seeds: Data sets.
        small_steps: Steps of the optimizations in θ and sinh θ of the small model.
    """

    num_centers: int = 1_000
    num_train: int = 30
    num_frequencies: int = 20
    lr: float = 0.1
    steps: int = 5_000
    seeds: int = 3
    small_steps: int = 4_000


class Reparam(Experiment):
    """PS-MAP under θ and 1/θ; then both methods under θ and sinh θ."""

    id = "reparam"
    label = "Fig. A.1"
    title = "Another parametrization, another PS-MAP"
    see = (
        "The same model and prior, written in 1/θ: PS-MAP pushes the weights away from zero and "
        "becomes rough. Written in sinh θ, FS-MAP finds the very same function, PS-MAP does not."
    )
    cost = "20 s"
    protocol = "true objectives, ε = 0 in log space; optimized by Adam, in both coordinates"
    config = Config()
    quick = Config(steps=1_200, seeds=2, small_steps=1_500)

    def units(self, config: Config) -> list[dict[str, Any]]:
        """The paper's experiment, and what goes beyond it."""
        return [{"part": "invert"}, {"part": "sinh"}]

    def run(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """One of the two parts."""
        if unit["part"] == "invert":
            yield from _invert(config, context)
        else:
            yield from measure_sinh(config.small_steps, config.seeds, context.advance)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Roughness, weights, distances."""
        names = ("roughness", "median_weight", "distance_to_ridge", *SINH_METRICS)
        chosen = [row for name in names for row in tables.select(rows, metric=name)]
        return tables.summarize(chosen, "metric", "method", "parameters")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Rougher, away from zero; FS-MAP covariant."""
        rough, weight = _mean_by(rows, "roughness"), _mean_by(rows, "median_weight")
        rougher = rough.get(INVERTED, math.nan) / rough.get(ORIGINAL, math.nan)
        larger = weight.get(INVERTED, math.nan) / weight.get(ORIGINAL, math.nan)
        return [
            Claim(
                "PS-MAP in 1/θ learns a rougher function",
                rougher > 1.5,
                f"root mean square slope {rougher:.1f} times larger",
                "less smooth",
            ),
            Claim(
                "… and pushes the weights away from zero",
                larger > 5,
                f"median |θ| {weight.get(INVERTED, math.nan):.2f} against "
                f"{weight.get(ORIGINAL, math.nan):.3f}",
                "favors non-zero weights",
            ),
            *sinh_claims(rows),
        ]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """Functions and weights; then the functions found in θ and sinh θ."""
        figure, (left, right) = figures.axes(2, panel=(3.9, 2.9))
        looks = {
            ORIGINAL: {"color": figures.COLORS["ps-map"], "label": r"PS-MAP in $\theta$"},
            INVERTED: {"color": figures.COLORS["bma"], "label": r"PS-MAP in $1/\theta$"},
        }
        for row in tables.select(rows, metric="function", part="invert"):
            left.plot(CURVE.tolist(), row.value, linewidth=1.3, **looks[row.config["parameters"]])
        for row in tables.select(rows, metric="data"):
            left.plot(*row.value, "o", color=figures.COLORS["truth"], markersize=4, label="data")
        left.set(xlabel="$x$", ylabel="$f(x)$", title="Learned functions")
        for row in tables.select(rows, metric="weights"):
            look = looks[row.config["parameters"]]
            right.hist(row.value, bins=[i / 10 for i in range(-40, 41)], alpha=0.75, **look)
        right.set(xlabel=r"weight $\theta_i$", ylabel="count", title="Parameter distributions")
        legend_above(figure, left)
        return {"reparam": figure, "reparam-sinh": draw_sinh(rows)}


def _invert(config: Config, context: Context) -> Iterator[Measured]:
    model = RBFBasis(config.num_centers, dtype=torch.float64)
    data = [_draw_data(config, seed) for seed in range(config.seeds)]
    found = _solve(config, model, data, context)  # [2, seeds, P]
    design = model.design(CURVE)
    ridge = torch.stack([_ridge(model.design(batch.x), batch.y) for batch in data])
    for name, theta in zip((ORIGINAL, INVERTED), found, strict=True):
        where = {"part": "invert", "parameters": name}
        curves = theta @ design.mT  # [seeds, grid]
        slopes = curves.diff(dim=-1) / CURVE.diff()
        for seed in range(config.seeds):
            roughness = slopes[seed].square().mean().sqrt()
            yield Measured("roughness", roughness, "ps-map", seed, where)
            weights = theta[seed, :-1].abs()
            yield Measured("median_weight", weights.median(), "ps-map", seed, where)
            gap = (curves[seed] - ridge[seed] @ design.mT).square().mean().sqrt()
            yield Measured("distance_to_ridge", gap, "ps-map", seed, where)
        yield Measured("function", curves[0], "ps-map", 0, where)
        yield Measured("weights", theta[0, :-1], "ps-map", 0, where)
    yield Measured("data", torch.stack([data[0].x, data[0].y]), seed=0, config={"part": "invert"})


def _draw_data(config: Config, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    target = synthetic.fourier_sum(config.num_frequencies, **draw)
    return synthetic.regression(target, config.num_train, noise_std=1.0, low=0.0, **draw)


def _solve(config: Config, model: RBFBasis, data: Sequence[Batch], context: Context) -> Tensor:
    r"""PS-MAP with unit noise and unit prior, in θ and in 1/θ.

    The density of $\theta' = 1/\theta$ is $p(\theta)\,\theta^2$, so the inverted objective has
    $-2\sum\log|\theta_i|$ more. Both are minimized over θ, from the same small random weights.

    Returns:
        Weights, ``[2, seeds, P]``.
    """
    design = torch.stack([model.design(batch.x) for batch in data])  # [seeds, N, P]
    y = torch.stack([batch.y for batch in data])
    inverted = torch.tensor([[0.0], [1.0]], dtype=torch.float64)

    def loss(theta: Tensor) -> Tensor:  # [2, seeds, P] to [2, seeds]
        out = torch.einsum("ksp,snp->ksn", theta, design)
        misfit = 0.5 * (out - y).square().sum(-1)
        prior = 0.5 * theta.square().sum(-1) - 2 * inverted * theta.abs().log().sum(-1)
        return (misfit + prior) / y.shape[-1]

    generator = torch.Generator().manual_seed(0)
    size = (len(data), design.shape[-1])
    start = torch.randn(size, generator=generator, dtype=torch.float64) / math.sqrt(size[-1])
    start = torch.stack([start, start])
    return descend(loss, start, lr=config.lr, steps=config.steps, advance=context.advance)


def _ridge(design: Tensor, y: Tensor) -> Tensor:
    """PS-MAP in θ in closed form: the ridge regression Aᵀ(AAᵀ + I)⁻¹y."""
    identity = torch.eye(len(y), dtype=y.dtype)
    solved: Tensor = torch.linalg.solve(design @ design.mT + identity, y)
    return design.mT @ solved


def _mean_by(rows: Sequence[Row], metric: str) -> dict[str, float]:
    groups = tables.group(tables.select(rows, metric=metric, part="invert"), "parameters")
    return {name: tables.mean(r.value for r in members).mean for (name,), members in groups.items()}
