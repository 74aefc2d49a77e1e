r"""``theory-metric``, ``-symmetry``, ``-flat``, ``-any-parameter``, ``-large-data``.

Symmetry (Theorem 2, appendices B.6 to B.8): swapping the two units of $w_2^\top \tanh(w_1 x)$ is a
symmetry; its fixed points $\theta^* = (a, a, b, b)$ are singular, and the density of the function
is infinite there.

Flat (section 3.3): for $L = \frac{1}{2N}\sum (f - y)^2$ the Gauss-Newton approximation is
$\nabla^2 L \approx \frac1N J^\top J = \mathcal{J}(\theta; p_X)$ with $p_X$ = the training inputs.
What it leaves out is proportional to the residuals, weighted by $\sigma''$.

Any parameter (abstract, appendix A): in $\theta' = (\theta - \theta_0)^3$ the prior density is
$p(\theta)\,|d\theta/d\theta'|$ with $|d\theta/d\theta'| = \prod_i 1/(3(\theta_i -
\theta_{0i})^2)$: infinite at $\theta_0$, whatever the data, so PS-MAP returns $\theta_0$.

Large data (section 4.3): the model of Fig. 1 is linear in the heights $h = e^\theta$, and FS-MAP is
the mode of $p(h|D)$ while the average is its mean. For a posterior of width s mode and mean differ
by $O(s^4)$, so like $N^{-2}$; PS-MAP is the mode of another density, $O(s^2)$ away, like $N^{-1}$.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fsmap.assess.model_average import Interval, PosteriorMean, posterior_mean
from fsmap.errors import DivergedError
from fsmap.linalg.logdet import log_det
from fsmap.linalg.metric import General
from fsmap.objective.closed_form import EXP, Invertible
from fsmap.objective.objective import Normal
from fsmap.paper.closed_form import mixture
from fsmap.paper.closed_form.fourier import FourierConfig, draw_options, draw_problem, regression
from fsmap.paper.closed_form.mixture import MixtureConfig
from fsmap.paper.engine import Context, Experiment, Measured, Plots, exact
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import legend_once, log_scale, power
from fsmap.paper.report.tables import epsilon, largest, smallest
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.types import Batch, Params

METHODS = ("ps-map", "fs-map")
Function = Callable[[Tensor, Tensor], Tensor]  # θ [P] and x [S] to [S]


def maximize(objective: Callable[[Tensor], Tensor], start: Tensor, *, steps: int = 100) -> Tensor:
    """Climb to a local maximum by Newton's method, to machine precision, ``[P]`` to ``[P]``."""
    theta, length = start.detach().clone(), float("inf")
    gradient, hessian = torch.func.grad(objective), torch.func.hessian(objective)
    for _ in range(steps):
        curvature, axes = torch.linalg.eigh(-hessian(theta))
        scale = curvature.abs().clamp_min(1e-12)  # so that a step goes uphill; else it is halved
        step = axes @ ((axes.mT @ gradient(theta)) / scale)
        step = step * min(1.0, 2.0 / max(float(step.norm()), 1e-300))
        before = objective(theta)
        halved = (step / 2**k for k in range(40))
        uphill = (step for step in halved if objective(theta + step) >= before)
        step = next(uphill, torch.zeros_like(step))  # no step: rounding decides, at the top
        theta, length = theta + step, float(step.norm())
        if length < 1e-9 * (1 + float(theta.norm())):  # the next one is its square
            return theta
    raise DivergedError(f"Newton's method: step {steps} was still {length:.1e} long. Start nearer.")


def jacobians(f: Function, theta: Tensor, x: Tensor) -> Tensor:
    """Derivatives at many θ, ``[T, P]`` to ``[T, S, P]``."""
    return torch.vmap(torch.func.jacfwd(f), (0, None))(theta, x)


WIDTH, DEGREE = 2, 4
TITLES = {"mlp": "tanh network", "linear": "linear model", "square": "square Jacobian"}


