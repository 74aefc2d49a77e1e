"""Metrics of predictions: arrays or tensors in, a float out; no gradients, float64 throughout.

Classifiers are given by their logits ``[N, K]`` (or ``[N, T, K]``, every position a point) and
labels ``[N]``. Fractions are in [0, 1], not percent. A classifier with one logit z per point has
the logits ``(0, z)``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.functional import aligned

ArrayLike = Tensor | npt.ArrayLike
Floats = npt.NDArray[np.float64]

# Kept per mille of the points: 100, 99, ..., 1 and 0.1 percent.
COVERAGES = np.array([1, *range(10, 1001, 10)])
TEMPERATURES = (1e-2, 1e2)  # bounds of a temperature


class Reliability(NamedTuple):
    """Confidence against accuracy in equal-width bins of confidence; nan in empty bins."""

    confidence: Floats  # [bins]  mean confidence
    accuracy: Floats  # [bins]
    count: npt.NDArray[np.int64]  # type: ignore[assignment]  # [bins]; hides tuple.count


class SelectiveCurve(NamedTuple):
    """Accuracy among the most confident points, by the share of points that are kept."""

    coverage: Floats  # [101]  0.001, 0.01, ..., 1
    accuracy: Floats  # [101]


def accuracy(logits: ArrayLike, y: ArrayLike) -> float:
    """Fraction of points whose largest logit is the label's (the first of equal ones counts)."""
    z, labels = _classified(logits, y)
    return float((z.argmax(1) == labels).double().mean())


def nll(logits: ArrayLike, y: ArrayLike) -> float:
    r"""Mean negative log-likelihood $-\frac1N \sum_n \log p_n(y_n)$, in nats."""
    z, labels = _classified(logits, y)
    return float(torch.nn.functional.cross_entropy(z, labels))


def brier(logits: ArrayLike, y: ArrayLike) -> float:
    r"""Brier score $\frac1N \sum_n \sum_k (p_{nk} - [y_n = k])^2$, in [0, 2]."""
    z, labels = _classified(logits, y)
    hit = torch.nn.functional.one_hot(labels, z.shape[1])
    return float((z.softmax(1) - hit).square().sum(1).mean())


def rmse(pred: ArrayLike, y: ArrayLike) -> float:
    """Root of the mean squared error over all points and outputs; [N] and [N, 1] are the same."""
    a, b = aligned(_floats("pred", pred), _floats("y", y))
    return math.sqrt(float((a - b).square().mean()))


def reliability(logits: ArrayLike, y: ArrayLike, bins: int = 10) -> Reliability:
    """Points sorted into bins ((i-1)/bins, i/bins] by confidence, the largest probability."""
    if bins < 1 or bins != int(bins):
        raise InputError(f"bins must be an integer of at least 1, got {bins}.")
    z, labels = _classified(logits, y)
    confidence, guess = z.softmax(1).max(1)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    place = (torch.bucketize(confidence, edges) - 1).clamp(0, bins - 1)  # [N]
    count = place.bincount(minlength=bins)
    total = place.bincount(confidence, minlength=bins)
    right = place.bincount((guess == labels).double(), minlength=bins)
    return Reliability((total / count).numpy(), (right / count).numpy(), count.numpy())


def ece(logits: ArrayLike, y: ArrayLike, bins: int = 10) -> float:
    r"""Expected calibration error $\sum_b \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|$."""
    table = reliability(logits, y, bins)
    gap = np.nan_to_num(np.abs(table.accuracy - table.confidence))
    return float((table.count * gap).sum() / table.count.sum())


def selective_accuracy(logits: ArrayLike, y: ArrayLike) -> float:
    r"""Area under the accuracy of the most confident q percent, over q; in [0, 1].

    Points are ranked by predictive entropy $-\sum_k p_k \log p_k$. For q = 100, 99, ..., 1, 0.1 the
    points with an entropy of at most the q-th percentile are kept (equal ones together, so that the
    order of the points does not matter), and a(q) is their accuracy. The result is the trapezoid
    rule's $\int a(q)\, dq / 99.9$: one for a classifier without errors, the plain accuracy for one
    whose confidence says nothing.

    DEVIATION: the authors' code does not divide, so that a perfect classifier has 99.9; a value v
    of the paper's Sel. Pred. columns is v/99.9 here. Their entropy has a 1e-6 inside the logarithm.
    """
    curve = selective_curve(logits, y)
    span = curve.coverage[-1] - curve.coverage[0]
    return float(np.trapezoid(curve.accuracy, curve.coverage) / span)


