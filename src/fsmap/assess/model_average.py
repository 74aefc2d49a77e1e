r"""The Bayesian model average $E_{p(\theta|D)}[f_\theta]$ of a two-parameter model, by quadrature.

The nodes are a tensor product of composite Gauss-Legendre rules. Densities enter as logarithms, up
to a constant, so nothing underflows; the error is the change if half the panels are used.
:func:`nuts_mean` takes the same expectation by Markov chains (pyro), as a reference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsmap.errors import InputError, require

NODES = 16  # Gauss-Legendre nodes per panel


class Interval(NamedTuple):
    """The range of one parameter, in panels that are narrow where the density changes quickly."""

    cuts: Sequence[float]  # ends of the panels, increasing

    def nodes(self, every: int = 1) -> tuple[Tensor, Tensor]:
        """Nodes and weights of the composite rule."""
        u, w = map(torch.from_numpy, np.polynomial.legendre.leggauss(NODES))
        ends = torch.tensor([*self.cuts[:-1:every], self.cuts[-1]], dtype=torch.float64)
        low, half = ends[:-1, None], ends.diff()[:, None] / 2
        return (low + half * (u + 1)).flatten(), (half * w).flatten()


def interval(low: float, high: float, panels: int) -> Interval:
    """An interval in equal panels."""
    if not low < high or panels < 2:
        raise InputError(
            f"an interval needs low < high and at least 2 panels (half of them give the error), "
            f"got ({low:g}, {high:g}) in {panels}."
        )
    return Interval(tuple(np.linspace(low, high, panels + 1).tolist()))


class PosteriorMean(NamedTuple):
    """A posterior expectation and its change at half the resolution."""

    mean: Tensor  # [K]  E[statistic(θ)]
    error: float  # largest change if every second cut is left out


def posterior_mean(
    log_density: Callable[[Tensor], Tensor],
    statistic: Callable[[Tensor], Tensor],
    left: Interval,
    right: Interval,
) -> PosteriorMean:
    r"""$\int g(\theta)\,p(\theta)\,d\theta / \int p(\theta)\,d\theta$ over two parameters.

    ``log_density``, up to a constant, takes θ ``[n, 2]`` to ``[n]``, ``statistic`` to ``[n, K]``.
    """

    def integrate(every: int) -> Tensor:
        (a, weight_a), (b, weight_b) = left.nodes(every), right.nodes(every)
        theta = torch.cartesian_prod(a, b)  # [n, 2]
        log_weight = (weight_a.log()[:, None] + weight_b.log()).flatten()  # [n]
        return (log_density(theta) + log_weight).softmax(0) @ statistic(theta)

    fine, coarse = integrate(1), integrate(2)
    return PosteriorMean(fine, float((fine - coarse).abs().max()))


class ChainMean(NamedTuple):
    """A posterior expectation from samples."""

    mean: Tensor  # [K]  E[statistic(θ)]
    stderr: Tensor  # [K]  Monte Carlo standard error, from the effective sample size


def nuts_mean(
    log_density: Callable[[Tensor], Tensor],
    statistic: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    num_samples: int,
    num_warmup: int,
    seed: int,
) -> ChainMean:
    """E[statistic(θ)] by the No-U-Turn sampler of pyro; arguments as :func:`posterior_mean`."""
    mcmc = require("pyro.infer.mcmc", extra="mcmc")
    stats = require("pyro.ops.stats", extra="mcmc")
    validate = torch.distributions.Distribution._validate_args  # importing pyro may change it

    def potential(sites: dict[str, Tensor]) -> Tensor:
        return -log_density(sites["theta"][None])[0]

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        kernel = mcmc.NUTS(potential_fn=potential, full_mass=True, target_accept_prob=0.9)
        chain = mcmc.MCMC(
            kernel,
            num_samples=num_samples,
            warmup_steps=num_warmup,
            initial_params={"theta": start.clone()},
            disable_progbar=True,
        )
        chain.run()
        values = statistic(chain.get_samples()["theta"])  # [n, K]
        effective = stats.effective_sample_size(values[:, None], sample_dim=0, chain_dim=1)
    torch.distributions.Distribution.set_default_validate_args(validate)
    return ChainMean(values.mean(0), values.std(0) / effective.sqrt())
