"""Precision of values, and looking at them where that is possible.

Inside ``vmap`` a tensor has many values, while a CUDA graph is captured none.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def number(tensor: Tensor) -> float | None:
    """The value of a 0-dimensional tensor, or None where it has not one."""
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


def accumulate(tensor: Tensor) -> Tensor:
    """The tensor in at least single precision, for sums of squares."""
    return tensor.to(wide(tensor.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of :func:`accumulate`."""
    return torch.float32 if dtype in HALF else dtype
