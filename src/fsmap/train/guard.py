"""The collapse guard: is the model still alive, and what was it like when it last was?

A λ that is too large turns the network into a constant. A constant has its temperature at the
upper end, so a rule that looks at the temperature alone would raise λ further. The guard looks at
what a collapse cannot hide: held-out accuracy (R² in regression) and the variance of the outputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from fsmap.errors import InputError

GOOD, SUSPECT, COLLAPSED = "good", "suspect", "collapsed"

SCORE_SUSPECT, SCORE_COLLAPSED = 0.5, 0.25
"""Shares of the best score above chance: below the first twice, or the second once, is a collapse.

One dip is normal at a large learning rate: running statistics of BatchNorm lag behind.
"""

KEPT = 0.8
"""Share of the best score above chance from which on a state is worth returning to."""

PATIENCE = 3
"""Collapses in a row after which it is not λ: training goes on from where it is."""

LEARNED = 0.05
"""Share of the way from chance to a perfect score after which there is something to lose."""

SPREAD_COLLAPSED = 1e-3
"""Share of the last good outputs' variance below which the outputs are a constant."""


class Health(NamedTuple):
    """How a model does on held-out data.

    Attributes:
        score: Accuracy, or R² = 1 − mean squared error / variance of the targets.
        chance: What a constant prediction would score.
        spread: Variance of the outputs over points, mean over outputs.
    """

    score: float
    chance: float
    spread: float


def health(out: Tensor, y: Tensor) -> Health:
    """Measure it.

    Args:
        out: Outputs ``[N, ...]``; logits ``[N, K]`` for a classifier.
        y: Labels, or targets of the outputs' shape.

    Returns:
        Score, chance and spread; all nan-free where the outputs are finite.

    Raises:
        InputError: If the targets are neither labels nor of the outputs' shape.
    """
    z, target = out.detach().double(), y.detach()
    flat = z.flatten(0, -2) if z.dim() > 1 else z[:, None]  # [N, K]
    if not flat.isfinite().all():
        return Health(-math.inf, 0.0, math.nan)
    variance = float(flat.var(0, correction=0).mean())
    if not target.is_floating_point() and flat.shape[1] > 1:
        labels = target.reshape(-1).long()
        right = float((flat.argmax(1) == labels).double().mean())
        chance = float(labels.bincount().max()) / len(labels)
        return Health(right, chance, _class_spread(flat))
    if target.numel() != z.numel():
        message = (
            f"targets must be integer labels or have the shape of the outputs {list(z.shape)}, got "
            f"{target.dtype} of shape {list(target.shape)}"
        )
        raise InputError(message)
    target = target.double().reshape(flat.shape)
    error = float((flat - target).square().mean())
    scale = float(target.var(0, correction=0).mean())
    return Health(1 - error / scale if scale > 0 else 0.0, 0.0, variance)


def _class_spread(logits: Tensor) -> float:
    """Variance of centred logits: a shift of all logits of a point is no output."""
    centred = logits - logits.mean(1, keepdim=True)
    return float(centred.var(0, correction=0).mean())


class Guard:
    """Judges one observation after another.

    Attributes:
        best: Best score so far.
        learned: Whether the score has ever been clearly above chance.
        spread: Output variance at the last good observation.
        doubts: Observations in a row that were suspect.
        falls: Collapses since the last state that was worth keeping.
        keep: Whether the last observation was of such a state.
    """

    STATE = ("best", "learned", "spread", "doubts", "falls", "keep")

    def __init__(self) -> None:
        self.best = 0.0
        self.learned = False
        self.spread: float | None = None
        self.doubts = 0
        self.falls = 0
        self.keep = False

    def judge(self, now: Health) -> str:
        """Good, suspect or collapsed.

        Args:
            now: What was measured.

        Returns:
            ``"good"``, ``"suspect"`` (wait for the next one) or ``"collapsed"``.
        """
        verdict = self._verdict(now)
        if verdict == SUSPECT and self.doubts:
            verdict = COLLAPSED
        self.doubts = 1 if verdict == SUSPECT else 0
        if verdict == COLLAPSED:
            verdict = self._fallen(now)
        self.keep = False
        if verdict == GOOD:
            self.best = max(self.best, now.score)
            self.learned |= self.best - now.chance > LEARNED * (1 - now.chance)
            self.spread = now.spread
            most = self.best - now.chance
            self.keep = not self.learned or now.score - now.chance >= KEPT * most
            self.falls = 0 if self.keep else self.falls
        return verdict

    def _fallen(self, now: Health) -> str:
        """A collapse; or, after several in a row, the new measure of what is good."""
        self.falls += 1
        if self.falls <= PATIENCE or not math.isfinite(now.score):
            return COLLAPSED
        self.best, self.falls = now.score, 0
        return GOOD

    def _verdict(self, now: Health) -> str:
        if not math.isfinite(now.score) or math.isnan(now.spread):
            return COLLAPSED
        if self.spread is not None and now.spread < SPREAD_COLLAPSED * self.spread:
            return COLLAPSED
        above, most = now.score - now.chance, self.best - now.chance
        if not self.learned:  # nothing that could be lost
            return GOOD
        if above < SCORE_COLLAPSED * most:
            return COLLAPSED
        return SUSPECT if above < SCORE_SUSPECT * most else GOOD

    def state_dict(self) -> dict[str, float | int | None]:
        """What a checkpoint must hold."""
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state: dict[str, float | int | None]) -> None:
        """Restore what was seen."""
        for name in self.STATE:
            setattr(self, name, state[name])
