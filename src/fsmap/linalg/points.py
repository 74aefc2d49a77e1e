"""Evaluation points: a tensor, or a dict or tuple of tensors that share their first dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fsmap.errors import InputError
from fsmap.types import Inputs


def count(x: Inputs) -> int:
    """S, the number of points."""
    return int(_tensors(x)[0].shape[0])


def check(x: Inputs) -> None:
    """Refuse points that no function can be evaluated at.

    Args:
        x: Evaluation points.

    Raises:
        InputError: If ``x`` is empty, has NaN or inf, or its tensors disagree about S.
    """
    leaves = _tensors(x)
    if any(leaf.ndim == 0 for leaf in leaves):
        message = (
            "x needs a first dimension for the points, got a 0-dimensional tensor. Use x[None]."
        )
        raise InputError(message)
    sizes = {int(leaf.shape[0]) for leaf in leaves}
    if len(sizes) > 1:
        message = f"the tensors of x must share their first dimension, got {sorted(sizes)}"
        raise InputError(message)
    if any(leaf.numel() == 0 for leaf in leaves):
        found = [tuple(leaf.shape) for leaf in leaves]
        message = f"x is empty: shapes {found}. At least one evaluation point is needed."
        raise InputError(message)
    for leaf in leaves:
        if leaf.is_floating_point() and not torch.isfinite(leaf).all():
            bad = (~torch.isfinite(leaf)).reshape(leaf.shape[0], -1).any(1).nonzero().flatten()
            shown = ", ".join(str(i) for i in bad[:5].tolist())
            message = (
                f"x has NaN or inf in {len(bad)} of {len(leaf)} points (first: {shown}). "
                "Remove or impute them."
            )
            raise InputError(message)


def concat(a: Inputs, b: Inputs) -> Inputs:
    """Points of ``a`` followed by points of ``b``, in ``a``'s dtype and on its device.

    Args:
        a: Points.
        b: Points of the same kind.

    Returns:
        All of them.

    Raises:
        InputError: If they are not of one kind.
    """
    try:
        return tree_map(lambda s, t: torch.cat([s, t.to(s)]), a, b)
    except (RuntimeError, ValueError, AttributeError) as error:
        message = f"points of shape {shapes(a)} and {shapes(b)} cannot be one batch: {error}"
        raise InputError(message) from error


def shapes(x: Inputs) -> str:
    """The shapes of the points, for messages."""
    if isinstance(x, Tensor):
        return str(tuple(x.shape))
    return str(tree_map(lambda t: tuple(t.shape) if isinstance(t, Tensor) else t, x))


def take(x: Inputs, rows: slice | Tensor) -> Inputs:
    """Some of the points."""
    return tree_map(lambda t: t[rows], x)


def to(x: Inputs, *, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Points on a device; floating-point leaves in ``dtype``, others as they are."""
    wait = device.type != "cuda"  # copies to the device are in order there

    def move(t: Tensor) -> Tensor:
        kept = dtype if t.is_floating_point() else t.dtype
        return t.to(device, kept, non_blocking=not wait)

    return tree_map(move, x)


def _tensors(x: Inputs) -> list[Tensor]:
    leaves: list[Any] = tree_leaves(x)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves}) or [type(x).__name__]
        message = f"x must be a tensor, or a dict or tuple of tensors, got {', '.join(kinds)}"
        raise InputError(message)
    return leaves
