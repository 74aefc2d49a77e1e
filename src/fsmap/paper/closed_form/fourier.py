r"""``fourier``, ``fourier-points``, ``fourier-pX``, ``fourier-noise`` (Figs. 2 to 4).

$f = \sum_i \tanh(\theta_i)\varphi_i/\sqrt P$, $\varphi = \{\cos i\pi x, \sin i\pi x\}$,
$\theta_i \sim N(0, 10^2)$. Variants of an objective that share a closed form of the log-determinant
are fitted to all data sets by one ``fit_population``.

For an invertible $\Phi$ and no jitter the FS-MAP objective of this model does not depend on $p_X$
(appendix B.3). What Fig. 3 shows is therefore an effect of the rank of $\Phi$ and of the jitter,
and every number carries its jitter.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.objective.closed_form import TANH, Diagonal, Dual, Form, FourierBasis, Invertible, Squash
from fsmap.objective.objective import Normal, Objective
from fsmap.paper.engine import Context, Experiment, Measured, Plots, exact, judge_all, paired_effect
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import LINES, PAPER_LOOK, legend_above, log_scale, power
from fsmap.paper.report.tables import Mean, epsilon
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.train.loop import Schedule, adam
from fsmap.train.population import Grid, fit_population
from fsmap.types import Batch

Function = Callable[[Tensor], Tensor]

EXACT = "exact"  # true objective in log space, no jitter
PAPER, PAPER_JITTER = "paper", 1e-32
FORMS = {EXACT: EXACT, PAPER: "paper's jitter"}  # in words
"""The paper's numerical protocol: what the authors' code adds inside the logarithm. It cuts the
exact objective off where σ'²Φᵢᵢ falls below it, near |θ| = 18."""
NO_JITTER = "no jitter; the authors' code adds 1e-32 inside the logarithm"
FLOAT32 = "the authors' code factorizes Φ in float32"


# --- data and populations: the other experiments of this folder use them, too


def draw_options(seed: int) -> dict[str, Any]:
    """Keyword arguments of ``torch.rand``: a generator with this seed, and float64."""
    return {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}


def regression(
    f: Function, num_points: int, *, noise_std: float = 0.0, low: float = -1.0, **draw: Any
) -> Batch:
    """Noisy values of a function at uniform points of [low, 1]; ``draw``: :func:`draw_options`."""
    x = low + (1 - low) * torch.rand(num_points, **draw)
    return Batch(x, f(x) + noise_std * torch.randn(num_points, **draw))


def fourier_sum(num_frequencies: int, **draw: Any) -> Function:
    r"""A random smooth target, $\sum_i a_i \sin ix + b_i \cos ix$ with $a_i, b_i \sim N(0, 1)$."""
    weights = torch.randn(2, num_frequencies, **draw)
    frequencies = torch.arange(1, num_frequencies + 1, dtype=weights.dtype)

    def f(x: Tensor) -> Tensor:
        angles = x[..., None] * frequencies  # [N, n]
        return angles.sin() @ weights[0] + angles.cos() @ weights[1]

    return f


class FromZero(Schedule):
    """Linear warm-up whose first step does not move, as in the authors' code."""

    def factor(self, step: int, steps: int) -> float:
        return min(step / self.warmup, 1.0) if self.warmup else 1.0


def solve(
    build: Callable[..., Objective],
    squash: Squash,
    members: Sequence[Mapping[str, float]],
    data: Sequence[Batch],
    start: Tensor,
    *,
    lr: float,
    steps: int,
    warmup: int = 0,
    advance: Callable[[float], None] = lambda _: None,
) -> Tensor:
    """Train a population with full-batch Adam from ``[P]`` or ``[M, P]``; the last θ ``[M, P]``.

    A member's ``split`` is the place of its ``data``: rows of the design matrix and targets.
    """
    each = start.ndim == 2
    grid = [{**m, "seed": k if each else 0} for k, m in enumerate(members)]
    states, _ = fit_population(
        build,
        Grid(grid),
        squash.on_rows,
        list(data),
        steps=steps,
        init=(lambda seed: {"theta": start[seed]}) if each else {"theta": start},
        optimizer=adam(lr),
        schedule=FromZero(warmup),
        callback=lambda step, _: advance(step / steps),
        log_every=steps,
        chunk=len(members),
        progress=False,
    )
    return states.params["theta"]


