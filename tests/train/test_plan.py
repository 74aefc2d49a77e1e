"""Sizes by rows."""

from __future__ import annotations

import pytest

from fsmap.errors import InputError
from fsmap.train.plan import plan


@pytest.mark.parametrize("rows", [2, 20, 100, 1_000, 10_000, 50_000, 1_000_000])
def test_sizes_are_sane_for_any_number_of_rows(rows):
    found = plan(rows)
    assert 1 <= found.batch_size <= min(rows, 512)
    assert 300 <= found.steps <= 5_000
    seen = found.steps * found.batch_size / rows  # passes over the data
    assert seen > 2
    assert found.steps * found.batch_size <= max(3e6, 500 * rows)


def test_more_rows_get_more():
    sizes = [plan(rows) for rows in (100, 1_000, 10_000, 100_000)]
    for name in ("steps", "batch_size", "hidden"):
        values = [getattr(size, name) for size in sizes]
        assert values == sorted(values)


def test_what_is_given_stays():
    found = plan(100, hidden=[7], steps=3, batch_size=5, num_points=2, lr=0.1, patience=None)
    assert found == ((7,), 3, 5, 2, 0.1, None)
    assert plan(10, batch_size=64).batch_size == 10
    assert plan(1_000, "fs-map").num_points < plan(1_000, "l-map").num_points


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0. Left out, it goes by the rows."),
        ({"batch_size": -1}, "batch_size must be at least 1, got -1"),
        ({"num_points": 0}, "num_points must be at least 1, got 0"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"lr": 0.0}, "the learning rate must be positive and finite, got 0"),
        ({"hidden": (8, 0)}, r"hidden layers have at least 1 unit each, got \(8, 0\)"),
    ],
)
def test_numbers_that_are_not_positive(options, message):
    with pytest.raises(InputError, match=message):
        plan(100, **options)
