"""Types that several modules use, and the letters of their dimensions.

N training points, B batch, S evaluation points, K outputs per point (trailing output dimensions
flattened), P trainable parameters, R probes, M members.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

Params = dict[str, Tensor]
"""Trainable parameters, keyed as in ``named_parameters()``."""

Inputs = Any
"""A tensor ``[S, ...]``, or a dict or tuple of tensors that share their first dimension."""

ModelFn = Callable[[Params, Inputs], Tensor]
"""``f(params, x)``: a pure function; the first dimension of its output is the point."""


class Batch(NamedTuple):
    """Training points."""

    x: Inputs  # [B, ...]
    y: Tensor  # [B, ...]


class Draws(NamedTuple):
    """The random numbers of one evaluation of a geometry term."""

    x: Inputs = None  # [S, ...]  evaluation points
    psi: Params | Tensor | None = None  # probes: {name: [R, ...]}, or signs [R, ...]


class Estimate(NamedTuple):
    """A number and its standard error: zero for exact values, nan if there was one probe."""

    value: Tensor  # []
    stderr: Tensor  # []
