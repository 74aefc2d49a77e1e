"""Strengths of R: ``python -m benchmarks.strength``, minutes on a CPU for each set.

Small networks that memorize: without R (``plain``), with weight decay (``wd=1e-3``), smoothed
labels (``smoothing=0.05``), by SAM with radius ρ (``sam=0.05``), with λR (``lam=1e-3``;
``share=0.1``: the λ of ``fsmap.suggest_strength`` at which λR is ten percent of the loss), with
c·log(1 + R/R₀) (``nats=0.05``, see ``fsmap.LogTrace``), and with c trimmed after every epoch by the
held-out temperature T (``trim=0.05``: c ← c·T^κ within a factor of four). ``sam=0.05+nats=0.05`` is
both: R too is taken at the parameters that SAM moves to.

- ``steering`` (2,000 points, one label in ten wrong) and ``digits`` (scikit-learn's, one label in
  five drawn anew) are for choosing constants by held-out numbers;
- ``layernorm`` (an MLP with LayerNorm on 5,000 images of FashionMNIST), ``wine_red`` and
  ``wine_white`` (quality as classes) are for one test of the constants that were chosen;
- ``narrow`` (a ResNet-18 of width 8 on 2,000 images of FashionMNIST) is for the BatchNorm modes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap
from fsmap.data.uci import read_table
from fsmap.files import circumstances
from fsmap.models.resnet import resnet18

RESULTS = Path(__file__).parent / "results" / "strength.jsonl"
LAMBDAS, NATS = ("1e-3", "1.4e-3", "2e-3"), ("0.0125", "0.025", "0.05", "0.1", "0.2")
WAYS = ("plain", *(f"lam={lam}" for lam in LAMBDAS), *(f"nats={c}" for c in NATS))
SPLITS = ("held-out", "test")
METRICS = ("accuracy", "nll", "ece", "temperature")
BATCH, KAPPA, FACTOR = 50, 4, 4
KINDS = ("wd", "smoothing", "sam", "lam", "share", "nats", "trim")


class Task(NamedTuple):
    """Training, held-out and test points, and a network."""

    splits: list[tuple[Tensor, Tensor]]
    network: Callable[[], nn.Module]
    epochs: int


def steering() -> Task:
    """The sign of x₀x₁ + x₂/2, one label in ten flipped."""
    generator = torch.Generator().manual_seed(0)
    sizes = [2_000, 2_000, 10_000]
    x = torch.randn(sum(sizes), 8, generator=generator)
    y = (x[:, 0] * x[:, 1] + 0.5 * x[:, 2] > 0).long()
    y = torch.where(torch.rand(len(y), generator=generator) < 0.1, 1 - y, y)
    splits = list(zip(x.split(sizes), y.split(sizes), strict=True))
    return Task(splits, lambda: _mlp(8, 2, nn.BatchNorm1d), 40)


def digits() -> Task:
    """Handwritten digits; one label in five of all splits but the test's is drawn anew."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    splits = _split(torch.tensor(x).float() / 16, torch.tensor(y), [1_000, 397, 400])
    generator = torch.Generator().manual_seed(1)
    for _, labels in splits[:2]:
        noisy = torch.rand(len(labels), generator=generator) < 0.2
        drawn = torch.randint(0, 10, (len(labels),), generator=generator)
        labels.copy_(torch.where(noisy, drawn, labels))
    return Task(splits, lambda: _mlp(64, 10, nn.BatchNorm1d), 60)


def wine(name: str) -> Task:
    """Quality of wines from 11 measurements; rare qualities are joined to their neighbours.

    The committed rows (4e3a1a4) were standardized by all rows, not by those to train on.
    """
    table = read_table(name)
    x = torch.as_tensor(table.x).float()
    y = torch.as_tensor(table.y).flatten().long().clamp(4, 8) - 4
    n = len(x) // 5
    splits = _split(x, y, [len(x) - 2 * n, n, n])
    train = splits[0][0]
    splits = [((x - train.mean(0)) / train.std(0), y) for x, y in splits]
    return Task(splits, lambda: _mlp(11, 5, nn.BatchNorm1d), 60)


