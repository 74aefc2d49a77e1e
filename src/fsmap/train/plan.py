"""Sizes of a network for a table, by the number of its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fsmap.errors import InputError


class Plan(NamedTuple):
    """How a network for a table is built and trained."""

    hidden: tuple[int, ...]
    steps: int
    batch_size: int
    num_points: int  # S
    lr: float
    patience: int | None  # validations without a new best


def plan(
    num_data: int,
    method: str = "l-map",
    *,
    hidden: Sequence[int] | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    num_points: int | None = None,
    lr: float | None = None,
    patience: int | None = 15,
) -> Plan:
    """Sizes for N training rows; None is decided here.

    More rows get a wider network, larger batches and more steps, so that a search takes seconds for
    hundreds of rows and minutes for tens of thousands on two cores.

    Args:
        num_data: N.
        method: FS-MAP takes fewer evaluation points: its cost grows with their square.
        hidden: Units of the hidden layers.
        steps: Of the optimizer.
        batch_size: B.
        num_points: S.
        lr: Adam's learning rate, which falls to zero along a cosine.
        patience: Validations (there are 50) without a new best after which a run has ended.

    Returns:
        The plan.

    Raises:
        InputError: If a number is not positive.

    Examples:
        >>> plan(400).hidden, plan(400).batch_size, plan(400).steps
        ((64, 64), 64, 693)
        >>> plan(40_000).hidden, plan(40_000).batch_size, plan(40_000).steps
        ((128, 128), 512, 4373)
    """
    given = {
        "steps": steps,
        "batch_size": batch_size,
        "num_points": num_points,
        "patience": patience,
    }
    for name, count in given.items():
        if count is not None and count < 1:
            message = f"{name} must be at least 1, got {count}. Left out, it goes by the rows."
            raise InputError(message)
    if lr is not None and not 0 < lr < math.inf:
        message = f"the learning rate must be positive and finite, got {lr:g}"
        raise InputError(message)
    if hidden is not None and min(hidden, default=1) < 1:
        message = f"hidden layers have at least 1 unit each, got {tuple(hidden)}"
        raise InputError(message)
    width = 64 if num_data < 2_000 else 128
    usual = 2 ** round(math.log2(max(num_data, 8) / 8))
    return Plan(
        tuple(hidden) if hidden is not None else (width, width),
        steps or round(min(max(300, 1_000 * (num_data / 1_000) ** 0.4), 5_000)),
        min(batch_size or min(max(usual, 32), 512), num_data),
        num_points or (32 if method == "fs-map" else 64),
        lr or 3e-3,
        patience,
    )
