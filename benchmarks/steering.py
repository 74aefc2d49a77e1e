"""How strong? ``python -m benchmarks.steering``, minutes on a CPU.

A small classifier that memorizes: 2,000 points in eight dimensions, one label in ten wrong, 40
epochs with a cosine schedule. Without R (``plain``), with λR (``lam=1e-3``) and with
c·log(1 + R/R₀) (``nats=0.05``, see ``fsmap.LogTrace``). 2,000 held-out points are for choosing
constants, 10,000 test points for reporting what was chosen. ``--points 1000`` has more to memorize.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap
from fsmap.paper.rows import circumstances

RESULTS = Path(__file__).parent / "results" / "steering.jsonl"
LAMBDAS, NATS = ("1e-3", "1.4e-3", "2e-3"), ("0.01", "0.02", "0.05", "0.1", "0.2")
WAYS = ("plain", *(f"lam={lam}" for lam in LAMBDAS), *(f"nats={c}" for c in NATS))
SPLITS = ("held-out", "test")
METRICS = {"accuracy": (100, 2), "nll": (1, 4), "ece": (100, 2), "temperature": (1, 3)}
"""What is measured on each split; factor and digits in the table."""
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
    """Train one network and measure it on held-out and test points.

    Args:
        way: ``plain``, ``lam=λ`` or ``nats=c``.
        seed: Of the network and the batches.
        points: Training points.
        epochs: Length of the schedule.

    Returns:
        A row.
    """
    (x, y), *splits = data(points)
    torch.manual_seed(seed)
    model = network()
    lm = fsmap.LMAP(model, fsmap.px.Normal(shape=(8,)), num_points=50, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    kind, _, strength = way.partition("=")
    penalty = fsmap.LogTrace(float(strength)) if kind == "nats" else None
    for _ in range(epochs):
        for rows in torch.randperm(points).split(BATCH):
            if kind == "plain":
                loss = F.cross_entropy(model(x[rows]), y[rows])
            else:
                out, R = lm(x[rows])
                loss = F.cross_entropy(out, y[rows])
                loss = loss + (float(strength) * R if penalty is None else penalty(R))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    model.eval()
    row: dict[str, Any] = {"way": way, "seed": seed, "points": points, "epochs": epochs}
    row["lam"] = float(strength or 0) if penalty is None else penalty.reg_strength
    for split, (inputs, labels) in zip(SPLITS, splits, strict=True):
        with torch.no_grad():
            logits = model(inputs)
        row[split] = {name: float(getattr(fsmap.metrics, name)(logits, labels)) for name in METRICS}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Means over seeds with standard errors, held-out and test numbers apart."""
    heads = {"accuracy": "accuracy %", "nll": "NLL", "ece": "ECE %", "temperature": "T"}
    names = [f"{split} {heads[name]}" for split in SPLITS for name in METRICS]
    lines = [" | ".join([f"{'way':9}", "seeds", *(f"{n:20}" for n in names), "λ at the end"])]
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        cells = [
            f"{_mean([factor * row[split][name] for row in mine], digits):20}"
            for split in SPLITS
            for name, (factor, digits) in METRICS.items()
        ]
        lam = f"{statistics.median(row['lam'] for row in mine):.2g}"
        lines.append(" | ".join([f"{way:9}", f"{len(mine):5}", *cells, lam]))
    return "\n".join(lines)


def _mean(values: list[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"


def _way(word: str) -> str:
    kind, _, number = word.partition("=")
    try:
        known = word == "plain" or (kind in ("lam", "nats") and 0 <= float(number) < math.inf)
    except ValueError:
        known = False
    if not known:
        message = f"{word!r} is neither plain nor lam=λ nor nats=c with a number of at least 0"
        raise argparse.ArgumentTypeError(message)
    return word


def main(arguments: list[str] | None = None) -> None:
    """Train all, print a table, append rows."""
    parser = argparse.ArgumentParser(description="Strengths of R on a small network.")
    parser.add_argument(
        "--ways", nargs="+", type=_way, default=list(WAYS), help="plain, lam=λ or nats=c"
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