def layernorm(folder: Path) -> Task:
    """5,000 images of FashionMNIST and an MLP with LayerNorm."""
    x, y = _images(folder)
    splits = _split(x.flatten(1), y, [5_000, 2_000, 10_000])
    return Task(splits, lambda: _mlp(784, 10, nn.LayerNorm, 256), 40)


def narrow(folder: Path) -> Task:
    """2,000 images of FashionMNIST and a ResNet-18 of width 8."""
    splits = _split(*_images(folder), [2_000, 2_000, 5_000])
    return Task(splits, lambda: resnet18(10, channels=1, width=8), 24)


def _images(folder: Path) -> tuple[Tensor, Tensor]:
    from fsmap.data.images import read_idx

    x = read_idx(folder / "train-images-idx3-ubyte.gz").unsqueeze(1).float() / 255
    return x, read_idx(folder / "train-labels-idx1-ubyte.gz").long()


def _split(x: Tensor, y: Tensor, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: sum(sizes)]
    return [(x[part], y[part].clone()) for part in rows.split(sizes)]


def _mlp(inputs: int, outputs: int, norm: Any, width: int = 64) -> nn.Sequential:
    """Two hidden layers, the first normalized."""
    first = (nn.Linear(inputs, width), norm(width), nn.GELU())
    return nn.Sequential(*first, nn.Linear(width, width), nn.GELU(), nn.Linear(width, outputs))


