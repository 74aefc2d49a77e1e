r"""What the four Fourier experiments share: drawing problems, fitting variants, measuring them.

$f = \sum_i \tanh(\theta_i)\varphi_i/\sqrt P$, $\varphi = \{\cos i\pi x, \sin i\pi x\}$,
$\theta_i \sim N(0, 10^2)$.
All variants (methods, jitters, noise levels) of all problems (sizes, seeds) are one stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.data import synthetic
from fsmap.experiments.experiment import Measured
from fsmap.models.basis import FourierBasis
from fsmap.objective.closed_form import PAPER_JITTER, Diagonal, Form, Invertible
from fsmap.objective.likelihood import LOG_SQRT_2PI
from fsmap.objective.moments import Moments
from fsmap.train.descent import descend
from fsmap.types import Batch

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
