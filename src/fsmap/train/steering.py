r"""λ as a controlled quantity, in numbers alone: an integral controller on log λ.

One update moves

$\log\lambda \leftarrow \mathrm{clip}\bigl(\log\lambda + \mathrm{clip}(t b\,(\gamma g h (s - m)
+ \kappa\,(s - s')),\; \pm r h b)\bigr)$

with the signal s (log T: positive while the model is over-confident), the signal s' of the update
before, h the epochs between two updates, γ the gain, κ the weight of the trend and r the largest
rate.

The haste g = max(1, ``NEAR`` · loss / λR): where λ is hardly felt, it moves by as much as it would
where λR is ``NEAR`` times the loss, and not in proportion to itself. It may change many times over
before anything comes of it, so nothing can swing; and in a short run a signal of 0.1 would bring it
where it acts only when the training is over. Both ways, or noise would add up to a λ.

The others depend on the authority a = lr / largest lr, where there is a schedule.

The trust t = max(1 − a, ``TRUST``): while the learning rate is high, the held-out temperature is
that of a network that jumps about, and says little about the one that will be deployed.

The margin m = ``margin``·a, zero at the end of a schedule: at a high learning rate a network is
over-confident by itself (50 epochs of CIFAR-10, λ zero: log T = 0.06 to 0.18 shortly before half
time), and one that is calibrated there already is under-fitted. So λ falls until that is left.

λR stays below a ceiling (:mod:`fsmap.train.ceiling`), which counts for more than rate and range.

The boost b = min(1/a, ``boost``) grows as a falls: a network whose learning rate has come down
follows λ more slowly, so λ has to lead by more. Not by much more: ResNet-18 on FashionMNIST follows
within half an epoch at a tenth of its learning rate, and with a boost of 4 and κ = 4 λ swung by a
factor of 250 between updates until the end.

The sum *is* log λ, and it is clipped to its range: nothing can accumulate behind a bound
(no windup), and the first signal of the other sign moves λ back. For the same reason λ does not
fall further where λR is less than ``LEAST`` times the loss, which is as good as zero: a network
that is under-confident for long, as with noisy labels or strong augmentation, would bring it down
by many orders of magnitude, and a short run would be over before it had come back.
"""

from __future__ import annotations

import inspect
import math

from fsmap.errors import InputError
from fsmap.train import ceiling
from fsmap.train.ceiling import LEAST, Ceiling

RANGE = 1e6
"""λ stays within this factor of where it started, unless bounds are given."""

TRUST = 0.05
"""Share of the gain at the largest learning rate of a schedule."""

