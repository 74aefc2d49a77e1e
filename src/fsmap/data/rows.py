"""Rows to train on, to choose by, and to test on: three parts, every class in each where it can."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsmap.errors import InputError

Rows = npt.NDArray[np.int64]
FEWEST = 20  # with fewer rows a part would have one or two


class Parts(NamedTuple):
    """Row numbers, ascending; together all rows, each once."""

    train: Rows
    valid: Rows
    test: Rows


def split_rows(
    num_rows: int,
    *,
    valid: float,
    test: float,
    seed: int,
    labels: npt.NDArray[np.int64] | None = None,
) -> Parts:
    """Divide rows at random.

    Args:
        num_rows: N.
        valid: Share of the rows to choose by.
        test: Share of the rows to test on.
        seed: Seed of the division.
        labels: Classes ``[N]``; each is divided by itself, and its odd rows go to training.

    Returns:
        The three parts.

    Raises:
        InputError: If there are too few rows, or the shares leave nothing to train on.
    """
    check_enough(num_rows)
    if not (0 < valid < 1 and 0 < test < 1 and valid + test < 1):
        message = (
            f"the shares of validation and test rows must be positive and leave rows to train on, "
            f"got {valid:g} and {test:g}"
        )
        raise InputError(message)
    generator = np.random.default_rng(seed)
    groups = [np.arange(num_rows)]
    if labels is not None:
        groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    parts: list[list[Rows]] = [[], [], []]
    for group in groups:
        order = generator.permutation(group)
        first, second = round(valid * len(group)), round((valid + test) * len(group))
        for part, rows in zip(
            parts, (order[second:], order[:first], order[first:second]), strict=True
        ):
            part.append(rows)
    train, chosen, held = (np.sort(np.concatenate(part)) for part in parts)
    return Parts(train, chosen, held)


def check_enough(num_rows: int) -> None:
    """Refuse a table that is too short to be divided.

    Args:
        num_rows: N.

    Raises:
        InputError: With how many rows are needed.
    """
    if num_rows < FEWEST:
        message = (
            f"the table has {num_rows} row{'s' if num_rows > 1 else ''}; at least {FEWEST} are "
            "needed to train, to choose the strengths and to test."
        )
        raise InputError(message)
