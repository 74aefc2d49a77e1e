"""The ceiling on λR: the slope it follows, λ brought up to it, and what a checkpoint holds."""

from __future__ import annotations

import math

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
        times, lift = found.look(even, authority, 0.0)
        assert lift == (pytest.approx(0.4 * times) if authority <= 0.5 else 0.0)
        share = ceiling.FIRM / (ceiling.FIRM + 1 - authority)
        wanted = at_the_end * math.exp(authority * share * (slope - ceiling.SLOPE))
        assert times * even == pytest.approx(wanted if lift else LEAST * even)
        assert not lift or 0.6 < times * even / at_the_end < 1.6


def test_a_slope_that_falls_is_none():
    """R/loss that shrinks as the learning rate falls: the ceiling is STEADY, and not more."""
    found = Ceiling()
    found.look(1e-6, 1.0, 0.0)
    assert found.look(1e-3, 0.4, 0.0) == (STEADY, 0.1)


def test_a_learning_rate_that_rises_again_is_no_way():
    found = Ceiling()
    found.look(1e-6, 0.3, 0.0)
    times, _ = found.look(1e-6, 0.4, 0.0)
    assert times == pytest.approx(STEADY * math.exp(-3 * 0.4))


@pytest.mark.parametrize(
    ("signal", "authority", "wanted"),
    [
        (0.05, 0.4, 0.1 * math.exp(-1.2)),  # over-confident by more than the band
        (0.03, 0.4, None),  # by less
        (-0.2, 0.4, None),
        (0.05, 0.6, None),  # λ is zero
        (0.05, 0.05, None),  # calibration alone counts
        (0.05, None, None),  # no schedule
    ],
)
def test_lambda_is_brought_up_on_the_way_to_a_tenth_of_the_loss(
    signal: float, authority: float | None, wanted: float | None
):
    control = Steering(1e-9, band=0.1)
    found = control.hold(1e-3, authority, signal)
    assert found == (1e-9 if wanted is None else pytest.approx(1e-3 * wanted))


def test_lambda_is_not_brought_up_where_r_is_unknown_or_beyond_its_bounds():
    assert Steering(1e-9).hold(math.inf, 0.4, 1.0) == 1e-9
    assert Steering(1e-9, bounds=(1e-10, 1e-8)).hold(1e-3, 0.4, 1.0) == 1e-8


def test_after_a_collapse_lambda_is_left_to_the_integral():
    control = Steering(1e-9)
    held = control.hold(1e-3, 0.4, 1.0)
    assert control.fall() == pytest.approx(held / 10)
    assert control.hold(1e-3, 0.4, 1.0) == pytest.approx(held / 10)


def test_first_values_make_no_difference_once_lambda_is_felt():
    """Four orders of magnitude below and above, the same λ from a = 0.5 on."""
    ends = []
    for start in (1e-8, 1e-6, 1e-3):
        control, path = Steering(start, band=0.1, alarm=0.4), []
        for i in range(80):
            a = 0.5 * (1 + math.cos(math.pi * i / 80))
            signal = 0.15 - 0.02 * math.log1p(control.strength / 1e-7) * (a <= 0.5)
            control.move(signal, a, even_of(3.0, a))
            control.hold(even_of(3.0, a), a, signal)
            path.append(control.strength)
        ends.append(path[40:])
    assert ends[0] == ends[1] == ends[2]


def test_a_checkpoint_holds_the_slope():
    control, resumed = Steering(1.0), Steering(1.0)
    control.hold(even_of(6.0, 1.0), 1.0)
    resumed.load_state_dict(control.state_dict())
    for each in (control, resumed):
        each.strength = 1.0
        each.hold(even_of(6.0, 0.3), 0.3)
    assert resumed.state_dict() == control.state_dict()
    older = {k: v for k, v in control.state_dict().items() if not k.startswith("first")}
    resumed.load_state_dict(older)
    resumed.strength = 1.0
    assert resumed.hold(1e-3, 0.3) == pytest.approx(1e-3 * STEADY * math.exp(-3 * 0.3))
