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
from fsmap.paper.closed_form.fits import Advance, log_density, objective_of, solve
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import PAPER_LOOK, legend_above, log_scale
from fsmap.paper.report.tables import largest, listed, smallest
from fsmap.paper.rows import Claim, Row
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
    """Sizes of a Fourier experiment."""

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
    """One data set: its size, its seed, and the data."""

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
    variants: Sequence[Variant]  # k of them


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
    noise = config.noise_std
    blocks = [Block(None, [Variant("ps-map", {"objective": "none"}, noise)])]
    for name, form in uniform_forms(config).items():
        variant = Variant("fs-map", {"objective": name}, noise, DEVIATIONS[name])
        blocks.append(Block(_constant(form), [variant]))
    return blocks


def _constant(form: Form) -> Callable[[Tensor], Form]:
    return lambda _: form


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

    def log_posterior(self, form: Form) -> Tensor:
        """Log-density p(f|D) up to the evidence, with the data's own noise, ``[K, Q]``."""

        def value(theta: Tensor, problem: Problem) -> Tensor:
            ours = self.config.objective(form, problem.n_train)
            return log_density(ours, TANH, theta, self.config.rows(problem.train))

        return self._each(value)

    def train_rmse(self) -> Tensor:
        """``[K, Q]``, from the residuals themselves."""
        return self._each(lambda theta, problem: self._rmse(theta, problem.train))

    def test_rmse(self) -> Tensor:
        """``[K, Q]``, against noiseless targets."""
        return self._each(lambda theta, problem: self._rmse(theta, problem.test))

    def curvature(self) -> Tensor:
        """Mean eigenvalue of the Hessian of the training error, ``[K, Q]``."""

        def mean_eigenvalue(theta: Tensor, problem: Problem) -> Tensor:
            rows: Tensor = self.config.model().design(problem.train.x)
            value, slope = theta.tanh(), TANH.log_slope(theta).exp()
            pull = rows.mT @ (rows @ value - problem.train.y)  # half the gradient in tanh θ
            trace = slope.square() @ rows.square().sum(0) - 2 * (value * slope) @ pull
            return 2 * trace / (problem.n_train * len(theta))

        return self._each(mean_eigenvalue)

    def _rmse(self, theta: Tensor, batch: Batch) -> Tensor:
        out: Tensor = self.config.model().design(batch.x) @ theta.tanh()
        return (out - batch.y).square().mean().sqrt()

    def _each(self, measure: Callable[[Tensor, Problem], Tensor]) -> Tensor:
        columns = [
            torch.stack([measure(theta, problem) for theta in self.theta[:, q]])
            for q, problem in enumerate(self.problems)
        ]
        return torch.stack(columns, dim=-1)

    def rows(self, metric: str, values: Tensor) -> Iterator[Measured]:
        """One measured value per variant and problem; ``values`` is ``[K, Q]``."""
        for variant, line in zip(self.variants, values.tolist(), strict=True):
            for problem, value in zip(self.problems, line, strict=True):
                config = {"n_train": problem.n_train, **variant.config}
                said = variant.deviations
                yield Measured(metric, value, variant.method, problem.seed, config, said)


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
        theta = solve(
            build,
            model.squash,
            members,
            data,
            model.theta.detach(),
            lr=config.lr,
            steps=config.steps,
            warmup=config.warmup,
            advance=tell,
        )
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
    """Sizes."""

    # numbers N of training points
    sizes: tuple[int, ...] = (100, 200, 400, 800, 1_600, 3_200, 6_400)
    # steps of a longer run at the largest N, one seed: 2,500 do not converge there
    long_steps: int = 10_000


