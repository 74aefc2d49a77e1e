"""Units on a pool: written as they come back, in whichever order; what fails is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_experiment import Squares, only
from fsmap.errors import MissingDataError
from fsmap.paper import engine
from fsmap.paper.engine import Options
from fsmap.paper.rows import RunFolder


class Backwards:
    """A pool in this process that ends with what was begun first."""

    def __init__(self):
        self.asked: list[tuple[str, float]] = []

    def map(self, function, items, *, num_gpus):
        self.asked = [(f"{item.experiment.id} {item}", num_gpus(item)) for item in items]
        for number in reversed(range(len(items))):
            try:
                yield number, function(items[number]), None
            except Exception as error:
                yield number, None, error


class Large(Squares):
    id = "large"
    device = "gpu"


class NoData(Squares):
    id = "no-data"

    def run(self, config, unit, context):
        raise MissingDataError("boston is not there. Get it with: fsmap data get boston")


@pytest.fixture(autouse=True)
def experiments(monkeypatch):
    monkeypatch.setattr(Squares, "trouble", None)
    with only(Squares, Large, NoData):
        yield


def run(out: Path, *names: str, pool=None, notes=None, **options):
    say = (lambda _: None) if notes is None else notes.append
    settings = Options(out=out, silent=True, **options)
    return list(engine.run(names, settings, say, pool or Backwards()))


def comparable(folder: Path) -> list[str]:
    rows = [row._replace(seconds=0.0)._asdict() for row in RunFolder(folder).rows()]
    return [json.dumps(row, default=str) for row in rows]


def test_the_same_rows_in_the_same_order(tmp_path):
    (pooled,) = run(tmp_path / "pooled", "squares")
    assert pooled.status == "finished"
    (alone,) = engine.run(["squares"], Options(out=tmp_path / "alone", silent=True))
    assert comparable(pooled.folder) == comparable(alone.folder)
    assert pooled.summary["table"] == alone.summary["table"]
    assert list(RunFolder(pooled.folder).done()) == list(RunFolder(alone.folder).done())


def test_failures_are_named_and_only_they_are_repeated(tmp_path, monkeypatch):
    def trouble(unit):
        if unit["n"] in (2, 4):
            raise RuntimeError(f"boom {unit['n']}")

    monkeypatch.setattr(Squares, "trouble", staticmethod(trouble))
    (failed,) = run(tmp_path, "squares")
    assert failed.status == "failed"
    assert failed.reason.startswith("2 of 4 units failed (squares n=4; squares n=2). The first:")
    assert "RuntimeError: boom 4" in failed.reason
    assert f"fsmap run squares --out {tmp_path} --resume" in failed.reason
    assert len(RunFolder(failed.folder).done()) == 2
    monkeypatch.setattr(Squares, "trouble", None)
    pool, notes = Backwards(), []
    (outcome,) = run(tmp_path, "squares", pool=pool, notes=notes, resume=True)
    assert outcome.status == "finished"
    assert notes == ["squares: resuming, 2 units are done"]
    assert [name for name, _ in pool.asked] == ["squares n=2", "squares n=4"]
    assert [row.unit["n"] for row in RunFolder(outcome.folder).rows()][::3] == [1, 2, 3, 4]
    (kept,) = run(tmp_path, "squares", resume=True)
    assert kept.status == "kept"


def test_all_experiments_share_the_pool_and_those_without_data_are_skipped(tmp_path):
    pool = Backwards()
    outcomes = {o.id: o for o in run(tmp_path, "all", pool=pool)}
    assert {name: o.status for name, o in outcomes.items()} == {
        **{"squares": "finished", "large": "finished", "no-data": "skipped"}
    }  # what needs a GPU may find one elsewhere
    assert outcomes["no-data"].reason.startswith("boston is not there")
    assert dict(pool.asked)["large n=1"] == 1
    assert dict(pool.asked)["squares n=1"] == 0
    (outcome,) = run(tmp_path / "named", "no-data")
    assert outcome.status == "failed"
    assert "4 of 4 units failed" in outcome.reason


def test_gpus_follow_the_device_that_was_asked_for(tmp_path):
    for device, wanted in (("cpu", 0), ("auto", 1)):
        pool = Backwards()
        run(tmp_path / device, "large", pool=pool, device=device)
        assert {gpus for _, gpus in pool.asked} == {wanted}


def test_nothing_left_but_to_draw(tmp_path, monkeypatch):
    def broken(self, rows):
        raise RuntimeError("no ink")

    with monkeypatch.context() as patch:
        patch.setattr(Squares, "draw", broken)
        (failed,) = run(tmp_path, "squares")
        assert "no ink" in failed.reason
    pool = Backwards()
    (outcome,) = run(tmp_path, "squares", pool=pool, resume=True)
    assert outcome.status == "finished"
    assert pool.asked == []
