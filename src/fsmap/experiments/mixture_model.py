r"""What the two mixture experiments share: the model of Fig. 1, its data, its MAP solutions.

$f(x) = (e^{\theta_L}\varphi_L(x) + e^{\theta_R}\varphi_R(x))/\sqrt2$ with bumps at ∓0.5. Since
$\sigma = \exp$, $\log\det\mathcal{J} = 2(\theta_L + \theta_R)$ + const: FS-MAP is PS-MAP under the
prior $N(-\alpha^2, \alpha^2)$, whatever $p_X$ is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.data import synthetic
from fsmap.models.basis import BumpBasis
from fsmap.objective.closed_form import Invertible
from fsmap.objective.moments import Moments
from fsmap.train.descent import descend
from fsmap.types import Batch

TRUE, DOUBLED = "true log det", "doubled log det"
WEIGHTS = {"ps-map": {"none": 0.0}, "fs-map": {TRUE: 0.5, DOUBLED: 1.0}}
"""What log det 𝒥 is multiplied with, by method and objective. The authors' notebook squares the
singular values of 𝒥, which is a square already: its log-determinant is twice the true one."""

CURVE = torch.linspace(-1, 1, 201, dtype=torch.float64)
"""Where functions are drawn."""


@dataclasses.dataclass(frozen=True)
class MixtureConfig:
    """Sizes.

    Attributes:
        noise_std: σ of the data and of the likelihood.
        num_points: Points of Uniform(−1, 1) that Φ is made of.
        lr: Of Adam.
        steps: Of Adam, full batch.
        warmup: Steps of linear warm-up.
        seeds: Data sets.
    """

    noise_std: float = 0.1
    num_points: int = 1_000
    lr: float = 0.3
    steps: int = 1_000
    warmup: int = 100
    seeds: int = 5


def build() -> BumpBasis:
    """The model, in float64."""
    return BumpBasis([-0.5, 0.5], 0.03, "exp", dtype=torch.float64)


def draw_data(config: MixtureConfig) -> list[Batch]:
    """Ten points on the left and one on the right, once per seed."""
    return [
        synthetic.two_bumps(
            generator=torch.Generator().manual_seed(seed),
            noise_std=config.noise_std,
            dtype=torch.float64,
        )
        for seed in range(config.seeds)
    ]


def moments(data: Sequence[Batch]) -> Moments:
    """The data as the likelihood sees them."""
    model = build()
    return Moments.of([(model.design(batch.x), batch.y) for batch in data])


def log_det_form(config: MixtureConfig) -> Invertible:
    """The form of log det 𝒥 for p_X = points of Uniform(−1, 1): in log space, no jitter."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(config.num_points, generator=generator, dtype=torch.float64) - 1
    return Invertible.from_gram(build().gram(x))


class Solution(NamedTuple):
    """A MAP solution for every data set.

    Attributes:
        method: ``"ps-map"`` or ``"fs-map"``.
        objective: Which log-determinant.
        theta: ``[seeds, 2]``.
    """

    method: str
    objective: str
    theta: Tensor


def solve(
    config: MixtureConfig,
    data: Sequence[Batch],
    prior_std: float,
    advance: Callable[[float], None] | None = None,
) -> list[Solution]:
    """PS-MAP, FS-MAP, and FS-MAP with the notebook's log-determinant, for all data sets at once.

    Args:
        config: Sizes.
        data: The data sets.
        prior_std: α.
        advance: Told the fraction that is done.

    Returns:
        The solutions.
    """
    statistics, form = moments(data), log_det_form(config)
    named = [(m, o, w) for m, options in WEIGHTS.items() for o, w in options.items()]
    weight = torch.tensor([[w] for _, _, w in named], dtype=torch.float64)  # [3, 1]

    def loss(theta: Tensor) -> Tensor:  # [3, seeds, 2] to [3, seeds]
        fit = statistics.log_likelihood(theta.exp(), config.noise_std)
        prior = -theta.square().sum(-1) / (2 * prior_std**2)
        return -(fit + prior - weight * form.value(theta)) / statistics.num

    start = torch.zeros(len(named), len(data), 2, dtype=torch.float64)
    found = descend(
        loss, start, lr=config.lr, steps=config.steps, warmup=config.warmup, advance=advance
    )
    return [Solution(m, o, theta) for (m, o, _), theta in zip(named, found, strict=True)]


def log_density(
    statistics: Moments, number: int, noise_std: float, prior_std: float
) -> Callable[[Tensor], Tensor]:
    """Log-density p(θ|D) up to a constant, for one of the data sets, ``[n, 2]`` to ``[n]``."""
    square, cross, _, _ = (part[number] for part in statistics)

    def value(theta: Tensor) -> Tensor:  # few operations: a sampler calls it one θ at a time
        height = theta.exp()
        misfit = (height * (height @ square - 2 * cross)).sum(-1)
        return -misfit / (2 * noise_std**2) - theta.square().sum(-1) / (2 * prior_std**2)

    return value


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Distance of two functions in L2(Uniform(−1, 1)), from their coefficients ``[..., 2]``."""
    gram = build().uniform_gram(-1.0, 1.0)
    difference = a - b
    return ((difference @ gram) * difference).sum(-1).sqrt()
