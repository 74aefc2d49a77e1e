"""Is λ better steered or fixed? ``python -m benchmarks.steering``, minutes on a CPU.

A small classifier that memorizes: 2,000 points in eight dimensions, one label in ten wrong, 40
epochs with a cosine schedule. PS-MAP, λ fixed from the first step, and λ steered by 2,000 held-out
points with R known. A controller is worth having if it ends calibrated *and* about as accurate as
the fixed λ that does. ``--points 1000`` has more to memorize.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap
from fsmap.report.circumstances import circumstances

RESULTS = Path(__file__).parent / "results" / "steering.jsonl"
WAYS = ("ps-map", "steered", "1e-3", "1.4e-3", "2e-3")
METRICS = ("accuracy", "nll", "temperature")
BATCH, HELD_OUT, TEST = 50, 2_000, 10_000


def data(points: int) -> list[tuple[Tensor, Tensor]]:
    """Training, held-out and test points: the sign of x₀x₁ + x₂/2, one label in ten flipped."""
    generator = torch.Generator().manual_seed(0)
    sizes = [points, HELD_OUT, TEST]
    x = torch.randn(sum(sizes), 8, generator=generator)
    y = (x[:, 0] * x[:, 1] + 0.5 * x[:, 2] > 0).long()
    y = torch.where(torch.rand(len(y), generator=generator) < 0.1, 1 - y, y)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def network() -> nn.Sequential:
    """Two hidden layers, the first with batch normalization."""
    first = (nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU())
    return nn.Sequential(*first, nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))


def train(way: str, seed: int, points: int, epochs: int) -> dict[str, Any]:
    """One training, and what it ends with on test points.

    Args:
        way: ``ps-map``, ``steered``, or a fixed λ.
        seed: Of the network and the batches.
        points: Training points.
        epochs: Length of the schedule.

    Returns:
        A row.
    """
    (x, y), held_out, test = data(points)
    torch.manual_seed(seed)
    model = network()
    lm = fsmap.LMAP(model, fsmap.px.Normal(shape=(8,)), num_points=50, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    control = None
    if way == "steered":
        options: dict[str, Any] = {"optimizer": optimizer, "interval": 0.5, "warmup": 2}
        control = fsmap.TemperatureControl(lm, held_out, **options)
    fixed = 0.0 if way in ("ps-map", "steered") else float(way)
    R, strength = torch.zeros(()), fixed
    for _ in range(epochs):
        seen = []
        for rows in torch.randperm(points).split(BATCH):
            strength = fixed if control is None else control.strength
            out, R = lm(x[rows]) if way != "ps-map" else (model(x[rows]), R)
            seen.append(R.detach())
            loss = F.cross_entropy(out, y[rows]) + strength * R
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        if control is not None:
            control.update(laplacian=torch.stack(seen).mean())
    model.eval()
    with torch.no_grad():
        logits = model(test[0])
    found = {name: float(getattr(fsmap.metrics, name)(logits, test[1])) for name in METRICS}
    return {"way": way, "seed": seed, "points": points, "epochs": epochs, "lam": strength, **found}


def table(rows: list[dict[str, Any]]) -> str:
    """Means over seeds, with standard errors."""
    lines = ["way       seeds  accuracy %      NLL              log T, its range    λ at the end"]
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        accuracy = _mean([100 * row["accuracy"] for row in mine], 2)
        nll = _mean([row["nll"] for row in mine], 4)
        logs = [math.log(row["temperature"]) for row in mine]
        lam = statistics.median(row["lam"] for row in mine)
        ends = f"{min(logs):+.3f} to {max(logs):+.3f}"
        lines.append(f"{way:9} {len(mine):5}  {accuracy:14}  {nll:15}  {ends:18}  {lam:.2g}")
    return "\n".join(lines)


def _mean(values: list[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"


def _way(word: str) -> str:
    with contextlib.suppress(ValueError):
        if word in ("ps-map", "steered") or float(word) >= 0:
            return word
    message = f"{word!r} is neither ps-map nor steered nor a λ of at least zero"
    raise argparse.ArgumentTypeError(message)


def main(arguments: list[str] | None = None) -> None:
    """Train all, print a table, append rows."""
    parser = argparse.ArgumentParser(description="λ steered beside λ fixed, on a small network.")
    parser.add_argument(
        "--ways", nargs="+", type=_way, default=list(WAYS), help="ps-map, steered, or a λ"
    )
    parser.add_argument("--points", type=int, default=2_000, help="training points")
    parser.add_argument("--epochs", type=int, default=40, help="length of the schedule")
    parser.add_argument("--seeds", type=int, default=8, help="networks of each")
    parser.add_argument("--out", type=Path, default=RESULTS, help="rows are appended to it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the network is small
    about, rows = circumstances("cpu")._asdict(), []
    with options.out.open("a") as file:
        for way in options.ways:
            for seed in range(options.seeds):
                rows.append(train(way, seed, options.points, options.epochs))
                print(rows[-1], flush=True)
                file.write(json.dumps({**rows[-1], **about}) + "\n")
                file.flush()
    print(table(rows))


if __name__ == "__main__":
    main()
