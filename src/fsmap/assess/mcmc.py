"""Posterior expectations by Markov chains: NUTS of pyro, a reference that is not ours."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsmap.errors import require


class ChainMean(NamedTuple):
    """A posterior expectation from samples.

    Attributes:
        mean: E[statistic(θ)], ``[K]``.
        stderr: Its Monte Carlo standard error, from the effective sample size, ``[K]``.
        samples: The draws, ``[n, P]``.
        divergences: Transitions that the sampler itself calls divergent.
    """

    mean: Tensor
    stderr: Tensor
    samples: Tensor
    divergences: int


@contextmanager
def _global_seeds(seed: int) -> Iterator[None]:
    """Seed torch, numpy and random (pyro draws from torch's global stream), and put them back."""
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)


def nuts_mean(
    log_density: Callable[[Tensor], Tensor],
    statistic: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    num_samples: int,
    num_warmup: int,
    seed: int,
) -> ChainMean:
    """E[statistic(θ)] by the No-U-Turn sampler of pyro.

    Args:
        log_density: ``theta [1, P]`` to the log-density up to a constant, ``[1]``.
        statistic: ``theta [n, P]`` to ``[n, K]``.
        start: Where the chain starts, ``[P]``.
        num_samples: Draws after the warm-up.
        num_warmup: Steps that adapt step size and mass matrix, thrown away.
        seed: Of the chain.

    Returns:
        The mean with its Monte Carlo error.
    """
    mcmc = require("pyro.infer.mcmc", extra="mcmc")
    stats = require("pyro.ops.stats", extra="mcmc")
    validate = torch.distributions.Distribution._validate_args  # importing pyro may change it

    def potential(sites: dict[str, Tensor]) -> Tensor:
        return -log_density(sites["theta"][None])[0]

    with _global_seeds(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = mcmc.NUTS(potential_fn=potential, full_mass=True, target_accept_prob=0.9)
        chain = mcmc.MCMC(
            kernel,
            num_samples=num_samples,
            warmup_steps=num_warmup,
            initial_params={"theta": start.clone()},
            disable_progbar=True,
        )
        chain.run()
        samples = chain.get_samples()["theta"]  # [n, P]
        values = statistic(samples)  # [n, K]
        effective = stats.effective_sample_size(values[:, None], sample_dim=0, chain_dim=1)
    torch.distributions.Distribution.set_default_validate_args(validate)
    stderr = values.std(0) / effective.sqrt()
    divergences = sum(len(d) for d in chain.diagnostics()["divergences"].values())
    return ChainMean(values.mean(0), stderr, samples, divergences)
