"""``theory-metric`` (section 3.2, appendices B.2, B.3): when p_X matters, and a general metric."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.linalg.logdet import log_det
from fsmap.linalg.metric import General
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report import figures, tables
from fsmap.paper.rows import Claim, Row
from fsmap.types import Params

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, DEGREE = 2, 4
TITLES = {"mlp": "tanh network", "linear": "linear model", "square": "square Jacobian"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes."""

    draws: int = 300  # parameters at which log-determinants are compared
    points: int = 400  # points that stand for a continuous p_X
    metrics: int = 10  # random signed metrics that are checked by brute force


class TheoryMetric(Experiment):
    """Log-determinants under two evaluation distributions, at random parameters."""

    id = "theory-metric"
    label = "Sec. 3.2, App. B.2, B.3"
    title = "When the evaluation distribution matters"
    see = (
        "Two evaluation distributions order the functions of a tanh network differently. For a "
        "linear model, or as many outputs as parameters, they differ by a constant: points lie on "
        "a line of slope 1."
    )
    cost = "5 s"
    protocol = "true objective, ε = 0, float64, Jacobians by automatic differentiation"
    group = "theory"
    config = Config()
    quick = Config(draws=100, points=200, metrics=3)

    def run(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Three models under two distributions each, then the general metric."""
        generator = torch.Generator().manual_seed(0)
        narrow = torch.linspace(-1, 1, config.points, dtype=torch.float64)
        wide = torch.linspace(-3, 3, config.points, dtype=torch.float64)
        few = torch.linspace(-2, 2, 3 * WIDTH, dtype=torch.float64)  # as many as parameters
        skewed = torch.rand(len(few), generator=generator, dtype=torch.float64) + 0.05
        cases = {
            "mlp": (network_jacobian, (narrow, None), (wide, None), 3 * WIDTH),
            "linear": (polynomial_jacobian, (narrow, None), (wide, None), DEGREE + 1),
            "square": (network_jacobian, (few, None), (few, skewed), 3 * WIDTH),
        }
        for model, (jacobian, first, second, size) in cases.items():
            thetas = torch.randn(config.draws, size, generator=generator, dtype=torch.float64)
            thetas = thetas[_well_conditioned(jacobian(thetas, first[0]))]
            values = []
            for px, (x, weights) in (("first", first), ("second", second)):
                values.append(_log_det(jacobian(thetas, x), weights))
                yield Measured("log_det", values[-1], config={"model": model, "px": px})
            yield Measured("spread", (values[0] - values[1]).std(), config={"model": model})
        for seed in range(config.metrics):
            yield from _general(seed)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Spreads, and gaps to brute force."""
        chosen = tables.select(rows, metric=("spread", "metric_gap", "expectation_gap"))
        return tables.summarize(chosen, "metric", "model")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Matters for the network, not for the other two; the general metric is right."""
        spread = tables.values_by(rows, "model", metric="spread")
        gap = tables.largest(tables.values(rows, metric=("metric_gap", "expectation_gap")))
        claims = [
            Claim(
                "p_X changes the FS-MAP objective of a tanh network",
                spread.get("mlp", math.nan) > 0.1,
                f"½ log det differs by {spread.get('mlp', math.nan) / 2:.2f} nats (std over θ)",
                "it does",
            )
        ]
        for model in ("linear", "square"):
            claims.append(
                Claim(
                    f"… and only shifts it by a constant for a {TITLES[model]}",
                    spread.get(model, math.nan) < 1e-8,
                    f"{spread.get(model, math.nan):.0e} nats (std over θ)",
                    "no effect",
                )
            )
        claims.append(
            Claim(
                "A general, non-diagonal, signed metric agrees with the sums of appendix B.2",
                gap < 1e-8,
                f"largest gap {gap:.0e}",
                None,
            )
        )
        return claims

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """One point per θ: the two log-determinants against each other, means removed."""
        figure, panels = figures.axes(3, panel=(2.7, 2.8))
        names = {"square": ("uniform weights", "random weights")}
        values = [_centered(value) for value in tables.values(rows, metric="log_det")]
        reach = 1.05 * max((abs(v) for line in values for v in line), default=1.0)
        for ax, (model, title) in zip(panels, TITLES.items(), strict=True):
            pair = tables.values(rows, metric="log_det", model=model)
            if len(pair) == 2:
                _scatter(ax, *map(_centered, pair))
            first, second = names.get(model, ("U(−1, 1)", "U(−3, 3)"))
            ax.set(title=title, xlabel=f"log det, $p_X$ = {first}", ylabel=f"$p_X$ = {second}")
            ax.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        return {"theory-metric": figure}


def _centered(values: Sequence[float]) -> list[float]:
    middle = sum(values) / len(values)
    return [value - middle for value in values]


def _scatter(ax: Any, x: list[float], y: list[float]) -> None:
    ax.axline((0, 0), slope=1, color=figures.COLORS["data"], linewidth=0.8, linestyle="--")
    ax.plot(x, y, "o", color=figures.COLORS["fs-map"], markersize=3, alpha=0.6)
    if max(map(abs, x)) < 1e-9:
        where = {"xytext": (0, -18), "textcoords": "offset points", "ha": "center"}
        ax.annotate(r"the same at every $\theta$", (0, 0), **where)


def network(theta: Tensor, x: Tensor) -> Tensor:
    """F = w₂ᵀ tanh(w₁ x + b), θ = (w₁, b, w₂); ``[S]`` to ``[S]``."""
    w1, bias, w2 = theta.reshape(3, -1)
    out: Tensor = torch.tanh(x[:, None] * w1 + bias) @ w2
    return out


def network_jacobian(theta: Tensor, x: Tensor) -> Tensor:
    """Derivatives of the network at many θ, ``[T, P]`` to ``[T, S, P]``."""
    jacobian: Tensor = torch.vmap(torch.func.jacfwd(network), (0, None))(theta, x)
    return jacobian


def polynomial_jacobian(theta: Tensor, x: Tensor) -> Tensor:
    """Derivatives of a polynomial with coefficients θ, ``[T, P]`` to ``[T, S, P]``."""
    powers = x[:, None] ** torch.arange(theta.shape[-1])  # [S, P]
    jacobian: Tensor = torch.vmap(torch.func.jacfwd(lambda t: powers @ t))(theta)
    return jacobian


def _well_conditioned(jacobian: Tensor) -> Tensor:
    """Where singular values span less than 1e5, so that log det is right to many digits."""
    values = torch.linalg.svdvals(jacobian)  # [T, P]
    good: Tensor = values[:, -1] > 1e-5 * values[:, 0]
    return good


def _log_det(jacobian: Tensor, weights: Tensor | None) -> Tensor:
    """Log det(Jᵀ diag(w) J) from singular values, w = 1/S or the given weights, ``[T]``."""
    count = jacobian.shape[-2]
    share = torch.full((count,), 1 / count, dtype=jacobian.dtype)
    if weights is not None:
        share = weights / weights.sum()
    values: Tensor = torch.linalg.svdvals(share.sqrt()[:, None] * jacobian)
    return 2 * values.log().sum(-1)


def _general(seed: int) -> Iterator[Measured]:
    """Compare the library's General metric with both sums of appendix B.2, term by term."""
    generator = torch.Generator().manual_seed(seed)
    points, outputs, size = 5, 2, 4

    def f(params: Params, x: Tensor) -> Tensor:  # [S] to [S, 2]
        a, b, c, d = params["theta"]
        return torch.stack([a * torch.tanh(b * x), c * x + torch.tanh(d * x - 1)], dim=-1)

    theta = torch.randn(size, generator=generator, dtype=torch.float64)
    x = torch.randn(points, generator=generator, dtype=torch.float64)
    root = torch.randn(points * outputs, points * outputs, generator=generator, dtype=torch.float64)
    metric = (root @ root.mT).reshape(points, outputs, points, outputs)  # entries of both signs
    jacobian = torch.func.jacrev(lambda t: f({"theta": t}, x))(theta)  # [S, K, P]
    direct, expectation = _sum_over_metric(jacobian, metric), _mean_over_metric(jacobian, metric)
    library = log_det(f, {"theta": theta}, x, jitter=0.0, metric=General(metric))
    assert isinstance(library, Tensor)
    exact = torch.logdet(direct / points)  # the library's mean over S
    yield Measured("metric_gap", (library - exact).abs(), seed=seed)
    gap = (expectation - direct).abs().max() / direct.abs().max()
    yield Measured("expectation_gap", gap, seed=seed)


def _sum_over_metric(jacobian: Tensor, metric: Tensor) -> Tensor:
    """𝒥_ab = Σ g_ikjl ∂_a f_ik ∂_b f_jl by four loops, ``[P, P]``."""
    points, outputs, size = jacobian.shape
    total = torch.zeros(size, size, dtype=jacobian.dtype)
    for i in range(points):
        for k in range(outputs):
            for j in range(points):
                for m in range(outputs):
                    outer = jacobian[i, k][:, None] * jacobian[j, m][None, :]
                    total += metric[i, k, j, m] * outer
    return total


def _mean_over_metric(jacobian: Tensor, metric: Tensor) -> Tensor:
    """Z E[∂f ∂f' sgn g] with (x, k, x', l) drawn with probability |g|/Z, all outcomes counted."""
    rows = jacobian.reshape(-1, jacobian.shape[-1])
    flat = metric.reshape(len(rows), len(rows))
    total = flat.abs().sum()  # Z
    probability = flat.abs() / total
    expectation = torch.einsum("mn,mn,ma,nb->ab", probability, flat.sign(), rows, rows)
    return total * expectation
