"""Regression or classification, and targets that are neither."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fsmap.data.tables import Table
from fsmap.data.target import Target, find_target, labels
from fsmap.errors import InputError


def table(values, name="y") -> Table:
    cells = np.empty(len(values), dtype=object)
    cells[:] = values
    return Table({"x": cells, name: cells})


@pytest.mark.parametrize(
    ("values", "task", "why"),
    [
        (["yes", "no", "yes"], "classification", "text with 2 distinct values"),
        (["0", "1", "1", "0"], "classification", "two distinct numbers"),
        (["3", "5", "6", "5"], "regression", "3 distinct whole numbers; if these are classes"),
        (["0.5", "1.5", "2.5"], "regression", "3 distinct numbers"),
        ([str(k) for k in range(50)], "regression", "50 distinct numbers"),
    ],
)
def test_the_task_is_inferred_and_says_why(values, task, why):
    found = find_target(table(values), "y")
    assert found.task == task
    assert why in found.why


def test_the_task_can_be_said():
    found = find_target(table(["10", "9", "10", "8"]), "y", "classification")
    assert found.classes == ("8", "9", "10")  # in order of the numbers
    assert labels(table(["9", "10"]), found).tolist() == [1, 2]
    assert find_target(table(["0", "1"]), "y", "regression").outputs == 1


def test_numbers_are_standardized():
    found = find_target(table(["1", "2", "6"]), "y")
    y = labels(table(["1", "2", "6"]), found)
    assert y.dtype == np.float32
    assert y.shape == (3, 1)
    np.testing.assert_allclose([y.mean(), y.std()], [0, 1], atol=1e-6)


def test_json_and_back():
    found = find_target(table(["b", "a", "b"]), "y")
    assert Target.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("values", "task", "message"),
    [
        (["4", "4", "4"], "auto", "target 'y' is '4' in every row: there is nothing to predict"),
        ([None, None], "auto", "target 'y' has no value in any row"),
        (["1", None, "2", None], "auto", r"no value in 2 of 4 rows \(rows 2, 4\). Remove"),
        (["1", "2", "3", "4", "x"], "auto", "'x' in row 5 is no finite number. Or use --task"),
        (["a", "b", "a"], "regression", "target of a regression is a number.*'a' in row 1"),
        (
            [f"c{k}" for k in range(101)],
            "auto",
            "has 101 distinct values, more classes than the 100",
        ),
    ],
)
def test_targets_that_cannot_be_learned(values, task, message):
    with pytest.raises(InputError, match=message):
        find_target(table(values), "y", task)


def test_no_such_column_lists_columns_and_the_closest():
    message = r"there is no column 'prize'. Did you mean 'price'\? The columns are: 'x', 'price'"
    with pytest.raises(InputError, match=message):
        find_target(table(["1", "2"], "price"), "prize")


def test_new_targets_must_be_of_a_known_kind():
    found = find_target(table(["b", "a"]), "y")
    with pytest.raises(InputError, match="class 'c', which was not seen in training.*: a, b"):
        labels(table(["a", "c"]), found)
    found = find_target(table(["1", "2", "4"]), "y")
    with pytest.raises(InputError, match="'y' is no number in row 2"):
        labels(table(["1", None]), found)
