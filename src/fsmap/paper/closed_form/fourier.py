r"""``fourier`` (Fig. 2 a-d): FS-MAP finds more probable, flatter, better functions.

$f = \sum_i \tanh(\theta_i)\varphi_i/\sqrt P$, $\varphi = \{\cos i\pi x, \sin i\pi x\}$,
$\theta_i \sim N(0, 10^2)$. Each method is one ``fit_population`` over all sizes and seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fsmap.data import synthetic
from fsmap.models.basis import TANH, FourierBasis
from fsmap.objective.closed_form import PAPER_JITTER, Diagonal, Form, Invertible
from fsmap.objective.objective import Objective
from fsmap.objective.prior import Normal
from fsmap.paper.effects import exact, judge_all
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import PAPER_LOOK, legend_above, log_scale
from fsmap.paper.report.tables import Mean
from fsmap.paper.rows import Claim, Row
from fsmap.paper.solvers import Advance, log_density, objective_of, solve
from fsmap.types import Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    gram = config.model().uniform_gram(-1.0, 1.0)  # I/(2P)
    return {EXACT: Invertible.from_gram(gram), PAPER: Diagonal(gram.diagonal(), PAPER_JITTER)}


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

    def rmse(self, theta: Tensor, batch: Batch) -> Tensor:
        """Root mean squared residual."""
        out: Tensor = self.config.model().design(batch.x) @ theta.tanh()
        return (out - batch.y).square().mean().sqrt()

    def curvature(self, theta: Tensor, problem: Problem) -> Tensor:
        """Mean eigenvalue of the Hessian of the training error."""
        rows: Tensor = self.config.model().design(problem.train.x)
        value, slope = theta.tanh(), TANH.log_slope(theta).exp()
        pull = rows.mT @ (rows @ value - problem.train.y)  # half the gradient in tanh θ
        trace = slope.square() @ rows.square().sum(0) - 2 * (value * slope) @ pull
        return 2 * trace / (problem.n_train * len(theta))

    def measure(self, *metrics: str) -> Iterator[Measured]:
        """Some of test_rmse, train_rmse and curvature, for every variant and problem."""
        for variant, thetas in zip(self.variants, self.theta, strict=True):
            for problem, theta in zip(self.problems, thetas, strict=True):
                config = {"n_train": problem.n_train, **variant.config}
                about = variant.method, problem.seed, config, variant.deviations
                for metric in metrics:
                    if metric == "curvature":
                        value = self.curvature(theta, problem)
                    else:
                        batch = problem.test if metric == "test_rmse" else problem.train
                        value = self.rmse(theta, batch)
                    yield Measured(metric, value, *about)


def fit(
    config: FourierConfig,
    problems: Sequence[Problem],
    blocks: Sequence[Block],
    advance: Advance = lambda _: None,
) -> Fitted:
    """Fit every variant to every problem, from θ = 0: a population for each block."""
    model, prior = config.model(), Normal(config.prior_std)
    data = [compress(model, problem.train) for problem in problems]
    found = []
    for number, block in enumerate(blocks):

        def build(
            noise_std: Tensor, jitter: Tensor, num_data: Tensor, block: Block = block
        ) -> Objective:
            form = None if block.form is None else block.form(jitter)
            return objective_of(model.squash, noise_std, prior, form, num_data)

        def tell(done: float, number: int = number) -> None:
            advance((number + done) / len(blocks))

        members = [
            {"noise_std": v.noise_std, "jitter": v.jitter, "num_data": p.n_train, "split": q}
            for v in block.variants
            for q, p in enumerate(problems)
        ]
        sizes = {"lr": config.lr, "steps": config.steps, "warmup": config.warmup}
        start = model.theta.detach()
        theta = solve(build, model.squash, members, data, start, advance=tell, **sizes)
        found.append(theta.unflatten(0, (-1, len(problems))))  # [k, Q, P]
    variants = [variant for block in blocks for variant in block.variants]
    return Fitted(config, problems, variants, torch.cat(found))


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
    """Seven sizes, a few seeds, PS-MAP and FS-MAP by two protocols."""

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
    config = Config()
    quick = Config(sizes=(100, 200, 400, 1_600), steps=1_500, long_steps=3_000)

    def units(self, config: Config) -> list[dict[str, Any]]:
        """Everything at the paper's number of steps, then the long run."""
        return [{"part": "sizes"}, {"part": "long"}]

    def run(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Draw, fit and measure."""
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

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        chosen = tables.in_order(rows, *PANELS)
        return tables.summarize(chosen, "metric", "n_train", "method", "objective")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        gains = {
            _at(n, objective): tables.mean(row.value for row in members)
            for (n, objective), members in tables.group(
                tables.select(rows, metric="log_posterior_gain"), "n_train", "objective"
            ).items()
        }
        test = _against_ps(rows, "test_rmse", 200)
        train = _against_ps(rows, "train_rmse")
        few = min((row.config["n_train"] for row in rows), default=0)
        noise = {
            _at(n, objective): tables.mean(row.value - 0.1 for row in members)
            for (n, objective), members in tables.group(
                tables.select(rows, metric="train_rmse", method="fs-map"), "n_train", "objective"
            ).items()
            if n >= 200
        }
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
            judge_all("FS-MAP's test RMSE is lower than PS-MAP's for N ≥ 200", test, below=0,
                      paper="lower; 0.5 to 0.7 of PS-MAP's at N = 400"),
            judge_all("FS-MAP's train RMSE is within 0.015 of the noise (0.1) for N ≥ 200", noise,
                      within=0.015, paper="around 0.1"),
            judge_all(f"PS-MAP's train RMSE at N = {few} is lower by more than 0.05: it overfits",
                      {at: gap for at, gap in train.items() if at.startswith(f"N = {few},")},
                      above=0.05, paper="near zero against 0.1"),
        ]  # fmt: skip

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        figure, panels = figures.axes(2, 2)
        for ax, (metric, (title, ylabel)) in zip(panels.flat, PANELS.items(), strict=True):
            lines = tables.group(tables.select(rows, metric=metric), "method", "objective")
            for (method, objective), members in lines.items():
                look = PAPER_LOOK if objective == PAPER else {}
                figures.plot_mean(ax, *tables.line(members, "n_train"), method, **look)
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


def _at(n_train: int, objective: str) -> str:
    return f"N = {n_train}, {objective}"


def _against_ps(rows: Sequence[Row], metric: str, least: int = 0) -> dict[str, Mean]:
    """FS-MAP − PS-MAP, paired by seed, by N and objective."""
    chosen = [row for row in tables.select(rows, metric=metric) if row.config["n_train"] >= least]
    found = {}
    for (n, objective), members in tables.group(chosen, "n_train", "objective").items():
        if objective != "none":
            plain = tables.select(chosen, n_train=n, objective="none")
            found[_at(n, objective)] = tables.paired(members, plain)
    return found
