r"""``theory-symmetry`` (Theorem 2, appendices B.6 to B.8): merging units have infinite density.

$f = w_2^\top \tanh(w_1 x)$ with two units, $\theta = (w_1, w_2)$. Swapping the units is a symmetry;
its fixed points $\theta^* = (a, a, b, b)$ are singular.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import epsilon, log_scale, power
from fsmap.paper.report.tables import largest
from fsmap.paper.rows import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIXED = (1.0, 1.0, 0.7, 0.7)
"""θ* = (a, a, b, b)."""
AWAY = (1.0, -0.6, 0.5, -1.0)
"""Direction of the path θ* + t·v: it pulls the units apart."""
NULL = ((1.0, -1.0, 0.0, 0.0), (0.0, 0.0, 1.0, -1.0))
FUNCTION, PARAMETER = "N(θ, s²(𝒥+εI)⁻¹)", "N(θ, s²I)"


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes."""

    points: int = 200  # points that stand for p_X = Uniform(−2, 2)
    jitters: tuple[float, ...] = (1e-8, 1e-4, 1e-2)  # ε of the bounded objective
    path: int = 41  # steps of the path to θ*, from t = 1 to 1e-4
    samples: int = 100_000  # largest number of draws of q
    spread: float = 0.01  # s, the width of q
    seeds: int = 5  # independent estimates of E_q[log det]


