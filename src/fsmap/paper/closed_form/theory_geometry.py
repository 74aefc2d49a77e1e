r"""``theory-metric``, ``theory-symmetry``, ``theory-flat``: three statements about $\mathcal{J}$.

Metric (section 3.2, appendices B.2, B.3): when $p_X$ matters, and a general metric.

Symmetry (Theorem 2, appendices B.6 to B.8): $f = w_2^\top \tanh(w_1 x)$ with two units,
$\theta = (w_1, w_2)$. Swapping the units is a symmetry; its fixed points $\theta^* = (a, a, b, b)$
are singular, and the density of the function is infinite there.

Flat (section 3.3): for $L = \frac{1}{2N}\sum (f - y)^2$ the Gauss-Newton approximation is
$\nabla^2 L \approx \frac1N J^\top J = \mathcal{J}(\theta; p_X)$ with $p_X$ = the training inputs.
What it leaves out is proportional to the residuals, weighted by $\sigma''$; at an optimum the
residuals are orthogonal to the features but for the prior, and the difference falls like their
square.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fsmap.linalg.logdet import log_det
from fsmap.linalg.metric import General
from fsmap.models.basis import TANH
from fsmap.paper.closed_form.fourier import FourierConfig, draw_problem
from fsmap.paper.experiment import Context, Experiment, Measured, Plots, exact
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import epsilon, log_scale, power
from fsmap.paper.report.tables import largest
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.paper.solvers import log_density, maximize
from fsmap.types import Batch, Params

Function = Callable[[Tensor, Tensor], Tensor]
"""θ ``[P]`` and x ``[S]`` to ``[S]``."""


def jacobians(f: Function, theta: Tensor, x: Tensor) -> Tensor:
    """Derivatives at many θ, ``[T, P]`` to ``[T, S, P]``."""
    jacobian: Tensor = torch.vmap(torch.func.jacfwd(f), (0, None))(theta, x)
    return jacobian


WIDTH, DEGREE = 2, 4
TITLES = {"mlp": "tanh network", "linear": "linear model", "square": "square Jacobian"}


def network(theta: Tensor, x: Tensor) -> Tensor:
    """F = w₂ᵀ tanh(w₁ x + b), θ = (w₁, b, w₂)."""
    w1, bias, w2 = theta.reshape(3, -1)
    out: Tensor = torch.tanh(x[:, None] * w1 + bias) @ w2
    return out


def polynomial(theta: Tensor, x: Tensor) -> Tensor:
    """A polynomial with coefficients θ."""
    return x[:, None] ** torch.arange(theta.shape[-1]) @ theta


@dataclasses.dataclass(frozen=True)
class MetricConfig:
    draws: int = 300  # parameters at which log-determinants are compared
    points: int = 400  # points that stand for a continuous p_X
    metrics: int = 10  # random signed metrics that are checked by brute force


class TheoryMetric(Experiment):
    id = "theory-metric"
    label = "Sec. 3.2, App. B.2, B.3"
    title = "When the evaluation distribution matters"
    see = (
        "log det 𝒥 under two evaluation distributions, one point per θ. Points on a line of slope "
        "1 differ by a constant: p_X does not matter there."
    )
    cost = "5 s"
    protocol = "true objective, ε = 0, float64, Jacobians by automatic differentiation"
    group = "theory"
    metrics = ("spread", "metric_gap", "expectation_gap")
    columns = ("metric", "model")
    config = MetricConfig()
    quick = MetricConfig(draws=100, points=200, metrics=3)

    def run(self, config: MetricConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        generator = torch.Generator().manual_seed(0)
        narrow = torch.linspace(-1, 1, config.points, dtype=torch.float64)
        wide = torch.linspace(-3, 3, config.points, dtype=torch.float64)
        few = torch.linspace(-2, 2, 3 * WIDTH, dtype=torch.float64)  # as many as parameters
        skewed = torch.rand(len(few), generator=generator, dtype=torch.float64) + 0.05
        cases: dict[str, tuple[Function, Any, Any, int]] = {
            "mlp": (network, (narrow, None), (wide, None), 3 * WIDTH),
            "linear": (polynomial, (narrow, None), (wide, None), DEGREE + 1),
            "square": (network, (few, None), (few, skewed), 3 * WIDTH),
        }
        for model, (f, first, second, size) in cases.items():
            thetas = torch.randn(config.draws, size, generator=generator, dtype=torch.float64)
            singular = torch.linalg.svdvals(jacobians(f, thetas, first[0]))  # [T, P]
            # singular values span less than 1e5, so that log det is right to many digits
            thetas = thetas[singular[:, -1] > 1e-5 * singular[:, 0]]
            values = [_log_det(jacobians(f, thetas, x), weights) for x, weights in (first, second)]
            for px, value in zip(("first", "second"), values, strict=True):
                yield Measured("log_det", value, config={"model": model, "px": px})
            yield Measured("spread", (values[0] - values[1]).std(), config={"model": model})
        for seed in range(config.metrics):
            yield from _general(seed)

    def claims(self, rows: Rows) -> list[Claim]:
        spread = tables.values_by(rows, "model", metric="spread")
        mlp = spread.pop("mlp", math.nan)
        gaps = tables.values(rows, metric=("metric_gap", "expectation_gap"))
        shown = ", ".join(f"{value:.0e} nats ({TITLES[m]})" for m, value in spread.items())
        return [
            exact("p_X changes the FS-MAP objective of a tanh network", mlp > 0.1,
                  f"½ log det differs by {mlp / 2:.2f} nats (std over θ)", "it does",
                  seeds=int(bool(spread))),
            exact("… and only shifts it by a constant for a linear model and a square Jacobian",
                  largest(spread.values()) < 1e-8, f"std over θ: {shown}", "no effect",
                  seeds=int(bool(spread))),
            exact("A general, non-diagonal, signed metric agrees with the sums of appendix B.2",
                  largest(gaps) < 1e-8, f"largest gap {largest(gaps):.0e}", source="ours",
                  seeds=len(gaps)),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, panels = figures.axes(3, panel=(2.7, 2.8))
        names = {"square": ("uniform weights", "random weights")}
        reach = 1.05 * max(
            (abs(v) for line in tables.values(rows, metric="log_det") for v in _centered(line)),
            default=1.0,
        )
        for ax, (model, title) in zip(panels, TITLES.items(), strict=True):
            pair = [_centered(v) for v in tables.values(rows, metric="log_det", model=model)]
            if len(pair) == 2:
                _scatter(ax, *pair)
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
    direct, expectation = sum_over_metric(jacobian, metric), mean_over_metric(jacobian, metric)
    library = log_det(f, {"theta": theta}, x, jitter=0.0, metric=General(metric))
    assert isinstance(library, Tensor)
    value = torch.logdet(direct / points)  # the library's mean over S
    yield Measured("metric_gap", (library - value).abs(), seed=seed)
    gap = (expectation - direct).abs().max() / direct.abs().max()
    yield Measured("expectation_gap", gap, seed=seed)


def sum_over_metric(jacobian: Tensor, metric: Tensor) -> Tensor:
    """𝒥_ab = Σ g_ikjl ∂_a f_ik ∂_b f_jl, term by term, ``[P, P]``."""
    points, outputs, size = jacobian.shape
    total = torch.zeros(size, size, dtype=jacobian.dtype)
    for i, k, j, m in itertools.product(range(points), range(outputs), repeat=2):
        total += metric[i, k, j, m] * (jacobian[i, k][:, None] * jacobian[j, m][None, :])
    return total


def mean_over_metric(jacobian: Tensor, metric: Tensor) -> Tensor:
    """Z E[∂f ∂f' sgn g] with (x, k, x', l) drawn with probability |g|/Z, all outcomes counted."""
    rows = jacobian.reshape(-1, jacobian.shape[-1])
    flat = metric.reshape(len(rows), len(rows))
    total = flat.abs().sum()  # Z
    probability = flat.abs() / total
    expectation = torch.einsum("mn,mn,ma,nb->ab", probability, flat.sign(), rows, rows)
    return total * expectation


FIXED = (1.0, 1.0, 0.7, 0.7)
"""θ* = (a, a, b, b)."""
AWAY = (1.0, -0.6, 0.5, -1.0)
"""Direction of the path θ* + t·v: it pulls the units apart."""
NULL = ((1.0, -1.0, 0.0, 0.0), (0.0, 0.0, 1.0, -1.0))
FUNCTION, PARAMETER = "N(θ, s²(𝒥+εI)⁻¹)", "N(θ, s²I)"


@dataclasses.dataclass(frozen=True)
class SymmetryConfig:
    points: int = 200  # points that stand for p_X = Uniform(−2, 2)
    jitters: tuple[float, ...] = (1e-8, 1e-4, 1e-2)  # ε of the bounded objective
    path: int = 41  # steps of the path to θ*, from t = 1 to 1e-4
    samples: int = 100_000  # largest number of draws of q
    spread: float = 0.01  # s, the width of q
    seeds: int = 5  # independent estimates of E_q[log det]


class TheorySymmetry(Experiment):
    id = "theory-symmetry"
    label = "Theorem 2, App. B.6–B.8"
    title = "Symmetric networks have infinite prior density"
    see = "log p(f) as two units merge, without and with jitter, and its expectation over narrow q."
    cost = "45 s"
    protocol = (
        "exact Jacobians in float64, log det from singular values. q has constant function-space "
        "entropy, N(θ, s²(𝒥+εI)⁻¹); N(θ, s²I) is a labelled variant"
    )
    group = "theory"
    metrics = ("null_angle", "null_value", "growth", "expected_log_det")
    columns = ("metric", "jitter", "family", "samples")
    config = SymmetryConfig()
    quick = SymmetryConfig(points=60, path=25, samples=10_000, seeds=3)

    def run(self, config: SymmetryConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        fixed = torch.tensor(FIXED, dtype=torch.float64)
        x = torch.linspace(-2, 2, config.points, dtype=torch.float64)
        _, singular, right = torch.linalg.svd(scaled_jacobian(fixed[None], x)[0])
        expected = torch.tensor(NULL, dtype=torch.float64) / math.sqrt(2)  # [2, 4], orthonormal
        yield Measured("null_value", singular[-2] / singular[0])
        yield Measured("null_angle", (expected - (expected @ right[-2:].mT) @ right[-2:]).norm())
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

    def claims(self, rows: Rows) -> list[Claim]:
        angle, null = (
            largest(tables.values(rows, metric=metric)) for metric in ("null_angle", "null_value")
        )
        growth = tables.values_by(rows, "jitter", metric="growth")
        ran, free = int(bool(growth)), growth.pop(0.0, math.nan)
        shown = ", ".join(f"{value:.2f} ({epsilon(j)})" for j, value in growth.items())
        return [
            exact("At θ* = (a, a, b, b) the null space is spanned by (1,−1,0,0) and (0,0,1,−1)",
                  null < 1e-7 and angle < 1e-6,
                  f"singular values up to {null:.0e}, angle {angle:.0e}", "spanned", seeds=ran),
            exact("The prior density of the function, log p(f), grows without bound towards θ*",
                  free > 5, f"by {free:.1f} nats from t = 0.001 to 0.0001", "infinite", seeds=ran),
            exact("… and is bounded with a jitter", largest(map(abs, growth.values())) < 0.5,
                  f"grows by {shown}", "bounded", seeds=ran),
            _finite(rows),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
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
        looks = {
            FUNCTION: ("fs-map", "s", r"\mathcal{N}(\theta^*, s^2(\mathcal{J}+\epsilon I)^{-1})"),
            PARAMETER: ("l-map", "^", r"\mathcal{N}(\theta^*, s^2 I)"),
        }
        for family, (color, marker, name) in looks.items():
            look = {"marker": marker, "label": f"$q = {name}$"}
            figures.plot_mean(right, *_expected(rows, family), color, **look)
        for row in tables.select(rows, metric="jittered_log_det"):
            label = rf"$\log\det(\mathcal{{J}}+\epsilon I)$, {power(row.config['jitter'])}"
            right.axhline(row.value, color=figures.MUTED, linestyle="--", linewidth=1, label=label)
        right.set(xlabel="draws of $q$", ylabel=r"$E_q[\log\det\mathcal{J}]$")
        right.set_xscale("log")
        right.legend()
        return {"theory-symmetry": figure}


def two_units(theta: Tensor, x: Tensor) -> Tensor:
    """F = w₂ᵀ tanh(w₁ x), θ = (w₁, w₂)."""
    return torch.tanh(x[:, None] * theta[:2]) @ theta[2:]


def scaled_jacobian(theta: Tensor, x: Tensor) -> Tensor:
    """J/√S at many θ, ``[T, 4]`` to ``[T, S, 4]``; 𝒥 is its square."""
    return jacobians(two_units, theta, x) / math.sqrt(len(x))


def log_dets(theta: Tensor, x: Tensor, chunk: int = 5_000) -> Tensor:
    """Log det 𝒥 at many θ, without jitter, ``[T, 4]`` to ``[T]``."""
    parts = []
    for part in theta.split(chunk):
        upper = torch.linalg.qr(scaled_jacobian(part, x), mode="r").R  # [T, 4, 4]
        parts.append(2 * upper.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1))
    return torch.cat(parts)


def _expectations(
    config: SymmetryConfig, fixed: Tensor, x: Tensor, context: Context
) -> Iterator[Measured]:
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


def _expected(rows: Rows, family: str) -> tables.Line:
    chosen = tables.select(rows, metric="expected_log_det", family=family)
    return tables.line(chosen, "samples")


def _finite(rows: Rows) -> Claim:
    """The last tenfold of draws moves the estimate by no more than its error."""
    steady, shown = True, []
    for family in (FUNCTION, PARAMETER):
        line = _expected(rows, family)
        before, last = [math.nan, math.nan, *line.mean][-2:]
        error = line.stderr[-2] if len(line.x) > 1 else math.nan
        steady = steady and abs(last - before) < 4 * error + 0.05
        shown.append(f"{last:.2f} nats, moved by {abs(last - before):.2f} (q = {family})")
    seeds = len({row.seed for row in tables.select(rows, metric="expected_log_det")})
    text = "E_q[log det 𝒥] is finite at θ*: the last tenfold of draws of q does not move it"
    return exact(text, steady, "; ".join(shown), "finite", seeds=seeds)


@dataclasses.dataclass(frozen=True)
class FlatConfig(FourierConfig):
    num_frequencies: int = 50  # P/2
    prior_std: float = 1.0  # α, of the truth: small enough that tanh is not saturated
    n_train: int = 400  # N
    # noise of the data, which decides how well they are fitted
    noise_stds: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class TheoryFlat(Experiment):
    id = "theory-flat"
    label = "Sec. 3.3"
    title = "The geometry term is the curvature of the loss"
    see = "How far the Hessian of the loss is from 𝒥 at the training inputs, against the residual."
    cost = "30 s"
    protocol = "PS-MAP fits by Newton's method, Hessians by automatic differentiation in float64"
    group = "theory"
    metrics = ("relative_gap", "residual")
    columns = ("metric", "noise_std")
    config = FlatConfig()
    quick = FlatConfig(num_frequencies=20, n_train=200, noise_stds=(0.001, 0.01, 0.1, 1.0))

    def run(self, config: FlatConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        for number, noise in enumerate(config.noise_stds):
            drawn, where = dataclasses.replace(config, noise_std=noise), {"noise_std": noise}
            for seed in range(config.seeds):
                train = draw_problem(drawn, config.n_train, seed).train
                rows, objective = drawn.rows(train), drawn.objective(None, len(train.y))
                theta = maximize(
                    lambda t, o=objective, r=rows: log_density(o, TANH, t, r),  # type: ignore[misc]
                    drawn.model().theta.detach(),
                )
                gap, residual = compare(drawn, theta, train)
                yield Measured("relative_gap", gap, "ps-map", seed, where)
                yield Measured("residual", residual, "ps-map", seed, where)
            context.advance((number + 1) / len(config.noise_stds))

    def claims(self, rows: Rows) -> list[Claim]:
        gap, residual = _line(rows, "relative_gap"), _line(rows, "residual")
        slope = math.nan
        if len(gap) > 1:  # least squares in logarithms
            x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (residual, gap))
            slope = float((x - x.mean()) @ (y - y.mean()) / (x - x.mean()).square().sum())
        best, at = [*gap, math.nan][0], [*residual, math.nan][0]
        seeds = len({row.seed for row in rows})
        return [
            exact("The Hessian of the loss is 𝒥 at the training inputs, if the model fits well",
                  best < 0.02, f"relative difference {best:.1e} at a residual of {at:.1e}",
                  "Gauss–Newton", seeds=seeds),
            exact("The difference vanishes with the residual", slope > 0.8,
                  f"like residual^{slope:.2f}", source="ours", seeds=seeds),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, ax = figures.axes(panel=(4.4, 3.0))
        x, y = _line(rows, "residual"), _line(rows, "relative_gap")
        ax.plot(x, y, color=figures.COLORS["fs-map"], marker="s", label="measured")
        for exponent, line, label in ((1, "--", "∝ residual"), (2, ":", "∝ residual²")):
            guide = [y[0] * (value / x[0]) ** exponent for value in x]
            ax.plot(x, guide, color=figures.MUTED, linestyle=line, label=label)
        ax.set(
            xlabel="training RMSE",
            ylabel=r"$\|\nabla^2 L - \mathcal{J}\|_F \,/\, \|\mathcal{J}\|_F$",
        )
        ax.set_yscale("log")
        log_scale(ax, "x")
        ax.legend()
        return {"theory-flat": figure}


def compare(config: FourierConfig, theta: Tensor, train: Batch) -> tuple[Tensor, Tensor]:
    """Relative difference of the loss's Hessian and 𝒥, and the root mean squared residual."""
    design = config.model().design(train.x)

    def out(t: Tensor) -> Tensor:
        return design @ t.tanh()

    def loss(t: Tensor) -> Tensor:
        return 0.5 * (out(t) - train.y).square().mean()

    hessian = torch.func.hessian(loss)(theta)
    jacobian = torch.func.jacrev(out)(theta)  # [N, P]
    gram = jacobian.mT @ jacobian / len(train.y)
    gap = (hessian - gram).norm() / gram.norm()
    return gap, (out(theta) - train.y).square().mean().sqrt()


def _line(rows: Rows, metric: str) -> list[float]:
    return tables.line(tables.select(rows, metric=metric), "noise_std").mean