def train(task: Task, way: str, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train one network, with options of LMAP, and measure it on held-out and test points."""
    (x, y), *splits = task.splits
    torch.manual_seed(seed)
    model = task.network()
    lm = fsmap.LMAP(model, x, seed=seed, **options)
    strengths = resolved(parts(way), lm, x, y)
    decay, c = strengths.get("wd", 0.0), strengths.get("nats", strengths.get("trim"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.epochs)
    penalty = None if c is None else fsmap.LogTrace(c)
    start = time.process_time()
    for _ in range(task.epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            step(strengths, optimizer, lm, penalty, x[rows], y[rows])
        schedule.step()
        if "trim" in strengths:
            assert penalty is not None
            T = float(fsmap.metrics.temperature(logits(model, splits[0][0]), splits[0][1]))
            least = strengths["trim"] / FACTOR
            penalty.nats = min(max(penalty.nats * T**KAPPA, least), least * FACTOR**2)
    row: dict[str, Any] = {"way": way, "seed": seed, "epochs": task.epochs}
    row["cpu_seconds"] = time.process_time() - start
    row["lam"] = strengths.get("lam", 0.0) if penalty is None else penalty.reg_strength
    row["nats"] = None if penalty is None else float(penalty.nats)
    for split, (inputs, labels) in zip(SPLITS, splits, strict=True):
        out = logits(model, inputs)
        if not torch.isfinite(out).all():  # training diverged
            row[split] = dict.fromkeys((*METRICS, "scaled_nll"), math.inf)
            continue
        row[split] = {name: float(getattr(fsmap.metrics, name)(out, labels)) for name in METRICS}
        scale = row["held-out"]["temperature"]
        row[split]["scaled_nll"] = float(fsmap.metrics.nll(out / scale, labels))
    return row


def parts(way: str) -> dict[str, float]:
    """``sam=0.05+nats=0.05`` as numbers by kind; raises ValueError if it is none of them."""
    pairs = (part.partition("=") for part in way.split("+") if way != "plain")
    found = {kind: float(number) for kind, _, number in pairs}
    if not all(kind in KINDS and 0 <= number < math.inf for kind, number in found.items()):
        raise ValueError(way)
    return found


def resolved(strengths: dict[str, float], lm: fsmap.LMAP, x: Tensor, y: Tensor) -> dict[str, float]:
    """A share of the loss as the λ that it means for this network."""
    if "share" not in strengths:
        return strengths
    loss = F.cross_entropy(logits(lm.module, x), y)
    found = fsmap.suggest_strength(lm, loss=loss, num_data=len(x), x=x[:BATCH])
    return strengths | {"lam": found.choices[strengths["share"]]}


def step(
    strengths: dict[str, float],
    optimizer: torch.optim.Optimizer,
    lm: fsmap.LMAP,
    penalty: fsmap.LogTrace | None,
    x: Tensor,
    y: Tensor,
) -> None:
    """One step of training; SAM takes R with the same draws at the parameters that it moves to."""
    lm.step = n = lm.step  # passes are not steps
    drawn = lm.draw(x) if penalty is not None or "lam" in strengths else None

    def backward() -> None:
        optimizer.zero_grad()
        out, R = (lm.module(x), None) if drawn is None else lm(x, drawn=drawn)
        loss = F.cross_entropy(out, y, label_smoothing=strengths.get("smoothing", 0.0))
        if R is not None:
            every = lm.regularizer.every
            loss = loss + (strengths["lam"] * R if penalty is None else penalty(R, every=every))
        loss.backward()

    backward()
    if "sam" in strengths:
        sharpen(nn.ModuleList([lm.module, penalty]), strengths["sam"], backward)
    lm.step = n + 1
    optimizer.step()


@torch.no_grad()
def sharpen(model: nn.Module, radius: float, backward: Callable[[], None]) -> None:
    """Replace gradients by those at the parameters moved by ``radius`` along them (SAM)."""
    params = list(model.parameters())
    tensors = [*params, *model.buffers()]  # statistics are those of the first pass
    kept = [t.clone() for t in tensors]
    grads = [p.grad for p in params]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_add_(params, torch._foreach_mul(grads, radius / (norm + 1e-12)))
    with torch.enable_grad():
        backward()
    for t, before in zip(tensors, kept, strict=True):
        t.copy_(before)


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    out: Tensor = model(x)
    model.train()
    return out


def _way(word: str) -> str:
    try:
        parts(word)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{word!r} is neither plain nor {', '.join(KINDS)} with = and a number ≥ 0"
        ) from None
    return word


SETS: dict[str, Callable[[], Task]] = {
    "steering": steering,
    "digits": digits,
    "wine_red": lambda: wine("wine_red"),
    "wine_white": lambda: wine("wine_white"),
}
OF_IMAGES = {"layernorm": layernorm, "narrow": narrow}


def main(arguments: list[str] | None = None) -> None:
    """Train all, print and append rows; ``benchmarks.pages`` makes tables of them."""
    parser = argparse.ArgumentParser(description="Strengths of R on a small network.")
    parser.add_argument(
        "--ways", nargs="+", type=_way, default=list(WAYS), help="plain, lam=λ or nats=c"
    )
    parser.add_argument("--set", choices=[*SETS, *OF_IMAGES], default="steering")
    parser.add_argument("--epochs", type=int, help="instead of the set's")
    parser.add_argument("--images", type=Path, help="folder of FashionMNIST, for layernorm, narrow")
    parser.add_argument("--seeds", type=int, default=8, help="networks of each")
    parser.add_argument("--batchnorm", default="joint", help="where R is taken")
    parser.add_argument("--points", type=int, default=BATCH, help="S, evaluation points of a step")
    parser.add_argument("--every", type=int, default=1, help="R on each k-th step only")
    parser.add_argument("--out", type=Path, default=RESULTS, help="rows are appended to it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the network is small
    of_images = OF_IMAGES.get(options.set)
    task = SETS[options.set]() if of_images is None else of_images(options.images)
    task = task if options.epochs is None else task._replace(epochs=options.epochs)
    how = {"batchnorm": options.batchnorm, "num_points": options.points, "every": options.every}
    about = {"set": options.set, **how, **circumstances("cpu")}
    with options.out.open("a") as file:
        for way in options.ways:
            for seed in range(options.seeds):
                row = train(task, way, seed, how)
                print(row, flush=True)
                file.write(json.dumps({**row, **about}) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
