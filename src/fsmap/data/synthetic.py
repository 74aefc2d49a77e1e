"""Data sets that are drawn, not read: every one from a generator, in the generator's order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsmap.errors import InputError, require
from fsmap.types import Batch

Function = Callable[[Tensor], Tensor]


def regression(
    f: Function,
    num_points: int,
    *,
    generator: torch.Generator,
    noise_std: float = 0.0,
    low: float = -1.0,
    high: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Batch:
    """Observations ``x [N]``, ``y [N]`` of a function at uniform points in ``low`` to ``high``.

    The generator draws the points, then the noise; ``noise_std = 0`` gives noiseless targets.
    """
    if num_points < 1 or noise_std < 0:
        raise InputError(
            f"regression data need num_points ≥ 1 and noise_std ≥ 0, got {num_points=} and "
            f"{noise_std=:g}."
        )
    x = low + (high - low) * torch.rand(num_points, generator=generator, dtype=dtype)
    noise = torch.randn(num_points, generator=generator, dtype=dtype)
    return Batch(x, f(x) + noise_std * noise)


def two_bumps(
    *,
    generator: torch.Generator,
    num_left: int = 10,
    noise_std: float = 0.1,
    dtype: torch.dtype | None = None,
) -> Batch:
    """The data of Fig. 1: a well observed bump at -0.5, and one point (0.7, 0.1) on the right.

    The ``num_left`` points of the bump have x ~ N(-0.5, 0.2²) and y = exp(-(x + 0.5)²/0.03) +
    noise; the lone point comes last.
    """
    x = -0.5 + 0.2 * torch.randn(num_left, generator=generator, dtype=dtype)
    y = torch.exp(-(x + 0.5).square() / 0.03)
    y = y + noise_std * torch.randn(num_left, generator=generator, dtype=dtype)
    return Batch(torch.cat([x, x.new_tensor([0.7])]), torch.cat([y, y.new_tensor([0.1])]))


def fourier_sum(
    num_frequencies: int, *, generator: torch.Generator, dtype: torch.dtype | None = None
) -> Function:
    r"""A random smooth target, $\sum_i a_i \sin(ix) + b_i \cos(ix)$ with $a_i, b_i \sim N(0, 1)$.

    The frequencies are 1 to ``num_frequencies``; the function takes ``[N]`` to ``[N]``.
    """
    weights = torch.randn(2, num_frequencies, generator=generator, dtype=dtype)
    frequencies = torch.arange(1, num_frequencies + 1, dtype=weights.dtype)

    def f(x: Tensor) -> Tensor:
        angles = x[..., None] * frequencies  # [N, n]
        return angles.sin() @ weights[0] + angles.cos() @ weights[1]

    return f


def moons(*, dtype: torch.dtype | None = None) -> Batch:
    """The paper's two moons: inputs ``x [200, 2]``, labels ``y [200]`` 0 or 1."""
    datasets = require("sklearn.datasets", extra="data")
    x, y = datasets.make_moons(n_samples=200, shuffle=True, noise=0.2, random_state=0)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return Batch(torch.as_tensor(x, dtype=dtype), torch.as_tensor(y, dtype=torch.int64))
