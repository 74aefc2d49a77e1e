r"""What the four Fourier experiments share: drawing problems, fitting variants, measuring them.

$f = \sum_i \tanh(\theta_i)\varphi_i/\sqrt P$, $\varphi = \{\cos i\pi x, \sin i\pi x\}$,
$\theta_i \sim N(0, 10^2)$.
All variants (methods, jitters, noise levels) of all problems (sizes, seeds) are one stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fsmap.data import synthetic
from fsmap.models.basis import FourierBasis
from fsmap.objective.basis import PAPER_JITTER, Diagonal, Form, Invertible
from fsmap.objective.hyper import LOG_SQRT_2PI
from fsmap.objective.moments import Moments
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import PAPER_LOOK, legend_above, log_scale
from fsmap.paper.rows import Claim, Row
from fsmap.train.descent import descend
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
    """Sizes of a Fourier experiment.

    Attributes:
        num_frequencies: P/2.
        prior_std: α, of the truth and of the prior.
        noise_std: σ*, of the data.
        num_test: Test points, uniform, noiseless.
        lr: Of Adam.
        steps: Of Adam, full batch.
        warmup: Steps of linear warm-up.
        seeds: How many.
    """

    num_frequencies: int = 100
    prior_std: float = 10.0
    noise_std: float = 0.1
    num_test: int = 1_000
    lr: float = 0.1
    steps: int = 2_500
    warmup: int = 100
    seeds: int = 3

    def model(self) -> FourierBasis:
        """The model, in float64."""
        return FourierBasis(self.num_frequencies, "tanh", dtype=torch.float64)


class Problem(NamedTuple):
    """One data set: its size, its seed, and the data."""

    n_train: int
    seed: int
    train: Batch
    test: Batch


class Variant(NamedTuple):
    """One objective that is fitted to every problem.

    Attributes:
        method: ``"ps-map"`` or ``"fs-map"``.
        config: What tells the variant apart in the rows.
        noise_std: σ of the likelihood.
        deviations: Where it departs from the paper's numerical protocol.
    """

    method: str
    config: Mapping[str, Any]
    noise_std: float
    deviations: tuple[str, ...] = ()


class Block(NamedTuple):
    """Variants that share a log-determinant, which is evaluated for all of them at once.

    Attributes:
        form: How it is computed, ``[k, Q, P]`` to ``[k, Q]`` (jitters are ``[k, 1]``); None for
            PS-MAP.
        variants: k of them.
    """

    form: Form | None
    variants: Sequence[Variant]


def draw_problem(config: FourierConfig, n_train: int, seed: int) -> Problem:
    """Truth from the prior, then training points, then test points, all from one generator.

    Args:
        config: Sizes.
        n_train: N.
        seed: Of the generator; the truth depends on nothing else.

    Returns:
        The problem.
    """
    generator, model = torch.Generator().manual_seed(seed), config.model()
    size = 2 * config.num_frequencies
    theta = config.prior_std * torch.randn(size, generator=generator, dtype=torch.float64)

    def truth(x: Tensor) -> Tensor:
        return model.design(x) @ theta.tanh()

    draw = {"generator": generator, "dtype": torch.float64}
    train = synthetic.regression(truth, n_train, noise_std=config.noise_std, **draw)
    return Problem(n_train, seed, train, synthetic.regression(truth, config.num_test, **draw))


def uniform_forms(config: FourierConfig) -> dict[str, Form]:
    """The log-determinant for p_X = Uniform(-1, 1), exact and by the paper's protocol.

    Args:
        config: Sizes.

    Returns:
        Both forms, by name.
    """
    gram = config.model().uniform_gram(-1.0, 1.0)  # I/(2P)
    return {EXACT: Invertible.from_gram(gram), PAPER: Diagonal(gram.diagonal(), PAPER_JITTER)}


class Fitted(NamedTuple):
    """Parameters after the last step, for every variant and problem.

    Attributes:
        config: Sizes.
        problems: Q of them.
        variants: K of them.
        theta: ``[K, Q, P]``.
        moments: Of the training data.
    """

    config: FourierConfig
    problems: Sequence[Problem]
    variants: Sequence[Variant]
    theta: Tensor
    moments: Moments

    def log_prior(self) -> Tensor:
        """Log-density p(θ) in nats, ``[K, Q]``."""
        return log_prior(self.theta, self.config.prior_std)

    def log_posterior(self, form: Form) -> Tensor:
        """Log-density p(f|D) up to the evidence, with the data's own noise, ``[K, Q]``."""
        model = self.config.model()
        fit = self.moments.log_likelihood(self.theta.tanh(), self.config.noise_std)
        return fit + self.log_prior() - 0.5 * form.value(model.squash.log_slope(self.theta))

    def train_rmse(self) -> Tensor:
        """``[K, Q]``, from the residuals themselves."""
        return self._rmse([problem.train for problem in self.problems])

    def test_rmse(self) -> Tensor:
        """``[K, Q]``, against noiseless targets."""
        return self._rmse([problem.test for problem in self.problems])

    def curvature(self) -> Tensor:
        """Mean eigenvalue of the Hessian of the training error, ``[K, Q]``."""
        value = self.theta.tanh()
        slope = self.config.model().squash.log_slope(self.theta).exp()
        return self.moments.mean_curvature(value, slope, -2 * value * slope)

    def _rmse(self, batches: Sequence[Batch]) -> Tensor:
        model, columns = self.config.model(), []
        for number, batch in enumerate(batches):
            out = self.theta[:, number].tanh() @ model.design(batch.x).mT  # [K, N]
            columns.append((out - batch.y).square().mean(-1).sqrt())
        return torch.stack(columns, dim=-1)

    def rows(self, metric: str, values: Tensor) -> Iterator[Measured]:
        """One measured value per variant and problem.

        Args:
            metric: Its name.
            values: ``[K, Q]``.

        Yields:
            The values with their method, seed and config.
        """
        for variant, line in zip(self.variants, values.tolist(), strict=True):
            for problem, value in zip(self.problems, line, strict=True):
                config = {"n_train": problem.n_train, **variant.config}
                said = variant.deviations
                yield Measured(metric, value, variant.method, problem.seed, config, said)


