"""The default strength of ``fsmap.LogTrace`` and other methods on images: ResNet-18.

    python -m benchmarks.strength_images --sets cifar10-50 --ways plain nats --seeds 0 --runs DIR

A job is one run of a set, a way and a seed. A job that has a row is not repeated; one whose time is
up keeps a checkpoint in ``--runs`` and goes on with the next call. Several processes with the same
``--runs`` share the jobs, so one GPU can hold several. ``nats`` has the default constants of
``LogTrace`` (c = 0.05) with p_X = training images, S = 32, R on every second step, ``joint``.

At the paper's length (FashionMNIST 50 epochs, CIFAR-10 200) the same runs are rows of ``fsmap run
image-table``. Rows are appended to ``benchmarks/results/strength-images.jsonl``; ``--table`` prints
their means.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fsmap
from fsmap.files import circumstances
from fsmap.images import ImageRun, ImageSettings

RESULTS = Path(__file__).parent / "results" / "strength-images.jsonl"
SETS: dict[str, dict[str, Any]] = {
    "cifar10-50": {"data": "cifar10", "epochs": 50},
    "cifar100-50": {"data": "cifar100", "epochs": 50},
    "cifar10-50-noise": {"data": "cifar10", "epochs": 50, "label_noise": 0.2},
}
PLAIN: dict[str, Any] = {"method": "ps-map"}
NATS: dict[str, Any] = {
    "method": "l-map", "px": "train", "num_points": 32, "every": 2, "reg_nats": 0.05,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "label-smoothing": {**PLAIN, "label_smoothing": 0.05},
    "sam": {**PLAIN, "sam": 0.05},
    "nats": NATS,
    "sam+nats": {**NATS, "sam": 0.05},
}
"""Also ``wd=1e-3``: plain with that weight decay, and ``nats=0.02``: another strength."""
METRICS = ("accuracy", "nll", "ece")


class Job(NamedTuple):
    """One run."""

    set: str
    way: str
    seed: int

    def settings(self, device: str) -> ImageSettings:
        kind, _, number = self.way.partition("=")
        changes = WAYS.get(kind, PLAIN)
        if number:
            changes = {**changes, {"wd": "weight_decay", "nats": "reg_nats"}[kind]: float(number)}
        cuda = device == "cuda"
        how = {"precision": "bf16", "compile": True, "graph": True} if cuda else {}
        return ImageSettings(**{**SETS[self.set], **how, **changes, "seed": self.seed})


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Whether this process may run the job of a folder: no other one does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "claim").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def measured(path: Path) -> set[Job]:
    """Jobs that have a row."""
    return {Job(r["set"], r["way"], r["seed"]) for r in read(path) if "way" in r}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def row_of(run: ImageRun, job: Job, device: str) -> dict[str, Any]:
    """Held-out and test numbers of a finished run; the temperature is that of held-out images."""
    row: dict[str, Any] = {**job._asdict(), "settings": run.settings.describe()}
    valid, labels = run.logits("valid")
    scale = float(fsmap.metrics.temperature(valid, labels))
    for split, out, y in (("held-out", valid, labels), ("test", *run.logits("test"))):
        found = {name: float(getattr(fsmap.metrics, name)(out, y)) for name in METRICS}
        for name in METRICS[1:]:
            found[f"scaled_{name}"] = float(getattr(fsmap.metrics, name)(out / scale, y))
        row[split] = found
    last = run.history[-1]
    about = {name: last.get(name) for name in ("laplacian", "reg_strength", "skipped")}
    row |= {"temperature": scale, **about, "seconds": run.seconds, "steps": run.steps}
    return row | circumstances(device)


def take(job: Job, options: argparse.Namespace, seconds: float) -> None:
    """Train a job for some seconds; append its row if that ends it."""
    folder = options.runs / f"{job.set}-{job.way}-{job.seed}"
    with claimed(folder) as mine:
        if not mine or job in measured(options.out):
            return
        settings = job.settings(options.device)
        run = ImageRun(
            settings, device=options.device, folder=folder, resume=True, data_dir=options.data_dir
        )
        run.train(max_seconds=seconds, progress=False)
        print(f"{job}: step {run.step} of {run.steps}, {run.seconds:.0f} s", flush=True)
        if run.done:
            row = row_of(run, job, options.device)
            with options.out.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(json.dumps(row) + "\n")
            print(json.dumps({k: row[k] for k in ("set", "way", "seed", "test")}), flush=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Test numbers: means over seeds ± standard errors, a line per set and way."""
    names = ("accuracy", "nll", "ece", "scaled_nll")
    lines = ["| set | way | seeds | accuracy % | NLL | ECE % | NLL scaled |", "|---" * 7 + "|"]
    rows = [row for row in rows if "test" in row]
    for key in dict.fromkeys((row["set"], row["way"]) for row in rows):
        mine = [row["test"] for row in rows if (row["set"], row["way"]) == key]
        cells = []
        for name in names:
            factor, digits = (100, 2) if name in ("accuracy", "ece") else (1, 4)
            values = [factor * found[name] for found in mine]
            cell = f"{statistics.mean(values):.{digits}f}"
            if len(values) > 1:
                cell += f" ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"
            cells.append(cell)
        lines.append(f"| {' | '.join([*key, str(len(mine)), *cells])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Take jobs one after the other until they are done or the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--ways", nargs="+", default=["plain", "nats"], help="see WAYS")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", nargs="+", help="set:way:seed, instead of all combinations")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of this call")
    parser.add_argument("--runs", type=Path, default=Path("runs/strength"), help="checkpoints")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the rows that are there")
    options = parser.parse_args(arguments)
    jobs = [
        Job(s, way, seed) for seed in options.seeds for s in options.sets for way in options.ways
    ]
    if options.jobs:
        split = [job.split(":") for job in options.jobs]
        jobs = [Job(s, way, int(seed)) for s, way, seed in split]
    end = time.monotonic() + options.seconds
    for job in [] if options.table else jobs:
        if time.monotonic() < end and job not in measured(options.out):
            take(job, options, end - time.monotonic())
    print(table(read(options.out)))


if __name__ == "__main__":
    main()
