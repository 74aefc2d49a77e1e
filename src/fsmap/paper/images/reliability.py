"""``reliability``: calibration of a small classifier over the strength of LogTrace, on a CPU.

The paper has no such figure. Every strength is compared with PS-MAP after temperature scaling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap
from fsmap import metrics
from fsmap.data.images import facts_of, generate, read_images
from fsmap.lmap.module import NATS
from fsmap.paper.engine import Context, Experiment, Measured, Plots
from fsmap.paper.images.protocol import GENERATED, is_here, shown
from fsmap.paper.images.verdict import UNITS, claim_about, command, lines
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import Curve, Frame, Interactive
from fsmap.paper.rows import Claim, Rows, Unit

POINTS, EVERY = 16, 2
TRAINED, SCALED = "as trained", "after temperature scaling"
FEW = 0.001  # bins with a smaller share of the images are not drawn

Split = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Config:
    strengths: tuple[float, ...] = (0.0, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)  # nats; 0: PS-MAP
    seeds: int = 3
    images: int = 5_000  # to train on, and as many held out
    epochs: int = 20
    batch: int = 64


class ReliabilityByStrength(Experiment):
    id = "reliability"
    label = "LogTrace"
    title = "Calibration by strength"
    see = "Calibration as LogTrace grows, beside PS-MAP before and after temperature scaling."
    cost = "10 min"
    protocol = (
        "5,000 images of FashionMNIST, two hidden layers of 256 units with LayerNorm, SGD with "
        "momentum, 20 epochs, no weight decay; R at 16 training images on every second step; "
        "temperature from 5,000 held-out images; 10,000 test images"
    )
    group = "images"
    selecting = ("strengths", "seeds")
    config = Config()
    quick = Config(strengths=(0.0, 0.05), seeds=1, images=500, epochs=2)

    def units(self, config: Config) -> list[Unit]:
        return [{"nats": n, "seed": s} for s in range(config.seeds) for n in config.strengths]

    def run(self, config: Config, unit: Unit, context: Context) -> Iterator[Measured]:
        made = context.size == "quick" and not is_here("fmnist", context.data_dir)
        nats, seed, method = unit["nats"], unit["seed"], "l-map" if unit["nats"] else "ps-map"
        about = {"nats": nats, "generated": made, "images": config.images, "epochs": config.epochs}
        data = splits(config.images, context.data_dir, made)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _train(config, nats, seed, data[0], context)
            found = _measure(model, *data[1:])
        for (state, metric), value in found.items():
            where = {**about, "state": state}
            yield Measured(metric, value, method, seed, where, (GENERATED,) * made)

    def table(self, rows: Rows) -> tables.Table:
        metrics = ("accuracy", "nll", "ece", "temperature")
        return lines(rows, {}, by=("nats", "state"), metrics=metrics)

    def claims(self, rows: Rows) -> list[Claim]:
        real = [row for row in rows if not row.config["generated"] and row.config["images"] >= 5e3]
        ours = {"nats": NATS, "state": TRAINED}
        return [
            claim_about(f"LogTrace at its default has a lower {words} than PS-MAP {state}", real,
                        metric, one=ours, other={"nats": 0.0, "state": state}, below=0.0,
                        command=command(self.id, strengths=f"0,{NATS:g}"))
            for metric, words in (("nll", "NLL"), ("ece", "ECE"))
            for state in (TRAINED, SCALED)
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        figure, panels = figures.axes(2, panel=(3.9, 2.9))
        for ax, metric in zip(panels, ("nll", "ece"), strict=True):
            for state, look in ((TRAINED, {}), (SCALED, {"linestyle": ":", "marker": "v"})):
                some = shown(tables.select(rows, metric=metric, state=state))
                name = f"LogTrace, {state} (0: PS-MAP)"
                figures.plot_mean(ax, *tables.line(some, "nats"), "l-map", label=name, **look)
            ax.set(xlabel="strength, nats", ylabel=UNITS[metric])
            ax.set_xscale("symlog", linthresh=0.0125)
        figures.legend_above(figure, panels[0])
        return {self.id: figure}

    def interactive(self, rows: Rows) -> Interactive | None:
        plain = tables.select(rows, nats=0.0)
        strengths = sorted({row.config["nats"] for row in rows} - {0.0})
        if not (plain and strengths):
            return None
        fixed = [
            Curve("confidence = accuracy", [0.0, 1.0], [0.0, 1.0], "muted", "dashed"),
            _diagram("PS-MAP", plain, TRAINED, "ps-map"),
            _diagram("PS-MAP + temperature", plain, SCALED, "bma", "dotted"),
        ]
        frames = []
        for nats in (0.0, *strengths):
            mine = tables.select(rows, nats=nats)
            name = f"LogTrace, {nats:g} nats"
            curves = [*fixed, _diagram(name, mine, TRAINED, "l-map")] if nats else fixed
            note = f"{_numbers(name if nats else 'PS-MAP', mine, TRAINED)}; "
            note += _numbers("PS-MAP + temperature", plain, SCALED)
            frames.append(Frame(f"{nats:g} nats", curves, note=note))
        start = next((i for i, n in enumerate(strengths, 1) if n >= NATS), 0)
        title = "Reliability by the strength of LogTrace; above the diagonal is under-confident"
        axes = ("confidence of the prediction", "accuracy on test images")
        return Interactive(title, "strength", frames, *axes, start=start)


def _diagram(name: str, rows: Rows, state: str, *look: str) -> Curve:
    """Accuracy over confidence, by bins over all seeds."""
    count, confidence, accuracy = (
        np.array(tables.values(rows, metric=f"bin_{part}", state=state))  # [seeds, bins]
        for part in ("count", "confidence", "accuracy")
    )
    total = count.sum(0)
    full = total > FEW * total.sum()
    x, y = ((part * count).sum(0)[full] / total[full] for part in (confidence, accuracy))
    return Curve(name, x.tolist(), y.tolist(), *look)


def _numbers(name: str, rows: Rows, state: str) -> str:
    accuracy, nll, ece = (
        tables.mean_of(rows, metric=m, state=state) for m in ("accuracy", "nll", "ece")
    )
    return f"{name}: accuracy {100 * accuracy:.1f} %, NLL {nll:.3f}, ECE {100 * ece:.1f} %"


def splits(images: int, data_dir: Path | None, made: bool = False) -> tuple[Split, Split, Split]:
    """Training, as many held-out, and all test images, normalized."""
    if made:
        train, test = (generate((1, 28, 28), 4 * images, seed=seed) for seed in (0, 1))
    else:
        train, test = (read_images("fmnist", name, data_dir) for name in ("train", "test"))
    order = torch.randperm(len(train.y), generator=torch.Generator().manual_seed(0))
    mine, held_out = (train.take(part) for part in order[: 2 * images].split(images))
    (mean,), (std,) = facts_of("fmnist").normalize
    found = [((part.x / 255 - mean) / std, part.y.long()) for part in (mine, held_out, test)]
    return found[0], found[1], found[2]


def network() -> nn.Module:
    """Two hidden layers of 256 units with LayerNorm."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (784, 256):
        layers += [nn.Linear(inputs, 256), nn.LayerNorm(256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10)).float()