def network(theta: Tensor, x: Tensor) -> Tensor:
    """F = w₂ᵀ tanh(w₁ x + b), θ = (w₁, b, w₂)."""
    w1, bias, w2 = theta.reshape(3, -1)
    return torch.tanh(x[:, None] * w1 + bias) @ w2


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
    see = "log det 𝒥 under two p_X, by θ: points on a line of slope 1 differ by a constant."
    cost = "5 s"
    protocol = "true objective, ε = 0, float64, Jacobians by automatic differentiation"
    group = "theory"
    metrics = ("spread", "metric_gap", "expectation_gap")
    columns = ("metric", "model")
    config = MetricConfig()
    quick = MetricConfig(draws=100, points=200, metrics=3)

    def run(self, config: MetricConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        draw = draw_options(0)
        narrow = torch.linspace(-1, 1, config.points, dtype=torch.float64)
        wide = torch.linspace(-3, 3, config.points, dtype=torch.float64)
        few = torch.linspace(-2, 2, 3 * WIDTH, dtype=torch.float64)  # as many as parameters
        skewed = 0.05 + torch.rand(len(few), **draw)
        even = torch.ones_like(wide)
        cases: dict[str, tuple[Function, int, Tensor, Tensor, Tensor]] = {
            "mlp": (network, 3 * WIDTH, narrow, wide, even),
            "linear": (polynomial, DEGREE + 1, narrow, wide, even),
            "square": (network, 3 * WIDTH, few, few, skewed),
        }
        for model, (f, size, first, second, weights) in cases.items():
            thetas = torch.randn(config.draws, size, **draw)
            singular = torch.linalg.svdvals(jacobians(f, thetas, first))  # [T, P]
            # singular values span less than 1e5, so that log det is right to many digits
            thetas = thetas[singular[:, -1] > 1e-5 * singular[:, 0]]
            one = _log_det(jacobians(f, thetas, first), torch.ones_like(first))
            other = _log_det(jacobians(f, thetas, second), weights)
            yield Measured("log_det", one, config={"model": model, "px": "first"})
            yield Measured("log_det", other, config={"model": model, "px": "second"})
            yield Measured("spread", (one - other).std(), config={"model": model})
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
                  seeds=len(tables.values(rows, metric="metric_gap"))),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, panels = figures.axes(3, panel=(2.7, 2.8), sharex=True, sharey=True)
        for ax, (model, title) in zip(panels, TITLES.items(), strict=True):
            values = tables.values(rows, metric="log_det", model=model)  # [2, T]
            ax.axline((0, 0), slope=1, **{**figures.GUIDE, "linestyle": "--"})
            centered = [torch.tensor(v, dtype=torch.float64) - sum(v) / len(v) for v in values]
            ax.plot(*centered, "o", color=figures.COLORS["fs-map"], markersize=3, alpha=0.6)
            x, y = "U(−1, 1)", "U(−3, 3)"
            if model == "square":
                x, y = "uniform weights", "random weights"
            ax.set(title=title, xlabel=f"log det, $p_X$ = {x}", ylabel=f"$p_X$ = {y}")
        return {"theory-metric": figure}


def _log_det(jacobian: Tensor, weights: Tensor) -> Tensor:
    """Log det(Jᵀ diag(w) J) from singular values, ``[T]``."""
    share = weights / weights.sum()
    return 2 * torch.linalg.svdvals(share.sqrt()[:, None] * jacobian).log().sum(-1)


