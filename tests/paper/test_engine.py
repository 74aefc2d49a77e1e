"""What a run writes, what is refused, and what `all` skips."""

from __future__ import annotations

import dataclasses
import errno
import json
import sys

import pytest

import fake_experiment
from fake_experiment import Broken, Squares, only, run
from fsmap.cli import main
from fsmap.errors import InputError, MissingDataError
from fsmap.paper.closed_form.fourier import FourierConfig
from fsmap.paper.engine import check_range, override, registry
from fsmap.paper.rows import read_rows

ALL = registry()  # the real ones: within the tests below there are only made-up ones


@pytest.fixture(autouse=True)
def squares():
    with only(Squares):
        yield


def test_a_run_leaves_what_the_contract_says(tmp_path):
    (outcome,) = run(tmp_path, quick=True)
    assert outcome.status == "finished"
    here = tmp_path / "squares"
    names = {file.name for file in here.iterdir()}
    assert names == {"rows.jsonl", "units.jsonl", "summary.json", "squares.png", "squares.svg"}
    summary = json.loads((here / "summary.json").read_text())
    about = {"experiment": "squares", "size": "quick", "protocol": "exact arithmetic"}
    assert summary.items() >= {**about, "device": "cpu"}.items()
    assert summary["seconds"] >= 0
    assert summary["commit"]
    assert [claim["holds"] for claim in summary["claims"]] == [True, False]
    ours = {"n": 1, "method": "fs-map", "ours": 1.0, "stderr": "nan", "runs": 1}
    assert summary["table"][0] == {**ours, "paper": 1.0, "paper_stderr": 0.1}
    assert summary["deviations"] == ["made up"]


def test_rows_carry_their_circumstances(tmp_path):
    run(tmp_path)
    lines, dropped = read_rows(tmp_path / "squares" / "rows.jsonl")
    assert (len(lines), dropped) == (4 * 3, 0)
    square, curve = lines[0].row, lines[2].row
    assert square[1:5] == ("square", 1.0, "fs-map", 0)
    assert square.config == square.unit == {"n": 1}
    assert square.device == "cpu"
    assert square.torch.startswith("2.")
    assert square.deviations == ("made up",)
    assert repr(curve.value) == "[1, nan, inf]"


def test_a_folder_with_other_things_is_not_touched(tmp_path):
    (tmp_path / "squares").mkdir()
    (tmp_path / "squares" / "thesis.tex").write_text("years of work")
    (outcome,) = run(tmp_path, force=True)
    assert "holds no run of fsmap" in outcome.reason
    assert (tmp_path / "squares" / "thesis.tex").read_text() == "years of work"


def test_settings_change_the_config(tmp_path):
    (outcome,) = run(tmp_path, assignments=("sizes=7,8,8", "limit=none", "flip=true"), seeds=3)
    config = {"sizes": [7, 8, 8], "seeds": 3, "scale": 1.0, "flip": True, "limit": None}
    assert outcome.summary["config"] == config
    assert outcome.summary["rows"] == 2 * (3 + 1)  # a unit that is asked for twice runs once


class NeedsData(Squares):
    id = "needs-data"

    def run(self, config, unit, context):
        raise MissingDataError("boston is not there. Get it with: fsmap data get boston")
        yield


class NeedsGpu(Squares):
    id = "needs-gpu"
    device = "gpu"


def test_all_skips_what_lacks_data_or_a_device_and_survives_a_bug(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with only(Broken, NeedsData, NeedsGpu, Squares):
        outcomes = {outcome.id: outcome for outcome in run(tmp_path, "all")}
        quick = {outcome.id: outcome.status for outcome in run(tmp_path / "q", "all", quick=True)}
    statuses = [outcome.status for outcome in outcomes.values()]
    assert statuses == ["failed", "skipped", "skipped", "finished"]
    assert "fsmap data get boston" in outcomes["needs-data"].reason
    assert "needs a GPU at full size. Try: fsmap run needs-gpu" in outcomes["needs-gpu"].reason
    assert "ZeroDivisionError" in outcomes["broken"].reason
    assert quick["needs-gpu"] == "finished"


def test_a_full_disk_is_said_without_a_traceback(tmp_path, monkeypatch):
    def full(unit):
        raise OSError(errno.ENOSPC, "No space left on device", "rows.jsonl")

    monkeypatch.setattr(Squares, "trouble", staticmethod(full))
    (outcome,) = run(tmp_path)
    assert outcome.status == "failed"
    assert outcome.reason.startswith("[Errno 28] No space left on device: 'rows.jsonl'")
    assert "continue with: fsmap run squares" in outcome.reason
    assert "Traceback" not in outcome.reason


def test_all_takes_settings_that_only_some_have(tmp_path):
    (outcome,) = run(tmp_path, "all", assignments=("scale=3",))
    assert outcome.summary["config"]["scale"] == 3.0
    with pytest.raises(InputError, match="colour"):
        run(tmp_path, "all", assignments=("colour=red",))
    with pytest.raises(InputError, match=r"limit.*Write a number"):
        run(tmp_path, assignments=("limit=often",))


def test_two_experiments_with_one_id():
    class Twin(Squares):
        pass

    with only(Squares, Twin), pytest.raises(InputError, match="id"):
        fake_experiment.engine.registry()


def test_full_means_all_units_of_the_protocol(tmp_path, monkeypatch):
    monkeypatch.setattr(Squares, "selecting", ("sizes",))
    (part,) = run(tmp_path, assignments=("sizes=1,2",))
    assert part.summary["deviations"] == ["2 of 4 units", "made up"]
    whole = [*run(tmp_path, resume=True), *run(tmp_path / "quick", quick=True)]
    whole += run(tmp_path / "other", assignments=("scale=2",))
    found = [outcome.summary["units"] for outcome in (part, *whole)]
    assert found == ["2 of 4 units", "full", "quick", "scale = 2.0"]


def test_every_config_keeps_to_the_rule():
    for experiment in ALL.values():
        for config in (experiment.config, experiment.quick):
            for name, value in dataclasses.asdict(config).items():
                if value != ():  # a quick size may leave out all values, a user may not
                    check_range(name, value)
    assert override(FourierConfig(), ["warmup=0"]).warmup == 0


def test_pictures_that_cannot_be_drawn_are_said_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["run", "squares", "--quick", "--silent", "--out", str(tmp_path / "runs")]) == 2
    assert "pip install 'fsmap[report]'" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
