"""Corrupt files at random, and see that none is accepted silently.

    python tests/corruptions.py --count 500 --seed 0

Rows, units and summaries of runs (finished, and killed before the summary), checkpoints of ``fit``
and of image runs, and models of tables. A corruption passes if reading the file raises an error of
fsmap, or if a resumed run says which units do not match and ends with the numbers of a run whose
files were left alone. Bytes that make no difference to a reader (spaces of JSON) count as passed
only if what was read is the same.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fsmap
from fake_experiment import command, run
from fsmap.errors import FsmapError
from fsmap.paper.report.page import build
from fsmap.paper.rows import RunFolder
from fsmap.train import checkpoint
from image_cases import TINY, trained
from small_tables import save_model

Change = Callable[[bytes, random.Random], bytes]


def lines_of(change: Callable[[list[bytes], random.Random], list[bytes]]) -> Change:
    """A change of lines, as one of bytes."""
    return lambda data, chance: b"".join(change(data.splitlines(keepends=True), chance))


def flip(data: bytes, chance: random.Random) -> bytes:
    """Flip one bit."""
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def digit(data: bytes, chance: random.Random) -> bytes:
    """Change one digit."""
    places = [k for k, byte in enumerate(data) if chr(byte).isdigit()] or [0]
    place = chance.choice(places)
    return data[:place] + str(chance.randrange(10)).encode() + data[place + 1 :]


def cut(data: bytes, chance: random.Random) -> bytes:
    """Remove some bytes."""
    begin = chance.randrange(len(data))
    return data[:begin] + data[begin + chance.randint(1, 200) :]


def end(data: bytes, chance: random.Random) -> bytes:
    """Remove the end."""
    return data[: chance.randrange(len(data))]


def blank(data: bytes, chance: random.Random) -> bytes:
    """Zeros in place of some bytes, as a file system leaves them."""
    begin = chance.randrange(len(data))
    stop = min(len(data), begin + chance.randint(1, 200))
    return data[:begin] + bytes(stop - begin) + data[stop:]


def insert(data: bytes, chance: random.Random) -> bytes:
    """Insert some bytes."""
    place = chance.randrange(len(data))
    return data[:place] + chance.randbytes(chance.randint(1, 20)) + data[place:]


def drop_lines(lines: list[bytes], chance: random.Random) -> list[bytes]:
    """Remove some lines."""
    begin = chance.randrange(len(lines))
    return lines[:begin] + lines[begin + chance.randint(1, 3) :]


def repeat(lines: list[bytes], chance: random.Random) -> list[bytes]:
    """A line twice."""
    place = chance.randrange(len(lines))
    return [*lines[:place], lines[place], *lines[place:]]


def swap(lines: list[bytes], chance: random.Random) -> list[bytes]:
    """Two lines in each other's place."""
    a, b = (chance.randrange(len(lines)) for _ in range(2))
    lines[a], lines[b] = lines[b], lines[a]
    return lines


BYTES: list[Change] = [flip, digit, cut, end, blank, insert]
LINES: list[Change] = [digit, *map(lines_of, (drop_lines, repeat, swap))]


def rows_of(out: Path) -> list[Any]:
    """Rows of a run, in any order."""
    rows = RunFolder(out / "squares").content().rows
    return sorted((row.metric, row.seed, str(row.config), repr(row.value)) for row in rows)


def numbers(out: Path) -> tuple[Any, Any]:
    """Rows of a run, and what its summary says."""
    summary = json.loads((out / "squares" / "summary.json").read_text())
    return rows_of(out), (summary["claims"], summary["table"])


