"""Cells to numbers: by hand, by name, and for values that training has not seen."""

from __future__ import annotations

import numpy as np
import pytest

from fsmap.errors import InputError
from fsmap.tables.encoder import FLAG_STD, UnseenWarning, find_target, infer, with_target
from fsmap.tables.encoder import learn_encoder as learn
from fsmap.tables.reader import Table


def table(**columns) -> Table:
    made = {}
    for name, values in columns.items():
        made[name] = np.empty(len(values), dtype=object)
        made[name][:] = values
    return Table(made)


@pytest.fixture
def known() -> Table:
    return table(
        age=["10", "30", None, "20"],
        town=["Bern", "Basel", "Bern", "Basel"],
        height=["1.5", "1.7", "1.6", "1.8"],
    )


def test_by_hand(known):
    encoder = learn(known, ["age", "town", "height"])
    assert encoder.names() == ["age", "age is missing", "town=Basel", "town=Bern", "height"]
    raw = encoder.encode(known) * encoder.std + encoder.mean
    expected = [
        [10, 0, 0, 1, 1.5],
        [30, 0, 1, 0, 1.7],
        [20, 1, 0, 1, 1.6],  # the median, and a mark
        [20, 0, 1, 0, 1.8],
    ]
    np.testing.assert_allclose(raw, expected, atol=1e-6)
    np.testing.assert_allclose(encoder.encode(known).mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(encoder.encode(known)[:, 4].std(), 1, atol=1e-6)


def test_a_rare_level_does_not_become_a_huge_number_and_a_missing_one_is_a_level():
    towns = table(town=["a"] * 998 + ["b"] * 2)
    encoder = learn(towns, ["town"])
    assert encoder.std.tolist() == [FLAG_STD] * 2
    assert np.abs(encoder.encode(towns)).max() < 5
    towns = table(town=["a", "a", "b", "b", None])
    encoder = learn(towns, ["town"])
    assert encoder.names() == ["town=a", "town=b", "town=(missing)"]
    assert encoder.encode(towns)[4].argmax() == 2


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (("11", "Chur", "1.6"), r"'town' has values .* \('Chur'; in 1"),
        (("11", None, "1.6"), r"'town' has values .* \('\(missing\)'; in 1"),
        (("11", "Bern", None), r"'height' had no missing values .* 1.65"),
        (("500", "Bern", "1.6"), "'age' was between 10 and 30 .* is 500 here"),
    ],
)
def test_what_training_has_not_seen_is_said(known, cells, message):
    encoder = learn(known, ["age", "town", "height"])
    new = table(**{name: [cell] for name, cell in zip(known.columns, cells, strict=True)})
    with pytest.warns(UnseenWarning, match=message):
        raw = encoder.encode(new) * encoder.std + encoder.mean
    assert np.isfinite(raw).all()
    in_a_town = float(cells[1] == "Bern")  # or in none of the known ones
    assert raw[0, 2:4].sum() == pytest.approx(in_a_town, abs=1e-6)


def test_a_lacking_column_at_prediction(known):
    encoder = learn(known, ["age", "town", "height"])
    new = table(age=["1"], city=["Bern"], hight=["2"])
    message = r"no column 'town', 'height'.*The columns are: 'age', 'city', 'hight'"
    with pytest.raises(InputError, match=message):
        encoder.encode(new)
    with pytest.raises(InputError, match="Did you mean 'height'"):
        learn(known, ["HIGHT"])


def test_all_rows_decide_what_a_column_is():
    minutes = table(minute=["01", "01", "59", "59", "100", "120"])
    assert learn(minutes, ["minute"], rows=slice(4)).names() == ["minute"]  # no codes
    when = table(when=["01/02/2024", "01/03/2024", "31/01/2024"])
    assert learn(when, ["when"], rows=np.arange(2)).columns[0].form == "%d/%m/%Y"
    assert "may also hold %d/%m/%Y" in learn(when.take(slice(2)), ["when"]).notes[1]


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (["12 %", "7.5%", None], [12, 7.5, np.nan]),
        (["$1,200.50", "$900", "-$3"], [1200.5, 900, -3]),
        (["1'200", "3", "40"], [1200, 3, 40]),
        (["1,234", "2,500", "900"], [1234, 2500, 900]),
        (["3,14", "2,5", "1.000,5"], [3.14, 2.5, 1000.5]),
        (["2,375", "0,933", "12"], [2.375, 0.933, 12]),
        (["€ 1.200,50", "3,1 EUR", "-2 €"], [1200.5, 3.1, -2]),
        (["1e3", "-.5", "+2"], [1000, -0.5, 2]),
    ],
)
def test_numbers_as_people_write_them(cells, numbers):
    found = table(x=cells)
    encoder = learn(found, ["x"])
    raw = (encoder.encode(found) * encoder.std + encoder.mean)[:, 0]
    known = ~np.isnan(numbers)
    np.testing.assert_allclose(raw[known], np.array(numbers)[known], rtol=1e-5)


