"""``reparam`` (Fig. A.1): PS-MAP depends on the parametrization, FS-MAP does not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.data import synthetic
from fsmap.models.basis import RBFBasis
from fsmap.paper.closed_form import coordinates
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report import figures, tables
from fsmap.paper.report.panels import legend_above
from fsmap.paper.report.records import Claim, Row
from fsmap.train.descent import descend
from fsmap.types import Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            yield from coordinates.measure(config.small_steps, config.seeds, context.advance)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Roughness, weights, distances."""
        names = ("roughness", "median_weight", "distance_to_ridge", *coordinates.METRICS)
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
            *coordinates.claims(rows),
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
        return {"reparam": figure, "reparam-sinh": coordinates.draw(rows)}


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
