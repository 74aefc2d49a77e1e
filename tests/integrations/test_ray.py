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
from fsmap.integrations.ray import ATTEMPTS, RayPool, Trial
from fsmap.paper.run_folder import RunFolder

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Ray's own are many
    pytest.mark.timeout(300),  # each new worker imports torch, which takes long on a busy machine
]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster():
    """Two workers on this machine, started once; pools of this process use them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests"))  # they import fake_experiment
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

    notes: list[str] = []
    pool = RayPool(retries=1, say=notes.append)
    with pool:
        trials = sorted(pool.map(trial, range(6), name=lambda n: f"n={n}"))[:6]
    assert trials[:3] == [Trial(0, 0), Trial(1, 1), Trial(2, 4, attempts=2)]
    began = {n: len((tmp_path / f"began-{n}").read_text()) for n in range(6)}
    assert began == {0: 1, 1: 1, 2: 2, 3: 2, 4: 1, 5: 2}
    failed, refused, strange = trials[3:]
    assert isinstance(failed.error, ZeroDivisionError)
    assert failed.attempts == 2
    assert "in trial" in failed.error.__notes__[0]  # the worker's traceback came along
    assert isinstance(refused.error, InputError)
    assert "cannot travel" in str(strange.error)
    assert any(note.startswith("n=2: WorkerCrashedError") for note in notes)
    assert "n=3: ZeroDivisionError: always Trying again, attempt 2 of 2." in notes
    assert not any(note.startswith("n=4") for note in notes)

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
        assert main(["run", "squares", "--silent", "--ray", "--retries", "1"]) == 1
        errors = capsys.readouterr().err
        assert "squares n=3: WorkerCrashedError" in errors
        assert "1 of 4 units failed (squares n=4). The first:" in errors
        assert "in trouble" in errors
        assert "fsmap run squares --resume" in errors
        began = (tmp_path / "began").read_text().split()
        assert sorted(began) == ["1", "2", "3", "3", "4", "4"]

        (tmp_path / "mended").touch()
        assert main(["run", "squares", "--silent", "--ray", "--resume"]) == 0
        began = (tmp_path / "began").read_text().split()
        assert sorted(began) == ["1", "2", "3", "3", "4", "4", "4"]  # only what was left

        monkeypatch.setattr(Squares, "trouble", None)
        assert main(["run", "squares", "--silent", "--out", "plain"]) == 0
        there, here = (RunFolder(Path(out) / "squares") for out in ("runs", "plain"))
        assert comparable(there) == comparable(here)
        summaries = [json.loads(run.summary_file.read_text())["table"] for run in (there, here)]
        assert summaries[0] == summaries[1]

        grid = ["--set", "scale=1,2", "--set", "seeds=1,2", "--quick"]
        assert main(["sweep", "squares", "--silent", "--ray", *grid]) == 0
        assert capsys.readouterr().err.count("finished") == 4
        assert len((tmp_path / "sweeps/squares/table.csv").read_text().splitlines()) == 1 + 4 * 2


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
    began = time.monotonic()
    with pytest.raises(InputError) as refused:
        RayPool(f"127.0.0.1:{closed}").__enter__()
    message = f"cannot use Ray at '127.0.0.1:{closed}': cannot connect to "
    assert message in str(refused.value)
    with only(Squares):
        assert main(["sweep", "squares", "--set", "scale=1", "--ray", f"127.0.0.1:{closed}"]) == 2
    errors = capsys.readouterr().err
    assert f"connecting to Ray at 127.0.0.1:{closed}" in errors
    assert message in errors
    assert time.monotonic() - began < 10


def test_what_is_refused(alone, monkeypatch):
    with pytest.raises(InputError, match="retries"):
        RayPool(retries=-1)
    with pytest.raises(InputError, match="Only"):
        RayPool("ray://far:1").__enter__()

    def refuse(**_):
        assert os.environ[ATTEMPTS] == "1"
        raise ConnectionError("no Ray there.")

    monkeypatch.delenv(ATTEMPTS, raising=False)
    monkeypatch.setattr("ray.init", refuse)
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            InputError, match=rf"cannot use Ray at '{address}': no Ray there\. Give"
        ):
            RayPool(address).__enter__()
    assert ATTEMPTS not in os.environ
