"""Rows survive the trip to disk, a kill, and numbers that JSON does not have."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_experiment import Squares, only
from fsmap import files
from fsmap.cli import main
from fsmap.files import revive
from fsmap.paper import rows as records
from fsmap.paper.rows import Row, append_lines, key_of, read_rows

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


@pytest.mark.parametrize(
    ("effect", "stderr", "seeds", "bound", "verdict"),
    [
        (-0.28, 0.1, 5, {"below": 0}, "agrees"),
        (0.28, 0.1, 5, {"below": 0}, "differs"),
        (-0.0002, 0.0002, 5, {"below": 0}, "undecided"),  # .2916 against .2918 is no tick
        (0.02, 0.02, 5, {"below": 0}, "undecided"),  # and 3.86 against 3.84 no cross
        (0.4, 0.1, 5, {"above": 0.1}, "agrees"),
        (-0.1, 0.05, 5, {"within": 0.3}, "agrees"),
        (-0.5, 0.05, 5, {"within": 0.3}, "differs"),
        (-0.25, 0.05, 5, {"within": 0.3}, "undecided"),
        (-0.4, math.nan, 1, {"below": 0}, "undecided"),
        (math.nan, math.nan, 0, {"below": 0}, "not tested"),
        (math.inf, math.nan, 3, {"below": 0}, "differs"),
        (-math.inf, 0.1, 3, {"below": 0}, "agrees"),
        (-0.4, 0.1, 3, {"below": 0}, "undecided"),  # of three seeds 4.3 errors, of five 2.8
    ],
)
def test_an_effect_is_decided_by_its_95_percent_interval(effect, stderr, seeds, bound, verdict):
    claim = records.judge("it falls", effect, stderr, seeds, **bound)
    assert records.verdict(claim._asdict()) == verdict
    assert bool(claim.reason) == (claim.holds is None)
    with pytest.raises(TypeError, match="give one of below, above and within"):
        records.judge("it falls", effect, stderr, seeds, **bound, bellow=1)


def test_a_key_is_the_same_before_and_after_a_file():
    unit = {"n": 1, "eps": math.inf, "sizes": (1, 2)}
    assert key_of(unit) == key_of(revive(json.loads(records.encode(unit))))
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})


@pytest.mark.parametrize(
    "text", ['{"experiment": ', '{"hello": "world"}', "[]", "null", "", "[" * 100_000, "1" * 5000]
)
def test_a_line_that_is_no_row_is_counted(tmp_path, text):
    file = tmp_path / "rows.jsonl"
    file.write_text(text + "\n")
    write(file, ROW)
    lines, dropped = read_rows(file)
    assert [line.row for line in lines] == [ROW]
    assert dropped == 1


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_says_whether_the_package_was_changed(tmp_path, monkeypatch):
    package = tmp_path / "src" / "fsmap"
    package.mkdir(parents=True)
    (package / "errors.py").write_text("1")
    monkeypatch.setattr(files, "PACKAGE", package)
    commit = files.commit.__wrapped__  # without its cache
    git(tmp_path, "init", "-q")
    assert commit().startswith(("v", "unknown"))  # nothing is tracked yet
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert commit() == head
    (tmp_path / "notes.txt").write_text("beside the package")
    assert commit() == head
    (package / "errors.py").write_text("2")
    assert commit() == f"{head}+dirty"


COMMANDS = [
    ["report", "runs", "--out", "page"],
    ["report", "runs", "--redraw", "--out", "page"],
    ["list"],
    ["run", "squares", "--quick", "--resume", "--silent"],
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with only(Squares):
        assert main(["run", "squares", "--quick", "--silent"]) == 0
        yield tmp_path / "runs" / "squares"


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("/etc/passwd")])
@pytest.mark.parametrize("name", ["rows.jsonl", "units.jsonl", "summary.json", "squares.svg"])
def test_links_and_folders(folder: Path, name, make, capsys: pytest.CaptureFixture[str]):
    """Each command ends with 0 or 2: no traceback, and no file but its own."""
    (folder / name).unlink()
    make(folder / name)
    allowed = {folder.parent, folder.parent.parent / "page"}
    for command in COMMANDS:
        assert main(command) in (0, 2), command
        told = capsys.readouterr()
        assert "Traceback" not in told.out + told.err
        assert {*folder.parent.parent.iterdir()} <= allowed
    page = folder.parent.parent / "page" / "index.html"
    assert not page.exists() or "root:x:" not in page.read_text()