class Fourier(Experiment):
    """Seven sizes, a few seeds, PS-MAP and FS-MAP by two protocols: one stack."""

    id = "fourier"
    label = "Fig. 2 a–d"
    title = "FS-MAP on a Fourier model"
    see = (
        "FS-MAP's function is far more probable, lies in a flatter place, predicts better from "
        "N = 200 on, and its training error stays near the noise of 0.1."
    )
    cost = "2 min"
    protocol = (
        "exact: true objective in log space, no jitter. paper: 1e-32 inside the logarithm "
        "(authors' code). Full-batch Adam from θ = 0."
    )
    config = Config()
    quick = Config(sizes=(100, 200, 400, 1_600), steps=1_500, long_steps=3_000)

    def units(self, config: Config) -> list[dict[str, Any]]:
        """Everything at the paper's number of steps in one stack, then the long run."""
        return [{"part": "sizes"}, {"part": "long"}]

    def run(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Draw, fit and measure everything at once."""
        if unit["part"] == "long":
            yield from _long(config, context)
            return
        seeds = range(config.seeds)
        problems = [draw_problem(config, n, seed) for n in config.sizes for seed in seeds]
        forms = uniform_forms(config)
        fitted = fit(config, problems, uniform_blocks(config), context.advance)
        for name, values in (
            ("test_rmse", fitted.test_rmse()),
            ("train_rmse", fitted.train_rmse()),
            ("curvature", fitted.curvature()),
        ):
            yield from fitted.rows(name, values)
        yield from _gains("log_posterior_gain", fitted, forms)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Mean ± standard error over seeds, for every panel."""
        chosen = tables.in_order(rows, *PANELS)
        return tables.summarize(chosen, "metric", "n_train", "method", "objective")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """The four panels."""
        return [claim for objective in (EXACT, PAPER) for claim in _claims(rows, objective)]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """Four panels, as in the paper; the paper's protocol is dotted."""
        figure, panels = figures.axes(2, 2)
        for ax, (metric, (title, ylabel)) in zip(panels.flat, PANELS.items(), strict=True):
            _draw_panel(ax, tables.select(rows, metric=metric))
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


def _gains(metric: str, fitted: Fitted, forms: Mapping[str, Form]) -> Iterator[Measured]:
    """By how much FS-MAP's log p(f|D) is above PS-MAP's, each by its own objective."""
    for number, (objective, form) in enumerate(forms.items(), start=1):
        log_posterior = fitted.log_posterior(form)  # [K, Q]
        gain = (log_posterior[number] - log_posterior[0]).tolist()
        for problem, value in zip(fitted.problems, gain, strict=True):
            where = {"n_train": problem.n_train, "objective": objective}
            where["steps"] = fitted.config.steps
            said = DEVIATIONS[objective]
            yield Measured(metric, value, "fs-map", problem.seed, where, said)


def _long(config: Config, context: Context) -> Iterator[Measured]:
    """The largest N, trained until FS-MAP has converged."""
    forms, longer = uniform_forms(config), dataclasses.replace(config, steps=config.long_steps)
    problem = draw_problem(config, max(config.sizes), 0)
    fitted = fit(longer, [problem], uniform_blocks(config), context.advance)
    yield from _gains("log_posterior_gain_long", fitted, forms)


def _draw_panel(ax: Any, rows: Sequence[Row]) -> None:
    for (method, objective), members in tables.group(rows, "method", "objective").items():
        line = tables.line(members, "n_train")
        figures.plot_mean(ax, *line, method, **(PAPER_LOOK if objective == PAPER else {}))


def _claims(rows: Sequence[Row], objective: str) -> Iterator[Claim]:
    suffix = {EXACT: "true objective", PAPER: "paper's jitter of 1e-32"}[objective]

    def means(metric: str, method: str) -> dict[int, float]:
        form = "none" if method == "ps-map" else objective
        return tables.means_by(rows, "n_train", metric=metric, method=method, objective=form)

    gain = smallest(tables.values(rows, metric="log_posterior_gain", objective=objective))
    yield Claim(
        f"FS-MAP's log p(f|D) is above PS-MAP's at every N and seed ({suffix})",
        gain > 0,
        f"by {gain:,.0f} nats or more",
        "thousands of nats",
    )
    # At large N Adam needs more steps: its second moment remembers the first, large gradients.
    for row in tables.select(rows, metric="log_posterior_gain_long", objective=objective):
        size = row.config["n_train"]
        short = means("log_posterior_gain", "fs-map").get(size, math.nan)
        yield Claim(
            f"… by thousands of nats at the largest N too, once Adam has converged ({suffix})",
            row.value > 1_000,
            f"N = {size}: {row.value:,.0f} nats after {row.config['steps']:,} steps "
            f"({short:,.0f} after those of the figure)",
            "thousands of nats",
        )
    flatter = _ratios(means("curvature", "fs-map"), means("curvature", "ps-map"))
    yield Claim(
        f"FS-MAP's minimum is flatter at every N ({suffix})",
        largest(flatter.values()) < 1,
        f"curvature ratio {listed(flatter, 'N')}",
        "lower at every N",
    )
    better = _ratios(means("test_rmse", "fs-map"), means("test_rmse", "ps-map"), least=200)
    yield Claim(
        f"FS-MAP's test RMSE is lower for N ≥ 200 ({suffix})",
        largest(better.values()) < 1,
        f"RMSE ratio {listed(better, 'N')}",
        "lower",
    )
    if 400 in better:
        yield Claim(
            f"FS-MAP's test RMSE at N = 400 is below 0.8 of PS-MAP's ({suffix})",
            better[400] < 0.8,
            round(better[400], 3),
            "0.5 to 0.7",
        )
    ps, fs = means("train_rmse", "ps-map"), means("train_rmse", "fs-map")
    noise = {n: value for n, value in fs.items() if n >= 200}
    yield Claim(
        f"FS-MAP's train RMSE stays within 0.09–0.115 for N ≥ 200 ({suffix})",
        0.09 <= smallest(noise.values()) and largest(noise.values()) <= 0.115,
        listed(noise, "N", ".3f"),
        "around 0.1",
    )
    few = min(ps, default=0)
    yield Claim(
        f"PS-MAP overfits at small N, FS-MAP does not ({suffix})",
        ps.get(few, math.nan) < 0.5 * fs.get(few, math.nan),
        f"train RMSE at N = {few}: {ps.get(few, math.nan):.3f} against {fs.get(few, math.nan):.3f}",
        "near zero against 0.1",
    )


def _ratios(
    above: Mapping[int, float], below: Mapping[int, float], *, least: int = 0
) -> dict[int, float]:
    return {n: above[n] / below[n] for n in above if n >= least}
