r"""Gaussian regression with fixed features needs $A^\top A$, $A^\top y$ and $y^\top y$ only.

With $f = A c$ the residual sum is $c^\top A^\top\!A\,c - 2 c^\top A^\top y + y^\top y$, so that an
optimization of 2,500 steps touches the N points once. Problems (seeds, sizes) are stacked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """What a Gaussian likelihood knows of the data, for Q stacked problems.

    Attributes:
        square: AᵀA, ``[Q, P, P]``.
        cross: Aᵀy, ``[Q, P]``.
        power: yᵀy, ``[Q]``.
        num: N, ``[Q]``.
    """

    square: Tensor
    cross: Tensor
    power: Tensor
    num: Tensor

    @classmethod
    def of(cls, problems: Sequence[tuple[Tensor, Tensor]]) -> Moments:
        """Sum over the points of each problem, once.

        Args:
            problems: Pairs of a design matrix A ``[N, P]`` and targets y ``[N]``; N may differ.

        Returns:
            The stacked moments.
        """
        return cls(
            torch.stack([a.mT @ a for a, _ in problems]),
            torch.stack([a.mT @ y for a, y in problems]),
            torch.stack([y @ y for _, y in problems]),
            torch.stack([y.new_tensor(len(y)) for _, y in problems]),
        )

    def residual_sum(self, coefficients: Tensor) -> Tensor:
        """Sum of squared residuals ‖Ac − y‖².

        Args:
            coefficients: c, ``[..., Q, P]``.

        Returns:
            ``[..., Q]``.
        """
        pulled = torch.einsum("...qp,qpr->...qr", coefficients, self.square)  # AᵀA c
        return (coefficients * (pulled - self.cross - self.cross)).sum(-1) + self.power

    def log_likelihood(self, coefficients: Tensor, noise_std: float | Tensor) -> Tensor:
        r"""$\log p(y \mid f)$ in nats, constants included.

        Args:
            coefficients: c, ``[..., Q, P]``.
            noise_std: σ, a number or ``[..., Q]``.

        Returns:
            ``[..., Q]``.
        """
        std = torch.as_tensor(noise_std, dtype=self.power.dtype, device=self.power.device)
        constant = self.num * (std.log() + 0.5 * math.log(2 * math.pi))
        return -self.residual_sum(coefficients) / (2 * std.square()) - constant
