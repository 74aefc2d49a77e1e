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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.data import synthetic
from fsmap.models.basis import TANH, FourierBasis
from fsmap.objective.closed_form import (
    PAPER_JITTER,
    Diagonal,
    Dual,
    Form,
    Invertible,
    fourier_lattice,
)
from fsmap.objective.objective import Objective
from fsmap.objective.prior import Normal
from fsmap.paper.experiment import Context, Experiment, Measured, Plots, exact, judge_all, log_ratio
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import LINES, PAPER_LOOK, epsilon, legend_above, log_scale, power
from fsmap.paper.report.tables import Mean
from fsmap.paper.rows import Claim, Rows, Unit
from fsmap.paper.solvers import Advance, log_density, objective_of, solve
from fsmap.types import Batch

EXACT = "exact"
"""True objective in log space, no jitter."""
PAPER = "paper"
"""The paper's numerical protocol: 1e-32 inside the logarithm."""
DEVIATIONS = {EXACT: ("no jitter; the authors' code adds 1e-32 inside the logarithm",), PAPER: ()}
"""What the rows say of an objective."""


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
        """The model, in float64."""
        return FourierBasis(self.num_frequencies, TANH, dtype=torch.float64)

    def rows(self, data: Batch) -> Batch:
        """Rows of the design matrix, and targets."""
        return Batch(self.model().design(data.x), data.y)

    def objective(self, form: Form | None, num_data: int) -> Objective:
        """FS-MAP with this form, or PS-MAP, with the data's own noise."""
        return objective_of(TANH, self.noise_std, Normal(self.prior_std), form, num_data)

    def diagonal(self, jitter: float | Tensor) -> Diagonal:
        """The log-determinant for p_X = Uniform(-1, 1) with a jitter."""
        return Diagonal(self.model().uniform_gram(-1.0, 1.0).diagonal(), jitter)  # Φ = I/(2P)


class Problem(NamedTuple):
    """One data set."""

    n_train: int
    seed: int
    train: Batch
    test: Batch


class Variant(NamedTuple):
    """One objective that is fitted to every problem."""

    method: str  # "ps-map" or "fs-map"
    config: Mapping[str, Any]  # what tells the variant apart in the rows
    noise_std: float  # σ of the likelihood
    deviations: tuple[str, ...] = ()  # where it departs from the paper's numerical protocol
    jitter: float = 0.0  # ε of the log-determinant


class Block(NamedTuple):
    """Variants that share a closed form: one population, with every problem as a split."""

    # the closed form of log det(𝒥 + εI) at a jitter ε; None for PS-MAP
    form: Callable[[Tensor], Form] | None
    variants: Sequence[Variant]


def draw_problem(config: FourierConfig, n_train: int, seed: int) -> Problem:
    """Truth from the prior, then training points, then test points, all from one generator."""
    generator, model = torch.Generator().manual_seed(seed), config.model()
    size = 2 * config.num_frequencies
    theta = config.prior_std * torch.randn(size, generator=generator, dtype=torch.float64)

    def truth(x: Tensor) -> Tensor:
        return model.design(x) @ theta.tanh()

    draw = {"generator": generator, "dtype": torch.float64}
    train = synthetic.regression(truth, n_train, noise_std=config.noise_std, **draw)
    return Problem(n_train, seed, train, synthetic.regression(truth, config.num_test, **draw))


def uniform_forms(config: FourierConfig) -> dict[str, Form]:
    """The log-determinant for p_X = Uniform(-1, 1), exact and by the paper's protocol."""
    gram = config.model().uniform_gram(-1.0, 1.0)
    return {EXACT: Invertible.from_gram(gram), PAPER: config.diagonal(PAPER_JITTER)}


def uniform_blocks(config: FourierConfig) -> list[Block]:
    """PS-MAP, then FS-MAP by each form for p_X = Uniform(-1, 1)."""
    noise, blocks = config.noise_std, []
    for name, form in uniform_forms(config).items():
        variant = Variant("fs-map", {"objective": name}, noise, DEVIATIONS[name])
        blocks.append(Block(lambda _, form=form: form, [variant]))  # type: ignore[misc]
    return [Block(None, [Variant("ps-map", {"objective": "none"}, noise)]), *blocks]


