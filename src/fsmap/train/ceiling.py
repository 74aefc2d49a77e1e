"""How much λ may weigh as the learning rate falls: the largest λR over the loss.

a = lr / largest lr is what is known of a schedule.

- a > ``HALF``: ``LEAST``, which is as good as zero, and λ is left out.
- Then 10^(``OPEN`` − ``STEEP`` √a), at most ``LATE``.
- In the last ``LEFT`` epochs x = ``STEADY``·exp(−k a) where that is more, with the slope k of
  log(loss/R) over a as the run has shown it: a constant λ that will come to ``STEADY`` at the end
  comes to x now.

More would keep a network under-fitted, and an under-fitted network is calibrated at any λ, so that
its temperature would never bring λ down. Less would let it grow rough, and what is rough is
smoothed in a few epochs only by under-fitting. So it takes time, and a low learning rate. Accuracy
lost on CIFAR-10 (``joint``): 0.5 % with x left out in 50 epochs, where a < 0.1 for ten of them, and
0.1 % with it; in 200 epochs 0.2 % with x left out, and 0.4 % with x from half time on.

The ceiling opens earlier for a network that is far more over-confident than one in the middle of
its training is: a becomes smaller from a signal of ``alarm`` on, and zero at twice that, at once;
after that it comes back within ``CALM`` epochs.
"""

from __future__ import annotations

import math

LEAST, LATE = 1e-4, 10.0
"""λR over the loss: what a network does not feel, and the most at the end of a schedule."""

HALF = 0.5
"""Learning rate over its largest value from which on λ is felt."""

LEFT, TOP = 30.0, 0.999
"""Epochs before the end from which on a constant λ is let through; a that counts as the largest.

25 (50 epochs of CIFAR-10, from half time on) were needed, 100 (200 epochs) too many; there the
opening below comes 40 epochs before the end to a tenth of the loss.
"""

STEADY = 0.25
"""λR over the loss that the ceiling is heading for.

Where runs ended calibrated it was 0.15 to 0.25 in full-length ones (FashionMNIST 50, CIFAR-10 200
epochs) and in 50 epochs of CIFAR-10, 0.35 to 0.55 in 12 and 14 epochs. What is missing at the end
is made up where the ceiling opens.
"""

SLOPE, FIRM = 3.0, 0.2
"""k as it is thought of at first, and the range of a that this counts for beside what is seen.

With λ constant it is 3.4 in 50 epochs of CIFAR-10; in steered runs 2 in 50 epochs of FashionMNIST,
about zero in 12, and 0.1 in ``benchmarks.steering``.
"""

OPEN, STEEP = 1.5, 8.0
"""Near the end λ may be what calibration asks for: 10^(OPEN − STEEP √a), more from a = 0.075 on."""

FIRST = 0.01
"""λR over the loss that an alarm may allow at the first look, at most."""

CALM = 4.0
"""Epochs in which an alarm passes.

If it passed at once, as the signal does when λ has risen, the ceiling would bring λ down again and
the network would memorize again: on 400 noisy points λ went up and down by a factor of a thousand.
"""


class Ceiling:
    """The ceiling of one training, with what it remembers of it.

    Args:
        alarm: Signal from which on it opens earlier; at twice that it is open.
        interval: Epochs between two looks.
    """

    def __init__(self, alarm: float = math.inf, interval: float = 0.25) -> None:
        self.alarm, self.interval = alarm, interval
        self.calm = 1.0  # falls to zero with an alarm, and comes back slowly
        self.held = False  # whether it has been in use
        self.first: tuple[float, float] | None = None  # a and log(loss/R) when R was known first
        self.began = 0.0  # when the learning rate was at its top last
        self.near = False  # whether the end is near

    def look(
        self, even: float, authority: float | None, signal: float, epochs: float = 0.0
    ) -> float:
        """Look at where the training is.

        Args:
            even: λ > 0 at which λR equals the loss; inf: not known.
            authority: Learning rate over its largest value; None: as at the end of a schedule.
            signal: log T or what stands for it.
            epochs: So far.

        Returns:
            Largest λR over the loss.
        """
        self.calm = max(min(2 - signal / self.alarm, self.calm + self.interval / CALM, 1.0), 0.0)
        a = authority or 0.0
        if a > TOP:
            self.began = epochs
        passed = epochs - self.began
        self.near = (self.near and a <= HALF) or is_near_end(a, passed)  # a may stay where it is
        slope, alarmed = self._slope(even, authority), a * self.calm
        times = ceiling(alarmed, slope, near=self.near or is_near_end(alarmed, passed))
        if not self.held and math.isfinite(even):
            times, self.held = min(times, max(ceiling(a, slope, near=self.near), FIRST)), True
        return times

    def _slope(self, even: float, authority: float | None) -> float:
        """k: what is thought of it beforehand, and more and more what has been seen."""
        if authority is None or not math.isfinite(even):
            return SLOPE
        self.first = self.first or (authority, math.log(even))
        way = max(self.first[0] - authority, 0.0)
        seen = self.first[1] - math.log(even)
        return max((SLOPE * FIRM + seen) / (FIRM + way), 0.0)

    def state_dict(self) -> dict[str, float | None]:
        """What a checkpoint must hold."""
        a, even = self.first or (None, None)
        known = {"calm": self.calm, "held": self.held, "began": self.began, "near": self.near}
        return known | {"first_authority": a, "first_log_even": even}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Restore it; states from before there was a ceiling hold nothing of it."""
        calm = state.get("calm")
        self.calm, self.held = 1.0 if calm is None else calm, bool(state.get("held", True))
        self.began, self.near = state.get("began") or 0.0, bool(state.get("near"))
        a, even = state.get("first_authority"), state.get("first_log_even")
        self.first = None if a is None or even is None else (a, even)


def is_near_end(authority: float, epochs: float) -> bool:
    """Whether at most ``LEFT`` epochs are left of a schedule, taken for a cosine to zero.

    Args:
        authority: Learning rate over its largest value.
        epochs: Since it began to fall.

    Returns:
        Whether it is so, and the learning rate has come down by half.
    """
    if authority > HALF:
        return False
    share = math.acos(2 * authority - 1) / math.pi  # of the schedule that is over
    return epochs * (1 - share) <= LEFT * share


def ceiling(authority: float | None, slope: float = SLOPE, *, near: bool = True) -> float:
    """Largest λR over the loss.

    Args:
        authority: Learning rate over its largest value; None: as at the end of a schedule.
        slope: k.
        near: Whether the end is near, as :func:`is_near_end` says.

    Returns:
        Between ``LEAST`` and ``LATE``.

    Examples:
        >>> [float(f"{ceiling(a):.3g}") for a in (1.0, 0.5, 0.1, 0.0)]
        [0.0001, 0.0558, 0.185, 10.0]
        >>> [float(f"{ceiling(a, near=False):.3g}") for a in (1.0, 0.5, 0.1, 0.0)]
        [0.0001, 0.0001, 0.0934, 10.0]
    """
    a = authority or 0.0
    if a > HALF:
        return LEAST
    opening = math.pow(10.0, OPEN - STEEP * math.sqrt(a))
    steady = STEADY * math.exp(-slope * a) if near else 0.0
    return min(max(steady, opening, LEAST), LATE)
