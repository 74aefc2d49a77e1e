r"""``reparam`` (Fig. A.1): PS-MAP depends on the parametrization, FS-MAP does not.

First PS-MAP in θ and in 1/θ, then both methods in θ and in $\theta' = \sinh\theta$. There the
reparametrized model is a model of its own: another squashing function
$\sigma \circ \mathrm{arsinh}$, another prior $p(\theta)\,|d\theta/d\theta'|$, another Jacobian.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.objective.closed_form import IDENTITY, TANH, FourierBasis, Invertible, Squash
from fsmap.objective.objective import Normal, Objective, Reparametrized
from fsmap.paper.closed_form.fourier import draw_options, fourier_sum, regression, solve
from fsmap.paper.engine import Context, Experiment, Measured, Plots, exact, judge_all, paired_effect
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import legend_above
from fsmap.paper.report.tables import largest, smallest
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.types import Batch, Params

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
    see = "PS-MAP of the same model and prior, written in θ and in 1/θ: functions and weights."
    cost = "3 min"
    protocol = "true objectives, ε = 0 in log space; optimized by Adam, in both coordinates"
    metrics = ("roughness", "median_weight", "distance_to_ridge", "function_gap", "gradient_gap",
               "value_gap")  # fmt: skip
    columns = ("metric", "method", "parameters")
    config = Config()
    quick = Config(steps=1_200, seeds=2, small_steps=1_500)

    def units(self, config: Config) -> list[Unit]:
        return [{"part": "invert"}, {"part": "sinh"}]

    def run(self, config: Config, unit: Unit, context: Context) -> Iterator[Measured]:
        for measured in {"invert": invert, "sinh": sinh}[unit["part"]](config, context):
            yield measured._replace(config={**unit, **measured.config})

    def claims(self, rows: Rows) -> list[Claim]:
        sides = {"parameters": INVERTED}, {"parameters": ORIGINAL}
        chosen = (tables.select(rows, metric=m) for m in ("roughness", "median_weight"))
        rougher, larger = ({"": paired_effect(some, *sides, ratio=True)} for some in chosen)
        of_fs, of_ps = (tables.select(rows, method=method) for method in ("fs-map", "ps-map"))
        fs_gradient = largest(tables.values(of_fs, metric="gradient_gap"))
        ps_gradient = smallest(tables.values(of_ps, metric="gradient_gap"))
        fs = largest(tables.values(of_fs, metric="function_gap"))
        ps = smallest(tables.values(of_ps, metric="function_gap"))
        return [
            judge_all("PS-MAP in 1/θ learns a function more than 1.5 times as rough", rougher,
                      ratio=True, above=1.5, paper="less smooth"),
            judge_all("… and its median |θ| is more than 5 times as large", larger,
                      ratio=True, above=5, paper="favors non-zero weights"),
            exact("The gradient of the FS-MAP objective transforms covariantly under θ' = sinh θ, "
                  "PS-MAP's does not", fs_gradient < 1e-10 < ps_gradient,
                  f"relative gap {fs_gradient:.0e} (PS-MAP: {ps_gradient:.2f})", source="ours",
                  seeds=len(tables.values(of_fs, metric="gradient_gap"))),
            exact("Optimized in sinh θ, FS-MAP reaches the same function; PS-MAP does not",
                  fs < 1e-4 and ps > 100 * fs,
                  f"relative distance of the functions {fs:.0e} (PS-MAP: at least {ps:.3f})",
                  "invariant", seeds=len(tables.values(of_fs, metric="function_gap"))),
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
        return {"reparam": figure}


def features(x: Tensor, num_centers: int) -> Tensor:
    """Radial basis functions on [0, 1] as wide as they are apart, and a constant, ``[S, P]``."""
    centers = torch.linspace(0, 1, num_centers, dtype=torch.float64)
    bumps = torch.exp(-(x[:, None] - centers).square() / (1 / max(num_centers - 1, 1)))
    return torch.cat([bumps, torch.ones_like(x)[:, None]], dim=-1)


class Inverted(NamedTuple):
    """The density of 1/θ for θ ~ N(0, 1), as a function of θ; that of θ where ``inverted`` is 0."""

    inverted: Tensor

    def value(self, params: Params) -> Tensor:
        """Nats: the density of 1/θ is p(θ) θ²."""
        return Normal(1.0).value(params) + 2 * self.inverted * params["theta"].abs().log().sum()

    def check(self, params: Params) -> None:
        """All parameters are valid."""


def invert(config: Config, context: Context) -> Iterator[Measured]:
    """PS-MAP in θ and in 1/θ, both minimized over θ, from the same small random weights."""
    data = []
    for seed in range(config.seeds):
        draw = draw_options(seed)
        target = fourier_sum(config.num_frequencies, **draw)
        data.append(regression(target, config.num_train, noise_std=1.0, low=0.0, **draw))
    rows = [Batch(features(batch.x, config.num_centers), batch.y) for batch in data]
    size = config.num_centers + 1
    start = torch.randn(config.seeds, size, **draw_options(0)) / math.sqrt(size)
    members = [{"inverted": i, "split": q} for i in (0.0, 1.0) for q in range(config.seeds)]

    def objective(inverted: Tensor) -> Objective:
        return IDENTITY.objective(1.0, Inverted(inverted), None, config.num_train)

    sizes: dict[str, Any] = {"lr": config.lr, "steps": config.steps, "advance": context.advance}
    found = solve(objective, IDENTITY, members, rows, torch.cat([start, start]), **sizes)
    design = features(CURVE, config.num_centers)
    for name, thetas in zip((ORIGINAL, INVERTED), found.chunk(2), strict=True):
        where = {"parameters": name}
        curves = thetas @ design.mT  # [seeds, grid]
        for seed, (theta, curve, (x, y)) in enumerate(zip(thetas, curves, rows, strict=True)):
            roughness = (curve.diff() / CURVE.diff()).square().mean().sqrt()
            yield Measured("roughness", roughness, "ps-map", seed, where)
            yield Measured("median_weight", theta[:-1].abs().median(), "ps-map", seed, where)
            # PS-MAP in θ in closed form
            ridge = x.mT @ torch.linalg.solve(x @ x.mT + torch.eye(len(y), dtype=y.dtype), y)
            gap = (curve - ridge @ design.mT).square().mean().sqrt()
            yield Measured("distance_to_ridge", gap, "ps-map", seed, where)
        yield Measured("function", curves[0], "ps-map", 0, where)
        yield Measured("weights", thetas[0, :-1], "ps-map", 0, where)
    yield Measured("data", torch.stack([data[0].x, data[0].y]), seed=0)


PRIOR_STD, NOISE_STD, NUM_TRAIN, FREQUENCIES = 0.65, 1.0, 20, 5
SMALL_CURVE = torch.linspace(-1, 1, 201, dtype=torch.float64)


def small_model() -> FourierBasis:
    """Ten Fourier features with tanh weights."""
    return FourierBasis(FREQUENCIES, scale=1.0)


def _log_slope(t: Tensor) -> Tensor:
    """Of tanh(arsinh t); d arsinh(t)/dt = 1/√(1 + t²)."""
    return TANH.log_slope(torch.asinh(t)) - 0.5 * torch.log1p(t.square())


class Chart(NamedTuple):
    name: str  # of the coordinates
    squash: Squash  # σ as a function of them
    to_theta: Callable[[Tensor], Tensor]  # back to θ, element by element
    from_theta: Callable[[Tensor], Tensor]  # from θ

    def objective(self, method: str) -> Objective:
        """PS-MAP or FS-MAP in these coordinates; the narrow prior leaves one interior optimum."""
        prior = Reparametrized(Normal(PRIOR_STD), self.to_theta)
        form = Invertible.from_gram(small_model().uniform_gram()) if method == "fs-map" else None
        return self.squash.objective(NOISE_STD, prior, form, NUM_TRAIN)


CHARTS = (
    Chart(ORIGINAL, TANH, lambda t: t, lambda t: t),
    Chart("sinh θ", Squash(lambda t: t.asinh().tanh(), _log_slope), torch.asinh, torch.sinh),
)


def sinh(config: Config, context: Context) -> Iterator[Measured]:
    """Optimize both methods in both coordinates, and compare functions, values and gradients."""
    model, rows = small_model(), []
    for seed in range(config.seeds):
        draw = draw_options(seed)
        weights = torch.randn(2 * FREQUENCIES, **draw).tanh()
        truth = lambda x, w=weights: model.design(x) @ w  # noqa: E731
        data = regression(truth, NUM_TRAIN, noise_std=NOISE_STD, **draw)
        rows.append(Batch(model.design(data.x), data.y))
    members = [{"split": q} for q in range(config.seeds)]
    for number, method in enumerate(("ps-map", "fs-map")):
        curves = []
        for chart in CHARTS:
            objective, t = chart.objective(method), model.theta.detach()
            for lr in (0.03, 0.0003):  # the smaller rate gives the optimum to many digits
                sizes = {"lr": lr, "steps": config.small_steps // 2}
                t = solve(lambda o=objective: o, chart.squash, members, rows, t, **sizes)
            curves.append(chart.squash.value(t) @ model.design(SMALL_CURVE).mT)  # [seeds, grid]
            yield Measured("function", curves[-1][0], method, 0, {"parameters": chart.name})
        gaps = (curves[0] - curves[1]).square().mean(-1).sqrt()
        for seed, gap in enumerate(gaps / curves[0].square().mean(-1).sqrt()):
            yield Measured("function_gap", gap, method, seed)
        value_gap, gradient_gap = _covariance(rows, method)
        yield Measured("value_gap", value_gap, method)
        yield Measured("gradient_gap", gradient_gap, method)
        context.advance((number + 1) / 2)


def _covariance(rows: Sequence[Batch], method: str) -> tuple[Tensor, Tensor]:
    """How much value and gradient (in units of θ) differ between the charts, at random θ."""
    theta = torch.randn(len(rows), 2 * FREQUENCIES, **draw_options(1))
    values, gradients = [], []
    for chart in CHARTS:
        objective, t = chart.objective(method), chart.from_theta(theta).requires_grad_()
        value = torch.stack([
            chart.squash.log_density(objective, *pair) for pair in zip(t, rows, strict=True)
        ])  # fmt: skip
        (gradient,) = torch.autograd.grad(value.sum(), t)
        stretch = torch.func.jvp(chart.to_theta, (t.detach(),), (torch.ones_like(t),))[1]
        values.append(value.detach())
        gradients.append(gradient / stretch)
    gap = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    return (values[0] - values[1]).abs().max(), gap
