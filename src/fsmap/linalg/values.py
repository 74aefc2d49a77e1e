"""Looking at values, where that is possible: inside ``vmap`` a tensor has many, in a CUDA graph none."""

from __future__ import annotations

import torch
from torch import Tensor


def number(tensor: Tensor) -> float | None:
    """The value of a 0-dimensional tensor, or None inside ``vmap`` and while a CUDA graph is captured."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    try:
        return float(tensor.detach())
    except RuntimeError:  # what torch raises for .item() on a tensor that vmap has batched
        return None


def holds(condition: Tensor, *, otherwise: bool) -> bool:
    """Whether a condition holds, or ``otherwise`` where that cannot be asked."""
    value = number(condition)
    return otherwise if value is None else bool(value)
