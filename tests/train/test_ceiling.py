"""The ceiling on λR: the slope it follows, first values, and what a checkpoint holds of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from fsmap.train import ceiling
from fsmap.train.ceiling import LEAST, STEADY, Ceiling
from fsmap.train.steering import Steering


def even_of(slope: float, authority: float) -> float:
    """λ at which λR equals the loss, where log(loss/R) has this slope over the authority."""
    return 1e-6 * math.exp(slope * authority)


@pytest.mark.parametrize("slope", [0.1, 2.3, 3.0, 6.0])
def test_a_constant_lambda_comes_out_of_a_run_that_shows_its_slope(slope: float):
    """But for what is thought of the slope beforehand, which counts for less and less."""
    found = Ceiling()
    at_the_end = STEADY * even_of(slope, 0.0)
    for authority in (1.0, 0.8, 0.5, 0.3, 0.2, 0.1):
        even = even_of(slope, authority)
        strength = found.look(even, authority, 0.0) * even
        if authority > ceiling.HALF:
            assert strength == LEAST * even
            continue
        share = ceiling.FIRM / (ceiling.FIRM + 1 - authority)
        wanted = at_the_end * math.exp(authority * share * (slope - ceiling.SLOPE))
        assert strength == pytest.approx(wanted)
        assert 0.6 < strength / at_the_end < 1.6


def test_a_slope_that_falls_is_none():
    """R/loss that shrinks as the learning rate falls: the ceiling is STEADY, and not more."""
    found = Ceiling()
    found.look(1e-6, 1.0, 0.0)
    assert found.look(1e-3, 0.4, 0.0) == STEADY


def test_a_learning_rate_that_rises_again_is_no_way():
    found = Ceiling()
    found.look(1e-6, 0.3, 0.0)
    assert found.look(1e-6, 0.4, 0.0) == pytest.approx(STEADY * math.exp(-3 * 0.4))


def test_first_values_make_no_difference_once_lambda_is_felt():
    """λR is a ten-thousandth of the loss until a = 0.5, and the same λ from there on."""
    ends = []
    for start in (1e-8, 1e-6, 1e-3):
        control, path = Steering(start, margin=0.1, alarm=0.4), []
        for i in range(80):
            a = 0.5 * (1 + math.cos(math.pi * i / 80))
            signal = 0.15 - 0.02 * math.log1p(control.strength / 1e-7) * (a <= 0.5)
            control.move(signal, a, even_of(3.0, a))
            control.hold(even_of(3.0, a), a, signal)
            path.append(control.strength)
        ends.append(path[40:])
    assert ends[0] == ends[1] == ends[2]


def cosine(epochs: int, *, warmup: float = 0.0) -> Callable[[float], float]:
    way = epochs - warmup
    return lambda t: 0.5 * (1 + math.cos(math.pi * max(t - warmup, 0.0) / way))


def looks(
    epochs: int, rate: Callable[[float], float], interval: float = 0.25
) -> list[tuple[float, float]]:
    """Times of a schedule, and the ceiling then; k is 3."""
    found = Ceiling(interval=interval)
    times = [i * interval for i in range(round(epochs / interval))]
    return [(t, found.look(even_of(3.0, rate(t)), rate(t), 0.0, t)) for t in times]


@pytest.mark.parametrize(
    ("epochs", "felt", "tenth"),
    [(12, 6.0, 7.5), (50, 25.0, 31.4), (60, 30.0, 37.7), (100, 51.7, 70.0), (200, 103.5, 159.5)],
)
def test_long_runs_wait_for_a_low_learning_rate(epochs: int, felt: float, tenth: float):
    """When λ is felt first, and when λR may be a tenth of the loss."""
    seen = looks(epochs, cosine(epochs))
    assert min(t for t, times in seen if times > LEAST) == pytest.approx(felt, abs=0.5)
    assert min(t for t, times in seen if times >= 0.1) == pytest.approx(tenth, abs=1.0)


def test_in_two_hundred_epochs_a_constant_lambda_is_never_let_through():
    rate = cosine(200)
    for t, times in looks(200, rate):
        opening = min(max(10 ** (1.5 - 8 * math.sqrt(rate(t))), LEAST), 10.0)
        assert times == (opening if rate(t) <= 0.5 else LEAST)


@pytest.mark.parametrize(
    ("epochs", "rate"),
    [
        (12, cosine(12)),
        (60, cosine(60)),
        (60, cosine(60, warmup=10.0)),
        (200, lambda t: min(1.0, (200 - t) / 40)),  # constant, then linear
        (200, lambda t: 1.0 if t < 60 else 0.2),  # in steps
        (100, lambda t: 0.5 ** (t // 20)),
        (100, lambda t: cosine(50)(t % 50)),  # with a restart
    ],
)
def test_time_counts_from_where_the_learning_rate_begins_to_fall(
    epochs: int, rate: Callable[[float], float]
):
    """And what is open stays so while the learning rate stays."""
    for t, times in looks(epochs, rate, 0.5):
        a = rate(t)
        wanted = max(STEADY * math.exp(-3 * a), 10 ** (1.5 - 8 * math.sqrt(a)))
        assert times == pytest.approx(min(wanted, 10.0) if a <= 0.5 else LEAST), t


def test_an_alarm_need_not_wait_and_does_not_last():
    """Far into a long run, and with most of it to come."""
    found = Ceiling(alarm=0.2, interval=1.0)
    found.look(1e-3, 0.65, 0.0, 80)
    times = [found.look(1e-3, 0.65, signal, 80) for signal in (0.2, 0.3, 0.4)]
    assert times == pytest.approx([LEAST, 10 ** (1.5 - 8 * math.sqrt(0.65 / 2)), 10.0])
    assert [found.look(1e-3, 0.5, 0.0, 81) for _ in range(4)][-1] == LEAST


def test_a_checkpoint_holds_the_time():
    for epochs, rate in ((100, cosine(50)), (200, lambda t: 1.0 if t < 60 else 0.2)):
        found = Ceiling()
        for t, times in looks(epochs, rate, 1.0):
            resumed = Ceiling()
            resumed.load_state_dict(found.state_dict())
            assert resumed.look(even_of(3.0, rate(t)), rate(t), 0.0, t) == times
            found = resumed


def test_a_checkpoint_holds_the_slope():
    control, resumed = Steering(1.0), Steering(1.0)
    control.hold(even_of(6.0, 1.0), 1.0)
    resumed.load_state_dict(control.state_dict())
    for each in (control, resumed):
        each.strength = 1.0
        each.hold(even_of(6.0, 0.3), 0.3)
    assert resumed.state_dict() == control.state_dict()
    newer = ("first", "began", "near")
    older = {k: v for k, v in control.state_dict().items() if not k.startswith(newer)}
    resumed.load_state_dict(older)
    resumed.strength = 1.0
    assert resumed.hold(1e-3, 0.3) == pytest.approx(1e-3 * STEADY * math.exp(-3 * 0.3))
