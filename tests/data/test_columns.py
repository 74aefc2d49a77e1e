"""What a column is taken for, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from fsmap.data.columns import CATEGORY, LEFT_OUT, MAX_LEVELS, NUMBER, infer, numbers, texts
from fsmap.errors import InputError


def cells(*values):
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def test_numbers_with_gaps():
    column = infer("x", cells("1", "2.5", None, "-3e2", "7"))
    assert column.kind == NUMBER
    assert column.missing
    assert column.fill == 1.75  # the median
    assert not infer("x", np.array([1.0, 5.0])).missing


def test_categories_most_frequent_first_rare_ones_apart():
    column = infer("town", cells(*"bbbaacd", None))
    assert (column.kind, column.levels, column.others) == (CATEGORY, ("b", "a"), ("c", "d"))
    assert column.missing


def test_at_most_so_many_levels():
    many = [f"level {k}" for k in range(60)] * 3
    column = infer("town", cells(*many))
    assert len(column.levels) == MAX_LEVELS
    assert len(column.others) == 10


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (["4", "4.0", "4"], "it is 4 in every row"),
        (["red"] * 3, "it is 'red' in every row"),
        (["1", "2", "3", "4"], "it counts the rows"),
        ([f"name {k}" for k in range(30)], "30 different texts in 30 rows: an identifier"),
        (["a", "b", "c"], "no category occurs twice"),
    ],
)
def test_columns_that_teach_nothing_are_left_out(values, reason):
    column = infer("c", cells(*values))
    assert column.kind == LEFT_OUT
    assert reason in column.reason


def test_the_user_overrules():
    codes = cells("8001", "3000", "8001", "3000")
    assert infer("zip", codes).kind == NUMBER
    assert infer("zip", codes, category=True).levels == ("3000", "8001")
    names = cells(*[f"name {k // 2}" for k in range(100)], *map(str, range(60)))
    assert infer("name", names, category=True).kind == CATEGORY


def test_whole_numbers_as_categories_are_the_same_from_csv_and_parquet():
    assert texts(np.array([3.0, np.nan, 0.1])) == ["3", None, "0.1"]
    assert infer("c", np.array([3.0, 4.0, 3.0, 4.0]), category=True).levels == ("3", "4")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([None, None], r"column 'c' has no value in any of the 2 rows. Leave it out: --drop c"),
        (
            ["1", "2", "3", "4", "oops"],
            r"column 'c' holds numbers, but 'oops' in row 5 is no finite number.*"
            r"--missing 'oops'.*--category c",
        ),
        (["1"] * 8 + ["a", "b"], r"'a' in row 9, 'b' in row 10 are no finite numbers"),
        (["1", "2", "3", "4", "inf"], "'inf' in row 5 is no finite number"),
        (["1"] * 20 + list("abcd"), "'c' in row 23 and 1 more are no finite numbers"),
        (["2024-01-31", "2024-02-01"], r"column 'c' holds dates, such as '2024-01-31'.*--drop c"),
        (["31.12.2023", "1.1.24 12:30"], "column 'c' holds dates"),
        (["2024-01-31T12:00:00", None], "column 'c' holds dates"),
    ],
)
def test_columns_that_only_the_user_can_explain(values, message):
    with pytest.raises(InputError, match=message):
        infer("c", cells(*values))


def test_infinite_numbers_from_parquet_are_refused():
    with pytest.raises(InputError, match="'inf' in row 2 is no finite number"):
        infer("c", np.array([1.0, np.inf, 2.0, 3.0, 4.0]))


def test_numbers_tell_gaps_from_text():
    values, wrong = numbers(cells("1", None, "x", "1e400"))
    np.testing.assert_array_equal(values, [1, np.nan, np.nan, np.nan])
    assert wrong.tolist() == [False, False, True, True]
