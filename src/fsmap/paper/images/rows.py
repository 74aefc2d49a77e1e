"""The rows of ``image-table`` as kinds of runs; figures take their PS-MAP and L-MAP from here."""

from __future__ import annotations

from fsmap.errors import InputError
from fsmap.paper.images.config import BASELINES, ROWS
from fsmap.paper.images.protocol import Kind

SMOOTHING = 0.05
"""Of the label-smoothing baseline."""

SAM_RADIUS = 0.05
"""ρ of sharpness-aware minimization, as its authors have it for CIFAR-10."""


def kind_of(name: str) -> Kind:
    """A row of the table as a kind of run.

    Args:
        name: The row.

    Returns:
        The kind.

    Raises:
        InputError: If there is no such row.
    """
    if name == "ps-map":
        return Kind(name, "ps-map")
    if name == "label-smoothing":
        return Kind(name, name, changes={"label_smoothing": SMOOTHING})
    if name == "sam":
        return Kind(name, name, changes={"sam": SAM_RADIUS})
    if name in ROWS:
        return Kind(name, px=name)
    message = f"no row {name!r}; there are {', '.join((*ROWS, *BASELINES))}"
    raise InputError(message)
