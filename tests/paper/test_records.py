"""Rows survive the trip to disk, a kill, and numbers that JSON does not have."""

from __future__ import annotations

import json
import math
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsmap.paper import rows as records
from fsmap.paper.rows import Row, append_lines, key_of, plain, read_rows, revive

ROW = Row("fourier", "rmse", 0.1, "fs-map", 0, {"n_train": 100}, unit={"n": 1}, deviations=("a",))


def strict(text: str):
    """Parse as a parser that knows no NaN does."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def write(file, *rows):
    append_lines(file, [records.encode(row._asdict()) for row in rows])


def test_a_row_comes_back_as_it_was(tmp_path):
    file = tmp_path / "rows.jsonl"
    write(file, ROW, ROW._replace(value=[1.0, 2.0]))
    lines, dropped = read_rows(file)
    assert [line.row for line in lines] == [ROW, ROW._replace(value=[1.0, 2.0])]
    assert b"".join(line.text + b"\n" for line in lines) == file.read_bytes()
    assert dropped == 0


@given(st.recursive(st.floats() | st.integers(), lambda kids: st.lists(kids, max_size=4)))
def test_any_value_survives_strict_json(value):
    back = revive(strict(records.encode(value)))
    assert repr(back) == repr(value)  # nan is not equal to itself, but is written the same


def test_tensors_and_arrays_become_lists():
    assert plain(torch.tensor([[1.0, math.nan]])) == [[1.0, "nan"]]
    assert plain(np.float32(0.5)) == 0.5
    assert plain({1: (np.int64(2), torch.tensor(3))}) == {"1": [2, 3]}
    assert plain({"device": torch.device("cpu")}) == {"device": "cpu"}


def test_a_key_is_the_same_before_and_after_a_file():
    unit = {"n": 1, "eps": math.inf, "sizes": (1, 2)}
    assert key_of(unit) == key_of(revive(json.loads(records.encode(unit))))
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})


@pytest.mark.parametrize("cut", [1, 7, 60])
def test_a_cut_off_last_line_is_left_out_and_counted(tmp_path, cut):
    file = tmp_path / "rows.jsonl"
    write(file, ROW, ROW)
    file.write_bytes(file.read_bytes()[:-cut])
    lines, dropped = read_rows(file)
    assert [line.row for line in lines] == [ROW]
    assert dropped == 1


def test_a_missing_file_is_empty(tmp_path):
    assert read_rows(tmp_path / "no.jsonl") == ([], 0)


@pytest.mark.parametrize(
    "text",
    [
        '{"experiment": ',
        '{"hello": "world"}',
        "[]",
        "7",
        "null",
        '"text"',
        "",
        "[" * 100_000,
        "[" * 60 + "]" * 60,
        '{"experiment": ' * 10_000,
        "\x00",
        "1" * 5000,
    ],
)
def test_a_line_that_is_no_row_is_counted(tmp_path, text):
    file = tmp_path / "rows.jsonl"
    file.write_text(text + "\n")
    write(file, ROW)
    lines, dropped = read_rows(file)
    assert [line.row for line in lines] == [ROW]
    assert dropped == 1


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "long"},
        {"value": "text"},
        {"value": {"a": 1}},
        {"value": [1, [None]]},
        {"unit": [1]},
        {"unit": None},
        {"config": 7},
        {"deviations": 7},
        {"deviations": [7]},
        {"seed": "a"},
        {"seed": 1.5},
        {"method": 3},
        {"metric": None},
        {"more": 1},
    ],
)
def test_entries_of_another_type_are_no_row(tmp_path, change):
    file = tmp_path / "rows.jsonl"
    file.write_text(records.encode({**ROW._asdict(), **change}) + "\n")
    assert read_rows(file) == ([], 1)


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_says_whether_the_package_was_changed(tmp_path):
    package = tmp_path / "src" / "fsmap"
    package.mkdir(parents=True)
    (package / "errors.py").write_text("1")
    git(tmp_path, "init", "-q")
    assert records.commit(package).startswith(("v", "unknown"))  # nothing is tracked yet
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "--short", "HEAD")
    records.commit.cache_clear()
    assert records.commit(package) == head
    (tmp_path / "notes.txt").write_text("beside the package")
    records.commit.cache_clear()
    assert records.commit(package) == head
    (package / "errors.py").write_text("2")
    records.commit.cache_clear()
    assert records.commit(package) == f"{head}+dirty"
    records.commit.cache_clear()


def test_circumstances_of_the_processor():
    found = records.circumstances("cpu")
    assert found.device == "cpu"
    assert found.torch == torch.__version__
    assert records.machine()["cores"] >= 1