def selective_curve(logits: ArrayLike, y: ArrayLike) -> SelectiveCurve:
    """The curve of :func:`selective_accuracy`, coverages in increasing order."""
    z, labels = _classified(logits, y)
    uncertain, order = _entropy(z).sort()
    right = (z.argmax(1) == labels)[order].double().cumsum(0)  # [N]  hits among the first ones
    last = torch.from_numpy((len(z) - 1) * COVERAGES // 1000)  # floor of the percentile's position
    kept = torch.searchsorted(uncertain, uncertain[last], right=True)  # with all that are equal
    return SelectiveCurve(COVERAGES / 1000, (right[kept - 1] / kept).numpy())


def ood_auroc(logits_in: ArrayLike, logits_out: ArrayLike) -> float:
    """Area under the ROC curve of out-of-distribution detection by predictive entropy.

    The probability that a point of ``logits_out`` has a larger entropy than one of ``logits_in``
    (one half for ties).
    """
    inside, outside = _logits(logits_in).flatten(0, -2), _logits(logits_out).flatten(0, -2)
    if inside.shape[1] != outside.shape[1]:
        found = f"logits_in has {inside.shape[1]} classes and logits_out {outside.shape[1]}"
        raise InputError(f"{found}. Both must come from one model.")
    low, high = _entropy(inside).sort().values, _entropy(outside)
    below = torch.searchsorted(low, high) + torch.searchsorted(low, high, right=True)  # [M]
    return float(below.double().mean() / (2 * len(low)))


def temperature(logits: ArrayLike, y: ArrayLike) -> float:
    r"""The T in [0.01, 100] that minimizes the negative log-likelihood of logits/T.

    T > 1 says that the model is over-confident, T < 1 that it is under-confident. The NLL is convex
    in 1/T with slope $\frac1N \sum_n (\sum_k p_{nk} z_{nk} - z_{n y_n})$, whose zero is found by
    bisection. Without one the better bound is returned: the lower for a classifier without errors
    on these points, the upper for logits that are worse than none. Logits that are equal in every
    point have T = 1.
    """
    z, labels = _classified(logits, y)
    margin = z - z.gather(1, labels[:, None])  # [N, K]

    def slope(T: float) -> float:
        return float(((margin / T).softmax(1) * margin).sum(1).mean())

    low, high = TEMPERATURES
    if not margin.any():
        return 1.0
    if slope(low) <= 0:
        return low
    if slope(high) >= 0:
        return high
    while high > (1 + 1e-12) * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return math.sqrt(low * high)


def _entropy(z: Tensor) -> Tensor:
    log_p = z.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)  # [N]


def _floats(name: str, values: ArrayLike) -> Tensor:
    """Finite numbers, at least one of them, as float64 on the CPU."""
    tensor = _tensor(name, values).to(torch.float64)
    bad = int((~torch.isfinite(tensor)).sum())
    if bad or not tensor.numel():
        raise InputError(f"{name} holds {tensor.numel()} values, {bad} of them nan or infinite.")
    return tensor


def _tensor(name: str, values: Any) -> Tensor:
    try:
        return torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(values).__name__
        raise InputError(f"{name} must be an array or tensor of numbers, got {kind}.") from error


def _logits(values: ArrayLike) -> Tensor:
    z = _floats("logits", values)
    if z.dim() < 2 or z.shape[-1] < 2:
        hint = "For one logit z per point pass the pair (0, z)."
        raise InputError(f"logits must be [N, K] with K >= 2 classes, got {list(z.shape)}. {hint}")
    return z


def _classified(logits: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
    """Logits ``[N, K]`` and labels ``[N]`` that fit them."""
    z, labels = _logits(logits), _tensor("y", y)
    classes = z.shape[-1]
    if labels.shape != z.shape[:-1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(
            f"y must hold one integer label for each of the points {list(z.shape[:-1])}, got "
            f"{labels.dtype} of shape {list(labels.shape)}."
        )
    if labels.min() < 0 or labels.max() >= classes:
        found = f"{labels.min().item()} to {labels.max().item()}"
        raise InputError(f"labels must lie in 0..{classes - 1} for {classes} logits, got {found}.")
    return z.flatten(0, -2), labels.reshape(-1).long()
