"""Means, standard errors, selections, and how numbers are written."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsmap.paper.report import tables
from fsmap.paper.rows import Row


def rows():
    for n in (200, 100):
        for method, value in (("ps-map", 2.0), ("fs-map", 1.0)):
            for seed in range(3):
                yield Row("e", "rmse", value * n + seed, method, seed, {"n_train": n})
    yield Row("e", "curve", [1.0], "fs-map", 0, {})


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30))
def test_mean_and_standard_error_are_numpys(values):
    found = tables.mean(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert found.stderr == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-9)
    assert found.n == len(values)


def test_means_of_few_or_bad_values():
    assert tables.mean([2.0])[::2] == (2.0, 1)
    assert math.isnan(tables.mean([2.0]).stderr)
    assert math.isnan(tables.mean([]).mean)
    assert math.isnan(tables.mean([1.0, math.nan]).mean)
    assert tables.mean([1.0, math.inf]).mean == math.inf


def test_select_by_field_and_by_config():
    assert len(tables.select(rows(), metric="rmse", n_train=100)) == 6
    assert len(tables.select(rows(), method=("ps-map", "fs-map"), seed=0)) == 5
    assert tables.select(rows(), n_train=300) == []
    assert tables.select(rows(), experiment="other") == []


def test_a_line_is_sorted_and_averaged():
    line = tables.line(tables.select(rows(), metric="rmse", method="fs-map"), "n_train")
    assert line.x == [100, 200]
    assert line.mean == [101.0, 201.0]
    assert line.stderr == pytest.approx([1 / math.sqrt(3)] * 2)


def test_summarize_puts_the_paper_beside_ours():
    paper = {(100, "fs-map"): (99.0, 2.0), (200, "fs-map"): 199.0}
    table = tables.summarize(tables.select(rows(), metric="rmse"), "n_train", "method", paper=paper)
    lines = {(entry["n_train"], entry["method"]): entry for entry in table}
    assert len(lines) == 4
    assert lines[100, "fs-map"]["ours"] == 101.0
    assert lines[100, "fs-map"]["runs"] == 3
    assert (lines[100, "fs-map"]["paper"], lines[100, "fs-map"]["paper_stderr"]) == (99.0, 2.0)
    assert (lines[200, "fs-map"]["paper"], lines[200, "fs-map"]["paper_stderr"]) == (199.0, None)
    assert lines[100, "ps-map"]["paper"] is None
    single = tables.summarize(tables.select(rows(), metric="rmse"), "method", paper={"fs-map": 5})
    assert {entry["method"]: entry["paper"] for entry in single} == {"ps-map": None, "fs-map": 5}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.12346, "\u22120.1235"),
        (123456.0, "123456"),
        (999999.9, "1000000"),
        (1.5e9, "1.5e9"),
        (-2.5e-9, "\u22122.5e\u22129"),
        (math.nan, "nan"),
        (-math.inf, "\u2212∞"),
        (True, "yes"),
        (-3, "\u22123"),
        ("text", "text"),
        ([0.5, 1], "0.5, 1"),
        (None, "\u2014"),
    ],
)
def test_numbers_are_written(value, text):
    assert tables.number(value) == text


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (0.329, 0.033, "0.329 ± 0.033"),
        (95.4, 0.1, "95.40 ± 0.10"),
        (-12345.6, 678.9, "\u221212346 ± 679"),
        (3e8, 2e6, "3e8 ± 2e6"),
        (1e-7, 2e-9, "1e\u22127 ± 2e\u22129"),
        (0.5, math.nan, "0.5"),
        (0.5, 0.0, "0.5"),
        (math.nan, 0.1, "nan"),
        (None, None, "\u2014"),
    ],
)
def test_errors_are_written_to_the_same_place(value, stderr, text):
    assert tables.with_error(value, stderr) == text


def test_a_table_joins_errors_and_uses_the_papers_letters():
    table = [
        {"n_train": 100, "ours": 0.1, "stderr": 0.01, "paper": 0.2, "paper_stderr": None},
        {"n_train": 200, "ours": 0.1, "stderr": math.nan, "remark": "x"},
    ]
    header, lines = tables.shown(table)
    assert header == ["N", "ours", "paper", "remark"]
    assert lines == [["100", "0.100 ± 0.010", "0.2", ""], ["200", "0.1", "", "x"]]


def test_an_error_without_its_value_keeps_its_column():
    assert tables.shown([{"stderr": 0.1}]) == (["stderr"], [["0.1"]])
    assert tables.shown([]) == ([], [])
