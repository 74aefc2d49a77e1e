"""Milliseconds of an image training step: ``python -m benchmarks.images``.

ResNet-18 on 32×32 images, B = S = 128, R at every step (and with few points, S = 32: R on every
second or fourth step, the mean over both kinds of steps, or `frozen` on every step), generated
images on the device (only time is measured). On CUDA: bf16 (fp16 for differences), channels-last,
compiled, the whole step in a graph. On a CPU B = S = 32 in float32, to look at the ratios
(``--steps 3``: a step takes seconds).
The last column compares the ratio to PS-MAP with the count of forward and backward passes; up to
1.25 is the promise.

Every cell is compiled in a process of its own, all at once; then they are timed in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fsmap.report.circumstances import circumstances
from fsmap.train.images import ImageRun, ImageSettings
from fsmap.train.images.kernels import kernels

RESULTS = Path(__file__).parent / "results"

CELLS: dict[str, dict[str, Any]] = {
    "ps-map": {"method": "ps-map"},
    "fd joint": {"estimator": "fd", "batchnorm": "joint"},
    "fd frozen": {"estimator": "fd", "batchnorm": "frozen"},
    "jvp frozen": {"estimator": "jvp", "batchnorm": "frozen"},
    "jvp joint": {"estimator": "jvp", "batchnorm": "joint"},
    "few points, every 2": {"estimator": "jvp", "batchnorm": "joint", "every": 2},
    "few points, every 4": {"estimator": "jvp", "batchnorm": "joint", "every": 4},
    "few points, every 2, fd": {"estimator": "fd", "batchnorm": "joint", "every": 2},
    "few points, frozen": {"estimator": "jvp", "batchnorm": "frozen"},
}
# Passes of B points, counted (design, section 5), and the time allowed on the GPU machine.
COUNTS = {"ps-map": 3, "fd joint": 12, "fd frozen": 9, "jvp frozen": 11, "jvp joint": 16}
# B + S points, S = B / 4; R on every k-th step.
COUNTS["few points, every 2"] = 1.25 * (16 / 2 + 3) / 2
COUNTS["few points, every 4"] = 1.25 * (16 / 2 + 3 * 3) / 4
COUNTS["few points, every 2, fd"] = 1.25 * (12 / 2 + 3) / 2
COUNTS["few points, frozen"] = 3 + 8 / 4  # B points, and R of S alone on every step
LIMITS = {"ps-map": 2.5, "fd joint": 8.0, "jvp frozen": 7.5, "jvp joint": 12.0}
AUTHORS = {"ps-map": 8.6, "fd joint": 14.2}  # the authors' code on the same card


def settings(cell: str, options: argparse.Namespace) -> ImageSettings:
    """The settings of a cell."""
    cuda = options.device.startswith("cuda")
    size = {"width": 64, "batch_size": 128 if cuda else 32}
    how = {"precision": "bf16", "compile": True, "graph": True} if cuda else {}
    chosen = {
        "data": "cifar10",
        "generated": True,
        "px": "cifar100",
        "num_points": size["batch_size"] // (4 if cell.startswith("few points") else 1),
        "epochs": 1_000,
        **size,
        **how,
        **CELLS[cell],
        **dict(pair.split("=") for pair in options.set),
    }
    for name, kind in (("width", int), ("batch_size", int), ("num_points", int), ("every", int)):
        if name in chosen:
            chosen[name] = kind(chosen[name])
    for name in ("compile", "graph", "channels_last"):
        chosen[name] = str(chosen.get(name, name == "channels_last")) in ("True", "1")
    return ImageSettings(**chosen)


def child(cell: str, options: argparse.Namespace) -> None:
    """Build and compile, wait for the word, then measure."""
    start = time.perf_counter()
    run = ImageRun(settings(cell, options), device=options.device)
    step = run._step
    with kernels(run.settings, run.device):
        for number in range(run.settings.every):
            kind = step.kind(number, strength(cell))
            step.feeder.prepare(number, kind)
            step.gradients[kind] = step.make(kind)
        built = time.perf_counter() - start
        print(json.dumps({"built": built}), flush=True)
        sys.stdin.readline()
        start = time.perf_counter()
        take(run, 3, strength(cell))
        first = time.perf_counter() - start
        every = run.settings.every  # whole turns, or the mean would be of something else
        steps = every * math.ceil(options.steps / every)
        times = [take(run, steps, strength(cell)) for _ in range(options.repeats)]
        found = {
            "cell": cell,
            "ms": statistics.median(times),
            "fastest": min(times),
            "build_s": built,
            "capture_s": first,
            "steps": steps,
            "repeats": options.repeats,
            "peak_gb": torch.cuda.max_memory_allocated() / 2**30 if step.cuda else None,
        }
        if step.cuda and hasattr(step, "graphs") and run.settings.every == 1:
            found["replay_ms"] = replay(step, kind, options.steps)
        if options.profile and step.cuda:
            print(profiled(run, strength(cell)), file=sys.stderr, flush=True)
    print(json.dumps(found), flush=True)


def strength(cell: str) -> float:
    """λ of a cell; at zero R is left out."""
    return 0.0 if cell == "ps-map" else 1e-6


def take(run: ImageRun, number: int, reg_strength: float) -> float:
    """Milliseconds per step."""
    wait(run)
    start = time.perf_counter()
    for i in range(number):
        run._step(i % run.steps_per_epoch, lr=1e-3, reg_strength=reg_strength)
    wait(run)
    return 1e3 * (time.perf_counter() - start) / number


def replay(step: Any, kind: str, number: int) -> float:
    """Milliseconds of the captured part alone."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(number):
        step.graphs[kind].replay()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / number