# --- the model and its variants


@dataclasses.dataclass(frozen=True)
class FourierConfig:
    num_frequencies: int = 100  # P/2
    prior_std: float = 10.0  # α, of the truth and of the prior
    noise_std: float = 0.1  # σ*, of the data
    num_test: int = 1_000  # test points, uniform, noiseless
    lr: float = 0.1  # of Adam
    steps: int = 2_500  # of Adam, full batch
    warmup: int = 100  # steps of linear warm-up
    seeds: int = 3  # how many

    def model(self) -> FourierBasis:
        return FourierBasis(self.num_frequencies)

    def log_posterior(self, theta: Tensor, data: Batch, form: Form | None = None) -> Tensor:
        """Log p(f|D), or log p(θ|D) without a form, up to the evidence, with the data's noise."""
        objective = TANH.objective(self.noise_std, Normal(self.prior_std), form, len(data.y))
        return TANH.log_density(objective, theta, Batch(self.model().design(data.x), data.y))

    def diagonal(self, jitter: float | Tensor) -> Diagonal:
        """The log-determinant for p_X = Uniform(-1, 1) with a jitter."""
        return Diagonal(self.model().uniform_gram().diagonal(), jitter)  # Φ = I/(2P)


class Problem(NamedTuple):
    """A data set: noisy training points and noiseless test points of one function."""

    n_train: int
    seed: int
    train: Batch
    test: Batch


class Variant(NamedTuple):
    """One objective that is fitted to every problem."""

    method: str  # "ps-map" or "fs-map"
    config: Mapping[str, Any]  # of its rows
    form: Callable[[Any], Form] | None  # log det(𝒥 + εI) in closed form at a jitter ε
    noise_std: float  # σ of the likelihood
    jitter: float = 0.0  # ε


def draw_problem(config: FourierConfig, n_train: int, seed: int) -> Problem:
    """Truth from the prior, then training points, then test points, all from one generator."""
    draw, model = draw_options(seed), config.model()
    theta = config.prior_std * torch.randn(2 * config.num_frequencies, **draw)

    def truth(x: Tensor) -> Tensor:
        return model.design(x) @ theta.tanh()

    train = regression(truth, n_train, noise_std=config.noise_std, **draw)
    return Problem(n_train, seed, train, regression(truth, config.num_test, **draw))


def uniform_variants(config: FourierConfig) -> list[Variant]:
    """PS-MAP, then FS-MAP for p_X = Uniform(-1, 1): exact, and by the paper's protocol."""
    invertible = Invertible.from_gram(config.model().uniform_gram())
    noise, paper = config.noise_std, config.diagonal(PAPER_JITTER)
    return [
        Variant("ps-map", {"objective": "none"}, None, noise),
        Variant("fs-map", {"objective": EXACT}, lambda _: invertible, noise),
        Variant("fs-map", {"objective": PAPER}, lambda _: paper, noise),
    ]


def compress(model: FourierBasis, data: Batch) -> Batch:
    """P + 1 rows of features and targets with the residual sum of all N points, at any θ."""
    # R of [A, y], times √((P + 1)/N): an objective counts each row for N/(P + 1) points
    table = torch.cat([model.design(data.x), data.y[:, None]], dim=-1)  # [N, P + 1]
    upper = torch.linalg.qr(table, mode="r").R
    size, num = table.shape[-1], len(table)
    rows = torch.cat([upper, upper.new_zeros(size - len(upper), size)])  # [P + 1, P + 1]
    rows = rows * math.sqrt(size / num)
    return Batch(rows[:, :-1], rows[:, -1])