def _general(seed: int) -> Iterator[Measured]:
    """Compare the library's General metric with both sums of appendix B.2, term by term."""
    draw, points, size = draw_options(seed), 5, 4
    n = 2 * points  # two outputs

    def f(params: Params, x: Tensor) -> Tensor:  # [S] to [S, 2]
        a, b, c, d = params["theta"]
        return torch.stack([a * torch.tanh(b * x), c * x + torch.tanh(d * x - 1)], dim=-1)

    theta, x, root = (torch.randn(shape, **draw) for shape in (size, points, (n, n)))
    metric = root @ root.mT  # entries of both signs
    rows = torch.func.jacrev(lambda t: f({"theta": t}, x))(theta).reshape(n, size)
    # 𝒥_ab = Σ g_mn ∂_a f_m ∂_b f_n, where m and n are a point and an output
    direct = torch.zeros(size, size, dtype=torch.float64)
    for i, j in itertools.product(range(n), repeat=2):
        direct += metric[i, j] * torch.outer(rows[i], rows[j])
    # Z E[∂f ∂f' sgn g] with pairs drawn with probability |g|/Z, all outcomes counted
    total = metric.abs().sum()
    mean = torch.einsum("mn,mn,ma,nb->ab", metric.abs() / total, metric.sign(), rows, rows)
    library = log_det(f, {"theta": theta}, x, jitter=0.0, metric=General(metric))
    assert isinstance(library, Tensor)
    value = torch.logdet(direct / points)  # the library's mean over S
    yield Measured("metric_gap", (library - value).abs(), seed=seed)
    gap = (total * mean - direct).abs().max() / direct.abs().max()
    yield Measured("expectation_gap", gap, seed=seed)


FIXED = (1.0, 1.0, 0.7, 0.7)  # θ* = (a, a, b, b)
AWAY = (1.0, -0.6, 0.5, -1.0)  # v of the path θ* + t·v: it pulls the units apart
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
    protocol = "log det from singular values; q = N(θ, s²(𝒥+εI)⁻¹), and N(θ, s²I) as a variant"
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
        decade = int((times <= 1.001e-3).nonzero()[0])
        for jitter in (0.0, *config.jitters):
            log_p, where = prior - 0.5 * (values + jitter).log().sum(-1), {"jitter": jitter}
            yield Measured("path", torch.stack([times, log_p]), config=where)
            yield Measured("growth", log_p[-1] - log_p[decade], config=where)
        yield from _expectations(config, fixed, x, context)

    def claims(self, rows: Rows) -> list[Claim]:
        angle, null = (largest(tables.values(rows, metric=m)) for m in ("null_angle", "null_value"))
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
        figure, ax = figures.axes(panel=(4.4, 3.0))
        paths = tables.select(rows, metric="path")
        for line, row in zip(("-", "--", "-.", ":"), paths, strict=False):
            jitter = row.config["jitter"]
            label = power(jitter) if jitter else "no jitter"
            ax.plot(*row.value, linestyle=line, color=figures.COLORS["fs-map"], label=label)
        ax.set(xlabel="distance $t$ to the fixed point", ylabel=r"$\log p(f_\theta)$")
        log_scale(ax, "x")
        ax.invert_xaxis()
        ax.legend()
        return {"theory-symmetry": figure}


def scaled_jacobian(theta: Tensor, x: Tensor) -> Tensor:
    """J/√S of F = w₂ᵀ tanh(w₁ x), θ = (w₁, w₂), at many θ, ``[T, 4]`` to ``[T, S, 4]``."""
    two_units: Function = lambda t, at: torch.tanh(at[:, None] * t[:2]) @ t[2:]  # noqa: E731
    return jacobians(two_units, theta, x) / math.sqrt(len(x))


def log_dets(theta: Tensor, x: Tensor) -> Tensor:
    """Log det 𝒥 at many θ, without jitter, ``[T, 4]`` to ``[T]``."""
    parts = [torch.linalg.qr(scaled_jacobian(t, x), mode="r").R for t in theta.split(5_000)]
    return 2 * torch.cat(parts).diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)


