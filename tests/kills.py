"""Kill processes while they write, resume, and compare with a process that was left alone.

    python tests/kills.py --count 300 --seed 0

A kill comes at a file operation (open, rename, remove, mkdir, fsync) of the work, at each once in
random order; one at an fsync may tear what was written since the last. A kill counts as stuck if
the work cannot be brought to its end afterwards, and as different if it then ends with other
numbers.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fsmap
from fake_experiment import Squares, only, run
from fsmap.data import fetch
from fsmap.data.catalogue import DataFile, DataSet, Download
from fsmap.errors import InputError
from fsmap.images import ImageRun
from fsmap.paper.report.page import build
from fsmap.paper.rows import RunFolder
from fsmap.tables.model import TableOptions, fit_table, load_model
from fsmap.tables.reader import read_table
from image_cases import TINY
from small_tables import houses

WATCHED = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
TABLE = b"a,b\n1,2\n"
FILE = DataFile("toy/table.csv", hashlib.sha256(TABLE).hexdigest(), len(TABLE))
SET = DataSet("toy", "", (FILE,), "", (Download("https://toy", FILE.path, "gunzip"),))


class Work(NamedTuple):
    """Something that writes files, and what has to be there after it was killed and resumed."""

    share: int  # how often, of a hundred kills
    finish: Callable[[Path], Any]  # bring it to its end; what it ended with
    start: Callable[[Path], Any] | None = None  # what is killed, if it is not ``finish``
    prepare: Callable[[Path], Any] = lambda _: None  # make what is there before


def finish_run(out: Path, **options: Any) -> Any:
    """Numbers of a run, resumed, or started anew where that is what the message asks for."""
    (outcome,) = run(out, resume=True, **options)
    if isinstance(outcome.error, InputError):
        (outcome,) = run(out, force=True, **options)
    assert outcome.status in ("finished", "kept"), outcome.reason
    here = RunFolder(out / "squares")
    build([out], out / "report")
    rows = [(row.metric, row.seed, row.config, repr(row.value)) for row in here.rows()]
    summary = json.loads(here.summary_file.read_text())
    return rows, summary["claims"], summary["table"]


def fit(folder: Path) -> Any:
    """``fit`` with a checkpoint on every step."""
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


def images(folder: Path) -> Any:
    """An image run with its log."""
    one = ImageRun(TINY, folder=folder, resume=True)
    one.train(progress=False, checkpoint_every=1)
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()[1:]]
    weights = {name: t.tolist() for name, t in one.stepper.tensors().items()}
    return weights, [(row["epoch"], row["loss"]) for row in rows]


def prepare_model(folder: Path) -> None:
    """The model of a table."""
    table = read_table(houses(folder / "table.csv"))
    options = TableOptions(hidden=(4,), steps=5, device="cpu", progress=False)
    fit_table(table, "price", options).model.save(folder / "model.pt")


def model(folder: Path) -> Any:
    """The model of a table, written over an older one."""
    changed = load_model(folder / "model.pt")
    changed.results["l-map"]["more"] = 1
    changed.save(folder / "model.pt")
    return (folder / "model.pt").read_bytes()


def data(folder: Path) -> Any:
    """A download that is stored."""
    fetch.find = lambda _: SET
    fetch._download = lambda *_: gzip.compress(TABLE)
    return fetch.get("toy", folder)["table.csv"].read_bytes()


def sizes(text: str) -> dict[str, Any]:
    """Options of a run of these sizes."""
    return {"assignments": (f"sizes={text}",)}


SCALED = {"assignments": ("scale=2",)}
WORKS = {
    "fresh": Work(30, finish_run, run),
    "replaced": Work(
        20, partial(finish_run, **SCALED), partial(run, force=True, **SCALED), prepare=run
    ),
    "grown": Work(
        15,
        partial(finish_run, **sizes("1,2,3,4")),
        partial(run, resume=True, **sizes("1,2,3,4")),
        prepare=partial(run, **sizes("1,2")),
    ),
    "fit": Work(15, fit),
    "images": Work(8, images),
    "model": Work(6, model, prepare=prepare_model),
    "data": Work(6, data),
}


def forked(job: Callable[[], Any], out: Path) -> Any:
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


def trial(work: Work, scratch: Path, expected: Any, seed: float, operation: int) -> str:
    """Kill once, resume, and say how it ended: "same", "different: …" or "stuck: …"."""
    folder = scratch / "work"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(scratch / "before", folder)

    def killed() -> None:
        watch(folder, operation, random.Random(seed))
        (work.start or work.finish)(folder)

    forked(killed, scratch / "killed")
    ended = forked(lambda: work.finish(folder), scratch / "finish")
    if ended is None or not ended[0]:
        return f"stuck: {ended}"
    return "same" if ended[1] == expected else f"different: {ended[1]}"


def trials(work: Work, scratch: Path, kills: int, chance: random.Random) -> list[str]:
    """How kills of one kind of work came about, and how they ended."""
    (scratch / "before").mkdir()
    forked(lambda: work.prepare(scratch / "before"), scratch / "prepared")
    shutil.copytree(scratch / "before", scratch / "work")

    def whole() -> int:
        seen = watch(scratch / "work", 0, chance)
        (work.start or work.finish)(scratch / "work")
        return seen[0]

    done, operations = forked(whole, scratch / "whole")
    assert done, operations
    done, expected = forked(lambda: work.finish(scratch / "work"), scratch / "expected")
    assert done, expected
    every = itertools.cycle(chance.sample(range(1, operations + 1), operations))
    return [
        f"killed at operation {at} of {operations}: "
        + trial(work, scratch, expected, chance.random(), at)
        for at in itertools.islice(every, kills)
    ]


def main(count: int, seed: int) -> int:
    """Do the kills and print what came of them."""
    torch.set_num_threads(1)
    chance, done, bad = random.Random(seed), 0, []
    Squares.selecting = ("sizes",)
    for name, work in WORKS.items():
        kills = max(1, round(count * work.share / 100))
        with tempfile.TemporaryDirectory(prefix="fsmap-kills-") as scratch:
            ends = trials(work, Path(scratch), kills, chance)
        wrong = [f"{name}, {end}" for end in ends if not end.endswith(": same")]
        print(f"{name}: {len(wrong)} of {kills} stuck or different", flush=True)
        bad += wrong
        done += kills
    print(f"{done} kills, seed {seed}: {len(bad)} stuck or different")
    print("\n".join(bad))
    return len(bad)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with only(Squares):
        sys.exit(bool(main(given.count, given.seed)))