def log_prior(theta: Tensor, std: float) -> Tensor:
    """Log-density N(θ; 0, std² I) in nats over the last dimension."""
    constant = theta.shape[-1] * (LOG_SQRT_2PI + torch.tensor(std, dtype=theta.dtype).log())
    return -theta.square().sum(-1) / (2 * std**2) - constant


def fit(
    config: FourierConfig,
    problems: Sequence[Problem],
    blocks: Sequence[Block],
    advance: Callable[[float], None] | None = None,
) -> Fitted:
    """Fit every variant to every problem, from θ = 0, in one stack.

    Args:
        config: Sizes.
        problems: Q data sets.
        blocks: Objectives, K variants in all.
        advance: Told the fraction that is done.

    Returns:
        The fitted stack.
    """
    model = config.model()
    moments = Moments.of([(model.design(p.train.x), p.train.y) for p in problems])
    variants = [variant for block in blocks for variant in block.variants]
    noise = torch.tensor([[v.noise_std] for v in variants], dtype=torch.float64)  # [K, 1]
    sizes = [len(block.variants) for block in blocks]

    def loss(theta: Tensor) -> Tensor:
        value = moments.log_likelihood(theta.tanh(), noise) + log_prior(theta, config.prior_std)
        total = value.sum(0)  # [Q]
        for block, part in zip(blocks, theta.split(sizes), strict=True):
            if block.form is not None:
                log_det = block.form.value(model.squash.log_slope(part))  # [k, Q]
                total = total - 0.5 * log_det.sum(0)
        return -total / moments.num

    start = torch.zeros(len(variants), len(problems), len(model.theta), dtype=torch.float64)
    theta = descend(
        loss, start, lr=config.lr, steps=config.steps, warmup=config.warmup, advance=advance
    )
    return Fitted(config, problems, variants, theta, moments)


PANELS = {
    "log_posterior_gain": ("Log posterior increase", r"$\Delta \log p(f\,|\,\mathcal{D})$ in nats"),
    "curvature": ("Loss curvature", "mean Hessian eigenvalue"),
    "test_rmse": ("Test RMSE", "RMSE"),
    "train_rmse": ("Train RMSE", "RMSE"),
}
METRICS = tuple(PANELS)