class TheorySymmetry(Experiment):
    """The path to a fixed point of the permutation, and the expectation over q."""

    id = "theory-symmetry"
    label = "Theorem 2, App. B.6–B.8"
    title = "Symmetric networks have infinite prior density"
    see = (
        "As two units merge, log p(f) grows without bound; with a jitter it levels off, and its "
        "expectation over a narrow q is finite."
    )
    cost = "45 s"
    protocol = (
        "exact Jacobians in float64, log det from singular values. q has constant function-space "
        "entropy, N(θ, s²(𝒥+εI)⁻¹); N(θ, s²I) is a labelled variant"
    )
    group = "theory"
    config = Config()
    quick = Config(points=60, path=25, samples=10_000, seeds=3)

    def run(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Null space at θ*, the path, and the expectation."""
        fixed = torch.tensor(FIXED, dtype=torch.float64)
        x = torch.linspace(-2, 2, config.points, dtype=torch.float64)
        yield from _null_space(fixed, x)
        times = torch.logspace(0, -4, config.path, dtype=torch.float64)
        path = fixed + times[:, None] * torch.tensor(AWAY, dtype=torch.float64)
        prior = -0.5 * path.square().sum(-1)
        values = torch.linalg.svdvals(scaled_jacobian(path, x)).square()  # [T, 4]
        for jitter in (0.0, *config.jitters):
            log_p = prior - 0.5 * (values + jitter).log().sum(-1)
            where = {"jitter": jitter}
            yield Measured("path", torch.stack([times, log_p]), config=where)
            decade = int((times <= 1.001e-3).nonzero()[0])
            yield Measured("growth", log_p[-1] - log_p[decade], config=where)
        yield from _expectations(config, fixed, x, context)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Singular values, growth, expectations."""
        chosen = tables.in_order(rows, "null_angle", "null_value", "growth", "expected_log_det")
        return tables.summarize(chosen, "metric", "jitter", "family", "samples")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Null space, growth, bound, finiteness."""
        angle, null = (
            largest(tables.values(rows, metric=metric)) for metric in ("null_angle", "null_value")
        )
        growth = tables.values_by(rows, "jitter", metric="growth")
        jitters = [jitter for jitter in growth if jitter]
        return [
            Claim(
                "At θ* = (a, a, b, b) the null space is spanned by (1,−1,0,0) and (0,0,1,−1)",
                null < 1e-7 and angle < 1e-6,
                f"singular values up to {null:.0e}, angle {angle:.0e}",
                "spanned",
            ),
            Claim(
                "The prior density of the function, log p(f), grows without bound on the way to θ*",
                growth.get(0.0, math.nan) > 5,
                f"by {growth.get(0.0, math.nan):.1f} nats from t = 0.001 to 0.0001",
                "infinite",
            ),
            Claim(
                "… and is bounded with a jitter",
                largest(abs(growth[j]) for j in jitters) < 0.5,
                "grows by " + ", ".join(f"{growth[j]:.2f} ({epsilon(j)})" for j in jitters),
                "bounded",
            ),
            *(_finite(rows, family) for family in (FUNCTION, PARAMETER)),
        ]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """The path, and the estimates of the expectation."""
        figure, (left, right) = figures.axes(2, panel=(3.9, 2.9))
        shades = ("-", "--", "-.", ":")
        for line, row in zip(shades, tables.select(rows, metric="path"), strict=False):
            jitter = row.config["jitter"]
            color = figures.COLORS["fs-map"] if jitter else figures.COLORS["ps-map"]
            label = power(jitter) if jitter else r"no jitter, $\epsilon = 0$"
            left.plot(*row.value, linestyle=line, color=color, label=label)
        left.set(xlabel="distance $t$ to the fixed point", ylabel=r"$\log p(f_\theta)$")
        log_scale(left, "x")
        left.invert_xaxis()
        left.legend()
        _draw_expectations(right, rows)
        return {"theory-symmetry": figure}


def network(theta: Tensor, x: Tensor) -> Tensor:
    """F = w₂ᵀ tanh(w₁ x), θ = (w₁, w₂), ``[S]`` to ``[S]``."""
    return torch.tanh(x[:, None] * theta[:2]) @ theta[2:]


def scaled_jacobian(theta: Tensor, x: Tensor) -> Tensor:
    """J/√S at many θ, ``[T, 4]`` to ``[T, S, 4]``; 𝒥 is its square."""
    jacobian: Tensor = torch.vmap(torch.func.jacfwd(network), (0, None))(theta, x)
    return jacobian / math.sqrt(len(x))


def _null_space(fixed: Tensor, x: Tensor) -> Iterator[Measured]:
    _, values, right = torch.linalg.svd(scaled_jacobian(fixed[None], x)[0])
    expected = torch.tensor(NULL, dtype=torch.float64) / math.sqrt(2)  # [2, 4], orthonormal
    residual = (expected - (expected @ right[-2:].mT) @ right[-2:]).norm()
    yield Measured("null_value", values[-2] / values[0])
    yield Measured("null_angle", residual)


def log_dets(theta: Tensor, x: Tensor, chunk: int = 5_000) -> Tensor:
    """Log det 𝒥 at many θ, without jitter, ``[T, 4]`` to ``[T]``."""
    parts = []
    for part in theta.split(chunk):
        upper = torch.linalg.qr(scaled_jacobian(part, x), mode="r").R  # [T, 4, 4]
        parts.append(2 * upper.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1))
    return torch.cat(parts)


def _expectations(config: Config, fixed: Tensor, x: Tensor, context: Context) -> Iterator[Measured]:
    """E_q[log det 𝒥(θ')] at θ* for growing numbers of draws: it settles, so it is finite."""
    rows = scaled_jacobian(fixed[None], x)[0]
    gram, identity = rows.mT @ rows, torch.eye(4, dtype=torch.float64)
    jitter = config.jitters[1]
    roots = {
        FUNCTION: torch.linalg.cholesky(torch.linalg.inv(gram + jitter * identity)),
        PARAMETER: identity,
    }
    sizes = [n for n in (100, 1_000, 10_000, 100_000, 1_000_000) if n <= config.samples]
    for seed in range(config.seeds):
        for family, root in roots.items():
            generator = torch.Generator().manual_seed(seed)
            unit = torch.randn(config.samples, 4, generator=generator, dtype=torch.float64)
            values = log_dets(fixed + config.spread * unit @ root.mT, x)
            for size in sizes:
                where = {"family": family, "samples": size, "jitter": jitter}
                yield Measured("expected_log_det", values[:size].mean(), seed=seed, config=where)
        context.advance((seed + 1) / config.seeds)
    jittered = torch.logdet(gram + jitter * identity)
    yield Measured("jittered_log_det", jittered, config={"jitter": jitter})


def _finite(rows: Sequence[Row], family: str) -> Claim:
    chosen = tables.select(rows, metric="expected_log_det", family=family)
    line = tables.line(chosen, "samples")
    steady = len(line.x) > 1 and all(map(math.isfinite, line.mean))
    change = abs(line.mean[-1] - line.mean[-2]) if steady else math.nan
    error = line.stderr[-2] if steady else math.nan
    last = line.mean[-1] if steady else math.nan
    return Claim(
        f"E_q[log det 𝒥] is finite at θ*, q = {family}",
        steady and change < 4 * error + 0.05,
        f"{last:.2f} nats; the last tenfold of draws moves it by {change:.2f}",
        "finite",
    )


def _draw_expectations(ax: Any, rows: Sequence[Row]) -> None:
    looks = {FUNCTION: ("fs-map", "s"), PARAMETER: ("l-map", "^")}
    labels = {
        FUNCTION: r"$\mathcal{N}(\theta^*, s^2(\mathcal{J}+\epsilon I)^{-1})$",
        PARAMETER: r"$\mathcal{N}(\theta^*, s^2 I)$",
    }
    for family, (color, marker) in looks.items():
        line = tables.line(tables.select(rows, metric="expected_log_det", family=family), "samples")
        figures.plot_mean(ax, *line, color, marker=marker, label=f"$q = $ {labels[family]}")
    for row in tables.select(rows, metric="jittered_log_det"):
        label = rf"$\log\det(\mathcal{{J}}+\epsilon I)$, {power(row.config['jitter'])}"
        ax.axhline(row.value, color=figures.MUTED, linestyle="--", linewidth=1, label=label)
    ax.set(xlabel="draws of $q$", ylabel=r"$E_q[\log\det\mathcal{J}]$")
    ax.set_xscale("log")
    ax.legend()
