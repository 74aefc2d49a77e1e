"""Training sets of a population."""

from __future__ import annotations

import pytest
import torch

from fsmap.errors import InputError
from fsmap.train.feed import as_splits
from fsmap.types import Batch

PARAMS = {"w": torch.zeros(1, dtype=torch.float64)}
X, Y = torch.arange(6.0)[:, None], torch.arange(6)


def test_one_set_for_all():
    splits = as_splits((X, Y), None, PARAMS)
    assert splits.rows.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert torch.equal(splits.batch(0).y, Y)


@pytest.mark.parametrize(
    "data",
    [
        [Batch(X[:4], Y[:4]), Batch(X[2:], Y[2:])],
        {1: Batch(X[2:], Y[2:]), 0: Batch(X[:4], Y[:4])},
        (Batch(X, Y), [torch.arange(4), torch.arange(2, 6)]),
        ((X, Y), {0: [0, 1, 2, 3], 1: [2, 3, 4, 5]}),
    ],
    ids=["list", "dict", "rows in a list", "rows in a dict"],
)
def test_several_sets(data: object):
    splits = as_splits(data, (0, 1), PARAMS)
    assert splits.rows.shape == (2, 4)
    assert splits.batch(0).y.tolist() == [0, 1, 2, 3]
    assert splits.batch(splits.index(1)).y.tolist() == [2, 3, 4, 5]
    assert torch.equal(splits.batch(1).x[:, 0].long(), splits.batch(1).y)


def test_only_the_wanted_sets_are_kept():
    splits = as_splits([(X, Y), (X + 1, Y), (X + 2, Y)], (2,), PARAMS)
    assert splits.data.x[0].item() == 2.0
    assert len(splits.rows) == 1


def test_dicts_of_inputs():
    data = [Batch({"a": X[:3]}, Y[:3]), Batch({"a": X[3:]}, Y[3:])]
    assert as_splits(data, (0, 1), PARAMS).batch(1).x["a"].tolist() == [[3.0], [4.0], [5.0]]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (Batch(X, Y), r"the grid has a 'split' axis, so data must be a dict or list.*got Batch"),
        ([(X, Y)], r"the grid asks for the splits \[1\], and data has \[0\]"),
        ([(X, Y), (X[1:], Y[1:])], r"must have the same size, got \{0: 6, 1: 5\}"),
        (((X, Y), [[0, 1], [0]]), r"must have the same size, got \{0: 2, 1: 1\}"),
    ],
)
def test_bad_sets_are_refused(data: object, text: str):
    with pytest.raises(InputError, match=text):
        as_splits(data, (0, 1), PARAMS)