def _expectations(
    config: SymmetryConfig, fixed: Tensor, x: Tensor, context: Context
) -> Iterator[Measured]:
    """E_q[log det 𝒥(θ')] at θ* for growing numbers of draws: it settles, so it is finite."""
    rows, jitter = scaled_jacobian(fixed[None], x)[0], config.jitters[1]
    identity = torch.eye(4, dtype=torch.float64)
    gram = rows.mT @ rows + jitter * identity
    roots = {FUNCTION: torch.linalg.cholesky(torch.linalg.inv(gram)), PARAMETER: identity}
    sizes = [n for n in (100, 1_000, 10_000, 100_000, 1_000_000) if n <= config.samples]
    for seed in range(config.seeds):
        for family, root in roots.items():
            unit = torch.randn(config.samples, 4, **draw_options(seed))
            values = log_dets(fixed + config.spread * unit @ root.mT, x)
            for size in sizes:
                where = {"family": family, "samples": size, "jitter": jitter}
                yield Measured("expected_log_det", values[:size].mean(), seed=seed, config=where)
        context.advance((seed + 1) / config.seeds)
    yield Measured("jittered_log_det", torch.logdet(gram), config={"jitter": jitter})


def _finite(rows: Rows) -> Claim:
    """The last tenfold of draws moves the estimate by no more than its error."""
    steady, shown = True, []
    for family in (FUNCTION, PARAMETER):
        _, mean, stderr = tables.line(rows, "samples", metric="expected_log_det", family=family)
        (before, last), error = [math.nan, math.nan, *mean][-2:], [math.nan, *stderr[:-1]][-1]
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
                theta = maximize(
                    lambda t, c=drawn, d=train: c.log_posterior(t, d),  # type: ignore[misc]
                    drawn.model().theta.detach(),
                )
                gap, residual = hessian_gap(drawn, theta, train)
                yield Measured("relative_gap", gap, "ps-map", seed, where)
                yield Measured("residual", residual, "ps-map", seed, where)
            context.advance((number + 1) / len(config.noise_stds))

    def claims(self, rows: Rows) -> list[Claim]:
        gap, residual = (tables.line(rows, "noise_std", metric=m).mean for m in self.metrics)
        slope = np.polyfit(np.log(residual), np.log(gap), 1)[0] if len(gap) > 1 else math.nan
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
        y, x = (tables.line(rows, "noise_std", metric=m).mean for m in self.metrics)
        ax.plot(x, y, color=figures.COLORS["fs-map"], marker="s")
        ax.set_ylabel(r"$\|\nabla^2 L - \mathcal{J}\|_F \,/\, \|\mathcal{J}\|_F$")
        ax.set(xlabel="training RMSE", yscale="log")
        log_scale(ax, "x")
        return {"theory-flat": figure}


def hessian_gap(config: FourierConfig, theta: Tensor, train: Batch) -> tuple[Tensor, Tensor]:
    """Relative difference of the loss's Hessian and 𝒥, and the root mean squared residual."""
    design = config.model().design(train.x)

    def residual(t: Tensor) -> Tensor:
        return design @ t.tanh() - train.y

    hessian = torch.func.hessian(lambda t: 0.5 * residual(t).square().mean())(theta)
    jacobian = torch.func.jacrev(residual)(theta)  # [N, P]
    gram = jacobian.mT @ jacobian / len(train.y)
    gap = (hessian - gram).norm() / gram.norm()
    return gap, residual(theta).square().mean().sqrt()


TARGETS = ((-1.0, 1.0), (1.0, 0.5), (-2.0, -2.5))  # values of θ₀ that PS-MAP is made to return


@dataclasses.dataclass(frozen=True)
class AnyConfig(MixtureConfig):
    prior_std: float = 1.2  # α
    starts: int = 7  # starting points per axis
    steps: int = 2_000
    lr: float = 0.5
    seeds: int = 4


