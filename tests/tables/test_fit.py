"""From a table to a tested model: no row leaks, and what was measured can be measured again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fsmap.errors import InputError
from fsmap.tables.model import TableOptions, fit_table, load_model
from fsmap.tables.network import METHODS
from fsmap.tables.reader import Table, read_table
from small_tables import flowers, houses

OPTIONS = TableOptions(hidden=(8,), steps=40, device="cpu", progress=False)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    return read_table(houses(tmp_path_factory.mktemp("table") / "houses.csv"))


@pytest.fixture(scope="module")
def fitted(table):
    return fit_table(table, "price", replace(OPTIONS, steps=200))


def test_the_best_on_held_out_rows_is_used(fitted):
    losses = {method: one.loss for method, one in fitted.learned.items()}
    assert tuple(losses) == METHODS
    assert fitted.model.chosen == min(losses, key=losses.get)
    assert fitted.measured["linear"]["r2"] > 0.9  # the truth is linear
    assert fitted.measured["l-map"]["r2"] > 0.8
    assert fitted.measured["constant"]["r2"] < 0.1


def test_the_saved_model_predicts_the_same(table, fitted, tmp_path):
    fitted.model.save(tmp_path / "model.pt")
    again = load_model(tmp_path / "model.pt")
    before, after = fitted.model.predict(table), again.predict(table)
    for name in ("prediction", "low", "high"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-5)
    truth = np.array([float(c) for c in table.columns["price"]])
    error = truth - again.predict(table)["prediction"]
    assert np.sqrt(np.mean(error**2)) < 15  # the noise is 10


def test_the_choice_is_made_without_test_rows(table):
    fitted = fit_table(table, "price", replace(OPTIONS, steps=10))
    changed = {n: c.copy() for n, c in table.columns.items()}
    for row in fitted.test:
        changed["size"][row], changed["price"][row] = "1e6", "1e6"
        changed["town"][row] = "Atlantis"
    again = fit_table(Table(changed), "price", replace(OPTIONS, steps=10))
    assert again.model.encoder.columns == fitted.model.encoder.columns
    np.testing.assert_array_equal(again.model.encoder.mean, fitted.model.encoder.mean)
    for method in METHODS:
        assert again.learned[method].search == fitted.learned[method].search


def test_classes(tmp_path):
    found = fit_table(read_table(flowers(tmp_path / "flowers.csv")), "kind", OPTIONS)
    assert found.model.target.classes == ("iris", "lily", "rose")
    assert found.measured["l-map"]["accuracy"] > 0.6
    assert found.spread is None


def test_none_is_a_class_among_text(tmp_path):
    path = flowers(tmp_path / "t.csv")
    path.write_text(path.read_text().replace("iris", "None"))
    for missing, classes in ((), ("None", "lily", "rose")), (("none",), ("lily", "rose")):
        read = read_table(path, target="kind", missing=missing)
        found = fit_table(read, "kind", replace(OPTIONS, method="linear"))
        assert found.model.target.classes == classes
        assert "40 " in found.notes[0]


def test_what_matters_comes_first(fitted):
    first, *others = (name for name, _ in fitted.importance)
    assert (first, set(others)) == ("size", {"age", "town"})


def test_columns_can_be_dropped_but_not_the_target(table):
    found = fit_table(table, "price", replace(OPTIONS, drop=("id", "country"), steps=2))
    assert [c.name for c in found.model.encoder.columns] == ["size", "age", "town"]
    for name, message in (("price", "would leave out the target"), ("sise", "you mean 'size'")):
        with pytest.raises(InputError, match=message):
            fit_table(table, "price", replace(OPTIONS, drop=(name,)))


def test_a_rare_class_is_named(tmp_path):
    path = flowers(tmp_path / "flowers.csv")
    path.write_text(path.read_text() + "9.0;9.0;tulip\n" + 2 * "-9.0;9.0;orchid\n")
    found = fit_table(read_table(path), "kind", replace(OPTIONS, steps=2))
    assert "1 of 123 rows are copies of others: the test may be too easy" in found.notes
    for name, rows in (("orchid", 2), ("tulip", 1)):
        assert f"class {name!r} is too rare to be tested (rows: {rows})" in found.notes
