"""Do a model's outputs and the targets fit together? Shapes first, numbers in ``check_batch``."""

from __future__ import annotations

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.objective.hyper import working


def aligned(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both as ``[B, ..., K]`` in the working dtype; never broadcasts [B] against [B, 1]."""
    if out.dim() == y.dim() + 1 == 2 and out.shape[1] == 1:
        y = y.unsqueeze(1)
    if y.dim() == out.dim() + 1 == 2 and y.shape[1] == 1:
        out = out.unsqueeze(1)
    if out.shape != y.shape or out.dim() == 0:
        message = (
            f"outputs {list(out.shape)} and targets {list(y.shape)} do not match: they must have "
            "the same shape [B, ...] ([B] and [B, 1] count as the same). Reshape y, or change the "
            "model's last layer."
        )
        raise InputError(message)
    out = working(out if out.dim() > 1 else out.unsqueeze(1))
    return out, y.reshape(out.shape).to(out.dtype)


def check_classes(out: Tensor, y: Tensor) -> None:
    """Shapes and dtypes of a classification batch: known without looking at the numbers."""
    if out.dim() < 2 or out.shape[-1] < 2:
        message = (
            f"Categorical needs logits [B, K] or [B, T, K] with K >= 2, got {list(out.shape)}. "
            "For one logit per point use Bernoulli()."
        )
        raise InputError(message)
    if y.dtype == torch.bool or y.is_complex():
        message = (
            f"labels have dtype {y.dtype}; allowed are integers (class numbers) or floats "
            "(probabilities). Convert with y.long()."
        )
        raise InputError(message)
    want = out.shape if y.is_floating_point() else out.shape[:-1]
    if y.shape != want:
        what = "float targets are probabilities" if y.is_floating_point() else "integer targets"
        message = (
            f"{what} of shape {list(y.shape)} do not fit logits {list(out.shape)}: expected "
            f"{list(want)}. Integer class numbers are [B] or [B, T] (use y.long()), "
            "probabilities have the shape of the logits."
        )
        raise InputError(message)


def check_batch(out: Tensor, y: Tensor) -> None:
    """What every likelihood asks of a batch: points, floating outputs, finite targets."""
    if out.numel() == 0 or y.numel() == 0:
        message = (
            f"the batch is empty: outputs {list(out.shape)}, targets {list(y.shape)}. "
            "Give at least one point."
        )
        raise InputError(message)
    if not out.is_floating_point():
        message = f"outputs have dtype {out.dtype}; a model must return floating point numbers."
        raise InputError(message)
    bad = int((~torch.isfinite(y)).sum())
    if bad:
        message = (
            f"targets hold {bad} values that are nan or infinite (of {y.numel()}). "
            "Remove or impute those points."
        )
        raise InputError(message)
