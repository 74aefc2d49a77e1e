r"""Likelihoods: $\log p(y \mid f_\theta(x))$ in nats, summed over the batch, with all constants.

A likelihood is an immutable tuple of its hyper-parameters. ``value`` is pure, differentiable (in
the hyper-parameters too) and vmaps over stacked ones; it branches on shapes, never on numbers.
``check`` looks at the numbers once, before training, outside of ``vmap``.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from fsmap.errors import InputError
from fsmap.objective.hyper import LOG_2, LOG_SQRT_2PI, check_positive, tensor_like, working
from fsmap.objective.targets import aligned, check_batch, check_classes


class Likelihood(Protocol):
    """What the objective needs of a likelihood."""

    def value(self, out: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Sum of ``log p(y | out)`` over the batch, in nats."""

    def check(self, out: Tensor, y: Tensor) -> None:
        """Raise InputError if the outputs and targets do not fit this likelihood."""


class Gaussian(NamedTuple):
    r"""Gaussian noise, $y = f(x) + \mathcal{N}(0, \sigma^2)$, independent over points and outputs.

    $\log p = -\sum_{b,k} [(y_{bk} - f_{bk})^2 / 2\sigma_k^2 + \log\sigma_k + \log\sqrt{2\pi}]$

    Attributes:
        std: $\sigma$: one number for all outputs, or a tensor ``[K]`` with one per output.
    """

    std: float | Tensor

    def value(self, out: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Log-likelihood of a batch.

        Args:
            out: Predictions, ``[B]``, ``[B, K]`` or ``[B, ..., K]``.
            y: Targets of the same shape; ``[B]`` and ``[B, 1]`` are the same thing.
            weight: Optional weights of the points, ``[B]``.

        Returns:
            A 0-dim tensor, in nats.
        """
        out, y = aligned(out, y)  # [B, ..., K]
        std = _per_output("std", self.std, out)  # [] or [K]
        log_p = -0.5 * ((y - out) / std).square() - std.log() - LOG_SQRT_2PI
        return _total(log_p, weight)

    def check(self, out: Tensor, y: Tensor) -> None:
        """Raise InputError on wrong shapes, y that is not finite, or ``std <= 0``."""
        _check_regression("std", self.std, out, y)


class LaplaceNoise(NamedTuple):
    r"""Laplace noise: the mean absolute error as a likelihood.

    $\log p = -\sum_{b,k} [|y_{bk} - f_{bk}| / s_k + \log 2 s_k]$

    Attributes:
        scale: $s$ (standard deviation $\sqrt 2 s$): one number, or a tensor ``[K]``.
    """

    scale: float | Tensor

    def value(self, out: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Log-likelihood of a batch; shapes as in ``Gaussian.value``."""
        out, y = aligned(out, y)  # [B, ..., K]
        scale = _per_output("scale", self.scale, out)  # [] or [K]
        return _total(-((y - out) / scale).abs() - scale.log() - LOG_2, weight)

    def check(self, out: Tensor, y: Tensor) -> None:
        """Raise InputError on wrong shapes, y that is not finite, or ``scale <= 0``."""
        _check_regression("scale", self.scale, out, y)


class Categorical(NamedTuple):
    r"""One of K classes, $p(y = k) = \mathrm{softmax}(f)_k$: cross-entropy as a likelihood."""

    def value(self, out: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        r"""Log-likelihood of a batch.

        Args:
            out: Logits, ``[B, K]`` or ``[B, T, K]``; classes are the last dimension.
            y: Integer labels ``[B]`` or ``[B, T]``, or probabilities (floating dtype) of the
                logits' shape, for which $\sum_k y_k \log p_k$ is the value.
            weight: Optional weights of the points, ``[B]``.

        Returns:
            A 0-dim tensor, in nats.
        """
        check_classes(out, y)
        log_p = working(out).log_softmax(-1)  # [B, ..., K]
        if y.is_floating_point():
            return _total(y.to(log_p.dtype) * log_p, weight)
        return _total(log_p.gather(-1, y.long().unsqueeze(-1)), weight)

    def check(self, out: Tensor, y: Tensor) -> None:
        """Raise InputError on wrong shapes, labels outside 0..K-1, or improper probabilities.

        Args:
            out: Logits.
            y: Labels or probabilities.

        Raises:
            InputError: With what came, what is allowed and what to do.
        """
        check_classes(out, y)
        check_batch(out, y)
        classes = out.shape[-1]
        if y.is_floating_point():
            total = y.sum(-1)
            if (y < 0).any() or (total - 1).abs().max() > 1e-3:
                message = (
                    "probability targets must be >= 0 and sum to one over the classes, got a "
                    f"minimum of {y.min().item():g} and sums from {total.min().item():g} to "
                    f"{total.max().item():g}. Normalize them, or give integer labels."
                )
                raise InputError(message)
        elif y.min() < 0 or y.max() >= classes:
            message = (
                f"labels must lie in 0..{classes - 1} for {classes} logits, got labels from "
                f"{y.min().item()} to {y.max().item()}. Renumber them, widen the last layer, or "
                "drop points whose label only means 'ignore'."
            )
            raise InputError(message)


class Bernoulli(NamedTuple):
    r"""Yes or no, $p(y = 1) = \mathrm{sigmoid}(f)$, independent over points and outputs."""

    def value(self, out: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        r"""Log-likelihood of a batch, $y \log\sigma(f) + (1 - y) \log\sigma(-f)$.

        Args:
            out: Logits, ``[B]``, ``[B, K]`` or ``[B, ..., K]``.
            y: Targets in [0, 1] of the same shape; ``[B]`` and ``[B, 1]`` are the same thing.
            weight: Optional weights of the points, ``[B]``.

        Returns:
            A 0-dim tensor, in nats.
        """
        out, y = aligned(out, y)
        return _total(y * F.logsigmoid(out) + (1 - y) * F.logsigmoid(-out), weight)

    def check(self, out: Tensor, y: Tensor) -> None:
        """Raise InputError on wrong shapes or targets outside [0, 1].

        Args:
            out: Logits.
            y: Targets.

        Raises:
            InputError: With what came, what is allowed and what to do.
        """
        check_batch(out, y)
        aligned(out, y)
        if y.min() < 0 or y.max() > 1:
            message = (
                f"Bernoulli targets must lie in [0, 1], got values from {y.min().item():g} to "
                f"{y.max().item():g}. Map the two classes to 0 and 1."
            )
            raise InputError(message)


def _per_output(name: str, value: float | Tensor, out: Tensor) -> Tensor:
    """A scale as ``[]`` or ``[K]`` that fits the last dimension of ``out``."""
    scale = tensor_like(value, out)
    if scale.dim() > 1 or (scale.dim() == 1 and scale.shape[0] != out.shape[-1]):
        message = (
            f"{name} has shape {list(scale.shape)}, but the model has {out.shape[-1]} output(s). "
            f"Give one number, or a tensor [{out.shape[-1]}]."
        )
        raise InputError(message)
    return scale


def _total(log_p: Tensor, weight: Tensor | None) -> Tensor:
    """Sum ``[B, ...]`` over everything, points weighted by ``weight`` [B] if given."""
    if weight is None:
        return log_p.sum()
    if weight.shape != log_p.shape[:1]:
        message = (
            f"weight has shape {list(weight.shape)}, but there are {log_p.shape[0]} points. "
            f"Give one weight per point, [{log_p.shape[0]}]."
        )
        raise InputError(message)
    return (log_p.flatten(1).sum(1) * weight.to(log_p.dtype)).sum()


def _check_regression(name: str, scale: float | Tensor, out: Tensor, y: Tensor) -> None:
    """Shapes, numbers and scale of a regression batch."""
    check_batch(out, y)
    check_positive(name, scale)
    _per_output(name, scale, aligned(out, y)[0])
