r"""λ as a controlled quantity, in numbers alone: an integral controller on log λ.

One update moves

$\log\lambda \leftarrow \mathrm{clip}\bigl(\log\lambda + \mathrm{clip}(t b\,(\gamma h (s - m)
+ \kappa\,(s - s')),\; \pm r h b)\bigr)$

with the signal s (log T: positive while the model is over-confident), the signal s' of the update
before, h the epochs between two updates, γ the gain, κ the weight of the trend and r the largest
rate. The others depend on the authority a = lr / largest lr, where there is a schedule.

The margin m = ``margin``·a: an under-fitted network is calibrated at any λ, so s = 0 alone would
leave a λ standing that keeps it under-fitted. With a margin λ falls until over-confidence begins,
and is the smallest that calibrates; at the end of a schedule the margin is zero.

The trust t = max(1 − a, ``TRUST``): while the learning rate is high, the held-out temperature is
that of a network that jumps about and whose running statistics lag behind, and says little about
the one that will be deployed. On CIFAR-10 it stayed above one for 70 of 200 epochs whatever λ was,
and a controller that believed it had raised λ by 10⁶ by then.

The boost b = min(1/a, ``boost``) grows as a falls: a network whose learning rate has come down
follows λ more slowly, so λ has to lead by more. Not by much more: ResNet-18 on FashionMNIST follows
within half an epoch at a tenth of its learning rate, and with a boost of 4 and κ = 4 λ swung by a
factor of 250 between updates until the end.

The sum *is* log λ, and it is clipped to its range: nothing can accumulate behind a bound
(no windup), and the first signal of the other sign moves λ back.
"""

from __future__ import annotations

import math

from fsmap.errors import InputError

RANGE = 1e6
"""λ stays within this factor of where it started, unless bounds are given."""

TRUST = 0.05
"""Share of the gain at the largest learning rate of a schedule."""

AFTER_COLLAPSE = 10.0
"""λ is divided by this after a collapse."""

CAP_BELOW_COLLAPSE = 3.0
"""No λ above the collapsed one divided by this is tried again."""


class Steering:
    """Integral control of log λ with bounded rate and range.

    Args:
        start: The first λ.
        gain: γ, per epoch: at log T = 0.1 and γ = 6, λ grows by a factor of exp(0.6) an epoch.
        trend: κ, the weight of the signal's change; it damps, because a network follows λ with lag.
        rate: r, the largest change of log λ per epoch.
        interval: h, epochs between two updates. An epoch stands for the time in which a network
            follows a change of λ; say 0.1 where it takes ten epochs.
        boost: Largest factor by which gain and rate grow as the learning rate falls.
        margin: Signal that is wanted at the largest learning rate of a schedule, none at its end.
        bounds: Smallest and largest λ; None: a factor of 1e6 around ``start``.

    Raises:
        InputError: If a number is out of range.
    """

    def __init__(
        self,
        start: float,
        *,
        gain: float = 6.0,
        trend: float = 1.0,
        rate: float = math.log(16.0),
        interval: float = 0.25,
        boost: float = 2.0,
        margin: float = 0.0,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        low, high = bounds or (start / RANGE, start * RANGE)
        _check_positive(start=start, gain=gain, rate=rate, interval=interval)
        if not (0 <= trend < math.inf and 1 <= boost < math.inf and math.isfinite(margin)):
            message = (
                "trend must be at least 0, boost at least 1, and all with margin finite, got "
                f"{trend=:g}, {boost=:g}, {margin=:g}"
            )
            raise InputError(message)
        if not 0 < low <= start <= high < math.inf:
            message = (
                f"bounds must be 0 < low <= start <= high, got low={low:g}, start={start:g}, "
                f"high={high:g}"
            )
            raise InputError(message)
        self.gain, self.trend, self.rate = gain, trend, rate
        self.interval, self.boost, self.margin = interval, boost, margin
        self.low, self.high = low, high
        self.cap = high  # falls after a collapse
        self.strength = float(start)
        self.before: float | None = None  # the last signal

    def move(self, signal: float, authority: float | None = None) -> float:
        """Look at the signal and move λ.

        Args:
            signal: log T or what stands for it: positive asks for a larger λ.
            authority: Learning rate now over its largest value; None: it has no schedule.

        Returns:
            λ from now on, also in ``strength``.

        Raises:
            InputError: If the signal is nan, or the authority is not in [0, 1].
        """
        if not math.isfinite(signal) or not (authority is None or 0 <= authority <= 1):
            message = (
                f"the signal must be a finite number and the authority in [0, 1], got {signal=:g}, "
                f"{authority=}. A signal that is nan means that training has diverged."
            )
            raise InputError(message)
        margin, trust, boost = 0.0, 1.0, 1.0
        if authority is not None:
            margin = self.margin * authority
            trust = max(1 - authority, TRUST)
            boost = min(1 / max(authority, 1e-12), self.boost)
        change = 0.0 if self.before is None else signal - self.before
        wanted = (
            trust * boost * (self.gain * self.interval * (signal - margin) + self.trend * change)
        )
        most = boost * self.rate * self.interval
        moved = math.log(self.strength) + min(max(wanted, -most), most)
        self.strength = max(min(math.exp(moved), self.cap), self.low)
        self.before = signal
        return self.strength

    def hold(self, limit: float) -> float:
        """Bring λ down to a limit, if it is above; it counts for more than the range.

        Args:
            limit: λ > 0 that must not be exceeded now, such as ten times the loss over R.

        Returns:
            λ from now on.
        """
        self.strength = min(self.strength, limit)
        return self.strength

    def fall(self) -> float:
        """After a collapse: a tenth of λ, and a cap that keeps it from getting there again.

        Returns:
            λ from now on.
        """
        self.cap = max(min(self.cap, self.strength / CAP_BELOW_COLLAPSE), self.low)
        self.strength = max(self.strength / AFTER_COLLAPSE, self.low)
        self.before = None
        return self.strength

    @property
    def at_floor(self) -> bool:
        """Whether λ is as low as it may get."""
        return self.strength <= self.low * (1 + 1e-9)

    @property
    def at_cap(self) -> bool:
        """Whether λ is as high as it may get."""
        return self.strength >= self.cap * (1 - 1e-9)

    def state_dict(self) -> dict[str, float | None]:
        """What a checkpoint must hold."""
        return {
            "strength": self.strength,
            "low": self.low,
            "high": self.high,
            "cap": self.cap,
            "before": self.before,
        }

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Restore λ, its range and the last signal."""
        for name in ("strength", "low", "high", "cap", "before"):
            setattr(self, name, state[name])


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            message = f"{name} must be positive and finite, got {value:g}"
            raise InputError(message)
