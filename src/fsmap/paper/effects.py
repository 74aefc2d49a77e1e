"""One claim about several measured effects: judged by the one that supports it least."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fsmap.paper.report.tables import Mean, mean, with_error
from fsmap.paper.rows import Claim, judge


def judge_all(
    claim: str, effects: Mapping[str, Mean], *, ratio: bool = False, **options: Any
) -> Claim:
    """A claim that holds at every N (or ε, or set): :func:`judge` of the weakest effect.

    Args:
        claim: The statement, in words.
        effects: Mean, standard error and number of seeds by where they were measured; without
            any the claim is not tested.
        ratio: Effects are of :func:`log_ratio`, bounds are factors.
        **options: ``below``, ``above`` or ``within``, ``paper``, ``source``; see :func:`judge`.

    Examples:
        >>> found = {"N = 100": Mean(-0.4, 0.1, 5), "N = 200": Mean(-0.3, 0.02, 5)}
        >>> judge_all("the error falls", found, below=0).ours
        '−0.40 ± 0.10 (N = 100)'
    """
    (kind,) = {"below", "above", "within"} & options.keys()
    if ratio:
        options[kind] = math.log(options[kind])
    bound = options[kind]
    effects = {place: effect for place, effect in effects.items() if effect.n}
    if not effects:
        return judge(claim, math.nan, math.nan, 0, **options)

    def support(effect: Mean) -> float:
        """By how many standard errors the effect is on the right side of its bound."""
        lead = {
            "below": bound - effect.mean,
            "above": effect.mean - bound,
            "within": bound - abs(effect.mean),
        }[kind]
        if not math.isfinite(lead):
            return -math.inf
        if math.isnan(effect.stderr):
            return 0.0
        return lead / effect.stderr if effect.stderr else math.copysign(math.inf, lead)

    place, weakest = min(effects.items(), key=lambda item: support(item[1]))
    if ratio:
        factor = math.exp(weakest.mean)
        shown = f"{with_error(factor, factor * weakest.stderr)} times"
    else:
        shown = with_error(weakest.mean, weakest.stderr)
    options.setdefault("ours", f"{shown} ({place})" if place else shown)
    return judge(claim, *weakest, **options)


def log_ratio(one: Mapping[Any, float], other: Mapping[Any, float]) -> Mean:
    """Mean and error of log(one/other) over the keys (seeds) that both have."""
    pairs = [(one[k], other[k]) for k in one if k in other]
    return mean(math.log(a / b) if a > 0 and b > 0 else math.nan for a, b in pairs)


def exact(
    claim: str, holds: bool, ours: Any, paper: Any = None, *, seeds: int, source: Any = "paper"
) -> Claim:
    """A claim about an exact quantity; not tested without ``seeds`` (or other repetitions)."""
    if not seeds:
        return Claim(claim, None, None, paper, seeds=0, source=source, reason="no rows")
    return Claim(claim, bool(holds), ours, paper, seeds=seeds, source=source)
