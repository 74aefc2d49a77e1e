r"""The squashing functions $\sigma$ of basis models, with $\log\sigma'$ exact in the tails."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.errors import InputError


class Squash(NamedTuple):
    r"""An increasing function $\sigma$ and the logarithm of its derivative.

    Attributes:
        name: What messages call it.
        value: $\sigma(\theta)$, element by element.
        log_slope: $\log \sigma'(\theta)$, finite wherever the true value is a finite float.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    log_slope: Callable[[Tensor], Tensor]


def log_sech_squared(theta: Tensor) -> Tensor:
    r"""$\log \tanh'(\theta) = \log \mathrm{sech}^2\theta$, exact in the tails.

    With $2\cosh\theta = e^\theta + e^{-\theta}$ nothing overflows, and autograd's derivative
    is $-2\tanh\theta$ to an absolute error of one rounding.

    Args:
        theta: Any shape.

    Returns:
        The same shape; about $2\log 2 - 2|\theta|$ for large $|\theta|$.

    Examples:
        >>> log_sech_squared(torch.tensor([0.0, 30.0, -2000.0], dtype=torch.float64)).tolist()
        [0.0, -58.61370563888011, -3998.61370563888]
    """
    return 2 * math.log(2) - 2 * torch.logaddexp(theta, -theta)


TANH = Squash("tanh", torch.tanh, log_sech_squared)
EXP = Squash("exp", torch.exp, lambda theta: theta)
IDENTITY = Squash("identity", lambda theta: theta, torch.zeros_like)
SQUASHES = {squash.name: squash for squash in (TANH, EXP, IDENTITY)}

SquashLike = str | Squash | Callable[[Tensor], Tensor]
"""A name, torch's function, or a :class:`Squash`."""


def find_squash(squash: SquashLike) -> Squash:
    """Look a squashing function up by its name or by torch's function.

    Args:
        squash: ``"tanh"``, ``"exp"``, ``"identity"``, ``torch.tanh``, ``torch.exp``, or a
            :class:`Squash` of your own.

    Returns:
        The function with the logarithm of its slope.

    Raises:
        InputError: If the name is not known.
    """
    if isinstance(squash, Squash):
        return squash
    for known in SQUASHES.values():
        if squash in (known.name, known.value):
            return known
    message = (
        f"squash must be one of {', '.join(map(repr, SQUASHES))} or a Squash, got {squash!r}. "
        "For another increasing function give Squash(name, value, log_slope)."
    )
    raise InputError(message)
