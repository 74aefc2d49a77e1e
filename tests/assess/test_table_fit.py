"""From a table to a tested model: no row leaks, and what was measured can be measured again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from fsmap import metrics
from fsmap.assess.table_fit import METHODS, TableOptions, fit_table
from fsmap.data.tables import Table, read_table
from fsmap.data.target import labels
from fsmap.errors import InputError
from small_tables import flowers, houses

OPTIONS = TableOptions(hidden=(8,), steps=40, device="cpu", progress=False)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    return read_table(houses(tmp_path_factory.mktemp("table") / "houses.csv"))


@pytest.fixture(scope="module")
def fitted(table):
    return fit_table(table, "price", OPTIONS._replace(steps=200))


def test_numbers_can_be_measured_again_from_the_model(table, fitted):
    rows = table.take(fitted.parts.test)
    y = torch.from_numpy(labels(rows, fitted.model.target))
    for method in METHODS:
        out = fitted.model.outputs(rows, method)
        assert_close(out, fitted.runs[method].out)
        rmse = fitted.model.target.std * metrics.rmse(out, y)
        assert fitted.runs[method].measured["rmse"] == pytest.approx(rmse)
        assert fitted.model.results[method]["rmse"] == pytest.approx(rmse)


def test_it_learns(fitted):
    assert fitted.runs["linear"].measured["r2"] > 0.8  # the truth is linear
    assert fitted.runs["l-map"].measured["r2"] > 0.5


def test_everything_is_learned_from_training_rows_alone(table):
    fitted = fit_table(table, "price", OPTIONS._replace(steps=10))
    changed = {n: c.copy() for n, c in table.columns.items()}
    for row in fitted.parts.test:
        changed["size"][row], changed["price"][row] = "1e6", "1e6"
        changed["town"][row] = "Atlantis"
    again = fit_table(Table(changed), "price", OPTIONS._replace(steps=10))
    assert again.model.encoder.columns == fitted.model.encoder.columns
    np.testing.assert_array_equal(again.model.encoder.mean, fitted.model.encoder.mean)
    assert again.model.target == fitted.model.target._replace(why=again.model.target.why)
    for method in METHODS:
        assert again.runs[method].trained.search == fitted.runs[method].trained.search


def test_what_is_going_on_is_said(table):
    lines = []
    fit_table(table, "price", OPTIONS._replace(steps=5), lines.append)
    text = "\n".join(lines)
    assert "target 'price': regression (120 distinct numbers)" in text
    assert "column 'id' is left out: 120 different texts" in text
    assert "column 'country' is left out: it is 'CH' in every row" in text
    assert "rows: 84 to train, 18 to choose by, 18 to test; " in text
    assert "2 columns of numbers, 1 of categories, 1 with missing values" in text
    assert "l-map: 16 configurations" in text


def test_classes(tmp_path):
    found = fit_table(read_table(flowers(tmp_path / "flowers.csv")), "kind", OPTIONS)
    assert found.model.target.classes == ("iris", "lily", "rose")
    assert found.runs["l-map"].measured["accuracy"] > 0.6
    assert found.runs["l-map"].spread is None


def test_one_column_is_one_column(table):
    lines = []
    options = OPTIONS._replace(drop=("id", "country", "age"), steps=1)
    fit_table(table, "price", options, lines.append)
    assert any("; 1 column of numbers, 1 of categories" in line for line in lines)


def test_columns_can_be_dropped_but_not_the_target(table):
    options = OPTIONS._replace(drop=("id", "country"), steps=2)
    found = fit_table(table, "price", options)
    assert [c.name for c in found.model.encoder.columns] == ["size", "age", "town"]
    with pytest.raises(InputError, match="--drop price would leave out the target"):
        fit_table(table, "price", OPTIONS._replace(drop=("price",)))
    with pytest.raises(InputError, match="there is no column 'sise'. Did you mean 'size'"):
        fit_table(table, "price", OPTIONS._replace(drop=("sise",)))


def test_messages_count_rows_of_the_whole_table(table):
    changed = {n: c.copy() for n, c in table.columns.items()}
    changed["size"][97] = "large"
    with pytest.raises(InputError, match="column 'size' holds numbers, but 'large' in row 98"):
        fit_table(Table(changed), "price", OPTIONS)


def test_a_class_that_is_not_in_every_part_is_named(tmp_path):
    path = flowers(tmp_path / "flowers.csv")
    path.write_text(path.read_text() + "9.0;9.0;tulip\n-9.0;9.0;orchid\n-9.1;9.0;orchid\n")
    lines = []
    found = fit_table(read_table(path), "kind", OPTIONS._replace(steps=2), lines.append)
    told = [
        "class 'orchid' has 2 rows: none to choose by",
        "class 'tulip' has 1 row: none to choose by, none to test on",
    ]
    assert found.notes == told
    assert [line for line in lines if "none to" in line] == told


def test_the_linear_model_does_not_depend_on_early_stopping(table):
    """Small tables used to end after a handful of steps."""
    found = fit_table(table, "price", OPTIONS._replace(steps=1))
    assert found.runs["linear"].measured["r2"] > 0.95
    assert "linear" not in found.edges
