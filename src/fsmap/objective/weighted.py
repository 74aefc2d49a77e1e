"""Points that count differently: a likelihood whose targets carry their weights with them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.objective.likelihood import Likelihood


class Weighted(NamedTuple):
    r"""A likelihood with a weight per point, $\sum_b w_b \log p(y_b \mid f_b)$.

    A batch is ``(x, y)``, so the weights travel as the last column of ``y``: see :func:`packed`.
    With weights of mean 1 the loss per point keeps its scale, and so do prior and geometry; a point
    of weight 2 counts like two equal points, one of weight 0 like none.

    Attributes:
        likelihood: What each point contributes.
        labels: Whether the targets are integer labels.
    """

    likelihood: Likelihood
    labels: bool = False

    def value(self, out: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Log-likelihood of a batch, in nats.

        Args:
            out: Predictions or logits, ``[B, K]``.
            y: Packed targets, ``[B, K + 1]``.
            weight: Further weights, ``[B]``.

        Returns:
            A 0-dim tensor.
        """
        target, own = unpacked(y, labels=self.labels)
        return self.likelihood.value(out, target, own if weight is None else own * weight)

    def check(self, out: Tensor, y: Tensor) -> None:
        """Raise InputError where the likelihood would, on the targets without their weights."""
        self.likelihood.check(out, unpacked(y, labels=self.labels)[0])


def packed(y: Tensor, weight: Tensor) -> Tensor:
    """Targets with their weights as one floating-point tensor.

    Args:
        y: Numbers ``[N]`` or ``[N, K]``, or integer labels ``[N]`` (exact up to 2^24).
        weight: ``[N]``.

    Returns:
        ``[N, K + 1]``, in the dtype of the weights.
    """
    return torch.cat([y.reshape(len(y), -1).to(weight.dtype), weight[:, None]], dim=1)


def unpacked(y: Tensor, *, labels: bool) -> tuple[Tensor, Tensor]:
    """Undo :func:`packed`.

    Args:
        y: ``[B, K + 1]``.
        labels: Whether the targets are integer labels.

    Returns:
        Targets (``[B]`` for labels, else ``[B, K]``) and weights ``[B]``.
    """
    return (y[:, 0].long() if labels else y[:, :-1]), y[:, -1]
