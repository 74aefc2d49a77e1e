"""What a run writes, what is refused, what `all` skips, and units on a pool."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import sys
from contextlib import nullcontext

import pytest

import fake_experiment
from fake_experiment import Squares, only, run
from fsmap.cli import main
from fsmap.errors import CheckpointError, InputError, MissingDataError
from fsmap.paper.engine import ZERO_IS_NONE, check_range, is_bug, override, redraw
from fsmap.paper.experiment import registry
from fsmap.paper.rows import RunFolder, read_rows

ALL = registry()


@pytest.fixture(autouse=True)
def squares(monkeypatch):
    monkeypatch.setattr(Squares, "trouble", None)
    with only(Squares):
        yield


def test_a_run_leaves_what_the_contract_says(tmp_path):
    (outcome,) = run(tmp_path, quick=True)
    assert outcome.status == "finished"
    here = tmp_path / "squares"
    names = {file.name for file in here.iterdir()}
    pictures = {"squares.png", "squares.svg"}
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
    lines, dropped = read_rows(tmp_path / "squares" / "rows.jsonl")
    rows = [line.row for line in lines]
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


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (outcome,) = run(tmp_path / "file" / "runs")
    assert outcome.status == "failed"
    folder = tmp_path / "file" / "runs" / "squares"
    assert f"cannot write to {folder}: Not a directory" in outcome.reason
    assert "--out" in outcome.reason


def test_a_folder_with_other_things_is_not_touched(tmp_path):
    (tmp_path / "squares").mkdir()
    (tmp_path / "squares" / "thesis.tex").write_text("years of work")
    (outcome,) = run(tmp_path, force=True)
    assert "holds no run of fsmap" in outcome.reason
    assert (tmp_path / "squares" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step=3", r"no field 'step'.*Known: sizes"),
        ("seed=3", r"Did you mean 'seeds'\?"),
        ("seeds", r"key=value"),
        ("seeds=many", r"whole number"),
        ("seeds=-3", r"at least 1"),
        ("sizes=4,0", r"at least 1"),
        ("sizes=", "at least one value"),
        ("scale=0", r"positive"),
        ("scale=nan", r"finite"),
        ("scale=-1", r"positive"),
        ("limit=often", r"Write a number"),
        ("flip=maybe", r"true or false"),
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


class FullDisk(Squares):
    id = "full-disk"

    def run(self, config, unit, context):
        raise OSError(errno.ENOSPC, "No space left on device", "rows.jsonl")


def test_a_full_disk_is_said_without_a_traceback(tmp_path):
    with only(FullDisk):
        (outcome,) = run(tmp_path, "full-disk")
    assert outcome.status == "failed"
    assert outcome.reason.startswith("[Errno 28] No space left on device: 'rows.jsonl'")
    assert "continue with: fsmap run full-disk" in outcome.reason
    assert "Traceback" not in outcome.reason
    assert not is_bug(outcome.error)
    assert is_bug(FileNotFoundError(errno.ENOENT, "No such file", "a path of ours"))


def test_all_takes_settings_that_only_some_have(tmp_path):
    (outcome,) = run(tmp_path, "all", assignments=("scale=3",))
    assert outcome.summary["config"]["scale"] == 3.0
    with pytest.raises(InputError, match="colour"):
        run(tmp_path, "all", assignments=("colour=red",))


def test_two_experiments_with_one_id():
    class Twin(Squares):
        pass

    with only(Squares, Twin), pytest.raises(InputError, match="id"):
        fake_experiment.registry_module.registry()


def test_full_means_all_units_of_the_protocol(tmp_path, monkeypatch):
    monkeypatch.setattr(Squares, "selecting", ("sizes",))
    (part,) = run(tmp_path, assignments=("sizes=1,2",))
    assert part.summary["units"] == "2 of 4 units"
    assert part.summary["deviations"] == ["2 of 4 units", "made up"]
    (more,) = run(tmp_path, resume=True)
    assert more.summary["units"] == "full"
    (quick,) = run(tmp_path / "quick", quick=True)
    assert quick.summary["units"] == "quick"
    (other,) = run(tmp_path / "other", assignments=("scale=2",))
    assert other.summary["units"] == "scale = 2.0"


def test_redraw_judges_the_same_rows_with_the_code_of_today(tmp_path, monkeypatch):
    run(tmp_path, quick=True)
    here = RunFolder(tmp_path / "squares")
    before = json.loads(here.summary_file.read_text())
    monkeypatch.setattr(Squares, "claims", lambda self, rows: [])
    redraw(Squares(), here)
    after = json.loads(here.summary_file.read_text())
    assert after["claims"] == []
    assert after["command"] == before["command"]
    assert after["seconds"] == before["seconds"]


@pytest.mark.parametrize(("name", "lines"), [("units", 0), ("units", 1), ("rows", 0)])
def test_nothing_to_redraw_is_said(tmp_path, name, lines):
    run(tmp_path, quick=True)
    here = RunFolder(tmp_path / "squares")
    file = here.path / f"{name}.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]))
    before = here.summary_file.read_bytes()
    with pytest.raises(CheckpointError, match="rows.jsonl"):
        redraw(Squares(), here)
    assert here.summary_file.read_bytes() == before


class Backwards:
    """A pool in this process that ends with what was begun first."""

    def __init__(self):
        self.asked: dict[str, float] = {}

    def map(self, function, items, *, num_gpus):
        self.asked = {f"{item.experiment.id} {item}": num_gpus(item) for item in items}
        for number in reversed(range(len(items))):
            try:
                yield number, function(items[number]), None
            except Exception as error:
                yield number, None, error


def comparable(folder):
    rows = [row._replace(seconds=0.0)._asdict() for row in RunFolder(folder).rows()]
    return [json.dumps(row, default=str) for row in rows]


def test_a_pool_leaves_the_same_rows_in_the_same_order(tmp_path):
    (pooled,) = run(tmp_path / "pooled", pool=Backwards())
    (alone,) = run(tmp_path / "alone")
    assert pooled.status == "finished"
    assert comparable(pooled.folder) == comparable(alone.folder)
    assert pooled.summary["table"] == alone.summary["table"]
    assert list(RunFolder(pooled.folder).done()) == list(RunFolder(alone.folder).done())


def test_units_that_fail_on_a_pool_are_named_and_only_they_are_repeated(tmp_path, monkeypatch):
    def trouble(unit):
        if unit["n"] in (2, 4):
            raise RuntimeError(f"boom {unit['n']}")

    monkeypatch.setattr(Squares, "trouble", staticmethod(trouble))
    (failed,) = run(tmp_path, pool=Backwards())
    assert failed.reason.startswith("2 of 4 units failed (squares n=4; squares n=2). The first:")
    assert "RuntimeError: boom 4" in failed.reason
    assert f"fsmap run squares --out {tmp_path} --resume" in failed.reason
    monkeypatch.setattr(Squares, "trouble", None)
    with monkeypatch.context() as patch:
        patch.setattr(Squares, "draw", lambda self, rows: 1 / 0)
        pool = Backwards()
        (failed,) = run(tmp_path, pool=pool, resume=True)
    assert "ZeroDivisionError" in failed.reason
    assert list(pool.asked) == ["squares n=2", "squares n=4"]
    (outcome,) = run(tmp_path, pool=(pool := Backwards()), resume=True)
    assert (outcome.status, pool.asked) == ("finished", {})  # nothing was left but to draw
    assert [row.unit["n"] for row in RunFolder(outcome.folder).rows()][::3] == [1, 2, 3, 4]


def test_all_experiments_share_a_pool(tmp_path):
    pool = Backwards()
    with only(Squares, NeedsGpu, NeedsData):
        outcomes = {o.id: o for o in run(tmp_path, "all", pool=pool)}
        (named,) = run(tmp_path / "named", "needs-data", pool=Backwards())
        run(tmp_path / "cpu", "needs-gpu", pool=(cpu := Backwards()), device="cpu")
    assert {name: o.status for name, o in outcomes.items()} == {
        **{"squares": "finished", "needs-gpu": "finished", "needs-data": "skipped"}
    }  # what needs a GPU may find one elsewhere
    assert "4 of 4 units failed" in named.reason
    assert (pool.asked["needs-gpu n=1"], pool.asked["squares n=1"]) == (1, 0)
    assert set(cpu.asked.values()) == {0}


@dataclasses.dataclass(frozen=True)
class Ranges:
    """One field for each rule."""

    warmup: int = 10
    strengths: tuple[float, ...] = (1e-3, 1e-2)
    levels: tuple[float, ...] = (0.0, 0.5)
    shift: float = -1.0
    limit: int | None = None
    offset: float | None = None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(("warmup=0", ""), ("strengths=0,1", ""), ("shift=-7", ""), ("levels=0,1", "")),
        *(("limit=none", ""), ("offset=-2", ""), ("warmup=-1", "at least 0")),
        *(("strengths=1,-1", "at least 0"), ("limit=0", "at least 1"), ("shift=inf", "finite")),
    ],
)
def test_what_a_field_may_be_follows_from_its_type_name_and_default(text, message):
    with pytest.raises(InputError, match=message) if message else nullcontext():
        override(Ranges(), [text])


def test_every_config_keeps_to_the_rule_and_every_name_is_used():
    names = set()
    for experiment in ALL.values():
        for config in (experiment.config, experiment.quick):
            for field in dataclasses.fields(config):
                value = getattr(config, field.name)
                if value != ():  # a quick size may leave out all values, a user may not
                    check_range(field, value)
                names.add(field.name)
    assert names >= ZERO_IS_NONE


def test_pictures_that_cannot_be_drawn_are_said_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["run", "squares", "--quick", "--silent", "--out", str(tmp_path / "runs")]) == 2
    assert "pip install 'fsmap[report]'" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
