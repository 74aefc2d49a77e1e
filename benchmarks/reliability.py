"""Reliability of a small image classifier by training method: the picture of the README.

``python -m benchmarks.reliability`` trains a network of two hidden layers on 5,000 images of
FashionMNIST (a minute on a CPU for each run that has no row yet) and appends rows;
``python -m benchmarks.reliability --draw`` draws ``docs/pictures/reliability.svg`` from them.

Ways are those of ``benchmarks.strength``, with R on every second step. What is tuned (weight
decay, ρ, λ, c) has the lowest held-out log loss; nothing was chosen by test images.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn

import fsmap
from benchmarks.strength import parts, resolved, step
from fsmap.files import circumstances
from fsmap.paper.images.reliability import Split, network, splits
from fsmap.paper.report.figures import style

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "reliability.jsonl"
PICTURE = ROOT / "docs" / "pictures" / "reliability.svg"
WAYS = (
    *("plain", "nats=0.05", "wd=1e-3", "wd=5e-3", "wd=2e-2", "wd=5e-2", "smoothing=0.05"),
    *("sam=0.05", "sam=0.02", "sam=0.2", "sam=0.05+nats=0.05", "nats=0.0125", "nats=0.2"),
    *("share=0.01", "share=0.1", "share=1"),
)
EPOCHS, BATCH, POINTS, EVERY = 20, 64, 16, 2


def train(way: str, seed: int, data: tuple[Split, Split, Split], epochs: int) -> dict[str, Any]:
    """Train one network, and measure it on held-out and test images."""
    (x, y), held_out, test = data
    torch.manual_seed(seed)
    model = network()
    lm = fsmap.LMAP(model, x, num_points=POINTS, every=EVERY, batchnorm="frozen", seed=seed)
    strengths = resolved(parts(way), lm, x, y)
    decay, c = strengths.get("wd", 0.0), strengths.get("nats")
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=decay)
    steps = epochs * (len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    penalty = None if c is None else fsmap.LogTrace(c)
    start = time.process_time()
    for _ in range(epochs):
        for rows in torch.randperm(len(x))[: steps // epochs * BATCH].split(BATCH):
            step(strengths, optimizer, lm, penalty, x[rows], y[rows])
            schedule.step()
    about = {"way": way, "seed": seed, "epochs": epochs}
    about["ms_a_step"] = 1e3 * (time.process_time() - start) / steps
    return about | _measure(model, held_out, test)


@torch.no_grad()
def _measure(model: nn.Module, held_out: Split, test: Split) -> dict[str, Any]:
    model.eval()
    held, out = model(held_out[0]), model(test[0])
    T = float(fsmap.metrics.temperature(held, held_out[1]))
    row: dict[str, Any] = {"held_out_nll": fsmap.metrics.nll(held, held_out[1]), "temperature": T}
    row["accuracy"] = fsmap.metrics.accuracy(out, test[1])
    for name, logits in (("", out), ("_scaled", out / T)):
        row[f"nll{name}"] = fsmap.metrics.nll(logits, test[1])
        row[f"ece{name}"] = fsmap.metrics.ece(logits, test[1])
    bins = fsmap.metrics.reliability(out, test[1])
    for name, values in bins._asdict().items():
        row[f"bin_{name}"] = np.nan_to_num(values).tolist()
    return row


def read(path: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows that were measured."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def bins_of(rows: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidence, accuracy and share of points of each bin, over all seeds."""
    count = np.array([row["bin_count"] for row in rows])
    total = count.sum(0).clip(1)
    confidence, accuracy = (
        (np.array([row[f"bin_{name}"] for row in rows]) * count).sum(0) / total
        for name in ("confidence", "accuracy")
    )
    return confidence, accuracy, count.sum(0) / count.sum()


def draw(rows: list[dict[str, Any]]) -> Any:
    """Two reliability diagrams: before, and with LogTrace."""
    import matplotlib.pyplot as plt

    with style():
        figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.4), sharey=True, layout="constrained")
        for ax, way, title in zip(
            axes, ("plain", "nats=0.05"), ("plain training", "with LMAP and LogTrace"), strict=True
        ):
            mine = [row for row in rows if row["way"] == way]
            confidence, accuracy, share = bins_of(mine)
            full = share > 0.001
            left = np.arange(10) / 10
            ax.bar(left, accuracy * full, 0.1, align="edge", color="#4477aa", edgecolor="white")
            gap = (confidence - accuracy) * full
            ax.bar(left, gap, 0.1, bottom=accuracy * full, align="edge", color="#ee6677", alpha=0.5)
            ax.plot([0, 1], [0, 1], color="0.4", lw=1, ls="--")
            nll, ece = (fmean(row[name] for row in mine) for name in ("nll", "ece"))
            ax.set_title(f"{title}\nNLL {nll:.3f}, ECE {100 * ece:.1f} %")
            ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence")
            ax.set_aspect("equal")
        axes[0].set_ylabel("accuracy")
    return figure


def main(arguments: list[str] | None = None) -> None:
    """Train what has no row yet, or draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="rows are appended to it")
    parser.add_argument("--draw", action="store_true", help="draw the picture from the rows")
    options = parser.parse_args(arguments)
    if options.draw:
        PICTURE.parent.mkdir(exist_ok=True)
        figure = draw(read(options.out))
        with style():  # with its salt of ids: the same rows give the same file
            figure.savefig(PICTURE, facecolor="white", metadata={"Date": None})
        return
    torch.set_num_threads(1)  # the network is small
    done = {(row["way"], row["seed"], row["epochs"]) for row in read(options.out)}
    data, about = splits(5_000, None), circumstances("cpu")
    for seed in range(options.seeds):
        for way in options.ways:
            if (way, seed, options.epochs) not in done:
                row = train(way, seed, data, options.epochs) | about
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print({name: row[name] for name in ("way", "seed", "accuracy", "nll", "ece")})


if __name__ == "__main__":
    main()
