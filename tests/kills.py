"""Kill processes while they write, resume, and compare with a process that was left alone.

    python tests/kills.py --count 300 --seed 0

Half of the kills come at a file operation (open, rename, remove, mkdir, fsync) of the work, each
once in random order (at 300, at every one of a fresh run); one at an fsync may tear what was
written since the last. The other half come after a random time. A kill counts as stuck if the work
cannot be brought to its end afterwards, and as different if it then ends with other numbers.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fsmap
from fake_experiment import Squares, command, run
from fsmap.data import fetch
from fsmap.data.catalogue import DataFile, DataSet, Download
from fsmap.errors import InputError
from fsmap.images import ImageRun
from fsmap.paper.report.page import build
from fsmap.paper.rows import RunFolder
from fsmap.tables.model import load_model
from image_cases import TINY
from small_tables import save_model

WATCHED = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
TABLE = b"a,b\n1,2\n"
FILE = DataFile("toy/table.csv", hashlib.sha256(TABLE).hexdigest(), len(TABLE))
SET = DataSet("toy", "", (FILE,), "", (Download("https://toy", FILE.path, "gunzip"),))


def finished(out: Path, **options: Any) -> Any:
    """Numbers of a run, resumed, or started anew where that is what the message asks for."""
    (outcome,) = run(out, resume=True, **options)
    if isinstance(outcome.error, InputError):
        (outcome,) = run(out, force=True, **options)
    assert outcome.status in ("finished", "kept"), outcome.reason
    here = RunFolder(out / "squares")
    build([out], out / "report")
    rows = [(row.metric, row.seed, row.config, repr(row.value)) for row in here.content().rows]
    summary = json.loads(here.summary_file.read_text())
    return rows, summary["claims"], summary["table"]


class Work:
    """Something that writes files, and what has to be there after it was killed and resumed."""

    def prepare(self, folder: Path) -> None:
        """Make what is there before."""

    def start(self, folder: Path) -> None:
        """Do the work; killed."""
        self.finish(folder)

    def finish(self, folder: Path) -> Any:
        """Bring it to its end; what it ended with."""


@dataclass
class Run(Work):
    """A run into a folder in which another one may have finished, with options of both."""

    options: dict[str, Any]
    before: dict[str, Any] | None = None
    selecting: tuple[str, ...] = ()

    def prepare(self, folder: Path) -> None:
        Squares.selecting = self.selecting
        if self.before is not None:
            run(folder, **self.before)

    def start(self, folder: Path) -> None:
        Squares.selecting = self.selecting
        run(folder, **self.options)

    def finish(self, folder: Path) -> Any:
        Squares.selecting = self.selecting
        return finished(folder, assignments=self.options.get("assignments", ()))


def sized(sizes: str) -> dict[str, Any]:
    """Options of a run of these sizes."""
    return {"assignments": (f"sizes={sizes}",)}


class Fit(Work):
    """``fit`` with a checkpoint on every step."""

    def finish(self, folder: Path) -> Any:
        x = torch.linspace(-1, 1, 16)[:, None]
        objective = fsmap.ps_map(fsmap.Gaussian(1.0), fsmap.Normal(1.0), num_data=16)
        f, start = lambda p, x: x * p["a"].sum(), {"a": torch.ones(3)}
        options = {"steps": 8, "batch_size": 4, "checkpoint_every": 1, "progress": False}
        path = folder / "fit.safetensors"
        state, history = fsmap.fit(
            objective, f, start, (x, x**2), checkpoint=path, resume=True, **options
        )
        left = {p.name for p in folder.iterdir()}
        assert left == {"fit.safetensors"}, left
        return state.params["a"].tolist(), history.loss.tolist()


class Images(Work):
    """An image run with its log."""

    def finish(self, folder: Path) -> Any:
        one = ImageRun(TINY, folder=folder, resume=True)
        one.train(progress=False, checkpoint_every=1)
        rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()[1:]]
        weights = {name: t.tolist() for name, t in one.stepper.tensors().items()}
        return weights, [(row["epoch"], row["loss"]) for row in rows]


class Model(Work):
    """The model of a table, written over an older one."""

    def prepare(self, folder: Path) -> None:
        save_model(folder)

    def start(self, folder: Path) -> None:
        model = load_model(folder / "model.pt")
        model._replace(target=model.target._replace(why="another")).save(folder / "model.pt")

    def finish(self, folder: Path) -> Any:
        self.start(folder)
        return (folder / "model.pt").read_bytes()


class Data(Work):
    """A download that is stored."""

    def finish(self, folder: Path) -> Any:
        fetch.find = lambda _: SET
        fetch.read_url = lambda *_: gzip.compress(TABLE)
        return fetch.get("toy", folder)["table.csv"].read_bytes()


WORKS: dict[str, tuple[Work, int]] = {  # and how often, of a hundred
    "fresh": (Run({}), 30),
    "replaced": (Run({"force": True, "assignments": ("scale=2",)}, before={}), 20),
    "grown": (Run({"resume": True, **sized("1,2,3,4")}, sized("1,2"), ("sizes",)), 15),
    "fit": (Fit(), 15),
    "images": (Images(), 8),
    "model": (Model(), 6),
    "data": (Data(), 6),
}


def forked(job: Callable[[], Any], out: Path, delay: float | None = None) -> Any:
    """The result of a job in a process of its own; None if that was killed."""
    out.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            content = pickle.dumps((True, job()))
        except BaseException as error:  # told by the parent
            content = pickle.dumps((False, f"{type(error).__name__}: {error}"))
        out.write_bytes(content)
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return pickle.loads(out.read_bytes()) if out.exists() else None


def watch(folder: Path, kill_at: int, chance: random.Random) -> list[int]:
    """Count file operations below a folder, and die before the one of that number."""
    seen, sizes, fsync, where = [0], {}, os.fsync, str(folder)

    def step() -> bool:
        seen[0] += 1
        return seen[0] == kill_at

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in WATCHED or where not in str(arguments[0]):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if step():
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "open" and isinstance(arguments[0], str) and os.path.exists(arguments[0]):
            sizes[arguments[0]] = os.path.getsize(arguments[0])  # is on the disk: cannot be torn

    def torn(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        size = os.fstat(handle).st_size
        if where in path and os.path.isfile(path) and step():
            if chance.random() < 0.7:
                os.truncate(path, chance.randint(min(sizes.get(path, 0), size), size))
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(handle)
        sizes[path] = size

    sys.addaudithook(hook)
    os.fsync = torn
    return seen


def trial(work: Work, scratch: Path, expected: Any, chance: random.Random, at: Any) -> str:
    """Kill once, resume, and say how it ended: "same", "different: …" or "stuck: …"."""
    folder = scratch / "work"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(scratch / "before", folder)
    seed = chance.random()

    def start() -> None:
        if isinstance(at, int):
            watch(folder, at, random.Random(seed))
        work.start(folder)

    forked(start, scratch / "start", at if isinstance(at, float) else None)
    ended = forked(lambda: work.finish(folder), scratch / "finish")
    if ended is None or not ended[0]:
        return f"stuck: {ended}"
    return "same" if ended[1] == expected else "different"


def trials(work: Work, scratch: Path, kills: int, chance: random.Random) -> list[tuple[str, str]]:
    """How each kill of one kind of work came about, and how it ended."""
    (scratch / "before").mkdir()
    forked(lambda: work.prepare(scratch / "before"), scratch / "prepared")
    shutil.copytree(scratch / "before", scratch / "work")

    def whole() -> tuple[int, float]:
        seen, begin = watch(scratch / "work", 0, chance), time.perf_counter()
        work.start(scratch / "work")
        return seen[0], time.perf_counter() - begin

    _, (operations, seconds) = forked(whole, scratch / "whole")
    done, expected = forked(lambda: work.finish(scratch / "work"), scratch / "expected")
    assert done, expected
    ends = []
    every = itertools.cycle(chance.sample(range(1, operations + 1), operations))
    for number in range(kills):
        at: int | float = chance.uniform(0, 1.1 * seconds) if number % 2 else next(every)
        how = f"after {at:.3f} s" if isinstance(at, float) else f"at operation {at} of {operations}"
        ends.append((how, trial(work, scratch, expected, chance, at)))
    return ends


def main(count: int, seed: int) -> int:
    """Do the kills and print what came of them."""
    torch.set_num_threads(1)
    chance, done, bad = random.Random(seed), 0, []
    total = sum(share for _, share in WORKS.values())
    for name, (work, share) in WORKS.items():
        kills = max(1, round(count * share / total))
        with tempfile.TemporaryDirectory(prefix="fsmap-kills-") as scratch:
            ends = trials(work, Path(scratch), kills, chance)
        print(f"{name}: {dict(Counter(end.split(':')[0] for _, end in ends))}", flush=True)
        bad += [f"{name}, killed {how}: {end}" for how, end in ends if end != "same"]
        done += kills
    print(f"{done} kills, seed {seed}: {len(bad)} stuck or different")
    print("\n".join(bad))
    return len(bad)


if __name__ == "__main__":
    command(main, __doc__, 300)
