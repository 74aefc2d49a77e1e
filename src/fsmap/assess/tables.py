"""How good a model of a table is on new rows: error, calibration, and beside another model."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsmap import metrics
from fsmap.data.target import REGRESSION, Target

COVER = 0.9  # of the intervals that regression reports
LEVELS = np.linspace(0.05, 0.95, 19)


class Spread(NamedTuple):
    """How far held-out targets lie from their predictions, in the unit of the target."""

    noise_std: float
    margin: float  # a 90 % interval is prediction ± this
    errors: list[float]  # sorted absolute residuals


def spread(out: Tensor, y: Tensor, target: Target) -> Spread:
    """Learn the spread from validation rows.

    The margin is the conformal one: the ⌈0.9 (n + 1)⌉-th smallest absolute residual, which covers
    nine of ten new rows whatever the noise looks like.

    Args:
        out: Standardized predictions ``[n, 1]``.
        y: Standardized targets ``[n, 1]``.
        target: The unit.

    Returns:
        The spread.
    """
    errors = (target.std * (out - y).abs()[:, 0].double()).sort().values
    return Spread(
        float(errors.square().mean().sqrt()), margin(errors.numpy(), COVER), errors.tolist()
    )


def margin(errors: np.ndarray, level: float) -> float:
    """The absolute residual that a share ``level`` of new rows stays below."""
    rank = min(math.ceil(level * (len(errors) + 1)), len(errors))
    return float(errors[rank - 1])


def regression(out: Tensor, y: Tensor, target: Target, held: Spread) -> dict[str, float]:
    """Numbers of a regression on test rows.

    Args:
        out: Standardized predictions ``[n, 1]``.
        y: Standardized targets ``[n, 1]``.
        target: The unit.
        held: Spread of the validation rows.

    Returns:
        ``rmse`` and ``mae`` in the target's unit, ``r2``, ``nll`` (nats, Gaussian noise of the
        validation rows' size) and ``coverage`` of the 90 % intervals.
    """
    error = target.std * (out - y)[:, 0].double()
    sigma = max(held.noise_std, 1e-12)
    nll = 0.5 * (error / sigma).square() + math.log(sigma) + 0.5 * math.log(2 * math.pi)
    return {
        "rmse": float(error.square().mean().sqrt()),
        "mae": float(error.abs().mean()),
        "r2": float(1 - error.square().mean() / (target.std * y.double()).var(unbiased=False)),
        "nll": float(nll.mean()),
        "coverage": float((error.abs() <= held.margin).double().mean()),
    }


def coverage_curve(out: Tensor, y: Tensor, target: Target, held: Spread) -> list[float]:
    """The share of test rows inside the intervals of each of ``LEVELS``."""
    error = (target.std * (out - y)[:, 0].double()).abs().numpy()
    return [float((error <= margin(np.array(held.errors), p)).mean()) for p in LEVELS]


def classification(out: Tensor, y: Tensor) -> dict[str, float]:
    """Numbers of a classification on test rows.

    Args:
        out: Logits ``[n, K]``.
        y: Labels ``[n]``.

    Returns:
        ``accuracy``, ``nll``, ``brier``, ``ece`` and ``temperature`` (1: neither over- nor
        under-confident).
    """
    return {
        "accuracy": metrics.accuracy(out, y),
        "nll": metrics.nll(out, y),
        "brier": metrics.brier(out, y),
        "ece": metrics.ece(out, y),
        "temperature": metrics.temperature(out, y),
    }


class Difference(NamedTuple):
    """Mean difference of the loss per row between two models, and its standard error."""

    mean: float
    stderr: float

    @property
    def clear(self) -> bool:
        """Whether it is more than two standard errors."""
        return abs(self.mean) > 2 * self.stderr


def difference(first: Tensor, second: Tensor, y: Tensor, target: Target) -> Difference:
    """Compare two models row by row: squared errors (standardized) or log losses.

    Args:
        first: Outputs of one model.
        second: Outputs of the other.
        y: Targets or labels.
        target: Which of the two.

    Returns:
        First minus second: negative where the first is better.
    """
    if target.task == REGRESSION:
        rows = ((first - y).square() - (second - y).square())[:, 0].double()
    else:
        loss = torch.nn.functional.cross_entropy
        rows = loss(first, y, reduction="none") - loss(second, y, reduction="none")
    return Difference(float(rows.mean()), float(rows.std() / math.sqrt(len(rows))))
