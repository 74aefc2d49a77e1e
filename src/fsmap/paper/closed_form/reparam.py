r"""``reparam`` (Fig. A.1): PS-MAP depends on the parametrization, FS-MAP does not.

First PS-MAP in θ and in 1/θ, then both methods in θ and in $\theta' = \sinh\theta$. There the
reparametrized model is a model of its own: another squashing function
$\sigma \circ \mathrm{arsinh}$, another prior $p(\theta)\,|d\theta/d\theta'|$, another Jacobian.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fsmap.data import synthetic
from fsmap.models.basis import IDENTITY, TANH, FourierBasis, RBFBasis, Squash
from fsmap.objective.closed_form import Invertible
from fsmap.objective.objective import Objective
from fsmap.objective.prior import Normal, Reparametrized
from fsmap.paper.experiment import Context, Experiment, Measured, Plots, exact, judge_all, log_ratio
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import legend_above
from fsmap.paper.report.tables import largest, smallest
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.paper.solvers import log_density, objective_of, solve
from fsmap.types import Batch, Params

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRIOR_STD, NOISE_STD, NUM_TRAIN, FREQUENCIES = 0.65, 1.0, 20, 5
SMALL_CURVE = torch.linspace(-1, 1, 201, dtype=torch.float64)
SINH_METRICS = ("function_gap", "gradient_gap", "value_gap")


class Chart(NamedTuple):
    """Coordinates of the parameters."""

    name: str  # of the coordinates
    squash: Squash  # σ as a function of them
    to_theta: Callable[[Tensor], Tensor]  # back to θ, element by element
    from_theta: Callable[[Tensor], Tensor]  # from θ


def _tanh_of_arsinh() -> Squash:
    def log_slope(t: Tensor) -> Tensor:  # d arsinh(t)/dt = 1/√(1 + t²)
        return TANH.log_slope(torch.asinh(t)) - 0.5 * torch.log1p(t.square())

    return Squash("tanh∘arsinh", lambda t: torch.tanh(torch.asinh(t)), log_slope)


CHARTS = (
    Chart("θ", TANH, lambda t: t, lambda t: t),
    Chart("sinh θ", _tanh_of_arsinh(), torch.asinh, torch.sinh),
)


class Task(NamedTuple):
    """A small, well-conditioned model and its data, one per seed."""

    model: FourierBasis
    rows: Sequence[Batch]
    form: Invertible

    def objective(self, chart: Chart, method: str) -> Objective:
        """PS-MAP or FS-MAP in the chart's coordinates."""
        prior = Reparametrized(Normal(PRIOR_STD), chart.to_theta)
        form = self.form if method == "fs-map" else None
        return objective_of(chart.squash, NOISE_STD, prior, form, NUM_TRAIN)


def build(seeds: int) -> Task:
    """Ten Fourier features with tanh weights; a prior narrow enough for one interior optimum."""
    model = FourierBasis(FREQUENCIES, "tanh", scale=1.0, dtype=torch.float64)
    rows = []
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
        rows.append(Batch(model.design(data.x), data.y))
    return Task(model, rows, Invertible.from_gram(model.uniform_gram(-1.0, 1.0)))


def measure_sinh(steps: int, seeds: int, advance: Callable[[float], None]) -> Iterator[Measured]:
    """Optimize both methods in both coordinates, and compare functions, values and gradients."""
    task = build(seeds)
    design = task.model.design(SMALL_CURVE)
    for number, method in enumerate(("ps-map", "fs-map")):
        curves = []
        for chart in CHARTS:
            t = _ascend(task, chart, method, steps)
            curves.append(chart.squash.value(t) @ design.mT)  # [seeds, grid]
            where = {"part": "sinh", "parameters": chart.name}
            yield Measured("function", curves[-1][0], method, 0, where)
        gaps = (curves[0] - curves[1]).square().mean(-1).sqrt()
        spread = curves[0].square().mean(-1).sqrt()
        for seed, gap in enumerate((gaps / spread).tolist()):
            yield Measured("function_gap", gap, method, seed, {"part": "sinh"})
        for metric, value in _covariance(task, method).items():
            yield Measured(metric, value, method, config={"part": "sinh"})
        advance((number + 1) / 2)