class Fitted(NamedTuple):
    """Parameters after the last step, for every variant and problem."""

    config: FourierConfig  # sizes
    problems: Sequence[Problem]  # Q of them
    variants: Sequence[Variant]  # K of them
    theta: Tensor  # [K, Q, P]

    def value(self, metric: str, theta: Tensor, problem: Problem) -> Tensor:
        """Root mean squared residual, or mean eigenvalue of the Hessian of the training error."""
        x, y = problem.test if metric == "test_rmse" else problem.train
        design, value = self.config.model().design(x), theta.tanh()
        residual = design @ value - y
        if metric != "curvature":
            return residual.square().mean().sqrt()
        slope = TANH.log_slope(theta).exp()
        pull = design.mT @ residual  # half the gradient in tanh θ
        trace = slope.square() @ design.square().sum(0) - 2 * (value * slope) @ pull
        return 2 * trace / (problem.n_train * len(theta))

    def measure(self, *metrics: str) -> Iterator[Measured]:
        """Some of test_rmse, train_rmse and curvature, for every variant and problem."""
        for variant, thetas in zip(self.variants, self.theta, strict=True):
            for problem, theta in zip(self.problems, thetas, strict=True):
                where = {"n_train": problem.n_train, "noise_std": self.config.noise_std}
                about = variant.method, problem.seed, {**where, **variant.config}
                for metric in metrics:
                    yield Measured(metric, self.value(metric, theta, problem), *about)

    def gains(self, metric: str) -> Iterator[Measured]:
        """How far FS-MAP's log p(f|D) is above that of PS-MAP, the first variant."""
        for variant, thetas in zip(self.variants[1:], self.theta[1:], strict=True):
            assert variant.form is not None
            form = variant.form(variant.jitter)
            for problem, *pair in zip(self.problems, thetas, self.theta[0], strict=True):
                fs, ps = (self.config.log_posterior(t, problem.train, form) for t in pair)
                where = {"n_train": problem.n_train, **variant.config, "steps": self.config.steps}
                yield Measured(metric, fs - ps, "fs-map", problem.seed, where)


def fit(
    config: FourierConfig,
    problems: Sequence[Problem],
    variants: Sequence[Variant],
    advance: Callable[[float], None] = lambda _: None,
) -> Fitted:
    """Fit every variant to every problem, from θ = 0: a population for each form."""
    model, prior = config.model(), Normal(config.prior_std)
    data = [compress(model, problem.train) for problem in problems]
    sizes = {"lr": config.lr, "steps": config.steps, "warmup": config.warmup}
    found, done = [], 0
    for form, block in itertools.groupby(variants, attrgetter("form")):

        def build(noise_std: Tensor, jitter: Tensor, num_data: Tensor, f: Any = form) -> Objective:
            return TANH.objective(noise_std, prior, f and f(jitter), num_data)

        members = [
            {"noise_std": v.noise_std, "jitter": v.jitter, "num_data": p.n_train, "split": q}
            for v in block
            for q, p in enumerate(problems)
        ]
        theta = solve(build, TANH, members, data, model.theta.detach(), **sizes)
        found.append(theta.unflatten(0, (-1, len(problems))))  # [k, Q, P]
        done += len(found[-1])
        advance(done / len(variants))
    return Fitted(config, problems, variants, torch.cat(found))


def _plot(ax: Any, rows: Rows, metric: str, x: str) -> None:
    """A line for each method and objective."""
    lines = tables.group(rows, "method", "objective", metric=metric)
    for (method, objective), members in lines.items():
        look = PAPER_LOOK if objective == PAPER else {}
        figures.plot_mean(ax, *tables.line(members, x), method, **look)


PANELS = {
    "log_posterior_gain": ("Log posterior increase", r"$\Delta \log p(f\,|\,\mathcal{D})$ in nats"),
    "curvature": ("Loss curvature", "mean Hessian eigenvalue"),
    "test_rmse": ("Test RMSE", "RMSE"),
    "train_rmse": ("Train RMSE", "RMSE"),
}


@dataclasses.dataclass(frozen=True)
class Config(FourierConfig):
    sizes: tuple[int, ...] = (100, 200, 400, 800, 1_600, 3_200, 6_400)  # N
    long_steps: int = 10_000  # at the largest N, one seed: 2,500 do not converge there