def compress(model: FourierBasis, data: Batch) -> Batch:
    """P + 1 rows of features and targets with the residual sum of all N points, at any θ.

    They are R of the QR decomposition of [A, y], times √((P + 1)/N), because an objective counts
    each row of a batch for N/(P + 1) points.
    """
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

    def log_posterior(self, theta: Tensor, problem: Problem, form: Form) -> Tensor:
        """Log p(f|D) up to the evidence, with the data's own noise."""
        ours = self.config.objective(form, problem.n_train)
        return log_density(ours, TANH, theta, self.config.rows(problem.train))

    def value(self, metric: str, theta: Tensor, problem: Problem) -> Tensor:
        """Root mean squared residual, or mean eigenvalue of the Hessian of the training error."""
        design, y = self.config.rows(problem.test if metric == "test_rmse" else problem.train)
        value, slope = theta.tanh(), TANH.log_slope(theta).exp()
        residual: Tensor = design @ value - y
        if metric != "curvature":
            return residual.square().mean().sqrt()
        pull = design.mT @ residual  # half the gradient in tanh θ
        trace: Tensor = slope.square() @ design.square().sum(0) - 2 * (value * slope) @ pull
        return 2 * trace / (problem.n_train * len(theta))

    def measure(self, *metrics: str) -> Iterator[Measured]:
        """Some of test_rmse, train_rmse and curvature, for every variant and problem."""
        for variant, thetas in zip(self.variants, self.theta, strict=True):
            for problem, theta in zip(self.problems, thetas, strict=True):
                config = {"n_train": problem.n_train, **variant.config}
                about = variant.method, problem.seed, config, variant.deviations
                for metric in metrics:
                    yield Measured(metric, self.value(metric, theta, problem), *about)


def fit(
    config: FourierConfig,
    problems: Sequence[Problem],
    blocks: Sequence[Block],
    advance: Advance = lambda _: None,
) -> Fitted:
    """Fit every variant to every problem, from θ = 0: a population for each block."""
    model, prior = config.model(), Normal(config.prior_std)
    data = [compress(model, problem.train) for problem in problems]
    sizes = {"lr": config.lr, "steps": config.steps, "warmup": config.warmup}
    found = []
    for number, block in enumerate(blocks):

        def build(
            noise_std: Tensor, jitter: Tensor, num_data: Tensor, block: Block = block
        ) -> Objective:
            form = None if block.form is None else block.form(jitter)
            return objective_of(TANH, noise_std, prior, form, num_data)

        def tell(done: float, number: int = number) -> None:
            advance((number + done) / len(blocks))

        members = [
            {"noise_std": v.noise_std, "jitter": v.jitter, "num_data": p.n_train, "split": q}
            for v in block.variants
            for q, p in enumerate(problems)
        ]
        theta = solve(build, TANH, members, data, model.theta.detach(), advance=tell, **sizes)
        found.append(theta.unflatten(0, (-1, len(problems))))  # [k, Q, P]
    variants = [variant for block in blocks for variant in block.variants]
    return Fitted(config, problems, variants, torch.cat(found))


def _plot(ax: Any, rows: Rows, metric: str, x: str) -> None:
    """A line for each method and objective."""
    lines = tables.group(tables.select(rows, metric=metric), "method", "objective")
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
    # numbers N of training points
    sizes: tuple[int, ...] = (100, 200, 400, 800, 1_600, 3_200, 6_400)
    # steps of a longer run at the largest N, one seed: 2,500 do not converge there
    long_steps: int = 10_000