def _ascend(task: Task, chart: Chart, method: str, steps: int) -> Tensor:
    """Adam, then with a hundredth of its rate: the optimum to many digits, ``[seeds, P]``."""
    objective = task.objective(chart, method)
    members = [{"split": q} for q in range(len(task.rows))]
    t = task.model.theta.detach()
    for lr in (0.03, 0.0003):
        sizes = {"lr": lr, "steps": steps // 2}
        t = solve(lambda: objective, chart.squash, members, task.rows, t, **sizes)
    return t


def _covariance(task: Task, method: str) -> dict[str, float]:
    """Does the value stay, and does the gradient pull back, between the charts, at random θ?"""
    generator = torch.Generator().manual_seed(1)
    size = (len(task.rows), len(task.model.theta))
    theta = torch.randn(size, generator=generator, dtype=torch.float64)
    values, gradients = [], []
    for chart in CHARTS:
        objective, t = task.objective(chart, method), chart.from_theta(theta).requires_grad_()
        value = torch.stack([
            log_density(objective, chart.squash, *pair) for pair in zip(t, task.rows, strict=True)
        ])  # fmt: skip
        (gradient,) = torch.autograd.grad(value.sum(), t)
        values.append(value.detach())
        stretch = torch.func.jvp(chart.to_theta, (t.detach(),), (torch.ones_like(t),))[1]
        gradients.append(gradient / stretch)  # in units of θ
    value_gap = (values[0] - values[1]).abs().max()
    gradient_gap = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    return {"value_gap": float(value_gap), "gradient_gap": float(gradient_gap)}


def draw_sinh(rows: Rows) -> Figure:
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
    num_centers: int = 1_000  # radial basis functions
    num_train: int = 30  # N
    num_frequencies: int = 20  # of the target
    lr: float = 0.1  # of Adam
    steps: int = 5_000  # of Adam, full batch
    seeds: int = 3  # data sets
    small_steps: int = 4_000  # steps of the optimizations in θ and sinh θ of the small model


class Reparam(Experiment):
    id = "reparam"
    label = "Fig. A.1"
    title = "Another parametrization, another PS-MAP"
    see = (
        "PS-MAP of the same model and prior, written in θ and in 1/θ: functions and weights. Then "
        "both methods, optimized in θ and in sinh θ."
    )
    cost = "3 min"
    protocol = "true objectives, ε = 0 in log space; optimized by Adam, in both coordinates"
    config = Config()
    quick = Config(steps=1_200, seeds=2, small_steps=1_500)

    def units(self, config: Config) -> list[Unit]:
        return [{"part": "invert"}, {"part": "sinh"}]

    def run(self, config: Config, unit: Unit, context: Context) -> Iterator[Measured]:
        if unit["part"] == "invert":
            yield from _invert(config, context)
        else:
            yield from measure_sinh(config.small_steps, config.seeds, context.advance)

    def table(self, rows: Rows) -> list[dict[str, Any]]:
        names = ("roughness", "median_weight", "distance_to_ridge", *SINH_METRICS)
        chosen = tables.in_order(rows, *names)
        return tables.summarize(chosen, "metric", "method", "parameters")

    def claims(self, rows: Rows) -> list[Claim]:
        rougher, larger = (
            log_ratio(*(tables.values_by(rows, "seed", metric=metric, parameters=name)
                        for name in (INVERTED, ORIGINAL)))
            for metric in ("roughness", "median_weight")
        )  # fmt: skip
        gaps = {
            (metric, method): tables.values(rows, metric=metric, method=method)
            for metric in ("gradient_gap", "function_gap")
            for method in ("fs-map", "ps-map")
        }
        (fs_gradient, ps_gradient), (fs, ps) = (
            (largest(gaps[metric, "fs-map"]), smallest(gaps[metric, "ps-map"]))
            for metric in ("gradient_gap", "function_gap")
        )
        seeds = len(gaps["function_gap", "fs-map"])
        return [
            judge_all("PS-MAP in 1/θ learns a function more than 1.5 times as rough",
                      {"": rougher}, ratio=True, above=1.5,
                      paper="less smooth"),
            judge_all("… and its median |θ| is more than 5 times as large",
                      {"": larger}, ratio=True, above=5,
                      paper="favors non-zero weights"),
            exact("The gradient of the FS-MAP objective transforms covariantly under θ' = sinh θ, "
                  "PS-MAP's does not", fs_gradient < 1e-10 < ps_gradient,
                  f"relative gap {fs_gradient:.0e} (PS-MAP: {ps_gradient:.2f})", source="ours",
                  seeds=seeds),
            exact("Optimized in sinh θ, FS-MAP reaches the same function; PS-MAP does not",
                  fs < 1e-4 and ps > 100 * fs,
                  f"relative distance of the functions {fs:.0e} (PS-MAP: {ps:.3f})", "invariant",
                  seeds=seeds),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
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
    """
    rows = [Batch(model.design(batch.x), batch.y) for batch in data]
    generator = torch.Generator().manual_seed(0)
    size = (len(data), len(model.theta))
    start = torch.randn(size, generator=generator, dtype=torch.float64) / math.sqrt(size[-1])
    members = [{"inverted": i, "split": q} for i in (0.0, 1.0) for q in range(len(data))]

    def objective(inverted: Tensor) -> Objective:
        return objective_of(IDENTITY, 1.0, Inverted(inverted), None, config.num_train)

    sizes = {"lr": config.lr, "steps": config.steps}
    both = torch.cat([start, start])
    found = solve(objective, IDENTITY, members, rows, both, advance=context.advance, **sizes)
    return found.unflatten(0, (2, -1))  # type: ignore[no-any-return]


class Inverted(NamedTuple):
    """The density of 1/θ for θ ~ N(0, 1), as a function of θ; that of θ where ``inverted`` is 0."""

    inverted: float | Tensor

    def value(self, params: Params) -> Tensor:
        """Nats."""
        theta = params["theta"]
        return Normal(1.0).value(params) + 2 * self.inverted * theta.abs().log().sum()

    def check(self, params: Params) -> None:
        """Anything goes."""


def _ridge(design: Tensor, y: Tensor) -> Tensor:
    """PS-MAP in θ in closed form: the ridge regression Aᵀ(AAᵀ + I)⁻¹y."""
    identity = torch.eye(len(y), dtype=y.dtype)
    solved: Tensor = torch.linalg.solve(design @ design.mT + identity, y)
    return design.mT @ solved