class Fourier(Experiment):
    id = "fourier"
    label = "Fig. 2 a–d"
    title = "FS-MAP on a Fourier model"
    see = "How much more probable FS-MAP's function is, how curved its loss, and errors against N."
    cost = "2 min"
    protocol = "full-batch Adam from θ = 0; exact: no jitter, in log space; paper: ε = 1e-32"
    departures = (NO_JITTER,)
    metrics = tuple(PANELS)
    columns = ("metric", "n_train", "method", "objective")
    config = Config()
    quick = Config(sizes=(100, 200, 400, 1_600), steps=1_500, long_steps=3_000)

    def units(self, config: Config) -> list[Unit]:
        return [{"part": "sizes"}, {"part": "long"}]

    def run(self, config: Config, unit: Unit, context: Context) -> Iterator[Measured]:
        if unit["part"] == "long":
            problems = [draw_problem(config, max(config.sizes), 0)]
            longer = dataclasses.replace(config, steps=config.long_steps)
            fitted = fit(longer, problems, uniform_variants(config), context.advance)
            yield from fitted.gains("log_posterior_gain_long")
            return
        seeds = range(config.seeds)
        problems = [draw_problem(config, n, seed) for n in config.sizes for seed in seeds]
        fitted = fit(config, problems, uniform_variants(config), context.advance)
        yield from fitted.measure("test_rmse", "train_rmse", "curvature")
        yield from fitted.gains("log_posterior_gain")

    def claims(self, rows: Rows) -> list[Claim]:
        train, noise = _effects(rows, "train_rmse"), _noise(rows)
        few = min((row.config["n_train"] for row in rows), default=0)
        # At large N Adam needs more steps: its second moment remembers the first, large gradients.
        long = tables.select(rows, metric="log_posterior_gain_long")
        return [
            judge_all("FS-MAP's log p(f|D) is above PS-MAP's at every N",
                      _effects(rows, "log_posterior_gain", minus=0.0), above=0,
                      paper="thousands of nats"),
            exact("… by thousands of nats at the largest N, once Adam has converged",
                  all(row.value > 1_000 for row in long),
                  ", ".join(f"{row.value:,.0f} nats ({FORMS[row.config['objective']]})"
                            for row in long) + "; more steps, one seed",
                  "thousands of nats", seeds=len({row.seed for row in long})),
            judge_all("The loss is less curved at FS-MAP's minimum, at every N",
                      _effects(rows, "curvature"), below=0, paper="lower"),
            judge_all("FS-MAP's test RMSE is lower than PS-MAP's for N ≥ 200",
                      _effects(rows, "test_rmse", 200), below=0,
                      paper="lower; 0.5 to 0.7 of PS-MAP's at N = 400"),
            judge_all(f"FS-MAP's train RMSE is within 0.015 of the noise ({noise:g}) for N ≥ 200",
                      _effects(rows, "train_rmse", 200, minus=noise),
                      within=0.015, paper="around 0.1"),
            judge_all(f"PS-MAP's train RMSE at N = {few} is lower by more than 0.05: it overfits",
                      {at: gap for at, gap in train.items() if at.startswith(f"N = {few},")},
                      above=0.05, paper="near zero against 0.1"),
            judge_all(f"FS-MAP's test RMSE is lower than PS-MAP's at N = {few} too",
                      {at: gap for at, gap in _effects(rows, "test_rmse").items()
                       if at.startswith(f"N = {few},")}, below=0, source="ours"),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, panels = figures.axes(2, 2)
        for ax, (metric, (title, ylabel)) in zip(panels.flat, PANELS.items(), strict=True):
            _plot(ax, rows, metric, "n_train")
            ax.set(title=title, ylabel=ylabel, xlabel="training points $N$")
            log_scale(ax, "x" if metric == "train_rmse" else "xy")
        ax.set_ylim(0, 1.3 * _noise(rows))  # the last one, of train errors
        look = {**figures.GUIDE, "color": figures.COLORS["truth"]}
        ax.axhline(_noise(rows), label=r"true noise $\sigma^*$", **look)
        legend_above(figure, ax)
        return {"fourier": figure}


def _noise(rows: Rows) -> float:
    """σ* of the data; older rows have the default."""
    found = (row.config["noise_std"] for row in rows if "noise_std" in row.config)
    return next(found, Config.noise_std)


def _effects(
    rows: Rows, metric: str, least: int = 0, *, minus: float | None = None
) -> dict[str, Mean]:
    """FS-MAP less PS-MAP, or less a number, by N (from the least on) and objective."""
    found = {}
    chosen = [row for row in tables.select(rows, metric=metric) if row.config["n_train"] >= least]
    mine = tables.group(chosen, "n_train", "objective", method="fs-map")
    for (n, objective), members in mine.items():
        effect = tables.paired(members, tables.select(chosen, n_train=n, method="ps-map"))
        if minus is not None:
            effect = tables.mean(row.value - minus for row in members)
        found[f"N = {n}, {FORMS[objective]}"] = effect
    return found


WIDE, NARROW = "U(−1, 1)", "U(−0.1, 0.1)"
FLOOR = 1e-14  # smaller singular values, relative to the largest, are rounding errors of features


@dataclasses.dataclass(frozen=True)
class AblationConfig(FourierConfig):
    n_train: int = 400  # N

    def fit(self, variants: Sequence[Variant], context: Context) -> Iterator[Measured]:
        """Test errors on one data set per seed."""
        problems = [draw_problem(self, self.n_train, seed) for seed in range(self.seeds)]
        return fit(self, problems, variants, context.advance).measure("test_rmse")


@dataclasses.dataclass(frozen=True)
class JitterConfig(AblationConfig):
    jitters: tuple[float, ...] = (1e-32, 1e-12, 1e-6)  # ε; the first is the authors'

    def variants(self, form: Callable[[Any], Form], **where: Any) -> list[Variant]:
        """FS-MAP at every jitter."""
        return [
            Variant("fs-map", {**where, "jitter": jitter}, form, self.noise_std, jitter)
            for jitter in self.jitters
        ]


@dataclasses.dataclass(frozen=True)
class PXConfig(JitterConfig):
    num_points: int = 10_000  # samples of U(−0.1, 0.1) that Φ is made of


class FourierPX(Experiment):
    id = "fourier-pX"
    label = "Fig. 3 b"
    title = "Which evaluation distribution"
    see = "Test errors with p_X where the test points are, and narrower: ε decides how they differ."
    cost = "90 s"
    protocol = "ε = 1e-32 (authors), 1e-12, 1e-6, and none: then the objective is that of any p_X"
    departures = (NO_JITTER, f"log det by QR of the features; {FLOAT32}")
    metrics = ("test_rmse",)
    columns = ("px", "method", "jitter")
    config = PXConfig()
    quick = PXConfig(steps=500, seeds=2, num_points=3_000)

    def run(self, config: PXConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        factor = narrow_factor(config)
        plain, exactly, _ = uniform_variants(config)
        variants = [
            plain._replace(config={"px": "none"}),
            exactly._replace(config={"px": WIDE, "jitter": 0.0}),
            *config.variants(config.diagonal, px=WIDE),
            *config.variants(lambda jitter: Dual(factor, jitter), px=NARROW),
        ]
        yield from config.fit(variants, context)
        yield Measured("rank", len(factor), config={"px": NARROW, "share": FLOOR})

    def claims(self, rows: Rows) -> list[Claim]:
        errors, effects = tables.select(rows, metric="test_rmse"), {}
        for (jitter,) in tables.group(errors, "jitter", px=NARROW):
            others = {NARROW: {"px": NARROW, "jitter": jitter}, "PS-MAP": {"px": "none"}}
            for name, other in others.items():
                place = f"{name}, {epsilon(jitter)}"
                effects[place] = paired_effect(errors, {"px": WIDE, "jitter": jitter}, other)
        text = f"Test RMSE with p_X = {WIDE} is below that with {NARROW} and PS-MAP's, at every ε"
        return [judge_all(text, effects, below=0, paper="best")]

    def draw(self, rows: Rows) -> Plots:
        figure, ax = figures.axes(panel=(4.6, 3.1))
        groups = tables.group(rows, "px", "method", "jitter", metric="test_rmse")
        names = []
        for place, ((px, method, jitter), members) in enumerate(groups.items()):
            mean = tables.mean(row.value for row in members)
            ax.bar(place, mean.mean, yerr=mean.stderr, color=figures.COLORS[method],
                   error_kw={"ecolor": figures.INK, "elinewidth": 1})  # fmt: skip
            how = "PS-MAP" if jitter is None else power(jitter) if jitter else "no jitter"
            names.append(f"{px}, {how}")
        ax.set_xticks(range(len(names)), names, rotation=40, ha="right")
        ax.set(ylabel="test RMSE", xlabel=r"evaluation distribution $p_X$")
        return {"fourier-pX": figure}


def narrow_factor(config: PXConfig) -> Tensor:
    """F with FᵀF = Φ of samples of U(−0.1, 0.1), less what is rounding error, ``[r, P]``."""
    x = 0.2 * torch.rand(config.num_points, **draw_options(0)) - 0.1
    _, singular, right = torch.linalg.svd(config.model().factor(x))
    rank = int((singular > FLOOR * singular[0]).sum())
    return singular[:rank, None] * right[:rank]


@dataclasses.dataclass(frozen=True)
class NoiseConfig(AblationConfig):
    ratios: tuple[float, ...] = (1 / 3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)  # σ/σ*


class FourierNoise(Experiment):
    id = "fourier-noise"
    label = "Fig. 4"
    title = "A wrong noise level"
    see = "Test errors if the noise of the likelihood is a third to ten times that of the data."
    cost = "60 s"
    protocol = "exact: true objective in log space. paper: 1e-32 inside the logarithm"
    departures = (NO_JITTER,)
    metrics = ("test_rmse",)
    columns = ("ratio", "method", "objective")
    config = NoiseConfig()
    quick = NoiseConfig(ratios=(1 / 3, 1.0, 3.0, 10.0), steps=800)

    def run(self, config: NoiseConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        variants = [
            v._replace(config={**v.config, "ratio": round(r, 6)}, noise_std=r * config.noise_std)
            for v, r in itertools.product(uniform_variants(config), config.ratios)
        ]
        yield from config.fit(variants, context)

    def claims(self, rows: Rows) -> list[Claim]:
        errors = tables.select(rows, metric="test_rmse")
        ratios = [row.config["ratio"] for row in errors] or [math.nan]
        low, high = min(ratios), max(ratios)

        def effects(one: float, other: float, base: str | None = None) -> dict[str, Mean]:
            """FS-MAP at one ratio against itself, or a base, at another."""
            return {
                FORMS[form]: paired_effect(errors, {"ratio": one, "objective": form},
                                           {"ratio": other, "objective": base or form}, ratio=True)
                for form in (EXACT, PAPER)
            }  # fmt: skip

        return [
            judge_all(f"At σ/σ* = {low:.2g} FS-MAP's test RMSE is PS-MAP's, to a factor of 1.25",
                      effects(low, low, "none"), ratio=True, within=1.25, paper="similar"),
            judge_all(f"At σ/σ* = {high:g} FS-MAP's is more than 5 times that at σ = σ*",
                      effects(high, 1.0), ratio=True, above=5, paper="high test error"),
            judge_all("… and more than twice PS-MAP's", effects(high, high, "none"),
                      ratio=True, above=2, paper="PS-MAP relatively stable"),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, ax = figures.axes(panel=(4.6, 3.1))
        _plot(ax, rows, "test_rmse", "ratio")
        ax.axvline(1.0, **figures.GUIDE)
        ax.set(xlabel=r"assumed noise $\sigma/\sigma^*$", ylabel="test RMSE")
        log_scale(ax)
        ax.legend()
        return {"fourier-noise": figure}


@dataclasses.dataclass(frozen=True)
class PointsConfig(JitterConfig):
    # numbers M of equidistant evaluation points, both ends of [-1, 1] included
    points: tuple[int, ...] = (10, *range(20, 201, 20), 201, 202, 204, 250, 300, 500, 1_000)


class FourierPoints(Experiment):
    id = "fourier-points"
    label = "Fig. 3 a"
    title = "How many evaluation points"
    see = "Test error against the number M of evaluation points: Φ has full rank from M = 202 on."
    cost = "4 min"
    protocol = "ε = 1e-32 (authors), 1e-12, 1e-6; M = ∞ is Uniform(−1, 1) at the same ε"
    departures = (f"log det in closed form; {FLOAT32}",)
    metrics = ("test_rmse",)
    columns = ("points", "method", "jitter")
    config = PointsConfig()
    quick = PointsConfig(points=(10, 40, 100, 160, 202, 300), steps=800, seeds=2)

    def units(self, config: PointsConfig) -> list[Unit]:
        return [{"points": m} for m in (math.inf, *config.points)]

    def run(self, config: PointsConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        if math.isinf(unit["points"]):
            plain = uniform_variants(config)[0]._replace(config=unit)
            variants = [plain, *config.variants(config.diagonal, **unit)]
        else:
            form = config.model().lattice(unit["points"], 0.0)
            yield Measured("rank", form.rank, config=unit)
            variants = config.variants(lambda jitter: form._replace(jitter=jitter), **unit)
        yield from config.fit(variants, context)

    def claims(self, rows: Rows) -> list[Claim]:
        ranks = tables.values_by(rows, "points", metric="rank")
        full = max(ranks.values(), default=0)
        enough = sorted(m for m in ranks if ranks[m] == full)
        enough = enough if len(enough) > 1 else []  # the rank may still grow
        fewer = sorted(ranks.keys() - {*enough})
        fall, rise, flat = {}, {}, {}
        errors = tables.group(rows, "jitter", metric="test_rmse", method="fs-map")
        for (jitter,), members in errors.items():
            at = epsilon(jitter)

            def ratio(one: float, other: float, members: Rows = members) -> Mean:
                return paired_effect(members, {"points": one}, {"points": other}, ratio=True)

            if fewer and enough:
                fall[at] = ratio(enough[0], fewer[0])
            for a, b in itertools.pairwise([*fewer, *enough[:1]]):
                rise[f"M = {b}, {at}"] = ratio(b, a)
            for m in enough:
                flat[f"M = {m}, {at}"] = ratio(m, math.inf)
        known = fewer and enough
        path = f"from M = {fewer[0]} to {enough[0]}" if known else "until Φ has full rank"
        return [
            judge_all(f"Test RMSE falls by more than 10 % {path}, at every ε", fall, ratio=True,
                      below=0.9, paper="decreases"),
            judge_all("… and rises by no more than 10 % from one M to the next", rise, ratio=True,
                      below=1.1, paper="monotonically until 200"),
            judge_all("… and is that of Uniform(−1, 1) to 2 % once Φ has full rank", flat,
                      ratio=True, within=1.02, paper="saturates at 200"),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, ax = figures.axes(panel=(4.6, 3.1))
        chosen = tables.select(rows, metric="test_rmse")
        curves = tables.group(chosen, "jitter", method="fs-map")
        for look, ((jitter,), members) in zip(LINES, curves.items(), strict=False):
            line = tables.line([r for r in members if math.isfinite(r.config["points"])], "points")
            figures.plot_mean(ax, *line, "fs-map", label=f"FS-MAP, {power(jitter)}", **look)
        base = tables.mean_of(chosen, method="ps-map")
        ax.axhline(base, **figures.method_style("ps-map", marker=""))
        ax.axvline(201.5, label="full rank", **figures.GUIDE)
        ax.set(xlabel="evaluation points $M$", ylabel="test RMSE")
        log_scale(ax, "x")
        ax.legend()
        return {"fourier-points": figure}