@dataclasses.dataclass(frozen=True)
class Config(FourierConfig):
    """Sizes.

    Attributes:
        sizes: Numbers N of training points.
        long_steps: Steps of a longer run at the largest N, one seed: 2,500 do not converge there.
    """

    sizes: tuple[int, ...] = (100, 200, 400, 800, 1_600, 3_200, 6_400)
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
    cost = "20 s"
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
        fitted = fit(config, problems, _blocks(config, forms), context.advance)
        for name, values in (
            ("test_rmse", fitted.test_rmse()),
            ("train_rmse", fitted.train_rmse()),
            ("curvature", fitted.curvature()),
            ("largest_parameter", fitted.theta.abs().amax(-1)),
        ):
            yield from fitted.rows(name, values)
        yield from _gains("log_posterior_gain", fitted, forms)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Mean ± standard error over seeds, for every panel."""
        chosen = [row for metric in METRICS for row in tables.select(rows, metric=metric)]
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


def _blocks(config: Config, forms: Mapping[str, Form]) -> list[Block]:
    """PS-MAP, then FS-MAP by each form."""
    noise = config.noise_std
    blocks = [Block(None, [Variant("ps-map", {"objective": "none"}, noise)])]
    for objective, form in forms.items():
        said = DEVIATIONS[objective]
        blocks.append(Block(form, [Variant("fs-map", {"objective": objective}, noise, said)]))
    return blocks


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
    fitted = fit(longer, [problem], _blocks(config, forms), context.advance)
    yield from _gains("log_posterior_gain_long", fitted, forms)


def _draw_panel(ax: Any, rows: Sequence[Row]) -> None:
    for (method, objective), members in tables.group(rows, "method", "objective").items():
        line = tables.line(members, "n_train")
        figures.plot_mean(ax, *line, method, **(PAPER_LOOK if objective == PAPER else {}))


def _means(rows: Sequence[Row], metric: str, method: str, objective: str) -> dict[int, float]:
    chosen = tables.select(rows, metric=metric, method=method, objective=objective)
    line = tables.line(chosen, "n_train")
    return {int(n): value for n, value in zip(line.x, line.mean, strict=True)}


def _claims(rows: Sequence[Row], objective: str) -> Iterator[Claim]:
    suffix = {EXACT: "true objective", PAPER: "paper's jitter of 1e-32"}[objective]
    gains = [
        row.value for row in tables.select(rows, metric="log_posterior_gain", objective=objective)
    ]
    yield Claim(
        f"FS-MAP's log p(f|D) is above PS-MAP's at every N and seed ({suffix})",
        bool(gains) and min(gains) > 0,
        f"by {min(gains, default=float('nan')):,.0f} nats or more",
        "thousands of nats",
    )
    yield from _converged(rows, objective, suffix)
    ps = {m: _means(rows, m, "ps-map", "none") for m in METRICS[1:]}
    fs = {m: _means(rows, m, "fs-map", objective) for m in METRICS[1:]}
    flatter = {n: fs["curvature"][n] / ps["curvature"][n] for n in fs["curvature"]}
    yield Claim(
        f"FS-MAP's minimum is flatter at every N ({suffix})",
        bool(flatter) and max(flatter.values()) < 1,
        _ratios("curvature", flatter),
        "lower at every N",
    )
    better = {n: fs["test_rmse"][n] / ps["test_rmse"][n] for n in fs["test_rmse"] if n >= 200}
    yield Claim(
        f"FS-MAP's test RMSE is lower for N ≥ 200 ({suffix})",
        bool(better) and max(better.values()) < 1,
        _ratios("RMSE", better),
        "lower",
    )
    if 400 in better:
        yield Claim(
            f"FS-MAP's test RMSE at N = 400 is below 0.8 of PS-MAP's ({suffix})",
            better[400] < 0.8,
            round(better[400], 3),
            "0.5 to 0.7",
        )
    noise = {n: value for n, value in fs["train_rmse"].items() if n >= 200}
    yield Claim(
        f"FS-MAP's train RMSE stays within 0.09–0.115 for N ≥ 200 ({suffix})",
        bool(noise) and all(0.09 <= value <= 0.115 for value in noise.values()),
        ", ".join(f"{value:.3f} (N = {n})" for n, value in noise.items()),
        "around 0.1",
    )
    few = min(ps["train_rmse"], default=0)
    yield Claim(
        f"PS-MAP overfits at small N, FS-MAP does not ({suffix})",
        bool(few) and ps["train_rmse"][few] < 0.5 * fs["train_rmse"][few],
        f"train RMSE at N = {few}: {ps['train_rmse'].get(few, float('nan')):.3f} against "
        f"{fs['train_rmse'].get(few, float('nan')):.3f}",
        "near zero against 0.1",
    )


def _converged(rows: Sequence[Row], objective: str, suffix: str) -> Iterator[Claim]:
    """At large N Adam needs more steps: its second moment remembers the first, large gradients."""
    for row in tables.select(rows, metric="log_posterior_gain_long", objective=objective):
        size = row.config["n_train"]
        short = _means(rows, "log_posterior_gain", "fs-map", objective).get(size, float("nan"))
        yield Claim(
            f"… by thousands of nats at the largest N too, once Adam has converged ({suffix})",
            row.value > 1_000,
            f"N = {size}: {row.value:,.0f} nats after {row.config['steps']:,} steps "
            f"({short:,.0f} after those of the figure)",
            "thousands of nats",
        )


def _ratios(name: str, ratios: dict[int, float]) -> str:
    return f"{name} ratio " + ", ".join(f"{r:.2f} (N = {n})" for n, r in ratios.items())
