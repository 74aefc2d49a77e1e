"""Milliseconds of an image training step: ``python -m benchmarks.images --device cuda``.

ResNet-18 on 32×32 generated images on the device, B = S = 128 (``few points``: S = 32, R on every
second step, the mean over both kinds). On CUDA: bf16, channels last, compiled, the whole step in a
CUDA graph. On a CPU B = S = 32 in float32, eager. Cells are timed in turns; ``first_s`` is the time
of the first step of each kind: tracing, compiling and capturing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.loops import exclusively
from fsmap.files import circumstances
from fsmap.images import ImageRun, ImageSettings

RESULTS = Path(__file__).parent / "results"

CELLS: dict[str, dict[str, Any]] = {
    "ps-map": {"method": "ps-map"},
    "jvp joint": {},
    "few points, every 2": {"num_points": 32, "every": 2},
    "jvp frozen": {"batchnorm": "frozen"},
    "fd joint": {"estimator": "fd"},
    "sam": {"method": "ps-map", "sam": 0.05},
}
LIMITS = {"ps-map": 2.6, "jvp joint": 11.0, "few points, every 2": 5.6}  # ms, on CUDA


def make(cell: str, device: str) -> ImageRun:
    cuda = device == "cuda"
    size = {} if cuda else {"batch_size": 32, "num_points": 32, "width": 16, "limit": 256}
    how = {"precision": "bf16", "compile": True, "graph": True} if cuda else {}
    fixed = {"data": "cifar10", "generated": True, "px": "cifar100", "epochs": 1_000}
    chosen: dict[str, Any] = {**fixed, **size, **how, **CELLS[cell]}
    if not cuda and "num_points" in CELLS[cell]:
        chosen["num_points"] = 8
    return ImageRun(ImageSettings(**chosen), device=device)


def take(run: ImageRun, number: int) -> float:
    """Seconds of so many steps."""
    start = now(run)
    for _ in range(number):
        run.stepper(run.step, lr=1e-3, reg_strength=run.reg_strength)
        run.step += 1
    return now(run) - start


def now(run: ImageRun) -> float:
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--cell", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--steps", type=int, help="of a round (100 on CUDA, 4 on a CPU)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--lock", type=Path, help="file to lock while timing, for several processes"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "images.jsonl")
    options = parser.parse_args()
    steps = options.steps or (100 if options.device == "cuda" else 4)
    runs, first = {}, {}
    for cell in options.cell:
        runs[cell] = make(cell, options.device)
        with runs[cell]._kernels():
            first[cell] = take(runs[cell], 2 * runs[cell].settings.every)
    times: dict[str, list[float]] = {cell: [] for cell in runs}
    with exclusively(options.lock):
        for _ in range(options.rounds):
            for cell, run in runs.items():
                with run._kernels():
                    times[cell].append(1e3 * take(run, steps) / steps)
    about = circumstances(options.device)
    plain = statistics.median(times["ps-map"]) if "ps-map" in times else float("nan")
    print(f"{'cell':<22}{'ms':>8}{'fastest':>9}{'x ps-map':>10}{'limit':>7}{'first, s':>10}")
    for cell, found in times.items():
        ms = statistics.median(found)
        row = {
            "cell": cell, "ms": ms, "fastest": min(found), "ratio": ms / plain,
            "limit_ms": LIMITS.get(cell) if options.device == "cuda" else None,
            "first_s": first[cell], "steps": steps, "rounds": options.rounds, **about,
        }  # fmt: skip
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        limit = row["limit_ms"] or ""
        print(
            f"{cell:<22}{ms:>8.2f}{min(found):>9.2f}{ms / plain:>10.2f}{limit:>7}"
            f"{first[cell]:>10.1f}"
        )


if __name__ == "__main__":
    main()
