"""A population against its members one after another: ``python -m benchmarks.population``.

Both take the same steps from the same starts (tests/train/test_population.py checks that they
agree), so only time is measured: milliseconds per member and step, the whole call included. The two
take turns, so that a busy machine slows both; shown are the median of the repeats and the range of
the ratio. Rows are written to ``benchmarks/results/population-cpu.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import fsmap
from fsmap.files import circumstances
from fsmap.models.mlp import MLP
from fsmap.train.loop import adam
from fsmap.train.population import initialize
from fsmap.types import Batch

FEATURES, DATA = 8, 2_048
RESULTS = Path(__file__).parent / "results"


class Setup(NamedTuple):
    """One line of the table."""

    width: int
    batch: int
    method: str
    steps: int
    least: float  # the ratio that the library promises on a CPU


SETUPS = (
    Setup(64, 64, "ps-map", 100, 3.0),
    Setup(64, 64, "l-map", 100, 3.0),
    Setup(128, 128, "l-map", 40, 1.0),
    Setup(256, 512, "ps-map", 8, 1.0),
    Setup(256, 512, "l-map", 4, 1.0),
)


def build(setup: Setup) -> Callable[..., fsmap.Objective]:
    noise, px = fsmap.Gaussian(1.0), fsmap.px.Normal(torch.zeros(FEATURES), 1.0)

    def make(prior_std: object) -> fsmap.Objective:
        prior = fsmap.Normal(prior_std)
        if setup.method == "ps-map":
            return fsmap.ps_map(noise, prior, num_data=DATA)
        return fsmap.l_map(
            noise, prior, px, num_points=setup.batch, jitter=1.0, num_data=DATA, estimator="fd"
        )

    return make


def timed(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(
    setup: Setup, members: int, repeats: int, device: torch.device
) -> list[tuple[float, float]]:
    """Seconds of the members one by one and of the population, for every repeat."""
    x = torch.randn(DATA, FEATURES, generator=torch.Generator().manual_seed(0)).to(device)
    data = Batch(x, x.sin().sum(1, keepdim=True))
    f, _ = fsmap.functional(MLP([FEATURES, *[setup.width] * 3, 1], "relu").to(device))
    grid = fsmap.Grid(prior_std=torch.linspace(0.5, 2.0, members).tolist())
    knobs = {"steps": setup.steps, "batch_size": setup.batch, "optimizer": adam(1e-3)}

    def one_by_one() -> None:
        for member in grid:
            start = initialize(f.module, 0)
            fsmap.fit(build(setup)(**member), f, start, data, progress=False, **knobs)

    def together() -> None:
        fsmap.fit_population(build(setup), grid, f, data, progress=False, **knobs)

    timed(together, device)  # lazy initialization of torch
    return [(timed(one_by_one, device), timed(together, device)) for _ in range(repeats)]


def main() -> int:
    """Print the table; the exit status says whether the promised ratios were reached (CPU only)."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--members", type=int, default=16)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--device", default="cpu")
    chosen = options.parse_args()
    device, about = torch.device(chosen.device), circumstances(chosen.device)
    sizes = {"members": chosen.members, "repeats": chosen.repeats}
    print(f"# {about['device']}, {torch.get_num_threads()} threads, {sizes}")
    print("width  batch  method   one by one   together   ratio (least .. most)   promised")
    broken, rows = False, []
    for setup in SETUPS:
        seconds = measure(setup, chosen.members, chosen.repeats, device)
        unit = 1e3 / (setup.steps * chosen.members)
        alone, together = (unit * statistics.median(part) for part in zip(*seconds, strict=True))
        ratios = sorted(a / b for a, b in seconds)
        middle = statistics.median(ratios)
        print(
            f"{setup.width:5d}  {setup.batch:5d}  {setup.method:7s} {alone:8.3f} ms "
            f"{together:8.3f} ms   {middle:5.2f} ({ratios[0]:.2f} .. {ratios[-1]:.2f})   "
            f"{setup.least:10.1f}",
            flush=True,
        )
        row = {"width": setup.width, "batch": setup.batch, "method": setup.method}
        row |= {"ms_alone": alone, "ms_together": together, "promised": setup.least}
        row |= {"ratio": middle, "ratio_least": ratios[0], "ratio_most": ratios[-1]}
        rows.append({"work": "population", **sizes, **row, **about})
        broken |= device.type == "cpu" and middle < setup.least
    path = RESULTS / f"population-{device.type}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return int(broken)


if __name__ == "__main__":
    raise SystemExit(main())
