"""A run is finished, resumed, refused or replaced, and nothing is lost on the way."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fake_experiment
from fake_experiment import Squares, only
from fsmap.errors import CheckpointError, InputError, MissingDataError
from fsmap.experiments import runner
from fsmap.experiments.options import Options
from fsmap.experiments.publish import redraw
from fsmap.experiments.run_folder import Place, RunFolder, locked
from fsmap.report.records import read_rows


@pytest.fixture(autouse=True)
def squares(monkeypatch):
    monkeypatch.setattr(Squares, "trouble", None)
    with only(Squares):
        yield Squares


def run(out: Path, *names: str, notes: list[str] | None = None, **options):
    """Outcomes of a silent run."""
    say = (lambda _: None) if notes is None else notes.append
    return list(runner.run(names or ("squares",), Options(out=out, silent=True, **options), say))


def raise_at(n: int):
    def trouble(unit):
        if unit["n"] == n:
            raise RuntimeError("boom")

    return staticmethod(trouble)


def test_a_run_leaves_what_the_contract_says(tmp_path):
    (outcome,) = run(tmp_path, quick=True)
    assert outcome.status == "finished"
    here = tmp_path / "squares"
    names = {file.name for file in here.iterdir()}
    pictures = {"squares.png", "squares.svg", "interactive.json"}
    assert names == {"rows.jsonl", "units.jsonl", "summary.json"} | pictures
    summary = json.loads((here / "summary.json").read_text())
    assert summary["experiment"] == "squares"
    assert summary["size"] == "quick"
    assert summary["protocol"] == "exact arithmetic"
    assert summary["device"] == "cpu"
    assert summary["seconds"] >= 0
    assert summary["commit"]
    assert summary["command"] == f"fsmap run squares --quick --out {tmp_path}"
    assert [claim["holds"] for claim in summary["claims"]] == [True, False]
    assert summary["table"][0] == {
        **{"n": 1, "method": "fs-map", "ours": 1.0, "stderr": "nan", "runs": 1},
        **{"paper": 1.0, "paper_stderr": 0.1},
    }
    assert summary["deviations"] == ["made up"]


def test_rows_carry_their_circumstances(tmp_path):
    run(tmp_path)
    rows, dropped = read_rows(tmp_path / "squares" / "rows.jsonl")
    assert dropped == 0
    assert len(rows) == 4 * 3
    square = rows[0]
    assert (square.metric, square.value, square.method, square.seed) == ("square", 1.0, "fs-map", 0)
    assert square.config == square.unit == {"n": 1}
    assert square.device == "cpu"
    assert square.torch.startswith("2.")
    assert square.deviations == ("made up",)
    curve = rows[2]
    assert curve.value[0] == 1
    assert math.isnan(curve.value[1])
    assert math.isinf(curve.value[2])
    assert curve.seconds == 0.5


def test_an_error_half_way_keeps_finished_units_and_resume_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(Squares, "trouble", raise_at(3))
    (failed,) = run(tmp_path)
    assert failed.status == "failed"
    assert "RuntimeError: boom" in failed.reason
    assert f"fsmap run squares --out {tmp_path} --resume" in failed.reason
    here = RunFolder(tmp_path / "squares")
    assert here.unfinished
    assert {row.config["n"] for row in here.rows()} == {1, 2}

    monkeypatch.setattr(Squares, "trouble", raise_at(1))  # a finished unit must not run again
    notes: list[str] = []
    (done,) = run(tmp_path, resume=True, notes=notes)
    assert done.status == "finished"
    assert notes == ["squares: resuming, 2 units are done"]
    values = [row.value for row in here.rows() if row.metric == "square"]
    assert values == [1.0, 1.1, 4.0, 4.1, 9.0, 9.1, 16.0, 16.1]


def script(*arguments: str, ready: Path | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "FAKE_READY": str(ready)}
    command = [sys.executable, fake_experiment.__file__, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, **pipes)


def test_a_killed_process_is_resumed(tmp_path):
    process = script("kill3", "run", "squares", "--out", str(tmp_path))
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    here = RunFolder(tmp_path / "squares")
    assert here.unfinished
    assert len(here.done()) == 2
    (refused,) = run(tmp_path)
    assert refused.status == "failed"
    assert "holds an unfinished run (2 units done)" in refused.reason
    assert "--resume" in refused.reason
    assert "--force" in refused.reason
    (outcome,) = run(tmp_path, resume=True)
    assert outcome.status == "finished"
    rows = here.rows()
    assert len({(row.metric, row.seed, row.config["n"]) for row in rows}) == len(rows) == 12


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
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert f"fsmap run squares --out {out} --resume" in errors
    assert len(RunFolder(out / "squares").done()) == 1


def test_a_cut_off_line_and_rows_of_an_unfinished_unit_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(Squares, "trouble", raise_at(3))
    run(tmp_path)
    file = tmp_path / "squares" / "rows.jsonl"
    lines = file.read_text().splitlines()
    orphan = lines[0].replace('"n": 1', '"n": 3')
    file.write_text("\n".join([*lines, orphan, orphan[:40]]))  # as a kill within a write leaves it
    monkeypatch.setattr(Squares, "trouble", None)
    notes: list[str] = []
    (outcome,) = run(tmp_path, resume=True, notes=notes)
    assert outcome.status == "finished"
    assert notes == ["squares: resuming, 2 units are done, 2 rows of an unfinished unit dropped"]
    assert len(read_rows(file)[0]) == 12


def test_a_line_that_says_a_unit_is_finished_and_is_cut_off_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(Squares, "trouble", raise_at(3))
    run(tmp_path)
    file = tmp_path / "squares" / "units.jsonl"
    file.write_text(file.read_text()[:-5])
    assert len(RunFolder(tmp_path / "squares").done()) == 1
    monkeypatch.setattr(Squares, "trouble", None)
    run(tmp_path, resume=True)
    assert len(RunFolder(tmp_path / "squares").rows()) == 12


def test_resume_keeps_a_finished_run(tmp_path, monkeypatch):
    run(tmp_path)
    before = (tmp_path / "squares" / "summary.json").read_bytes()
    monkeypatch.setattr(Squares, "trouble", raise_at(1))
    (outcome,) = run(tmp_path, resume=True)
    assert outcome.status == "kept"
    (outcome,) = run(tmp_path, resume=True, quick=True)  # the full size serves the quick one
    assert outcome.status == "kept"
    assert (tmp_path / "squares" / "summary.json").read_bytes() == before


def test_resume_with_another_config_is_refused(tmp_path):
    run(tmp_path, quick=True)
    (outcome,) = run(tmp_path, quick=True, resume=True, assignments=("scale=2",))
    assert outcome.status == "failed"
    assert "scale: 1.0 there, 2.0 now" in outcome.reason
    (outcome,) = run(tmp_path, resume=True)
    assert "size: quick there, full now" in outcome.reason


def test_a_finished_run_is_replaced_only_by_a_finished_one(tmp_path, monkeypatch):
    run(tmp_path, quick=True)
    before = (tmp_path / "squares" / "rows.jsonl").read_bytes()
    monkeypatch.setattr(Squares, "trouble", raise_at(2))
    (failed,) = run(tmp_path, assignments=("scale=5",))
    assert failed.status == "failed"
    assert (tmp_path / "squares" / "rows.jsonl").read_bytes() == before
    monkeypatch.setattr(Squares, "trouble", None)
    (outcome,) = run(tmp_path, assignments=("scale=5",), resume=True)
    assert outcome.status == "finished"
    assert outcome.folder == tmp_path / "squares"
    assert RunFolder(tmp_path / "squares").rows()[0].value == 5.0
    place = Place.of(tmp_path, "squares")
    assert (place.previous / "rows.jsonl").read_bytes() == before
    assert not place.fresh.path.exists()


def test_a_kill_between_the_two_renames_is_mended(tmp_path):
    run(tmp_path)
    place = Place.of(tmp_path, "squares")
    place.final.path.rename(place.fresh.path)
    (outcome,) = run(tmp_path, resume=True)
    assert outcome.status == "kept"
    assert place.final.finished


def test_force_drops_an_unfinished_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Squares, "trouble", raise_at(3))
    run(tmp_path)
    monkeypatch.setattr(Squares, "trouble", None)
    (outcome,) = run(tmp_path, force=True, assignments=("scale=2",))
    assert outcome.status == "finished"
    assert RunFolder(tmp_path / "squares").rows()[0].value == 2.0


def test_a_drawing_that_fails_leaves_the_run_unfinished_and_the_rows_complete(
    tmp_path, monkeypatch
):
    def broken(self, rows):
        raise RuntimeError("no ink")

    with monkeypatch.context() as patch:
        patch.setattr(Squares, "draw", broken)
        (failed,) = run(tmp_path)
        assert "no ink" in failed.reason
    here = RunFolder(tmp_path / "squares")
    assert here.unfinished
    assert len(here.rows()) == 12
    monkeypatch.setattr(Squares, "trouble", raise_at(1))
    (outcome,) = run(tmp_path, resume=True)
    assert outcome.status == "finished"


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (outcome,) = run(tmp_path / "file" / "runs")
    assert outcome.status == "failed"
    assert f"cannot write to {tmp_path / 'file' / 'runs'}: Not a directory" in outcome.reason
    assert "--out" in outcome.reason


def test_a_folder_with_other_things_is_not_touched(tmp_path):
    (tmp_path / "squares").mkdir()
    (tmp_path / "squares" / "thesis.tex").write_text("years of work")
    (outcome,) = run(tmp_path, force=True)
    assert "holds no run of fsmap" in outcome.reason
    assert (tmp_path / "squares" / "thesis.tex").read_text() == "years of work"


def test_unknown_id_names_the_closest(tmp_path):
    with pytest.raises(InputError, match=r"no experiment 'sqares'. Did you mean 'squares'\?"):
        run(tmp_path, "sqares")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step=3", r"no field 'step'.*Known: sizes \(tuple\[int, ...\]\), seeds \(int\)"),
        ("seed=3", r"no field 'seed'. Did you mean 'seeds'\?"),
        ("seeds", r"--set takes key=value, got 'seeds'"),
        ("seeds=many", r"--set seeds=many: seeds is int, got 'many'"),
        ("seeds=1.5", r"seeds is int, got '1.5'. Write a whole number."),
        ("flip=maybe", r"flip is bool, got 'maybe'. Write true or false."),
        ("sizes=1,x", r"sizes is tuple\[int, ...\], got '1,x'"),
    ],
)
def test_a_bad_setting_is_explained_before_anything_runs(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        run(tmp_path, assignments=(text,))
    assert not (tmp_path / "squares").exists()


def test_settings_change_the_config(tmp_path):
    (outcome,) = run(tmp_path, assignments=("sizes=7,8", "limit=none", "flip=yes"), seeds=3)
    assert outcome.summary["config"] == {
        **{"sizes": [7, 8], "seeds": 3, "scale": 1.0, "flip": True, "limit": None}
    }


def test_no_seeds_and_no_units_are_refused(tmp_path):
    with pytest.raises(InputError, match="--seeds must be at least 1, got 0"):
        run(tmp_path, seeds=0)
    (outcome,) = run(tmp_path, assignments=("sizes=",))
    assert "squares has nothing to do with this config" in outcome.reason


def test_a_device_that_is_not_there(tmp_path):
    (outcome,) = run(tmp_path, device="cuda:77")
    assert "--device cuda:77 cannot be used here" in outcome.reason
    (outcome,) = run(tmp_path, device="abacus")
    assert "--device abacus cannot be used here" in outcome.reason


class NeedsData(Squares):
    id = "needs-data"

    def run(self, config, unit, context):
        raise MissingDataError("boston is not there. Get it with: fsmap data get boston")
        yield


class NeedsGpu(Squares):
    id = "needs-gpu"
    device = "gpu"


class Broken(Squares):
    id = "broken"

    def run(self, config, unit, context):
        return [1 / 0]


def test_all_skips_what_lacks_data_or_a_device_and_survives_a_bug(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with only(Broken, NeedsData, NeedsGpu, Squares):
        outcomes = {outcome.id: outcome for outcome in run(tmp_path, "all")}
        quick = {outcome.id: outcome.status for outcome in run(tmp_path / "q", "all", quick=True)}
    statuses = {name: outcome.status for name, outcome in outcomes.items()}
    assert statuses == {
        **{"broken": "failed", "needs-data": "skipped"},
        **{"needs-gpu": "skipped", "squares": "finished"},
    }
    assert "fsmap data get boston" in outcomes["needs-data"].reason
    assert "needs a GPU at full size. Try: fsmap run needs-gpu" in outcomes["needs-gpu"].reason
    assert "ZeroDivisionError" in outcomes["broken"].reason
    assert quick["needs-gpu"] == "finished"


def test_missing_data_is_an_error_for_who_asked_for_it_by_name(tmp_path):
    with only(NeedsData):
        (outcome,) = run(tmp_path, "needs-data")
    assert outcome.status == "failed"
    assert isinstance(outcome.error, MissingDataError)


def test_all_takes_settings_that_only_some_have(tmp_path):
    (outcome,) = run(tmp_path, "all", assignments=("scale=3",))
    assert outcome.summary["config"]["scale"] == 3.0
    with pytest.raises(InputError, match="no experiment has a field 'colour'"):
        run(tmp_path, "all", assignments=("colour=red",))


def test_two_experiments_with_one_id():
    class Twin(Squares):
        pass

    with only(Squares, Twin), pytest.raises(InputError, match="two experiments have the id"):
        fake_experiment.registry_module.registry()


def test_redraw_judges_the_same_rows_with_the_code_of_today(tmp_path, monkeypatch):
    run(tmp_path, quick=True)
    here = RunFolder(tmp_path / "squares")
    before = json.loads(here.summary_file.read_text())
    monkeypatch.setattr(Squares, "claims", lambda self, rows: [])
    monkeypatch.setattr(Squares, "interactive", lambda self, rows: None)
    redraw(Squares(), here)
    after = json.loads(here.summary_file.read_text())
    assert after["claims"] == []
    assert after["command"] == before["command"]
    assert after["seconds"] == before["seconds"]
    assert not (here.path / "interactive.json").exists()


def test_a_header_that_was_lost_cannot_be_resumed(tmp_path):
    folder = RunFolder(tmp_path / "squares")
    folder.path.mkdir()
    folder.units_file.write_text("")
    with pytest.raises(CheckpointError, match="nothing can be resumed here"):
        folder.header()


def test_the_lock_is_released(tmp_path):
    place = Place.of(tmp_path, "squares")
    with locked(place), pytest.raises(InputError, match="another process"), locked(place):
        pass
    with locked(place):
        pass