def wait(run: ImageRun) -> None:
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)


def profiled(run: ImageRun, reg_strength: float, number: int = 3) -> str:
    """Where the time of a step goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        take(run, number, reg_strength)
    events = [e for e in found.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / number / 1e3
    count = sum(e.count for e in events) / number
    s = run.settings
    lines = [f"{s.method} {s.estimator} {s.batchnorm}: {total:.2f} ms, {count:.0f} kernels"]
    for e in events[:14]:
        ms = e.self_device_time_total / number / 1e3
        lines.append(f"  {ms:7.3f} ms {e.count // number:4d} {e.key[:90]}")
    return "\n".join(lines)


def measure(cells: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells: compiled together, timed one after the other."""
    passed = [w for pair in options.set for w in ("--set", pair)]
    passed += ["--device", options.device, "--steps", str(options.steps)]
    passed += ["--repeats", str(options.repeats), *(["--profile"] if options.profile else [])]
    started = []
    for cell in cells:
        command = [sys.executable, "-m", "benchmarks.images", "--child", cell, *passed]
        pipe = subprocess.PIPE
        started.append((cell, subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)))
        if not options.device.startswith("cuda"):
            started[-1][1].stdout.readline()  # two cores: one at a time
    for cell, process in started if options.device.startswith("cuda") else ():
        print(f"{cell}: built in {process.stdout.readline().strip()}", flush=True)
    rows = []
    for cell, process in started:
        answer, _ = process.communicate("go\n")
        if process.returncode:
            print(f"{cell}: failed", flush=True)
            continue
        rows.append(json.loads(answer.strip().splitlines()[-1]))
        print(f"{cell}: {rows[-1]}", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Lines to read."""
    base = next((row["ms"] for row in rows if row["cell"] == "ps-map"), math.nan)
    lines = [f"{'step':24} {'ms':>8} {'limit':>6} {'ratio':>6} {'counted':>8} {'excess':>7}"]
    for row in rows:
        cell = row["cell"]
        row["ratio"], row["counted"] = row["ms"] / base, COUNTS[cell] / COUNTS["ps-map"]
        limit = LIMITS.get(cell) if row["peak_gb"] else None  # of the GPU machine
        lines.append(
            f"{cell:24} {row['ms']:8.2f} {limit or '':>6} {row['ratio']:6.2f} "
            f"{row['counted']:8.2f} {row['ratio'] / row['counted']:7.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--cells", nargs="*", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--out", type=Path, help="rows are added to it; default: a file of benchmarks/results"
    )
    parser.add_argument("--child", choices=list(CELLS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options)
        return
    where = circumstances(options.device)._asdict()
    rows = measure(options.cells, options)
    print(table(rows))
    cuda = options.device.startswith("cuda")
    out = options.out or RESULTS / ("images.jsonl" if cuda else "images-cpu.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        for row in rows:
            if cuda:
                row |= {"limit_ms": LIMITS.get(row["cell"]), "authors_ms": AUTHORS.get(row["cell"])}
            file.write(json.dumps({**row, "set": options.set, **where}) + "\n")
    print(f"{len(rows)} rows added to {out}")
    if len(rows) < len(options.cells):
        sys.exit(1)


if __name__ == "__main__":
    main()