class TheoryAnyParameter(Experiment):
    id = "theory-any-parameter"
    label = "Abstract, App. A"
    title = "PS-MAP can be made to return anything"
    see = "Where the best solution of each method is if the model is written in (θ − θ₀)³."
    cost = "15 s"
    protocol = "true objective, ε = 0; Adam from a grid of starts and one next to θ₀"
    group = "theory"
    metrics = ("distance_to_target", "moved")
    columns = ("metric", "method")
    config = AnyConfig()
    quick = AnyConfig(starts=4, steps=800, seeds=3)

    def run(self, config: AnyConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        data = mixture.draw_data(config)
        task = Task(data, mixture.log_det_form(config), config)
        found = mixture.solve(MixtureConfig(), data, config.prior_std)
        plain = {"ps-map": found["ps-map", "none"], "fs-map": found["fs-map", mixture.TRUE]}
        for number, method in enumerate(METHODS):
            found_theta, log_offset = task.solve(method)  # [targets, seeds, 2]
            for target, thetas, offsets in zip(TARGETS, found_theta, log_offset, strict=True):
                where = {"target": list(target)}
                for seed, theta in enumerate(thetas):
                    gap = offsets[seed].exp().max()
                    yield Measured("distance_to_target", gap, method, seed, where)
                    moved = mixture.distance(theta.exp(), plain[method][seed].exp())
                    yield Measured("moved", moved, method, seed, where)
                    yield Measured("theta", theta, method, seed, where)
            for seed, theta in enumerate(plain[method]):
                yield Measured("theta", theta, method, seed, {"target": None})
            context.advance((number + 1) / 2)

    def claims(self, rows: Rows) -> list[Claim]:
        gaps = tables.select(rows, metric="distance_to_target")
        near, far = (tables.values(gaps, method=method) for method in METHODS)
        moved = largest(tables.values(rows, metric="moved", method="fs-map"))
        seeds = len({row.seed for row in rows})
        return [
            exact("PS-MAP in θ' = (θ − θ₀)³ returns θ₀ whatever the data", largest(near) < 0.01,
                  f"largest distance to θ₀: {largest(near):.0e}", "arbitrary θ₀", seeds=seeds),
            exact("FS-MAP does not, and finds the same function as in θ",
                  moved < 1e-3 and smallest(far) > 0.1, f"its function moves by {moved:.0e}; it "
                  f"stays {smallest(far):.2f} or more from θ₀", "invariant", seeds=seeds),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, panels = figures.axes(2, panel=(3.4, 3.1), sharex=True, sharey=True)
        for ax, method in zip(panels, METHODS, strict=True):
            places = zip(*TARGETS, strict=True)
            ax.plot(*places, "x", color=figures.INK, markeredgewidth=1.6, label=r"$\theta_0$")
            for row in tables.select(rows, metric="theta", method=method):
                plain = row.config["target"] is None
                look = {"markersize": 10, "alpha": 0.3} if plain else {"markersize": 4.5}
                label = r"optimum in $\theta$" if plain else r"optimum in $(\theta - \theta_0)^3$"
                ax.plot(*row.value, "o", color=figures.COLORS[method], label=label, **look)
            ax.set(title=tables.word(method), xlabel=r"$\theta_L$", ylabel=r"$\theta_R$")
            legend_once(ax)
        return {"theory-any-parameter": figure}


class Task:
    r"""Objectives in $\theta' = (\theta - \theta_0)^3$ for all θ₀, data sets and starts.

    They are maximized over $u = \log|\theta - \theta_0|$ (the sign is the start's): in θ the peak
    at θ₀ is infinitely high and narrower than float spacing; in u it becomes a slope that gradient
    ascent can follow. Each member has its own θ₀ and signs, which a model function of
    ``fit_population`` cannot have: this is Adam on the stack of all of them.
    """

    def __init__(self, data: Sequence[Batch], form: Invertible, config: AnyConfig) -> None:
        pairs = [(mixture.build().design(batch.x), batch.y) for batch in data]
        self.square = torch.stack([a.mT @ a for a, _ in pairs])  # [seeds, 2, 2]
        self.cross = torch.stack([a.mT @ y for a, y in pairs])
        self.power = torch.stack([y @ y for _, y in pairs])
        self.num, self.form, self.config = len(data[0].y), form, config
        self.target = torch.tensor(TARGETS, dtype=torch.float64)[:, None, None]  # [T, 1, 1, 2]

    def log_posterior(self, method: str, log_offset: Tensor, sign: Tensor) -> Tensor:
        """Log-density with respect to θ', ``[T, starts, seeds, 2]`` to ``[T, starts, seeds]``."""
        theta = self.target + sign * log_offset.exp()
        log_slope = -math.log(3) - 2 * log_offset  # log dθ/dθ'
        prior = -theta.square().sum(-1) / (2 * self.config.prior_std**2) + log_slope.sum(-1)
        height = theta.exp()
        pulled = torch.einsum("...qp,qpr->...qr", height, self.square)
        misfit = (height * (pulled - self.cross - self.cross)).sum(-1) + self.power
        value = -misfit / (2 * self.config.noise_std**2) + prior
        if method == "fs-map":
            value = value - 0.5 * self.form.value(theta + log_slope)
        return value

    def solve(self, method: str) -> tuple[Tensor, Tensor]:
        """The best of all starts: θ and log|θ − θ₀|, ``[T, seeds, 2]``."""
        axis = torch.linspace(-3.3, 2.2, self.config.starts, dtype=torch.float64)
        grid = torch.cartesian_prod(axis, axis)[None] - self.target[:, 0]  # [T, starts, 2]
        # one start is next to θ₀: the peak is narrow, and others may end in a lesser one
        offset = torch.cat([grid, torch.full_like(grid[:, :1], 1e-4)], dim=1)[:, :, None]
        offset = offset.expand(-1, -1, len(self.power), -1)  # [T, starts, seeds, 2]
        sign, u = offset.sign(), offset.abs().log().requires_grad_()
        for share in (1.0, 0.03):  # a smaller rate at the end
            adam = torch.optim.Adam([u], lr=self.config.lr * share, fused=True)
            for _ in range(self.config.steps // 2):
                loss = -self.log_posterior(method, u, sign) / self.num
                (u.grad,) = torch.autograd.grad(loss.sum(), u)
                adam.step()
        u = u.detach()
        best = self.log_posterior(method, u, sign).argmax(1)  # [T, seeds]
        index = best[:, None, :, None].expand(-1, 1, -1, 2)
        chosen, side = u.gather(1, index)[:, 0], sign.gather(1, index)[:, 0]  # [T, seeds, 2]
        return self.target[:, 0] + side * chosen.exp(), chosen


@dataclasses.dataclass(frozen=True)
class LargeConfig:
    sizes: tuple[int, ...] = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)  # N
    prior_std: float = 1.2  # α
    noise_std: float = 0.3  # σ
    panels: int = 40  # panels of the quadrature in each parameter
    seeds: int = 10  # data sets


class TheoryLargeData(Experiment):
    id = "theory-large-data"
    label = "Sec. 4.3"
    title = "With much data FS-MAP becomes the model average"
    see = "Distances of both MAP functions to the model average as N grows: both fall."
    cost = "30 s"
    protocol = "true objective, ε = 0, optima by Newton's method, average by 2-d quadrature"
    group = "theory"
    metrics = ("distance",)
    columns = ("n_train", "method")
    config = LargeConfig()
    quick = LargeConfig(sizes=(20, 100, 500, 2_000), panels=14, seeds=3)

    def units(self, config: LargeConfig) -> list[Unit]:
        return [{"n_train": n} for n in config.sizes]

    def run(self, config: LargeConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        for seed in range(config.seeds):
            data = _draw(config, unit["n_train"], seed)
            found = {method: _mode(config, data, method) for method in METHODS}
            average = _average(config, data, found["ps-map"])
            yield Measured("quadrature_error", average.error, seed=seed, config=unit)
            for method, theta in found.items():
                gap = mixture.distance(theta.exp(), average.mean)
                yield Measured("distance", gap, method, seed, unit)
            context.advance((seed + 1) / config.seeds)

    def claims(self, rows: Rows) -> list[Claim]:
        error = largest(tables.values(rows, metric="quadrature_error"))
        lines = {m: tables.line(rows, "n_train", metric="distance", method=m) for m in METHODS}
        ps, fs = map(_rate, lines.values())
        ps_end, fs_end = ([math.nan, *line.mean][-1] for line in lines.values())
        seeds = len({row.seed for row in rows})
        sizes = lines["fs-map"].x
        start = f"from N = {sizes[len(sizes) // 2]:g}" if sizes else ""
        return [
            exact("FS-MAP's function approaches the model average as N grows, faster than N^−1.5",
                  fs < -1.5 and error < 1e-6, f"distance like N^{fs:.2f} {start}",
                  "equal in the limit", seeds=seeds),
            exact("PS-MAP's function approaches it too, but more slowly",
                  fs + 0.5 < ps < -0.5 and fs_end < 0.1 * ps_end,
                  f"PS-MAP: N^{ps:.2f} {start}; FS-MAP's distance is {fs_end / ps_end:.1e} of "
                  "PS-MAP's at the largest N", "differs in general", source="ours", seeds=seeds),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, ax = figures.axes(panel=(4.4, 3.0))
        for method in METHODS:
            line = tables.line(rows, "n_train", metric="distance", method=method)
            figures.plot_mean(ax, *line, method)
        ax.set(xlabel="training points $N$", ylabel=r"$\|f - f_\mathrm{BMA}\|$ in $L_2(p_X)$")
        ax.set_yscale("log")
        log_scale(ax, "x")
        ax.legend()
        return {"theory-large-data": figure}


def _mode(config: LargeConfig, data: Batch, method: str) -> Tensor:
    """PS-MAP or FS-MAP by Newton's method, ``[2]``."""
    model = mixture.build()
    form = Invertible.from_gram(model.uniform_gram()) if method == "fs-map" else None
    objective = EXP.objective(config.noise_std, Normal(config.prior_std), form, len(data.y))
    rows = Batch(model.design(data.x), data.y)
    return maximize(lambda t: EXP.log_density(objective, t, rows), model.theta.detach())


def _draw(config: LargeConfig, size: int, seed: int) -> Batch:
    model = mixture.build()
    heights = torch.tensor([1.0, 0.6], dtype=torch.float64) / model.scale  # of the true bumps
    draw = {"noise_std": config.noise_std, **draw_options(seed)}
    return regression(lambda x: model.design(x) @ heights, size, **draw)


def _average(config: LargeConfig, data: Batch, peak: Tensor) -> PosteriorMean:
    """The average by panels that are narrow around the peak and reach to the ends of the prior."""
    sides = []
    widths = mixture.root_curvature(data, peak, config.noise_std)
    for place, pull in zip(peak.tolist(), widths.tolist(), strict=True):
        wide = np.linspace(-9 * config.prior_std, 5, config.panels + 1)
        width = 10 * min(1 / max(pull, 1e-9), config.prior_std)
        fine = place + width * np.linspace(-1, 1, config.panels + 1)
        cuts = np.union1d(wide[(wide < fine[0]) | (wide > fine[-1])], fine)
        sides.append(Interval(tuple(cuts.tolist())))
    posterior = mixture.log_density(data, config.noise_std, config.prior_std)
    return posterior_mean(posterior, torch.exp, *sides)


def _rate(line: tables.Line) -> float:
    """Exponent of N, from the upper half of the sizes."""
    half = len(line.x) // 2
    if len(line.x) - half < 2:
        return math.nan
    return math.log(line.mean[-1] / line.mean[half]) / math.log(line.x[-1] / line.x[half])