class Fourier(Experiment):
    id = "fourier"
    label = "Fig. 2 a–d"
    title = "FS-MAP on a Fourier model"
    see = (
        "How much more probable FS-MAP's function is, how curved the loss is around it, and how "
        "test and training error go with N. The noise of the data is 0.1."
    )
    cost = "2 min"
    protocol = (
        "exact: true objective in log space, no jitter. paper: 1e-32 inside the logarithm "
        "(authors' code). Full-batch Adam from θ = 0."
    )
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
            fitted = fit(longer, problems, uniform_blocks(config), context.advance)
            yield from _gains("log_posterior_gain_long", fitted)
            return
        seeds = range(config.seeds)
        problems = [draw_problem(config, n, seed) for n in config.sizes for seed in seeds]
        fitted = fit(config, problems, uniform_blocks(config), context.advance)
        yield from fitted.measure("test_rmse", "train_rmse", "curvature")
        yield from _gains("log_posterior_gain", fitted)

    def claims(self, rows: Rows) -> list[Claim]:
        gains = _by_place(rows, metric="log_posterior_gain")
        errors = _by_place(rows, 200, 0.1, metric="train_rmse", method="fs-map")
        train = _against_ps(rows, "train_rmse")
        few = min((row.config["n_train"] for row in rows), default=0)
        # At large N Adam needs more steps: its second moment remembers the first, large gradients.
        long = tables.select(rows, metric="log_posterior_gain_long")
        return [
            judge_all("FS-MAP's log p(f|D) is above PS-MAP's at every N", gains, above=0,
                      paper="thousands of nats"),
            exact("… by thousands of nats at the largest N, once Adam has converged",
                  all(row.value > 1_000 for row in long),
                  ", ".join(f"{row.value:,.0f} nats ({row.config['objective']})" for row in long),
                  "thousands of nats", seeds=len({row.seed for row in long})),
            judge_all("The loss is less curved at FS-MAP's minimum, at every N",
                      _against_ps(rows, "curvature"), below=0, paper="lower"),
            judge_all("FS-MAP's test RMSE is lower than PS-MAP's for N ≥ 200",
                      _against_ps(rows, "test_rmse", 200), below=0,
                      paper="lower; 0.5 to 0.7 of PS-MAP's at N = 400"),
            judge_all("FS-MAP's train RMSE is within 0.015 of the noise (0.1) for N ≥ 200", errors,
                      within=0.015, paper="around 0.1"),
            judge_all(f"PS-MAP's train RMSE at N = {few} is lower by more than 0.05: it overfits",
                      {at: gap for at, gap in train.items() if at.startswith(f"N = {few},")},
                      above=0.05, paper="near zero against 0.1"),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, panels = figures.axes(2, 2)
        for ax, (metric, (title, ylabel)) in zip(panels.flat, PANELS.items(), strict=True):
            _plot(ax, rows, metric, "n_train")
            ax.set(title=title, ylabel=ylabel, xlabel="training points $N$")
            log_scale(ax, "x" if metric == "train_rmse" else "xy")
        train = panels[1, 1]
        train.set_ylim(0, 0.13)
        train.axhline(0.1, color=figures.COLORS["truth"], linewidth=0.8, linestyle=":")
        where = {"xytext": (0, 3), "textcoords": "offset points", "ha": "right", "va": "bottom"}
        edge = ("axes fraction", "data")
        train.annotate(r"true noise $\sigma^*$", (1, 0.1), xycoords=edge, **where)
        legend_above(figure, panels[1, 0])
        return {"fourier": figure}


def _gains(metric: str, fitted: Fitted) -> Iterator[Measured]:
    """By how much FS-MAP's log p(f|D) is above PS-MAP's, each by its own objective."""
    for k, (objective, form) in enumerate(uniform_forms(fitted.config).items(), start=1):
        for q, problem in enumerate(fitted.problems):
            fs, ps = (fitted.log_posterior(fitted.theta[i, q], problem, form) for i in (k, 0))
            where = {"n_train": problem.n_train, "objective": objective}
            where["steps"] = fitted.config.steps
            yield Measured(metric, fs - ps, "fs-map", problem.seed, where, DEVIATIONS[objective])


def _by_place(rows: Rows, least: int = 0, minus: float = 0.0, **where: Any) -> dict[str, Mean]:
    """Means over seeds by N (from the least on) and objective."""
    groups = tables.group(tables.select(rows, **where), "n_train", "objective")
    return {
        f"N = {n}, {objective}": tables.mean(row.value - minus for row in members)
        for (n, objective), members in groups.items()
        if n >= least
    }


def _against_ps(rows: Rows, metric: str, least: int = 0) -> dict[str, Mean]:
    """FS-MAP − PS-MAP, paired by seed, by N and objective."""
    chosen = [row for row in tables.select(rows, metric=metric) if row.config["n_train"] >= least]
    return {
        f"N = {n}, {objective}": tables.paired(
            members, tables.select(chosen, n_train=n, objective="none")
        )
        for (n, objective), members in tables.group(chosen, "n_train", "objective").items()
        if objective != "none"
    }


WIDE, NARROW = "U(−1, 1)", "U(−0.1, 0.1)"
QR = ("log det by QR of the features; the authors' code factorizes Φ in float32",)
CLOSED_FORM = ("log det in closed form; the authors' code factorizes Φ in float32",)
FLOOR = 1e-14
"""Singular values of the feature matrix below this share of the largest are rounding errors: the
features themselves carry errors of 3e-14."""


@dataclasses.dataclass(frozen=True)
class AblationConfig(FourierConfig):
    n_train: int = 400  # N

    def fit(self, blocks: Sequence[Block], advance: Advance) -> Iterator[Measured]:
        """Test errors on one data set per seed."""
        problems = [draw_problem(self, self.n_train, seed) for seed in range(self.seeds)]
        return fit(self, problems, blocks, advance).measure("test_rmse")


@dataclasses.dataclass(frozen=True)
class JitterConfig(AblationConfig):
    jitters: tuple[float, ...] = (1e-32, 1e-12, 1e-6)  # ε; the first is the authors'

    def variants(self, where: Mapping[str, Any], notes: tuple[str, ...]) -> list[Variant]:
        """FS-MAP at every jitter."""
        return [
            Variant("fs-map", {**where, "jitter": jitter}, self.noise_std, notes, jitter)
            for jitter in self.jitters
        ]


@dataclasses.dataclass(frozen=True)
class PXConfig(JitterConfig):
    num_points: int = 10_000  # samples of U(−0.1, 0.1) that Φ is made of


class FourierPX(Experiment):
    id = "fourier-pX"
    label = "Fig. 3 b"
    title = "Which evaluation distribution"
    see = (
        "The test error with p_X where the test points are, and with a narrower one. How far apart "
        "they are depends on the jitter alone: without it the objectives differ by a constant."
    )
    cost = "90 s"
    protocol = (
        "jittered objective at ε = 1e-32 (authors), 1e-12, 1e-6, log det by QR of the features at "
        "10,000 samples; exact: true objective in log space, the same for both p_X"
    )
    metrics = ("test_rmse",)
    columns = ("px", "method", "jitter")
    config = PXConfig()
    quick = PXConfig(steps=500, seeds=2, num_points=3_000)

    def run(self, config: PXConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        noise, factor = config.noise_std, narrow_factor(config)
        exactly = Variant("fs-map", {"px": WIDE, "jitter": 0.0}, noise, DEVIATIONS[EXACT])
        blocks = [
            Block(None, [Variant("ps-map", {"px": "none"}, noise)]),
            Block(lambda _: uniform_forms(config)[EXACT], [exactly]),
            Block(config.diagonal, config.variants({"px": WIDE}, QR)),
            Block(lambda jitter: Dual(factor, jitter), config.variants({"px": NARROW}, QR)),
        ]
        yield from config.fit(blocks, context.advance)
        yield Measured("rank", len(factor), config={"px": NARROW, "share": FLOOR})

    def claims(self, rows: Rows) -> list[Claim]:
        errors = tables.select(rows, metric="test_rmse")
        wide, plain = (tables.select(errors, px=px) for px in (WIDE, "none"))
        effects = {}
        for (jitter,), members in tables.group(tables.select(errors, px=NARROW), "jitter").items():
            mine = tables.select(wide, jitter=jitter)
            effects[f"{NARROW}, {epsilon(jitter)}"] = tables.paired(mine, members)
            effects[f"PS-MAP, {epsilon(jitter)}"] = tables.paired(mine, plain)
        text = f"Test RMSE with p_X = {WIDE} is below that with {NARROW} and PS-MAP's, at every ε"
        return [judge_all(text, effects, below=0, paper="best")]

    def draw(self, rows: Rows) -> Plots:
        figure, ax = figures.axes(panel=(4.6, 3.1))
        groups = tables.group(tables.select(rows, metric="test_rmse"), "px", "method", "jitter")
        ticks: dict[str, list[float]] = {}
        for place, ((px, method, jitter), members) in enumerate(groups.items()):
            mean = tables.mean(row.value for row in members)
            x = place + len(ticks) * 0.6 + (0.6 if px not in ticks else 0.0)
            ticks.setdefault(px, []).append(x)
            shade = (
                1.0 if not jitter else 0.95 if jitter < 1e-20 else 0.8 if jitter < 1e-9 else 0.65
            )
            ax.bar(x, mean.mean, yerr=mean.stderr, color=figures.COLORS[method], width=0.85,
                   alpha=shade, error_kw={"ecolor": figures.INK, "elinewidth": 1})  # fmt: skip
            name = "" if jitter is None else "no jitter" if jitter == 0 else power(jitter)
            ax.annotate(name, (x, 0.002), rotation=90, ha="center", va="bottom",
                        color=figures.PAPER)  # fmt: skip
        names = {"none": "none (PS-MAP)", WIDE: "Uniform(−1, 1)", NARROW: "Uniform(−0.1, 0.1)"}
        ax.set_xticks([sum(xs) / len(xs) for xs in ticks.values()], [names[px] for px in ticks])
        ax.set(ylabel="test RMSE", xlabel=r"evaluation distribution $p_X$")
        ax.grid(visible=False, axis="x")
        return {"fourier-pX": figure}


def narrow_factor(config: PXConfig) -> Tensor:
    """F with FᵀF = Φ of samples of U(−0.1, 0.1), less what is rounding error, ``[r, P]``."""
    generator = torch.Generator().manual_seed(0)
    x = 0.2 * torch.rand(config.num_points, generator=generator, dtype=torch.float64) - 0.1
    _, singular, right = torch.linalg.svd(config.model().factor(x))
    rank = int((singular > FLOOR * singular[0]).sum())
    factor: Tensor = singular[:rank, None] * right[:rank]
    return factor


@dataclasses.dataclass(frozen=True)
class NoiseConfig(AblationConfig):
    ratios: tuple[float, ...] = (1 / 3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)  # σ/σ*


class FourierNoise(Experiment):
    id = "fourier-noise"
    label = "Fig. 4"
    title = "A wrong noise level"
    see = (
        "Test error of both methods if the likelihood's noise is not that of the data, from a "
        "third of it to ten times as much."
    )
    cost = "60 s"
    protocol = "exact: true objective in log space. paper: 1e-32 inside the logarithm"
    metrics = ("test_rmse",)
    columns = ("ratio", "method", "objective")
    config = NoiseConfig()
    quick = NoiseConfig(ratios=(1 / 3, 1.0, 3.0, 10.0), steps=800)

    def run(self, config: NoiseConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        blocks = []
        for form, (plain,) in uniform_blocks(config):
            variants = [
                plain._replace(
                    config={**plain.config, "ratio": round(ratio, 6)},
                    noise_std=ratio * config.noise_std,
                )
                for ratio in config.ratios
            ]
            blocks.append(Block(form, variants))
        yield from config.fit(blocks, context.advance)

    def claims(self, rows: Rows) -> list[Claim]:
        errors = tables.select(rows, metric="test_rmse")
        ratios = [row.config["ratio"] for row in errors] or [math.nan]
        low, high = min(ratios), max(ratios)

        def rmse(ratio: float, objective: str) -> dict[int, float]:
            return tables.values_by(errors, "seed", ratio=ratio, objective=objective)

        forms = (EXACT, PAPER) if errors else ()
        near = {form: log_ratio(rmse(low, form), rmse(low, "none")) for form in forms}
        far = {form: log_ratio(rmse(high, form), rmse(1.0, form)) for form in forms}
        apart = {form: log_ratio(rmse(high, form), rmse(high, "none")) for form in forms}
        return [
            judge_all(f"At σ/σ* = {low:.2g} FS-MAP's test RMSE is PS-MAP's, to a factor of 1.25",
                      near, ratio=True, within=1.25, paper="similar"),
            judge_all(f"At σ/σ* = {high:g} FS-MAP's is more than 5 times that at σ = σ*", far,
                      ratio=True, above=5, paper="high test error"),
            judge_all("… and more than twice PS-MAP's", apart, ratio=True, above=2,
                      paper="PS-MAP relatively stable"),
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, ax = figures.axes(panel=(4.6, 3.1))
        _plot(ax, rows, "test_rmse", "ratio")
        ax.axvline(1.0, color=figures.COLORS["data"], linewidth=0.8, linestyle=":")
        ax.set(xlabel=r"assumed noise $\sigma/\sigma^*$", ylabel="test RMSE")
        log_scale(ax)
        ax.legend()
        return {"fourier-noise": figure}


@dataclasses.dataclass(frozen=True)
class PointsConfig(JitterConfig):
    # numbers M of equidistant evaluation points, both ends of [-1, 1] included
    points: tuple[int, ...] = (
        *(10, 20, 40, 60, 80, 100, 120, 140, 160, 180),
        *(200, 201, 202, 204, 250, 300, 500, 1_000),
    )


class FourierPoints(Experiment):
    id = "fourier-points"
    label = "Fig. 3 a"
    title = "How many evaluation points"
    see = (
        "Test error against the number M of evaluation points. Φ has full rank from M = 202 on: "
        "sin(100πx) is zero on 201 points."
    )
    cost = "4 min"
    protocol = (
        "jittered objective at ε = 1e-32 (authors), 1e-12, 1e-6; log det by the alias classes of "
        "the lattice, exact at any rank. M = ∞ is Uniform(−1, 1) at the same ε"
    )
    metrics = ("test_rmse",)
    columns = ("points", "method", "jitter")
    config = PointsConfig()
    quick = PointsConfig(points=(10, 40, 100, 160, 202, 300), steps=800, seeds=2)

    def units(self, config: PointsConfig) -> list[Unit]:
        return [{"points": m} for m in (math.inf, *config.points)]

    def run(self, config: PointsConfig, unit: Unit, context: Context) -> Iterator[Measured]:
        variants = config.variants(unit, CLOSED_FORM)
        if math.isinf(unit["points"]):
            reference = Block(None, [Variant("ps-map", unit, config.noise_std)])
            blocks = [reference, Block(config.diagonal, variants)]
        else:
            form = fourier_lattice(config.num_frequencies, unit["points"], 0.0)
            yield Measured("rank", form.rank, config=unit)
            blocks = [Block(lambda jitter: form._replace(jitter=jitter), variants)]
        yield from config.fit(blocks, context.advance)

    def claims(self, rows: Rows) -> list[Claim]:
        ranks = tables.values_by(rows, "points", metric="rank")
        full = max(ranks.values(), default=0)
        fewer = sorted(m for m in ranks if ranks[m] < full)
        enough = sorted(m for m in ranks if ranks[m] == full)
        fall, rise, flat = {}, {}, {}
        errors = tables.select(rows, metric="test_rmse", method="fs-map")
        for (jitter,), members in tables.group(errors, "jitter").items():
            rmse = {m: tables.values_by(members, "seed", points=m) for m in (*ranks, math.inf)}
            at = epsilon(jitter)
            fall[at] = log_ratio(rmse[enough[0]], rmse[fewer[0]])
            for a, b in itertools.pairwise([*fewer, enough[0]]):
                rise[f"M = {b}, {at}"] = log_ratio(rmse[b], rmse[a])
            for m in enough:
                flat[f"M = {m}, {at}"] = log_ratio(rmse[m], rmse[math.inf])
        path = f"from M = {fewer[0]} to {enough[0]}" if ranks else "until Φ has full rank"
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
        curves = tables.group(tables.select(chosen, method="fs-map"), "jitter")
        for look, ((jitter,), members) in zip(LINES, curves.items(), strict=False):
            line = tables.line([r for r in members if math.isfinite(r.config["points"])], "points")
            stderr = line.stderr if look is LINES[0] else [math.nan] * len(line.x)
            label = f"FS-MAP, {power(jitter)}"
            figures.plot_mean(ax, line.x, line.mean, stderr, "fs-map", label=label, **look)
        base = tables.mean(tables.values(chosen, method="ps-map"))
        ends = [min(line.x), max(line.x)]
        figures.plot_mean(ax, ends, [base.mean] * 2, [base.stderr] * 2, "ps-map", marker="")
        ax.axvline(201.5, color=figures.COLORS["data"], linewidth=0.8, linestyle=":")
        ax.annotate("full rank", (201.5, 1), xycoords=("data", "axes fraction"), ha="left",
                    va="top", xytext=(3, -2), textcoords="offset points", fontsize=9)  # fmt: skip
        ax.set(xlabel="evaluation points $M$", ylabel="test RMSE")
        log_scale(ax, "x")
        ax.legend()
        return {"fourier-points": figure}
