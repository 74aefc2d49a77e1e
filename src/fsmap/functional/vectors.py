"""Parameters as dicts and as vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.types import Params


def ravel(params: Params) -> Tensor:
    """All parameters as one vector, in the order of the dict."""
    return torch.cat([p.reshape(-1) for p in params.values()])  # [P]


def unravel(vector: Tensor, like: Params) -> Params:
    """A vector cut into the shapes of ``like``; the inverse of :func:`ravel`."""
    total = count(like)
    if vector.shape[-1:] != (total,):
        message = f"a vector of shape {tuple(vector.shape)} does not fill {total} parameters"
        raise InputError(message)
    pieces = vector.split([p.numel() for p in like.values()], dim=-1)
    return {
        n: v.reshape(v.shape[:-1] + p.shape) for (n, p), v in zip(like.items(), pieces, strict=True)
    }


def count(params: Params) -> int:
    """P, the number of parameters."""
    return sum(p.numel() for p in params.values())
