r"""How large ε should be, and what an ε does, from the eigenvalues of 𝒥.

* **Exact FS-MAP.** At a fixed point of a symmetry the objective has a well of depth $\tfrac12 d
  \log(\lambda/\epsilon)$ for d eigenvalues that fall from λ to zero: the larger ε, the shallower.
  But ε must not touch the eigenvalues that carry the geometry. So ε is a tenth of the eigenvalue
  below which only a tenth of the non-zero ones lie: for nine in ten, log(λ + ε) is within 0.1 nats
  of log λ. It is never below ten times the rounding noise of the zero eigenvalues.
* **L-MAP.** $\log(1 + \lambda/\epsilon) \approx \lambda/\epsilon$ overstates by at most λ_max/(2ε):
  ε = 10 λ_max keeps the first-order form within 5 %.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fsmap.assess.spectrum import Spectrum

NOISE = 10  # times rounding, at least
BULK = (
    0.1  # share of the non-zero eigenvalues that ε may touch, and ε over the smallest of the rest
)
FIRST_ORDER = 10  # times the largest eigenvalue, for L-MAP
VALID = 0.1  # relative error up to which the first-order form is called valid


class JitterRow(NamedTuple):
    """What one ε does."""

    name: str  # "given", "fs-map" or "l-map": where it comes from
    jitter: float
    ratio: float  # λ_max/ε
    effective: float | None  # Σ λ/(λ+ε), the parameters that count
    log_det: float | None  # log det(I + 𝒥/ε), nats
    first_order: float | None  # Tr 𝒥/ε, nats
    error: float | None  # of the latter, relative
    error_bound: float  # from λ_max alone
    lam: float | None  # λ = 1/(2εN), where N was given


def rounding(spectrum: Spectrum, dtype: torch.dtype) -> float:
    """Size of eigenvalues that are zero in exact arithmetic, with a Jacobian in ``dtype``."""
    largest = float(spectrum.largest.value.abs())
    double = spectrum.parameters * torch.finfo(torch.float64).eps
    single = spectrum.rows * torch.finfo(dtype).eps ** 2
    return max(double, single) * largest


def recommended(spectrum: Spectrum, dtype: torch.dtype) -> dict[str, float]:
    """ε for exact FS-MAP, where the small eigenvalues are known, and for L-MAP.

    Args:
        spectrum: Eigenvalues.
        dtype: What the model will be evaluated in.

    Returns:
        By method; empty if 𝒥 is zero.
    """
    upper = float(spectrum.largest.value.abs() + spectrum.largest.stderr)
    if not upper > 0:
        return {}
    advice = {"l-map": _round(FIRST_ORDER * upper, up=True)}
    if spectrum.eigenvalues is not None:
        alive = spectrum.eigenvalues.abs()
        alive = alive[alive > spectrum.floor]
        low = float(alive.quantile(BULK)) if len(alive) < 10**7 else float(alive.min())
        advice["fs-map"] = _round(max(NOISE * rounding(spectrum, dtype), BULK * low), up=False)
    return dict(sorted(advice.items()))


def row(spectrum: Spectrum, name: str, jitter: float, num_data: int | None) -> JitterRow:
    """What one ε does.

    Args:
        spectrum: Eigenvalues.
        name: Where the ε comes from.
        jitter: ε.
        num_data: N, for λ.

    Returns:
        The row.
    """
    upper = float(spectrum.largest.value.abs() + spectrum.largest.stderr)
    ratio = upper / jitter
    effective = log_det = first = error = None
    if spectrum.eigenvalues is not None:
        scaled = spectrum.eigenvalues / jitter
        effective = float((scaled / (1 + scaled)).sum())
        first = float(scaled.sum())
        if bool((scaled > -1).all()):
            log_det = float(scaled.log1p().sum())
            error = (first - log_det) / log_det if log_det != 0 else None
    bound = ratio / math.log1p(ratio) - 1 if ratio > 1e-8 else ratio / 2
    lam = None if num_data is None else 1 / (2 * jitter * num_data)
    return JitterRow(name, jitter, ratio, effective, log_det, first, error, bound, lam)


def _round(value: float, *, up: bool) -> float:
    """To one digit, so that it can be said."""
    power = 10.0 ** math.floor(math.log10(value))
    digit = math.ceil(value / power - 1e-9) if up else max(1, math.floor(value / power + 1e-9))
    return float(f"{digit * power:.0e}")
