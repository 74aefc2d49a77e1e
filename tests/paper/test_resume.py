"""Kills, interruptions and second runs: nothing is lost, repeated or taken for finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fake_experiment
from fake_experiment import Squares, only, run
from fsmap.cli.list import last_result
from fsmap.errors import CheckpointError
from fsmap.paper.report import tables
from fsmap.paper.report.page import build
from fsmap.paper.rows import DAMAGED, RunFolder, read_rows


@pytest.fixture(autouse=True)
def squares():
    with only(Squares):
        yield


def raise_at(n: int):
    def trouble(unit):
        if unit["n"] == n:
            raise RuntimeError("boom")

    return staticmethod(trouble)


def refuse(out: Path, words: str, **options) -> None:
    """A run that would replace another is refused, and both ways on are named."""
    (refused,) = run(out, **options)
    assert refused.status == "failed"
    assert all(text in refused.reason for text in (words, "--resume", "--force"))


def finish(out: Path, *assignments: str):
    """Resume a run to its end: the notes that it made, and its summary."""
    notes: list[str] = []
    (outcome,) = run(out, resume=True, assignments=assignments, notes=notes)
    assert outcome.status == "finished"
    return notes, outcome.summary


def page(out: Path) -> str:
    return build([out], out / "report").read_text()


def script(*arguments: str, ready: Path | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "FAKE_READY": str(ready)}
    command = [sys.executable, fake_experiment.__file__, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, **pipes)


def test_an_error_half_way_keeps_finished_units_and_resume_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(Squares, "trouble", raise_at(3))
    (failed,) = run(tmp_path)
    assert failed.status == "failed"
    assert "RuntimeError: boom" in failed.reason
    assert f"fsmap run squares --out {tmp_path} --resume" in failed.reason
    here = RunFolder(tmp_path / "squares")
    assert here.state_of(here.content()) == "unfinished"
    assert {row.config["n"] for row in here.content().rows} == {1, 2}

    monkeypatch.setattr(Squares, "trouble", raise_at(1))  # a finished unit must not run again
    assert finish(tmp_path)[0] == ["squares: resuming, 2 units are done"]
    values = tables.values(here.content().rows, metric="square")
    assert values == [1.0, 1.1, 4.0, 4.1, 9.0, 9.1, 16.0, 16.1]


def test_a_cut_off_line_and_rows_of_an_unfinished_unit_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(Squares, "trouble", raise_at(3))
    run(tmp_path)
    file = tmp_path / "squares" / "rows.jsonl"
    lines = file.read_text().splitlines()
    orphan = lines[0].replace('"n": 1', '"n": 3')
    file.write_text("\n".join([*lines, orphan, orphan[:40]]))  # as a kill within a write leaves it
    monkeypatch.setattr(Squares, "trouble", None)
    dropped = "squares: resuming, 2 units are done, 2 rows of an unfinished unit dropped"
    assert finish(tmp_path)[0] == [dropped]
    assert len(read_rows(file)[0]) == 12


def test_an_interrupted_process_says_how_to_go_on(tmp_path):
    ready = tmp_path / "ready"
    out = tmp_path / "runs"
    process = script("wait2", "run", "squares", "--out", str(out), ready=ready)
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    (second,) = run(out)  # while the other process holds the folder
    assert second.status == "failed"
    assert f"another process is writing to {out / 'squares'}" in second.reason
    assert len(RunFolder(out / "squares").content().units) == 1  # a kill would find it, too
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert f"fsmap run squares --out {out} --resume" in errors
    assert len(RunFolder(out / "squares").content().units) == 1


def test_resume_with_another_config_is_refused(tmp_path):
    run(tmp_path, quick=True)
    (outcome,) = run(tmp_path, quick=True, resume=True, assignments=("scale=2",))
    assert outcome.status == "failed"
    assert "scale: 1.0 there, 2.0 now" in outcome.reason
    (outcome,) = run(tmp_path, resume=True)
    assert "size: quick there, full now" in outcome.reason


def test_a_finished_run_is_replaced_only_by_force_and_kept_aside(tmp_path, monkeypatch):
    run(tmp_path)
    before = (tmp_path / "squares" / "rows.jsonl").read_bytes()
    for options in ({}, {"quick": True}, {"assignments": ("scale=5",)}):
        refuse(tmp_path, "holds a finished run (4 units done)", **options)
        (kept,) = run(tmp_path, "all", **options)
        assert kept.status == "kept"
    assert (tmp_path / "squares" / "rows.jsonl").read_bytes() == before
    previous = tmp_path / ".fsmap" / "squares.previous" / "rows.jsonl"
    monkeypatch.setattr(Squares, "trouble", raise_at(2))
    for _ in range(2):  # an unfinished run does not replace what is kept aside
        (failed,) = run(tmp_path, assignments=("scale=5",), force=True)
        assert failed.status == "failed"
        assert previous.read_bytes() == before
    monkeypatch.setattr(Squares, "trouble", None)
    finish(tmp_path, "scale=5")
    assert RunFolder(tmp_path / "squares").content().rows[0].value == 5.0
    assert previous.read_bytes() == before


def test_a_run_in_pieces(tmp_path, monkeypatch):
    """Fields that only choose units may differ: what is there stays, what lacks is added."""
    monkeypatch.setattr(Squares, "selecting", ("sizes",))
    run(tmp_path, assignments=("sizes=1,2",))
    here = RunFolder(tmp_path / "squares")
    monkeypatch.setattr(Squares, "trouble", raise_at(2))  # done before: not measured again
    (kept,) = run(tmp_path, assignments=("sizes=2",), resume=True)
    assert kept.status == "kept"
    finish(tmp_path, "sizes=2,3")
    assert {row.config["n"] for row in here.content().rows} == {1, 2, 3}
    assert len(here.content().units) == 3
    assert here.content().header["config"]["sizes"] == [2, 3]
    (refused,) = run(tmp_path, assignments=("sizes=4", "scale=2"), resume=True)
    assert "another config (scale: 1.0 there, 2.0 now)" in refused.reason
    assert here.finished


@pytest.fixture
def grown(tmp_path, monkeypatch):
    """A finished run of two units that was asked for two more and failed at the last."""
    monkeypatch.setattr(Squares, "selecting", ("sizes",))
    (first,) = run(tmp_path, assignments=("sizes=1,2",))
    monkeypatch.setattr(Squares, "trouble", raise_at(4))
    (failed,) = run(tmp_path, assignments=("sizes=1,2,3,4",), resume=True)
    assert failed.status == "failed"
    monkeypatch.setattr(Squares, "trouble", None)
    return first.summary


def test_a_run_that_lacks_units_is_shown_with_those_it_has(tmp_path, grown):
    here = RunFolder(tmp_path / "squares")
    assert here.state_of(here.content()) == "unfinished"
    assert last_result(Squares(), [tmp_path]) == "1/2 agree, 1 differ, 3/4 units, unfinished"
    assert "3 of 4 units" in page(tmp_path)
    assert finish(tmp_path, "sizes=4,5")[1]["rows"] == 5 * 3
    assert last_result(Squares(), [tmp_path]).endswith(", full")


def test_a_summary_is_replaced_although_no_unit_is_missing(tmp_path, grown):
    """As after a kill between the last unit and the summary."""
    refuse(tmp_path, "holds an unfinished run (3 units done)", assignments=("sizes=1,2,3",))
    assert finish(tmp_path, "sizes=3")[1]["rows"] == 3 * 3
    here = RunFolder(tmp_path / "squares")
    assert here.state_of(here.content()) == "complete"


@pytest.mark.parametrize(("name", "resume"), [("squares", True), ("all", False)])
def test_a_full_run_in_pieces_satisfies_the_quick_size(tmp_path, grown, name, resume):
    before = (tmp_path / "squares" / "summary.json").read_bytes()
    (kept,) = run(tmp_path, name, quick=True, resume=resume)
    assert kept.status == "kept"
    assert (tmp_path / "squares" / "summary.json").read_bytes() == before


@pytest.mark.parametrize("sizes", ["1,2", "1,2,3"])
@pytest.mark.parametrize("text", ["{", '{"claims": []}'])
def test_a_run_with_a_damaged_summary_is_resumed_from_its_units(tmp_path, monkeypatch, sizes, text):
    monkeypatch.setattr(Squares, "selecting", ("sizes",))
    run(tmp_path, assignments=("sizes=1,2",))
    here = RunFolder(tmp_path / "squares")
    here.summary_file.write_text(text)
    monkeypatch.setattr(Squares, "trouble", raise_at(1))  # done before: not measured again
    assert finish(tmp_path, f"sizes={sizes}")[0] == ["squares: resuming, 2 units are done"]
    assert here.state_of(here.content()) == "complete"
    assert {row.config["n"] for row in here.content().rows} == set(map(int, sizes.split(",")))


def test_rows_of_different_units_in_each_others_place_are_put_in_order(tmp_path):
    run(tmp_path)
    here = RunFolder(tmp_path / "squares")
    before, summary = here.rows_file.read_bytes(), here.summary_file.read_bytes()
    lines = before.splitlines(keepends=True)
    units = [json.loads(line)["unit"] for line in lines]
    edge = next(n for n, unit in enumerate(units) if unit != units[0])
    lines[edge - 1], lines[edge] = lines[edge], lines[edge - 1]
    here.rows_file.write_bytes(b"".join(lines))
    here.summary_file.unlink()
    finish(tmp_path)
    assert here.rows_file.read_bytes() == before
    assert here.summary_file.read_bytes() == summary


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_text("")])
def test_only_force_helps_where_the_header_is_lost(tmp_path, spoil):
    run(tmp_path)
    here = RunFolder(tmp_path / "squares")
    spoil(here.units_file)
    files = {file: file.read_bytes() for file in here.path.iterdir()}
    for options in ({}, {"resume": True}):
        (refused,) = run(tmp_path, **options)
        assert isinstance(refused.error, CheckpointError)
        assert "--force" in refused.reason
    assert {file: file.read_bytes() for file in here.path.iterdir()} == files
    assert f"fsmap run squares --out {tmp_path} --force" in page(tmp_path)
    assert run(tmp_path, force=True)[0].status == "finished"


def altered_unit(key):
    def alter(lines):
        line = json.loads(lines[2]) | {key: {"n": 77} if key == "unit" else 77}
        return [*lines[:2], json.dumps(line) + "\n", *lines[3:]]

    return alter


ALTERED = {
    "rows are lost": lambda rows: rows[3:],
    "a value is changed": lambda rows: [rows[0].replace('"value": 1.0', '"value": 7.0'), *rows[1:]],
    "a row is repeated": lambda rows: [rows[0], *rows],
    "rows change places": lambda rows: [rows[1], rows[0], *rows[2:]],
    "a row is no JSON": lambda rows: [rows[0][:-2], *rows[1:]],
    "no row is left": lambda rows: [],
    **{f"unit: {key}": altered_unit(key) for key in ("rows", "seconds", "sha256", "unit")},
}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("name", ALTERED)
def test_a_unit_that_was_altered_runs_again(tmp_path, name, finished):
    run(tmp_path)
    here = RunFolder(tmp_path / "squares")
    expected = tables.values(here.content().rows, metric="square")
    file = here.units_file if name.startswith("unit") else here.rows_file
    file.write_text("".join(ALTERED[name](file.read_text().splitlines(keepends=True))))
    before = here.rows_file.read_bytes()
    assert "is damaged" in page(tmp_path)
    assert "damaged in" in last_result(Squares(), [tmp_path])
    if not finished:
        here.summary_file.unlink()
    assert "do not match" in finish(tmp_path)[0][0]
    assert (here.path / DAMAGED).read_bytes() == before
    assert tables.values(here.content().rows, metric="square") == expected


def test_a_summary_that_was_altered_changes_nothing_on_the_page_and_is_made_again(tmp_path):
    run(tmp_path)
    here = RunFolder(tmp_path / "squares")
    text, before = here.summary_file.read_text(), page(tmp_path)
    here.summary_file.write_text(text.replace('"holds": false', '"holds": true'))
    assert page(tmp_path) == before
    assert "1/2 agree, 1 differ" in last_result(Squares(), [tmp_path])
    finish(tmp_path)
    assert '"holds": false' in here.summary_file.read_text()


@pytest.mark.parametrize("how", ["resume", "force", None])
def test_a_kill_within_the_first_writes_is_mended(tmp_path, how):
    (tmp_path / "squares").mkdir()
    (tmp_path / "squares" / ".units.jsonl.1234.partial").write_text("{")
    (outcome,) = run(tmp_path, **{how: True} if how else {})
    assert outcome.status == "finished"
