"""A classifier's numbers before and after temperature scaling, the temperature from other data."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fsmap import metrics

SCALED = "_scaled"
"""Ending of metrics after temperature scaling."""

METRICS = ("accuracy", "selective", "nll", "ece", "brier", f"nll{SCALED}", f"ece{SCALED}")
"""In the order of tables. Accuracy and selective prediction do not change with T."""


class Predictions(NamedTuple):
    """Logits and labels of one part of the data."""

    logits: Tensor  # [N, K]
    y: Tensor  # [N]


def measure(test: Predictions, temperature: float | None) -> dict[str, float]:
    """All metrics of a set.

    The temperature must come from held-out data: one fitted on the same points would flatter.
    Selective prediction ranks by entropy, which temperature changes a little; the unscaled value is
    the paper's.

    Args:
        test: Logits and labels.
        temperature: T of held-out data; None where there are none: nothing is scaled.

    Returns:
        Values by name, fractions in [0, 1], NLL in nats.
    """
    logits, y = test
    found = {
        "accuracy": metrics.accuracy(logits, y),
        "selective": metrics.selective_accuracy(logits, y),
        "nll": metrics.nll(logits, y),
        "ece": metrics.ece(logits, y),
        "brier": metrics.brier(logits, y),
    }
    if temperature is not None:
        scaled = logits.double() / temperature
        found[f"nll{SCALED}"] = metrics.nll(scaled, y)
        found[f"ece{SCALED}"] = metrics.ece(scaled, y)
        found[f"brier{SCALED}"] = metrics.brier(scaled, y)
    return found