def test_the_decimal_mark_is_remembered():
    encoder = learn(table(x=["1,5", "2,25", "1.000,5"]), ["x"])
    raw = encoder.encode(table(x=["1.200", "7"])._replace(mark=",")) * encoder.std + encoder.mean
    np.testing.assert_allclose(raw[:, 0], [1200, 7], rtol=1e-5)


@pytest.mark.parametrize(
    ("cells", "form"),
    [
        (["2024-01-31", "2024-02-01T12:00", "2023-05-05"], "%Y-%m-%d"),
        (["31.1.2024", "1.2.2024", "5.5.2023"], "%d.%m.%Y"),
        (["31/01/2024", "01/02/2024", "05/05/2023"], "%d/%m/%Y"),
        (["01/31/2024", "02/01/2024 08:30", "05/05/2023"], "%m/%d/%Y"),
        (["1/31/2024 9:05", "2/1/2024 9:05:30 pm", "5/5/2023 12:00 AM"], "%m/%d/%Y"),
        (["31/01/24", "01/02/24", "05/05/23"], "%d/%m/%y"),
        (["31 Jan 2024", "01 Feb 2024 10:00", "05 May 2023"], "%d %b %Y"),
    ],
)
def test_dates_become_numbers(cells, form):
    found = table(when=cells)
    encoder = learn(found, ["when"])
    assert encoder.columns[0].form == form
    assert len(encoder.notes) == 1  # the form is certain
    raw = encoder.encode(found) * encoder.std + encoder.mean
    assert int(raw[1, 0] - raw[0, 0]) == 1  # days
    assert raw.shape[1] == 7
    with pytest.warns(UnseenWarning, match="2024-01-31 stands in"):  # the median
        encoder.encode(table(when=[None]))
    with pytest.raises(InputError, match="held dates"):
        encoder.encode(table(when=["soon"]))


@pytest.mark.parametrize(
    ("name", "cells", "reason"),
    [
        ("x", [None, None, None], "no value"),
        ("x", ["7", "7", "7"], "in every row"),
        ("x", ["1", "2", "3"], "counts the rows"),
        ("customer_id", [str(k * k) for k in range(30)], "identifier"),
        ("note", [f"text {k}" for k in range(30)], "identifier, free text"),
    ],
)
def test_what_is_left_out(name, cells, reason):
    column = infer(name, table(**{name: cells}).columns[name])
    assert column.kind == "left out"
    assert reason in column.reason
    if "--keep" in column.reason:
        assert learn(table(**{name: cells}), [name], keep=[name]).names() == [name]


def test_what_is_refused():
    for cells, new, message in (
        (["1,5", "2"], ["1", "1.200"], "decimal commas, .* but '1.200' in row 2 has not"),
        (["1.5", "2"], ["0,125"], "decimal points, .* but '0,125' in row 1 has not"),
        (["1 %", "2%"], ["0.1"], "has %, in training .* but row 1 is '0.1'"),
        (["1 USD", "2 JPY"], [], "has USD, .* but row 2 is '2 JPY'"),
        (["1", "1e300"], [], "numbers beyond 1e.100"),
        (["a", "a"], [], "no column is left .* 'x': it is 'a' in every row"),
    ):
        with pytest.raises(InputError, match=message):
            learn(table(x=cells), ["x"]).encode(table(x=new))
    with pytest.raises(InputError, match="There is only the target"):
        learn(table(x=["a"]), [])


def test_codes_are_categories_and_numbers_with_text_a_mistake():
    codes = ["01000", "08001", "08001", "01000"]
    assert infer("zip", table(zip=codes).columns["zip"]).kind == "category"
    assert infer("n", table(n=["10", "20", "10", "20"]).columns["n"]).kind == "number"
    with pytest.raises(InputError, match="'oops' in row 6"):
        learn(table(n=["1", "2", "4", "4", "5", "oops"]), ["n"], rows=np.arange(5))


@pytest.mark.parametrize(
    ("cells", "task", "classes"),
    [
        (["a", "b", "a"], "classification", ("a", "b")),
        (["1", "0", "1"], "classification", ("0", "1")),
        (["10", "9", "7"], "regression", ()),
        (["1,5", "2,5", "3,5"], "regression", ()),
    ],
)
def test_what_the_target_is(cells, task, classes):
    found = find_target(table(y=cells), "y")
    assert (found.task, found.classes) == (task, classes)


@pytest.mark.parametrize(
    ("cells", "task", "message"),
    [
        (["1", "1"], "auto", "in every row"),
        ([None, None], "auto", "no value in any row"),
        (["1", "2", "x"], "regression", "is a number"),
        ([f"c{k}" for k in range(200)], "auto", "more than 100 classes"),
    ],
)
def test_targets_that_cannot_be_learned(cells, task, message):
    with pytest.raises(InputError, match=message):
        find_target(with_target(table(y=cells), "y"), "y", task)
