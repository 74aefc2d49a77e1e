r"""Likelihoods: $\log p(y \mid f_\theta(x))$ in nats, summed over the batch, with all constants.

A likelihood is an immutable tuple of its hyper-parameters. ``value`` is pure, differentiable (in
the hyper-parameters too) and vmaps over stacked ones; it branches on shapes, never on numbers.
``check`` tests the numbers once, before training, outside of ``vmap``.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fsmap.errors import InputError
from fsmap.functional import accumulate, check_positive


class Likelihood(Protocol):
    """What the objective needs of a likelihood."""

    def value(self, out: Tensor, y: Tensor) -> Tensor:
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

    def value(self, out: Tensor, y: Tensor) -> Tensor:
        """Log-likelihood of outputs and targets ``[B]``, ``[B, K]`` or ``[B, ..., K]``."""
        out, y = aligned(out, y)  # [B, ..., K]
        std = self._per_output(out)  # [] or [K]
        return (-0.5 * ((y - out) / std).square() - std.log() - LOG_SQRT_2PI).sum()

    def check(self, out: Tensor, y: Tensor) -> None:
        """Raise InputError on wrong shapes, y that is not finite, or ``std <= 0``."""
        check_batch(out, y)
        check_positive("std", self.std)
        self._per_output(aligned(out, y)[0])

    def _per_output(self, out: Tensor) -> Tensor:
        """The scale as ``[]`` or ``[K]`` that fits the last dimension of ``out``."""
        std = tensor_like(self.std, out)
        if std.dim() > 1 or (std.dim() == 1 and std.shape[0] != out.shape[-1]):
            raise InputError(
                f"std has shape {list(std.shape)}, but the model has {out.shape[-1]} output(s). "
                f"Give one number, or a tensor [{out.shape[-1]}]."
            )
        return std


class Categorical(NamedTuple):
    r"""One of K classes, $p(y = k) = \mathrm{softmax}(f)_k$: cross-entropy as a likelihood."""

    def value(self, out: Tensor, y: Tensor) -> Tensor:
        r"""Log-likelihood of a batch.

        ``out`` are logits ``[B, K]`` or ``[B, T, K]``, ``y`` integer labels ``[B]`` or ``[B, T]``,
        or probabilities (floating dtype) of the logits' shape: then $\sum_k y_k \log p_k$.
        """
        check_classes(out, y)
        log_p = accumulate(out).log_softmax(-1)  # [B, ..., K]
        if y.is_floating_point():
            return (y.to(log_p.dtype) * log_p).sum()
        return log_p.gather(-1, y.long().unsqueeze(-1)).sum()

    def check(self, out: Tensor, y: Tensor) -> None:
        """Raise InputError on wrong shapes, labels outside 0..K-1, or improper probabilities."""
        check_classes(out, y)
        check_batch(out, y)
        classes = out.shape[-1]
        if y.is_floating_point():
            total = y.sum(-1)
            if (y < 0).any() or (total - 1).abs().max() > 1e-3:
                raise InputError(
                    "probability targets must be >= 0 and sum to one over the classes, got a "
                    f"minimum of {y.min().item():g} and sums from {total.min().item():g} to "
                    f"{total.max().item():g}. Normalize them, or give integer labels."
                )
        elif y.min() < 0 or y.max() >= classes:
            raise InputError(
                f"labels must lie in 0..{classes - 1} for {classes} logits, got labels from "
                f"{y.min().item()} to {y.max().item()}. Renumber them, widen the last layer, or "
                "drop points whose label only means 'ignore'."
            )


class Bernoulli(NamedTuple):
    r"""Yes or no, $p(y = 1) = \mathrm{sigmoid}(f)$, independent over points and outputs."""

    def value(self, out: Tensor, y: Tensor) -> Tensor:
        r"""Log-likelihood of a batch, $y \log\sigma(f) + (1 - y) \log\sigma(-f)$, y in [0, 1]."""
        out, y = aligned(out, y)
        return (y * F.logsigmoid(out) + (1 - y) * F.logsigmoid(-out)).sum()

    def check(self, out: Tensor, y: Tensor) -> None:
        """Raise InputError on wrong shapes or targets outside [0, 1]."""
        check_batch(out, y)
        aligned(out, y)
        if y.min() < 0 or y.max() > 1:
            raise InputError(
                f"Bernoulli targets must lie in [0, 1], got values from {y.min().item():g} to "
                f"{y.max().item():g}. Map the two classes to 0 and 1."
            )


def aligned(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both as ``[B, ..., K]`` in the working dtype; never broadcasts [B] against [B, 1]."""
    if out.dim() == y.dim() + 1 == 2 and out.shape[1] == 1:
        y = y.unsqueeze(1)
    if y.dim() == out.dim() + 1 == 2 and y.shape[1] == 1:
        out = out.unsqueeze(1)
    if out.shape != y.shape or out.dim() == 0:
        raise InputError(
            f"outputs {list(out.shape)} and targets {list(y.shape)} do not match: they must have "
            "the same shape [B, ...] ([B] and [B, 1] count as the same). Reshape y, or change the "
            "model's last layer."
        )
    out = accumulate(out if out.dim() > 1 else out.unsqueeze(1))
    return out, y.reshape(out.shape).to(out.dtype)


def check_classes(out: Tensor, y: Tensor) -> None:
    """Shapes and dtypes of a classification batch: known without looking at the numbers."""
    if out.dim() < 2 or out.shape[-1] < 2:
        raise InputError(
            f"Categorical needs logits [B, K] or [B, T, K] with K >= 2, got {list(out.shape)}. "
            "For one logit per point use Bernoulli()."
        )
    if y.dtype == torch.bool or y.is_complex():
        raise InputError(
            f"labels have dtype {y.dtype}; allowed are integers (class numbers) or floats "
            "(probabilities). Convert with y.long()."
        )
    expected = out.shape if y.is_floating_point() else out.shape[:-1]
    if y.shape != expected:
        what = "float targets are probabilities" if y.is_floating_point() else "integer targets"
        raise InputError(
            f"{what} of shape {list(y.shape)} do not fit logits {list(out.shape)}: expected "
            f"{list(expected)}. Integer class numbers are [B] or [B, T] (use y.long()), "
            "probabilities have the shape of the logits."
        )


def check_batch(out: Tensor, y: Tensor) -> None:
    """What every likelihood asks of a batch: points, floating outputs, finite targets."""
    if out.numel() == 0 or y.numel() == 0:
        raise InputError(
            f"the batch is empty: outputs {list(out.shape)}, targets {list(y.shape)}. "
            "Give at least one point."
        )
    if not out.is_floating_point():
        raise InputError(
            f"outputs have dtype {out.dtype}; a model must return floating point numbers."
        )
    bad = int((~torch.isfinite(y)).sum())
    if bad:
        raise InputError(
            f"targets hold {bad} values that are nan or infinite (of {y.numel()}). "
            "Remove or impute those points."
        )


LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


def tensor_like(value: float | Tensor, like: Tensor) -> Tensor:
    """A hyper-parameter as a tensor with the dtype and device of ``like``.

    A tensor keeps its graph, so that the scale can be learned or vmapped. A float becomes a 0-dim
    tensor by a fill, not by a copy from the host, so that a CUDA graph can capture it.
    """
    if isinstance(value, Tensor):
        return value.to(dtype=like.dtype, device=like.device)
    return like.new_full((), float(value))
