"""Evaluation points: tensors, dicts, tuples."""

from __future__ import annotations

import pytest
import torch

from fsmap.errors import InputError
from fsmap.linalg import points

PAIR = {"a": torch.arange(6.0).reshape(3, 2), "b": torch.tensor([1, 2, 3])}


def test_count_and_take():
    assert points.count(torch.zeros(4, 2)) == 4
    assert points.count(PAIR) == 3
    taken = points.take(PAIR, slice(1, 3))
    assert torch.equal(taken["b"], torch.tensor([2, 3]))
    taken = points.take((PAIR["a"],), torch.tensor([2, 0]))
    assert torch.equal(taken[0], PAIR["a"][[2, 0]])


def test_concat_takes_the_first_ones_dtype():
    joined = points.concat(PAIR, points.take(PAIR, slice(0, 1)))
    assert torch.equal(joined["b"], torch.tensor([1, 2, 3, 1]))
    joined = points.concat(torch.zeros(1, 2), torch.ones(2, 2, dtype=torch.float32))
    assert joined.dtype == torch.float64
    assert joined.shape == (3, 2)


def test_concat_names_points_that_do_not_fit():
    with pytest.raises(InputError, match=r"\(3, 2\) and \(3, 4\) cannot be one batch"):
        points.concat(torch.zeros(3, 2), torch.zeros(3, 4))
    with pytest.raises(InputError, match="cannot be one batch"):
        points.concat(torch.zeros(3, 2), PAIR)


def test_to_leaves_integers_alone():
    moved = points.to(PAIR, device=torch.device("cpu"), dtype=torch.float32)
    assert moved["a"].dtype == torch.float32
    assert moved["b"].dtype == torch.int64


def test_good_points_pass():
    points.check(torch.zeros(1, 2))
    points.check(PAIR)
    points.check((torch.zeros(2, 1), torch.zeros(2, 3, dtype=torch.bool)))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.tensor([[1.0], [torch.nan]]), r"NaN or inf in 1 of 2 points \(first: 1\)"),
        (torch.full((8, 2), torch.inf), r"8 of 8 points \(first: 0, 1, 2, 3, 4\)"),
        ({"a": torch.zeros(2), "b": torch.tensor([0.0, -torch.inf])}, "NaN or inf in 1 of 2"),
        (torch.zeros(0, 2), r"x is empty: shapes \[\(0, 2\)\]"),
        (torch.zeros(3, 0), "At least one evaluation point"),
        (torch.tensor(1.0), r"needs a first dimension .* Use x\[None\]"),
        ((torch.zeros(2, 1), torch.zeros(3, 1)), r"share their first dimension, got \[2, 3\]"),
        ([1.0, 2.0], "must be a tensor, or a dict or tuple of tensors, got float"),
        (None, "got NoneType"),
        ({}, "got dict"),
    ],
)
def test_bad_points_are_named(x, words):
    with pytest.raises(InputError, match=words):
        points.check(x)
