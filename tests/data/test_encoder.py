"""Cells to numbers: by hand, by name, and for values that training has not seen."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fsmap.data.encoder import FLAG_STD, Encoder, UnseenWarning, learn
from fsmap.data.tables import Table
from fsmap.errors import InputError


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
    names = ["age", "age is missing", "town=Basel", "town=Bern", "height"]
    assert encoder.names() == names
    assert encoder.width == 5
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


def test_a_rare_level_does_not_become_a_huge_number():
    towns = table(town=["a"] * 998 + ["b"] * 2)
    encoder = learn(towns, ["town"])
    assert encoder.std.tolist() == [FLAG_STD] * 2
    assert np.abs(encoder.encode(towns)).max() < 5


def test_columns_are_found_by_name_and_others_ignored(known):
    encoder = learn(known, ["age", "town", "height"])
    shuffled = Table({n: known.columns[n] for n in ("height", "town", "age")})
    extra = Table({**shuffled.columns, "other": np.array(["x"] * 4, dtype=object)})
    np.testing.assert_array_equal(encoder.encode(extra), encoder.encode(known))


def test_plain_json_and_back(known):
    encoder = learn(known, ["age", "town", "height"])
    text = json.dumps(encoder.to_json())
    again = Encoder.from_json(json.loads(text), encoder.mean, encoder.std)
    assert again.columns == encoder.columns
    np.testing.assert_array_equal(again.encode(known), encoder.encode(known))


def test_a_level_of_missing_values():
    towns = table(town=["a", "a", "b", "b", None])
    encoder = learn(towns, ["town"])
    assert encoder.names() == ["town=a", "town=b", "town=(missing)"]
    assert encoder.encode(towns)[4].argmax() == 2


def test_an_unseen_category_counts_as_other_with_a_warning(known):
    encoder = learn(known, ["age", "town", "height"])
    new = table(age=["1", "1"], town=["Chur", None], height=["1", "1"])
    message = (
        r"column 'town' has values that were not seen in training \('Chur', '\(missing\)'; in 2"
    )
    with pytest.warns(UnseenWarning, match=message):
        raw = encoder.encode(new) * encoder.std + encoder.mean
    np.testing.assert_allclose(raw[:, 2:4], 0, atol=1e-6)  # none of the known ones


def test_a_rare_category_of_training_is_no_surprise():
    towns = table(town=["a", "a", "b", "b", "c"])
    encoder = learn(towns, ["town"])
    raw = encoder.encode(towns) * encoder.std + encoder.mean  # a warning would be an error here
    np.testing.assert_allclose(raw[4], 0, atol=1e-6)


def test_a_gap_that_training_did_not_have_is_filled_with_a_warning(known):
    encoder = learn(known, ["age", "town", "height"])
    new = table(age=["1"], town=["Bern"], height=[None])
    with pytest.warns(UnseenWarning, match=r"'height' had no missing values .* median, 1.65"):
        assert np.isfinite(encoder.encode(new)).all()


def test_text_among_numbers_at_prediction(known):
    encoder = learn(known, ["age", "town", "height"])
    new = table(age=["1"], town=["Bern"], height=["tall"])
    with pytest.raises(InputError, match="column 'height' held numbers when.*'tall' in row 1"):
        encoder.encode(new)


def test_a_lacking_column_at_prediction(known):
    encoder = learn(known, ["age", "town", "height"])
    new = table(age=["1"], city=["Bern"], hight=["2"])
    message = r"no column 'town', 'height'.*The columns are: 'age', 'city', 'hight'"
    with pytest.raises(InputError, match=message):
        encoder.encode(new)
    with pytest.raises(InputError, match="Did you mean 'height'"):
        learn(known, ["hight"])


def test_nothing_to_predict_from():
    with pytest.raises(InputError, match=r"no column is left .* 'a': it is 'x' in every row"):
        learn(table(a=["x", "x"]), ["a"])
    with pytest.raises(InputError, match="There is only the target"):
        learn(table(a=["x", "x"]), [])
