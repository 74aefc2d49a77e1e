"""A step of Table 1's populations, eager, compiled and captured: ``python -m benchmarks.table1``.

The populations are those of ``uci-table`` at full size: 30 configurations on one split (``tune``),
and two on six splits (``final``). Milliseconds a step without compilation, draws included, and the
seconds that all steps of the paper's protocol would take. Rows are appended to
``benchmarks/results/table1-DEVICE.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fsmap
from fsmap.files import circumstances
from fsmap.models.mlp import MLP
from fsmap.paper.engine import get
from fsmap.train.loop import adam

FEATURES, DATA = 13, 2_000
RESULTS = Path(__file__).parent / "results"
MODES = {
    "eager": {"graph": False},
    "captured": {"graph": True},
    "compiled": {"graph": False, "compile": True},
    "compiled, captured": {"graph": True, "compile": True},
}


class Sizes(NamedTuple):
    """What one step works on."""

    width: int
    batch: int
    points: int
    beta: float


def members(stage: str) -> fsmap.Grid:
    """The members of one population of the paper's protocol."""
    config = get("uci-table").config
    if stage == "tune":
        return fsmap.Grid(decay=config.decays, strength=(0.0, *config.strengths), seed=[0])
    return fsmap.Grid(
        [
            {"decay": 1e-3, "strength": strength, "seed": seed}
            for strength in (0.0, 1e-3)
            for seed in range(config.seeds)
        ]
    )


def measure(
    grid: fsmap.Grid, sizes: Sizes, how: dict[str, Any], steps: int, warm: int, device: torch.device
) -> tuple[float, float]:
    """Seconds a step after ``warm`` steps, and the mean loss of the last one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(DATA, FEATURES, generator=generator)
    y = x.sin().sum(1, keepdim=True)
    layers = [FEATURES, *[sizes.width] * 3, 1]
    network = MLP(layers, "relu", init="lecun", generator=generator).to(device, torch.float32)
    f, _ = fsmap.functional(network)

    def build(decay: Any, strength: Any) -> fsmap.Objective:
        return fsmap.l_map(
            fsmap.Gaussian(math.sqrt(0.5)),
            fsmap.Normal((2 * decay * DATA) ** -0.5),
            fsmap.px.Normal(shape=FEATURES),
            num_points=sizes.points,
            num_data=DATA,
            reg_strength=strength,
            estimator="fd",
            beta=sizes.beta,
        )

    times: list[float] = []

    def clock(step: int, params: object) -> None:
        if step in (warm, warm + steps):
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    _, history = fsmap.fit_population(
        build,
        grid,
        f,
        (x, y),
        steps=warm + steps,
        optimizer=adam(1e-3),
        batch_size=sizes.batch,
        replace=True,
        log_every=100,
        progress=False,
        callback=clock,
        chunk=len(grid),
        **how,
    )
    return (times[1] - times[0]) / steps, float(history.loss[-1].mean())


def main() -> int:
    """Print and write the table."""
    config = get("uci-table").config
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", default="cpu")
    options.add_argument("--steps", type=int, default=500)
    options.add_argument("--warm", type=int, default=20)
    options.add_argument("--width", type=int, default=config.width)
    options.add_argument("--batch", type=int, default=config.batch)
    options.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    chosen = options.parse_args()
    device = torch.device(chosen.device)
    sizes = Sizes(chosen.width, chosen.batch, chosen.batch, config.beta)
    modes = [m for m in chosen.modes if "captured" not in m or device.type == "cuda"]
    tables = len(config.datasets)
    print("mode                  tune ms   final ms   Table 1 s   losses")
    for mode in modes:
        found = {
            stage: measure(members(stage), sizes, MODES[mode], chosen.steps, chosen.warm, device)
            for stage in ("tune", "final")
        }
        seconds = tables * config.steps * sum(step for step, _ in found.values())
        tune, final = (1e3 * found[stage][0] for stage in ("tune", "final"))
        losses = " ".join(f"{loss:.5g}" for _, loss in found.values())
        print(f"{mode:20s} {tune:8.3f}   {final:8.3f}   {seconds:9.0f}   {losses}", flush=True)
        row = {
            **{"work": "table1", "mode": mode, "ms_tune": tune, "ms_final": final},
            **{"seconds": seconds, **sizes._asdict(), **circumstances(chosen.device)},
        }
        with (RESULTS / f"table1-{device.type}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
