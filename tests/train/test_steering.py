"""Integral control of log λ: convergence on a plant with lag, delay and noise; bounds; windup."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from fsmap.errors import InputError
from fsmap.train import steering
from fsmap.train.steering import Steering


class Plant:
    """log T of a network: falls with log λ, follows it the more slowly the lower the lr is.

    Shaped by the measurements on FashionMNIST: PS-MAP ends at log T = 0.5, a decade of λ above the
    critical one takes off 0.4, and over-confidence appears as the learning rate falls. ``slowing``
    is the power of the learning rate with which it follows; what was measured is below a half.
    """

    def __init__(
        self, critical: float, *, delay: int, noise: float, seed: int, slowing: float
    ) -> None:
        self.critical, self.noise, self.slowing = critical, noise, slowing
        self.random = random.Random(seed)
        self.value = 0.0
        self.late = [0.0] * delay

    def step(self, strength: float, authority: float, epochs: float) -> float:
        free = 0.6 * (1 - authority) ** 1.5 - 0.05
        end = free - 0.17 * math.log(1 + strength / self.critical)
        speed = 4 * authority**self.slowing
        self.value += (1 - math.exp(-speed * epochs)) * (end - self.value)
        noisy = self.value + self.noise * math.sqrt(authority) * self.random.gauss(0, 1)
        self.late.append(noisy)
        return self.late.pop(0)


def steer(
    start: float,
    epochs: int,
    critical: float,
    seed: int,
    slowing: float = 0.5,
    **options: float,
) -> float:
    """log T at the end of a cosine schedule."""
    plant = Plant(critical, delay=1, noise=0.08, seed=seed, slowing=slowing)
    control = Steering(start, **options)
    total = round(epochs / control.interval)
    for i in range(total):
        authority = 0.5 * (1 + math.cos(math.pi * i / total))
        control.move(plant.step(control.strength, authority, control.interval), authority)
    return plant.value


@pytest.mark.parametrize("start", [1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("epochs", [12, 50, 200])
@pytest.mark.parametrize("slowing", [0.1, 0.25, 0.5])
def test_it_ends_calibrated_wherever_it_starts(start: float, epochs: int, slowing: float):
    for critical in (1e-7, 1e-6, 1e-5):
        assert abs(steer(start, epochs, critical, epochs, slowing)) < 0.1


def test_too_much_authority_swings():
    """What was measured with a boost of 4, κ = 4 and two looks an epoch."""
    before = {"gain": 4.0, "trend": 4.0, "boost": 4.0, "interval": 0.5}
    swings = [abs(steer(1e-6, 12, 1e-6, seed, 0.25, **before)) for seed in range(5)]
    calm = [abs(steer(1e-6, 12, 1e-6, seed, 0.25)) for seed in range(5)]
    assert max(calm) < 0.1 < sorted(swings)[2]


def test_without_it_the_same_plant_ends_over_confident():
    assert steer(1e-6, 50, 1e-5, 0, gain=1e-9, trend=0.0) > 0.3


def test_authority_at_the_end_of_the_schedule():
    """A short run whose over-confidence appears late: without the boost it comes too late."""
    boosted = [abs(steer(1e-8, 12, 1e-6, seed)) for seed in range(5)]
    plain = [abs(steer(1e-8, 12, 1e-6, seed, boost=1.0, trend=0.0)) for seed in range(5)]
    assert max(boosted) < 0.1 < min(plain)


def test_nothing_winds_up_behind_a_bound():
    control = Steering(1e-5, bounds=(1e-6, 1e-4), interval=1.0, trend=0.0)
    for _ in range(100):
        control.move(5.0)
    assert control.at_cap
    assert control.strength == pytest.approx(1e-4)
    control.move(-0.1)  # the first signal of the other sign moves it back at full gain
    assert control.strength == pytest.approx(1e-4 * math.exp(-0.6))
    for _ in range(100):
        control.move(-5.0)
    assert control.at_floor
    assert control.move(0.1) == pytest.approx(1e-6 * math.exp(0.6))


def end_of(
    plant: Callable[[float, float], tuple[float, float]],
    epochs: int,
    start: float,
    seed: int,
    *,
    known: bool = True,
) -> float:
    """log T at the end of a cosine schedule; a plant says where it tends, and where λR is the loss.

    Args:
        plant: Function of the authority and λ.
        epochs: Of the schedule.
        start: First λ.
        seed: Of the noise.
        known: Whether the controller knows R.
    """
    control, noise = Steering(start, margin=0.1, alarm=0.2), random.Random(seed)
    value = plant(1.0, start)[0]
    late = [0.0]
    total = round(epochs / control.interval)
    for i in range(total):
        a = 0.5 * (1 + math.cos(math.pi * i / total))
        end, even = plant(a, control.strength)
        value += (1 - math.exp(-4 * a**0.25 * control.interval)) * (end - value)
        late.append(value + 0.05 * math.sqrt(a) * noise.gauss(0, 1))
        signal = late.pop(0)
        even = even if known else math.inf
        control.move(signal, a, even)
        control.hold(even, a, signal)
    return value


def under_confident_for_long(a: float, strength: float) -> tuple[float, float]:
    """Until its learning rate has come down.

    After CIFAR-10 with a fifth of the labels random, where log T was −0.4 for more than half of the
    run while R grew by more than a hundred.
    """
    critical = 1e-6
    free = -0.4 + 0.95 * max(1 - a / 0.4, 0.0) ** 1.2
    even = critical * 10 / (0.01 * 100 ** min(1.0, 1.2 * (1 - a)))
    return free - 0.17 * math.log(1 + strength / critical), even


def test_long_under_confidence_does_not_wind_up():
    cases = [(start, seed) for start in (1e-7, 1e-6, 1e-5) for seed in range(3)]
    ends = [end_of(under_confident_for_long, 18, *case) for case in cases]
    assert max(map(abs, ends)) < 0.1
    before = [end_of(under_confident_for_long, 18, *case, known=False) for case in cases]
    assert min(before) > 0.2


def test_lambda_does_not_fall_below_what_is_not_felt_and_is_not_lifted():
    control = Steering(1e-3, trend=0.0)
    for _ in range(30):
        control.move(-1.0, even=0.1)
    assert control.strength == pytest.approx(1e-5)
    assert control.at_floor
    for small in (1e3, 1e9):  # an R that is far too small, as of one step, or of a constant
        assert control.move(-1.0, even=small) == pytest.approx(1e-5)
        assert control.at_floor
    assert control.move(-1e-3, even=1e-3) < 1e-5  # R has grown
    assert not control.at_floor
    assert control.move(-1e-3) < 1e-5  # R is not known
    bounded = Steering(1e-3, trend=0.0, bounds=(1e-4, 1.0))
    for _ in range(30):
        bounded.move(-1.0, even=0.1)
    assert bounded.strength == pytest.approx(1e-4)
    assert bounded.at_floor


def test_states_with_and_without_a_floor():
    control = Steering(1e-3, trend=0.0)
    for _ in range(30):
        control.move(-1.0, even=0.1)
    state = control.state_dict()
    again = Steering(7.0)
    again.load_state_dict(state)
    assert (again.strength, again.least, again.at_floor) == (control.strength, 1e-5, True)
    del state["least"]  # of an older version
    again.load_state_dict(state)
    assert again.least == again.low


def test_rate_is_bounded_and_grows_as_authority_falls():
    control = Steering(1e-7, interval=0.5, boost=4.0)
    before = control.strength
    assert control.move(100.0) / before == pytest.approx(4.0)  # log 16 an epoch, half of one
    before = control.strength
    assert control.move(100.0, authority=0.5) / before == pytest.approx(16.0)
    before = control.strength
    assert control.move(100.0, authority=0.0) / before == pytest.approx(256.0)  # boost at most 4


def test_after_a_collapse_a_tenth_and_a_cap():
    control = Steering(1e-3)
    assert control.fall() == pytest.approx(1e-4)
    for _ in range(100):
        control.move(1.0)
    assert control.strength == pytest.approx(1e-3 / 3)
    control.fall()
    assert control.cap == pytest.approx(1e-3 / 9)


def test_state_travels():
    control, other = Steering(1e-3), Steering(1.0)
    control.move(0.3)
    control.fall()
    control.move(-0.2)
    other.load_state_dict(control.state_dict())
    assert other.move(0.1) == control.move(0.1)
    assert other.cap == control.cap


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0.0}, "start must be positive and finite, got 0"),
        ({"start": 1.0, "rate": -1.0}, "rate must be positive"),
        (
            {"start": 1.0, "boost": 0.5},
            "finite, got trend=1, margin=0, boost=0.5",
        ),
        ({"start": 1.0, "bounds": (2.0, 3.0)}, "low <= start <= high, got low=2, start=1, high=3"),
    ],
)
def test_bad_numbers(options: dict, message: str):
    with pytest.raises(InputError, match=message):
        Steering(options.pop("start"), **options)


def test_a_signal_that_is_nan():
    with pytest.raises(InputError, match="signal=nan, authority=None. A signal that is nan means"):
        Steering(1.0).move(math.nan)
    with pytest.raises(InputError, match=r"authority in \[0, 1\], got signal=0, authority=2"):
        Steering(1.0).move(0.0, authority=2.0)


def rise(epochs: int) -> float:
    """By how much log λ rises in the first third if T stays at 1.07 whatever λ is."""
    control = Steering(1e-6, bounds=(1e-20, 1e20))
    total = round(epochs / control.interval)
    for i in range(total // 3):
        control.move(0.07, authority=0.5 * (1 + math.cos(math.pi * i / total)))
    return math.log(control.strength / 1e-6)


def test_little_trust_in_the_temperature_at_a_high_learning_rate(monkeypatch):
    """As it was measured on CIFAR-10: running statistics that lag, not a λ that is too small."""
    careful = rise(200)
    monkeypatch.setattr(steering, "TRUST", 1.0)
    assert careful < rise(200) / 3


def test_without_a_schedule_the_signal_counts_in_full():
    control = Steering(1.0, gain=2.0, trend=0.0, interval=1.0)
    assert control.move(0.3) == pytest.approx(math.exp(0.6))
    scheduled = Steering(1.0, gain=2.0, trend=0.0, interval=1.0, boost=1.0)
    assert scheduled.move(0.3, authority=0.75) == pytest.approx(math.exp(0.6 * 0.25))


def test_some_over_confidence_is_wanted_while_the_learning_rate_is_high():
    """An under-fitted network is calibrated at any λ: that alone would leave λ standing."""
    control = Steering(1.0, gain=2.0, trend=0.0, interval=1.0, boost=1.0, margin=0.1)
    assert control.move(0.05, authority=0.5) == 1.0
    assert control.move(0.0, authority=0.5) == pytest.approx(math.exp(0.5 * 2 * -0.05))
    control.strength = 1.0
    assert control.move(0.09, authority=0.5) == pytest.approx(math.exp(0.5 * 2 * 0.04))
    control.strength = 1.0
    assert control.move(0.04, authority=0.0) == pytest.approx(math.exp(2 * 0.04))


def test_a_margin_needs_a_schedule():
    control = Steering(1.0, gain=2.0, trend=0.0, interval=1.0, margin=0.1)
    assert control.move(0.04) == pytest.approx(math.exp(0.08))


@pytest.mark.parametrize(
    ("authority", "times"),
    [
        *(
            (1.0, 1e-4),
            (0.51, 1e-4),
            (0.5, 0.25 * math.exp(-3 * 0.5)),
            (0.25, 0.25 * math.exp(-3 * 0.25)),
        ),
        *((1 / 16, 10**-0.5), (0.0, 10.0), (None, 10.0)),
    ],
)
def test_the_ceiling_opens_as_the_learning_rate_falls(authority: float | None, times: float):
    assert Steering(1.0).hold(1e-3, authority) == pytest.approx(times * 1e-3)
    assert Steering(1e-9).hold(1e-3, authority) == 1e-9


@pytest.mark.parametrize(
    ("signal", "times"),
    [(-1.0, 1e-4), (0.3, 1e-4), (0.45, 0.25 * math.exp(-3 * 0.3)), (0.6, 10.0), (9.0, 10.0)],
)
def test_far_too_much_confidence_opens_the_ceiling(signal: float, times: float):
    control = Steering(1.0, alarm=0.3)
    control.ceiling.held = True
    assert control.hold(1e-3, 0.6, signal) == pytest.approx(1e-3 * times)
    assert Steering(1.0).hold(1e-3, 1.0, signal) == pytest.approx(1e-7)  # no alarm


def test_a_ceiling_holds_at_once_and_does_not_last():
    control = Steering(1.0, gain=1.0, trend=0.0, interval=1.0)
    assert control.hold(1e-3) == pytest.approx(1e-2)
    control.move(0.5)
    assert control.hold(1.0) == pytest.approx(1e-2 * math.exp(0.5))
    assert control.hold(1e-12) == pytest.approx(1e-11)  # it counts for more than the range
    assert control.move(0.0) == pytest.approx(1e-11)  # the range does not lift it
    assert control.fall() == pytest.approx(1e-12)
    assert control.cap == pytest.approx(1e-11 / 3)
    control.move(9.0)
    assert control.strength == control.cap


@pytest.mark.parametrize(
    "options", [{"margin": math.nan}, {"margin": -0.1}, {"trend": math.nan}, {"boost": math.inf}]
)
def test_numbers_that_are_none(options: dict[str, float]):
    with pytest.raises(InputError, match="boost at least 1, and all finite"):
        Steering(1.0, **options)
    for alarm in (0.0, -1.0, math.nan):
        with pytest.raises(InputError, match="alarm must be positive"):
            Steering(1.0, alarm=alarm)
    with pytest.raises(InputError, match="must be a finite number"):
        Steering(1.0).move(math.inf)


def test_the_trend_is_that_of_the_signal_and_is_trusted_as_little():
    control = Steering(1.0, gain=1e-9, trend=2.0, interval=1.0, boost=1.0, margin=0.1)
    control.move(0.02, authority=0.6)
    assert control.move(0.07, authority=0.5) == pytest.approx(math.exp(0.5 * 2 * 0.05))


def test_a_collapse_below_the_range_lowers_lambda_all_the_same():
    control = Steering(1.0, bounds=(0.1, 10.0))
    control.hold(1e-6)
    assert control.fall() == pytest.approx(1e-6)
    assert control.cap == pytest.approx(1e-5 / 3)


def test_a_collapse_forgets_the_trend():
    control = Steering(1.0, gain=1e-9, trend=1.0, interval=1.0, boost=1.0)
    control.move(0.5)
    control.fall()
    before = control.strength
    assert control.move(0.1) == pytest.approx(before)  # and not by 0.1 - 0.5


def test_gain_boost_and_trust_as_they_are():
    """One quarter of an epoch at log T = 0.1: 6 · 0.25 · 0.1, by trust and boost."""
    for authority, factor in ((1.0, 0.05), (0.25, 0.75 * 2), (0.0, 2.0), (None, 1.0)):
        control = Steering(1.0)
        assert math.log(control.move(0.1, authority)) == pytest.approx(0.15 * factor)


@pytest.mark.parametrize(
    ("signal", "even", "factor"),
    [(0.1, 40.0, 4), (0.1, 20.0, 2), (0.1, 5.0, 1), (0.1, math.inf, 1), (-0.1, 40.0, 4)],
)
def test_haste_where_lambda_is_too_small_and_hardly_felt(signal: float, even: float, factor: float):
    control = Steering(1.0, trend=0.0)
    assert math.log(control.move(signal, even=even)) == pytest.approx(0.15 * factor * signal / 0.1)


def test_haste_leaves_the_trend_and_the_rate_alone():
    control = Steering(1.0, gain=1e-9)
    control.move(0.1, even=1e3)
    assert math.log(control.move(0.3, even=1e3)) == pytest.approx(0.2)
    control = Steering(1.0)
    assert control.move(100.0, even=1e6) == pytest.approx(2.0)  # log 16 an epoch, a quarter of one


def test_haste_brings_a_short_run_there_in_time(monkeypatch):
    """Hardly over-confident, at a constant learning rate: there the ceiling does not lift λ."""

    def end(start: float) -> float:
        control, value = Steering(start), 0.1
        for _ in range(40):  # ten epochs
            tends = 0.1 - 0.06 * math.log(1 + 30 * control.strength / 1e-4)
            value += (1 - math.exp(-4 * control.interval)) * (tends - value)
            control.move(value, even=1e-4)
            control.hold(1e-4, signal=value)
        return value

    starts = (1e-8, 1e-7, 1e-6)
    hasty = [end(start) for start in starts]
    monkeypatch.setattr(steering, "NEAR", 0.0)
    assert max(map(abs, hasty)) < 0.01 < 0.05 < end(1e-8)


def test_haste_does_not_make_a_lambda_of_noise():
    """Signals of mean −0.01 and 0, where λ is hardly felt: it stays so, or falls."""
    for mean, most in ((-0.01, 0.01), (0.0, 0.05)):
        ends = []
        for seed in range(20):
            control, noise = Steering(1e-3), random.Random(seed)
            for _ in range(160):
                control.move(mean + noise.gauss(0, 0.02), even=1.0)
            ends.append(control.strength)
        assert sorted(ends)[10] < most


@pytest.mark.parametrize(
    ("even", "authority", "signal", "idle"),
    [
        (1e-3, 1.0, 0.0, True),
        (1e-3, 0.6, 0.2, True),
        (1e-3, 0.4, 0.0, False),
        (1e-3, 1.0, 0.4, False),  # an alarm
        (1e-3, None, 0.0, False),  # no schedule
        (math.inf, 1.0, 0.0, False),  # R is not known, and there is no ceiling
    ],
)
def test_idle_where_the_ceiling_keeps_lambda_from_being_felt(
    even: float, authority: float | None, signal: float, idle: bool
):
    control, other = Steering(1.0, alarm=0.2), Steering(1.0)
    control.hold(even, authority, signal)
    assert control.idle is idle
    other.load_state_dict(control.state_dict())
    assert other.idle is idle
    older = control.state_dict()
    del older["idle"]
    other.load_state_dict(older)
    assert not other.idle


def test_an_alarm_opens_the_ceiling_at_once_and_passes_slowly():
    control = Steering(1.0, alarm=0.2, interval=0.5)
    control.ceiling.held = True
    assert control.hold(1e-3, 1.0, 0.5) == pytest.approx(1e-2)
    seen = []
    for _ in range(9):
        control.strength = 1.0
        seen.append(control.hold(1e-3, 1.0, 0.0) / 1e-3)
    wanted = [0.25 * math.exp(-3 * k / 8) for k in range(1, 5)]  # and 1e-4 from a = 1/2 on
    assert seen == pytest.approx([*wanted, *[1e-4] * 5])
    control.hold(1e-3, 1.0, 0.5)
    other = Steering(1.0, alarm=0.2, interval=0.5)
    other.load_state_dict(control.state_dict())
    other.strength = 1.0
    assert other.hold(1e-3, 1.0) == pytest.approx(1e-3 * wanted[0])
    older = control.state_dict()
    del older["calm"]
    other.load_state_dict(older)
    assert other.hold(1e-3, 1.0) == pytest.approx(1e-7)


@pytest.mark.parametrize(
    ("authority", "first"),
    [(1.0, 0.01), (0.16, 0.25 * math.exp(-3 * 0.16)), (0.0, 10.0), (None, 10.0)],
)
def test_an_alarm_does_not_let_the_first_lambda_through(authority: float | None, first: float):
    control = Steering(1.0, alarm=0.2)
    control.hold(math.inf, authority, 9.0)  # R is not known yet
    assert control.hold(1e-3, authority, 9.0) == pytest.approx(1e-3 * first)
    resumed = Steering(1.0, alarm=0.2)
    for state in (control.state_dict(), Steering(1.0).state_dict()):
        resumed.load_state_dict(state)
        resumed.strength = 1.0
        wanted = 10.0 if state["held"] else first
        assert resumed.hold(1e-3, authority, 9.0) == pytest.approx(1e-3 * wanted)


def test_where_r_is_unknown_lambda_stays_zero_until_half_time():
    """As after outputs that are not finite; and not for longer, if R is never given again."""
    control = Steering(1e-3)
    control.hold(1e-3, 0.9)
    for authority, idle in ((0.8, True), (0.6, True), (0.5, False), (0.6, False)):
        control.hold(math.inf, authority)
        assert control.idle is idle
