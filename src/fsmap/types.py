"""The values that travel between modules, and the letters that name their dimensions.

N training points, B batch, S evaluation points, K outputs per point (trailing output dimensions
flattened), P trainable parameters, R probes, M members.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.errors import InputError

Params = dict[str, Tensor]
"""Trainable parameters, keyed as in ``named_parameters()``."""

Inputs = Any
"""A tensor ``[S, ...]``, or a dict or tuple of tensors that share their first dimension."""

ModelFn = Callable[[Params, Inputs], Tensor]
"""``f(params, x)``: a pure function; the first dimension of what it returns is the point."""


class Batch(NamedTuple):
    """Training points."""

    x: Inputs  # [B, ...]
    y: Tensor  # [B, ...]


class Draws(NamedTuple):
    """Everything random that one evaluation of a geometry term consumes."""

    x: Inputs = None  # [S, ...]  evaluation points
    psi: Params | Tensor | None = None  # probes: {name: [R, ...]}, or signs [R, ...]


class Estimate(NamedTuple):
    """A number and how sure it is.

    ``stderr`` is zero for exact values and nan where one probe cannot tell.
    """

    value: Tensor  # []
    stderr: Tensor  # []


def as_device(name: str | torch.device) -> torch.device:
    """A device by name, such as ``"cuda:1"``; ``"auto"`` is CUDA if there is one.

    Raises:
        InputError: If torch has no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"unknown device {name!r}: there are auto, cpu, cuda, cuda:1 …") from error
    own = torch.accelerator.current_accelerator(check_available=True)
    if device.type != "cpu" and (own is None or device.type != own.type):
        raise InputError(f"torch sees no {device.type.upper()} device here. Use device cpu.")
    if device.type != "cpu" and (device.index or 0) >= torch.accelerator.device_count():
        raise InputError(
            f"device {name}: torch sees {torch.accelerator.device_count()} of them here"
        )
    return device
