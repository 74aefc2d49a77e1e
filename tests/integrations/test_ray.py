"""Trials on Ray: a worker that dies costs its own trial; the same rows as without Ray."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import time
from pathlib import Path

import pytest

from fake_experiment import Squares, only
from fsmap.cli import main
from fsmap.errors import InputError
from fsmap.integrations.ray import RayPool, Trial
from fsmap.paper.rows import RunFolder

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Ray's own are many
    pytest.mark.timeout(300),  # each new worker imports torch, which takes long on a busy machine
]

ROOT = Path(__file__).parents[2]
ATTEMPTS = "RAY_gcs_server_port_wait_time_s"


@pytest.fixture(scope="module")
def cluster():
    """Two workers on this machine, started once; pools of this process use them."""
    with pytest.MonkeyPatch.context() as patch:
        paths = (str(ROOT / name) for name in ("src", "tests"))  # they import fake_experiment
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        notes: list[str] = []
        with RayPool(workers=2, say=notes.append):
            assert "reached from the network" in notes[0]
            yield


@pytest.mark.slow
def test_a_killed_worker_costs_its_own_trial(cluster, tmp_path):
    def trial(n):
        with (tmp_path / f"began-{n}").open("a") as file:
            file.write("x")
        if n == 2 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if n == 3:
            raise ZeroDivisionError("always")
        if n == 4:
            raise InputError("refused: 4 is not allowed")
        if n == 5:
            raise type("Local", (Exception,), {"__reduce__": None})("cannot travel")
        return n * n

    with RayPool() as pool:
        trials = sorted(pool.map(trial, range(6)), key=lambda ended: ended.number)
    assert trials[:3] == [Trial(0, 0), Trial(1, 1), Trial(2, 4)]
    began = {n: len((tmp_path / f"began-{n}").read_text()) for n in range(6)}
    assert began == {0: 1, 1: 1, 2: 2, 3: 1, 4: 1, 5: 1}
    failed, refused, strange = (ended.error for ended in trials[3:])
    assert isinstance(failed, ZeroDivisionError)
    assert "in trial" in failed.__notes__[0]  # the worker's traceback came along
    assert isinstance(refused, InputError)
    assert str(refused) == "refused: 4 is not allowed"
    assert "cannot travel" in strange.__notes__[0]

    def patient(n):
        (tmp_path / f"patient-{n}").touch()
        time.sleep(60 * n)

    some = pool.map(patient, range(8))
    assert next(some).number == 0
    some.close()  # an interrupt: what is left is cancelled, and the workers are free again
    assert not (tmp_path / "patient-7").exists()

    found = runpy.run_path(str(ROOT / "examples" / "ray_sweep.py"))["main"]()
    assert len(found) == 3
    assert all(0 < rmse < 0.6 for rmse in found.values())


@pytest.mark.slow
def test_the_command_line(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flag = tmp_path / "killed"

    def trouble(unit):
        with (tmp_path / "began").open("a") as file:
            file.write(f"{unit['n']}\n")
        if unit["n"] == 3 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if unit["n"] == 4 and not (tmp_path / "mended").exists():
            raise RuntimeError("boom")

    monkeypatch.setattr(Squares, "trouble", staticmethod(trouble))
    with only(Squares):
        assert main(["run", "squares", "--silent", "--ray"]) == 1
        errors = capsys.readouterr().err
        assert "RuntimeError: boom" in errors
        assert "in trouble" in errors
        assert "fsmap run squares --resume" in errors
        began = (tmp_path / "began").read_text().split()
        assert sorted(began) == ["1", "2", "3", "3", "4"]

        (tmp_path / "mended").touch()
        assert main(["run", "squares", "--silent", "--ray", "--resume"]) == 0
        began = (tmp_path / "began").read_text().split()
        assert sorted(began) == ["1", "2", "3", "3", "4", "4"]  # only what was left

        monkeypatch.setattr(Squares, "trouble", None)
        assert main(["run", "squares", "--silent", "--out", "plain"]) == 0
        there, here = (RunFolder(Path(out) / "squares") for out in ("runs", "plain"))
        assert comparable(there) == comparable(here)
        summaries = [json.loads(run.summary_file.read_text())["table"] for run in (there, here)]
        assert summaries[0] == summaries[1]


def comparable(run: RunFolder) -> list[str]:
    rows = [row._replace(seconds=0.0)._asdict() for row in run.rows()]
    return [json.dumps(row, default=str, sort_keys=True) for row in rows]  # in the same order, too


@pytest.fixture
def alone(monkeypatch):
    """As if this process were connected to nothing."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)


@pytest.fixture
def closed():
    """A port of this machine where nobody listens."""
    with socket.socket() as held:  # bound, so that nobody else takes it, and never listening
        held.bind(("", 0))
        yield held.getsockname()[1]


def never(**_):
    raise AssertionError("ray.init would wait for minutes")


def test_a_closed_port_is_refused_in_seconds(alone, closed, monkeypatch, capsys):
    monkeypatch.setattr("ray.init", never)
    with only(Squares):
        assert main(["run", "squares", "--ray", f"127.0.0.1:{closed}"]) == 2
    errors = capsys.readouterr().err
    assert f"connecting to Ray at 127.0.0.1:{closed}" in errors
    assert f"cannot use Ray at '127.0.0.1:{closed}': cannot connect to " in errors
    with pytest.raises(InputError, match="Only"):
        RayPool("ray://far:1").__enter__()


def test_a_server_that_is_no_ray_is_asked_once(alone, monkeypatch):
    def refuse(**_):
        assert os.environ[ATTEMPTS] == "1"
        raise ConnectionError("no Ray there.")

    monkeypatch.setenv(ATTEMPTS, "1")  # so that it is put back
    monkeypatch.delenv(ATTEMPTS)
    monkeypatch.setattr("ray.init", refuse)
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InputError, match=rf"cannot use Ray at '{address}': no Ray there"):
            RayPool(address).__enter__()