class Folder:
    """A run, with or without its summary; one of its files is corrupted."""

    changes = BYTES + LINES

    def __init__(self, name: str, *, summary: bool) -> None:
        self.name, self.summary = name, summary

    def make(self, folder: Path) -> Path:
        """Make the files; the one that is corrupted."""
        (outcome,) = run(folder)
        assert outcome.status == "finished"
        self.expected = numbers(folder)
        if not self.summary:
            (folder / "squares" / "summary.json").unlink()
        return folder / "squares" / self.name

    def accepted(self, folder: Path) -> str:
        """What is wrong with how the file was taken; "" if nothing is."""
        if self.summary:
            page = build([folder], folder / "report").read_text()
            told = "is damaged" in page or "of 4 units" in page
            if not told and rows_of(folder) != self.expected[0]:
                return "the report took it"
        notes: list[str] = []
        (outcome,) = run(folder, resume=True, notes=notes)
        if outcome.status == "failed":
            return "" if isinstance(outcome.error, FsmapError) else f"a bug: {outcome.reason}"
        return "" if self.same(folder) else f"{outcome.status}: other numbers"

    def same(self, folder: Path) -> bool:
        """Whether the numbers are there and as they were."""
        try:
            return bool(numbers(folder) == self.expected)
        except ValueError:
            return False


class Content:
    """A file that is refused as a whole."""

    changes = BYTES

    def __init__(self, write: Callable[[Path], Path], read: Callable[[Path], Any]) -> None:
        self.write, self.read = write, read

    def make(self, folder: Path) -> Path:
        """Make the file."""
        path = self.write(folder)
        self.path, self.expected = path.relative_to(folder), self.read(path)
        return path

    def accepted(self, folder: Path) -> str:
        """As above."""
        try:
            found = self.read(folder / self.path)
        except FsmapError:
            return ""
        return "" if found == self.expected else "read with another content"


def fit_checkpoint(folder: Path) -> Path:
    """A checkpoint of ``fit``."""
    x = torch.linspace(-1, 1, 8)[:, None]
    objective = fsmap.ps_map(fsmap.Gaussian(1.0), fsmap.Normal(1.0), num_data=8)
    path, start = folder / "fit.safetensors", {"a": torch.ones(64)}
    options = {"steps": 3, "checkpoint": path, "progress": False}
    fsmap.fit(objective, lambda p, x: x * p["a"].sum(), start, (x, x), **options)
    return path


def image_checkpoint(folder: Path) -> Path:
    """A checkpoint of an image run."""
    trained(TINY, folder=folder)
    return folder / "checkpoint.safetensors"


def content_of(path: Path) -> Any:
    """Everything in a checkpoint, comparable."""
    found = checkpoint.load(path)
    tensors = {n: (str(t.dtype), t.shape, t.tolist()) for n, t in found.tensors.items()}
    return repr((sorted(tensors.items()), found.config, found.progress))


TARGETS: dict[str, Callable[[], Folder | Content]] = {
    "rows, finished": lambda: Folder("rows.jsonl", summary=True),
    "rows, unfinished": lambda: Folder("rows.jsonl", summary=False),
    "units, finished": lambda: Folder("units.jsonl", summary=True),
    "units, unfinished": lambda: Folder("units.jsonl", summary=False),
    "summary": lambda: Folder("summary.json", summary=True),
    "checkpoint of fit": lambda: Content(fit_checkpoint, content_of),
    "checkpoint of images": lambda: Content(image_checkpoint, content_of),
    "model": lambda: Content(save_model, content_of),
}


def main(count: int, seed: int) -> int:
    """Make the corruptions and print what came of them."""
    torch.set_num_threads(1)
    chance, done, bad = random.Random(seed), Counter(), []
    with tempfile.TemporaryDirectory(prefix="fsmap-corruptions-") as scratch:
        for number, (name, make) in enumerate(TARGETS.items()):
            whole, folder, target = Path(scratch) / "whole", Path(scratch) / "work", make()
            whole.mkdir()
            file = target.make(whole).relative_to(whole)
            times = count // len(TARGETS) + (number < count % len(TARGETS))
            for _ in range(times):
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(whole, folder)
                before = after = (folder / file).read_bytes()
                while after == before:
                    change = chance.choice(target.changes)
                    after = change(before, chance)
                (folder / file).write_bytes(after)
                done[name] += 1
                if wrong := target.accepted(folder):
                    bad.append(f"{name}, {getattr(change, '__name__', 'lines')}: {wrong}")
            shutil.rmtree(whole)
            print(f"{name}: {times} corruptions", flush=True)
    print(f"{sum(done.values())} corruptions, seed {seed}: {len(bad)} accepted silently")
    print("\n".join(bad))
    return len(bad)


if __name__ == "__main__":
    command(main, __doc__, 500)