NEAR = 0.1
"""λR over the loss below which λ moves in haste."""

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
        margin: Signal that is wanted at the largest learning rate of a schedule; none at its end.
        alarm: Signal from which on the ceiling opens earlier; at twice that it is open.
        bounds: Smallest and largest λ, as far as the ceiling lets it; None: a factor of 1e6 around
            ``start``.

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
        alarm: float = math.inf,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        low, high = bounds or (start / RANGE, start * RANGE)
        _check_positive(start=start, gain=gain, rate=rate, interval=interval)
        if not alarm > 0:
            message = f"alarm must be positive, got {alarm:g}"
            raise InputError(message)
        if not (0 <= trend < math.inf and 1 <= boost < math.inf and 0 <= margin < math.inf):
            message = (
                "trend and margin must be at least 0, boost at least 1, and all finite, got "
                f"{trend=:g}, {margin=:g}, {boost=:g}"
            )
            raise InputError(message)
        if not 0 < low <= start <= high < math.inf:
            message = (
                f"bounds must be 0 < low <= start <= high, got low={low:g}, start={start:g}, "
                f"high={high:g}"
            )
            raise InputError(message)
        self.gain, self.trend, self.rate = gain, trend, rate
        self.interval, self.boost, self.margin, self.alarm = interval, boost, margin, alarm
        self.low, self.high = low, high
        self.ceiling = Ceiling(alarm, interval)
        self.cap = high  # falls after a collapse
        self.strength = float(start)
        self.least = low  # λ does not fall below it; follows the loss
        self.idle = False  # whether the ceiling keeps λ from being felt
        self.before: float | None = None  # the last signal

    def move(self, signal: float, authority: float | None = None, even: float = math.inf) -> float:
        """Look at the signal and move λ.

        Args:
            signal: log T or what stands for it: positive asks for a larger λ.
            authority: Learning rate now over its largest value; None: it has no schedule.
            even: λ > 0 at which λR equals the loss; inf: not known.

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
        haste = max(NEAR * even / self.strength, 1.0) if math.isfinite(even) else 1.0
        gain = self.gain * haste
        wanted = trust * boost * (gain * self.interval * (signal - margin) + self.trend * change)
        most = boost * self.rate * self.interval
        moved = math.log(self.strength) + min(max(wanted, -most), most)
        self.least = max(self.low, even * LEAST) if math.isfinite(even) else self.low
        floor = min(self.least, self.strength)  # it may be lower already, and is not lifted
        self.strength = max(min(math.exp(moved), self.cap), floor)
        self.before = signal
        return self.strength

    def hold(
        self,
        even: float,
        authority: float | None = None,
        signal: float = 0.0,
        epochs: float = 0.0,
    ) -> float:
        """Bring λ down to the ceiling, if it is above; it counts for more than the range.

        Args:
            even: λ > 0 at which λR equals the loss.
            authority: As in :meth:`move`; None: as at the end of a schedule.
            signal: As in :meth:`move`; more than ``alarm`` opens the ceiling.
            epochs: So far.

        Returns:
            λ from now on; ``idle`` says whether it might as well be zero.
        """
        times = self.ceiling.look(even, authority, signal, epochs)
        self.idle = times <= LEAST and (math.isfinite(even) or self.idle)
        self.strength = min(self.strength, even * times)
        return self.strength

    def fall(self) -> float:
        """After a collapse: a tenth of λ, and a cap that keeps it from getting there again.

        Returns:
            λ from now on.
        """
        low = self.low if self.strength >= self.low else 0.0  # as in move
        self.cap = max(min(self.cap, self.strength / CAP_BELOW_COLLAPSE), low)
        self.strength = max(self.strength / AFTER_COLLAPSE, low)
        self.before = None
        return self.strength

    @property
    def at_floor(self) -> bool:
        """Whether λ is as low as it may get."""
        return self.strength <= self.least * (1 + 1e-9)

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
            "least": self.least,
            "before": self.before,
            "idle": self.idle,
        } | self.ceiling.state_dict()

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Restore λ, its range and the last signal; older states lack what came later."""
        for name in ("strength", "low", "high", "cap", "before"):
            setattr(self, name, state[name])
        for name, otherwise in {"least": self.low, "idle": False}.items():
            setattr(self, name, state.get(name, otherwise))
        self.ceiling.load_state_dict(state)


def described() -> dict[str, object]:
    """What λ depends on besides options: constants, and the defaults of :class:`Steering`.

    Returns:
        Values by name.
    """
    here = "RANGE TRUST NEAR AFTER_COLLAPSE CAP_BELOW_COLLAPSE"
    there = "LEAST LATE HALF LEFT TOP STEADY SLOPE FIRM OPEN STEEP FIRST CALM"
    constants: dict[str, object] = {name.lower(): globals()[name] for name in here.split()}
    constants |= {name.lower(): getattr(ceiling, name) for name in there.split()}
    defaults = inspect.signature(Steering).parameters
    constants["idle"] = "λ is zero where the ceiling is least"
    return constants | {name: defaults[name].default for name in ("gain", "trend", "rate", "boost")}


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            message = f"{name} must be positive and finite, got {value:g}"
            raise InputError(message)
