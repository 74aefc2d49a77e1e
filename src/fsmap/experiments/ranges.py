"""What values a field of a config may take: read off its type, its name and its default.

- A whole number counts something: at least 1. Another number whose default is positive is a
  scale: positive.
- Zero is allowed where the default has one, and where it means "none of it": ``ZERO_IS_NONE``.
- A field with a negative default may be anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

ZERO_IS_NONE = frozenset(
    ("warmup", "chain_warmup", "decays", "reg_strength", "strengths")
    + ("fmnist_weight_decay", "cifar10_weight_decay")
)
"""Names, in any config, whose zero switches something off."""

LARGEST = 1e12


def check_range(field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a number that a field cannot mean.

    Args:
        field: A field of a config, with a default.
        value: A number or a tuple of numbers; anything else passes.

    Raises:
        ValueError: If a number is out of range.
    """
    if value == () and field.default != ():
        message = "It needs at least one value."
        raise ValueError(message)
    default = field.default if isinstance(field.default, tuple) else (field.default,)
    usual = [number for number in default if _is_number(number)]
    zero = 0 in usual or field.name in ZERO_IS_NONE
    for number in value if isinstance(value, tuple) else (value,):
        if not _is_number(number):
            continue
        if not abs(number) <= LARGEST:
            message = f"Write a finite number. At most {LARGEST:g} is allowed."
            raise ValueError(message)
        counts = isinstance(number, int)
        free = min(usual, default=0) < 0 or not (usual or counts)
        if free or number > 0 or (number == 0 and zero):
            continue
        bound = "at least 0" if zero else "at least 1" if counts else "positive"
        message = f"It must be {bound}."
        raise ValueError(message)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
