"""Hyper-parameters of densities: floats, tensors, or one of them for each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from fsmap.errors import InputError

LOG_2 = math.log(2.0)
LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)

T = TypeVar("T")


def working(tensor: Tensor) -> Tensor:
    """Raise half precision to float32, so that a sum of many log-densities keeps its digits."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def tensor_like(value: float | Tensor, like: Tensor) -> Tensor:
    """A hyper-parameter as a tensor with the dtype and device of ``like``.

    A tensor keeps its graph, so that the scale can be learned or vmapped. A float becomes a 0-dim
    tensor by a fill, not by a copy from the host, so that a CUDA graph can capture it.

    Args:
        value: A number, or a tensor of any shape.
        like: Where the dtype and the device come from.

    Returns:
        A tensor with the shape of ``value``.
    """
    if isinstance(value, Tensor):
        return value.to(dtype=like.dtype, device=like.device)
    return like.new_full((), float(value))


def check_positive(name: str, value: float | Tensor) -> None:
    """Refuse a scale that is not finite and greater than zero.

    Args:
        name: What the message calls it.
        value: A number or a tensor of them.

    Raises:
        InputError: If an entry is zero, negative, infinite or nan.
    """
    scale = torch.as_tensor(value).detach().reshape(-1)
    bad = scale[~(torch.isfinite(scale) & (scale > 0))]
    if len(bad):
        message = (
            f"{name} must be finite and > 0, got {bad[0].item():g} "
            f"({len(bad)} of {len(scale)} entries). Give a positive standard deviation or scale."
        )
        raise InputError(message)


def entry(what: str, table: T | Mapping[str, T], name: str, names: Iterable[str]) -> T:
    """What a table says about one parameter; a value that is no table is for all of them.

    Args:
        what: What the message calls the table.
        table: One value, or a dict from the parameters' names to values.
        name: The parameter.
        names: All parameters, for the message.

    Returns:
        The value for ``name``.

    Raises:
        InputError: If the table lacks the name; lists all that it lacks.
    """
    if not isinstance(table, Mapping):
        return table
    if name not in table:
        missing = [known for known in names if known not in table]
        message = (
            f"{what} has no entry for {missing}; it has {sorted(table)}. Give one entry for each "
            "trainable parameter, named as in named_parameters(), or one value for all."
        )
        raise InputError(message)
    return table[name]