def _train(config: Config, nats: float, seed: int, data: Split, context: Context) -> nn.Module:
    x, y = data
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    steps = len(x) // config.batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs * steps)
    lm = fsmap.LMAP(model, x, num_points=POINTS, every=EVERY, batchnorm="frozen", seed=seed)
    penalty = fsmap.LogTrace(nats)
    for epoch in range(config.epochs):
        for rows in torch.randperm(len(x))[: steps * config.batch].split(config.batch):
            optimizer.zero_grad()
            if nats:
                out, R = lm(x[rows])
                loss = F.cross_entropy(out, y[rows]) + penalty(R, every=EVERY)
            else:
                loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            schedule.step()
        context.advance((epoch + 1) / config.epochs)
    return model.eval()


@torch.no_grad()
def _measure(model: nn.Module, held_out: Split, test: Split) -> dict[tuple[str, str], Any]:
    """Values by state and metric; empty bins have the confidence and accuracy 0."""
    T = metrics.temperature(model(held_out[0]), held_out[1])
    out, y = model(test[0]), test[1]
    found: dict[tuple[str, str], Any] = {(SCALED, "temperature"): T}
    for state, logits in ((TRAINED, out), (SCALED, out / T)):
        for name in ("accuracy", "nll", "ece"):
            found[state, name] = getattr(metrics, name)(logits, y)
        for name, values in metrics.reliability(logits, y)._asdict().items():
            found[state, f"bin_{name}"] = np.nan_to_num(values).tolist()
    return found
