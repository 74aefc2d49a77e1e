"""Rows divided in three."""

from __future__ import annotations

import numpy as np
import pytest

from fsmap.data.rows import split_rows
from fsmap.errors import InputError


def test_every_row_is_in_one_part_and_the_seed_decides():
    parts = split_rows(103, valid=0.2, test=0.1, seed=3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(103))
    assert [len(part) for part in parts] == [72, 21, 10]
    again, other = (split_rows(103, valid=0.2, test=0.1, seed=s) for s in (3, 4))
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))
    assert parts.test.tolist() != other.test.tolist()


def test_every_class_is_in_every_part_and_a_lonely_one_is_trained_on():
    labels = np.array([0] * 80 + [1] * 20 + [2])
    parts = split_rows(101, valid=0.15, test=0.15, seed=0, labels=labels)
    assert [np.bincount(labels[part], minlength=3).tolist() for part in parts] == [
        [56, 14, 1],
        [12, 3, 0],
        [12, 3, 0],
    ]


@pytest.mark.parametrize(
    ("rows", "valid", "test", "message"),
    [
        (1, 0.1, 0.1, "the table has 1 row; at least 20 are needed to train"),
        (19, 0.1, 0.1, "the table has 19 rows; at least 20"),
        (50, 0.5, 0.5, "leave rows to train on, got 0.5 and 0.5"),
        (50, 0.0, 0.5, "must be positive"),
    ],
)
def test_refusals(rows, valid, test, message):
    with pytest.raises(InputError, match=message):
        split_rows(rows, valid=valid, test=test, seed=0)
