"""What is measured of a trained image classifier: one row per number, before and after T."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

from torch import Tensor

from fsmap import metrics
from fsmap.assess.landscape import laplacian
from fsmap.assess.shift import Predictions, measure
from fsmap.images import ImageRun
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.images.protocol import (
    BASELINES,
    OTHER,
    SELECTING,
    Kind,
    Run,
    joint_laplacian,
    kind_of,
    other_images,
    trained,
)
from fsmap.paper.solvers import one_thread

PERCENT = ("accuracy", "selective", "ece", "ece_scaled", "ood_auroc")
"""Metrics that tables show in percent, as the paper does; rows hold fractions."""

LAPLACIAN_POINTS = 256
OOD_IMAGES = 10_000

GENERATED = "generated images in place of the data set, which is not here"
SPLIT = "validation images chosen by us; the authors' choice is not known"


def describe(run: ImageRun, kind: Kind) -> dict[str, Any]:
    """What varies, for the ``config`` of a row."""
    s = run.settings
    return {
        "dataset": s.data,
        "row": kind.name,
        "px": _px_name(s.px, s.data) if s.regularized else None,
        "estimator": s.estimator if s.regularized else None,
        "batchnorm": s.batchnorm if s.regularized else None,
        "num_points": s.num_points if s.regularized else None,
        "every": s.every if s.regularized else None,
        "reg_strength": s.reg_strength if s.regularized else 0.0,
        "weight_decay": s.weight_decay,
        "epochs": s.epochs,
        "images": len(run.task.train.x),
        "label_noise": s.label_noise,
        "generated": s.generated,
    }


def _px_name(px: str, data: str) -> str:
    return {"white-noise": "N(0, I)", OTHER[data]: f"D' = {OTHER[data]}"}.get(px, px)


def rows_of(run: ImageRun, kind: Kind, **more: Any) -> _Rows:
    """A maker of rows that all carry the run's description."""
    notes = (GENERATED,) if run.settings.generated else (SPLIT,)
    return _Rows(kind.method, run.settings.seed, {**describe(run, kind), **more}, notes)


class _Rows:
    """Makes rows of one run."""

    def __init__(
        self, method: str, seed: int, config: dict[str, Any], notes: tuple[str, ...]
    ) -> None:
        self.method, self.seed, self.config, self.notes = method, seed, config, notes

    def __call__(self, metric: str, value: Any, **more: Any) -> Measured:
        """One row."""
        config = {**self.config, **more}
        return Measured(metric, value, self.method, self.seed, config, self.notes)


def held_out_temperature(run: ImageRun) -> float | None:
    """T of the held-out images; None where there are none."""
    if not len(run.task.valid.x):
        return None
    return metrics.temperature(*run.logits("valid"))


def measured(run: ImageRun, kind: Kind, context: Context) -> Iterator[Measured]:
    """Everything a table needs to know about a trained run."""
    row = rows_of(run, kind)
    T = held_out_temperature(run)
    test = Predictions(*run.logits("test"))
    for name, value in measure(test, T).items():
        yield row(name, value)
    if T is not None:
        yield row("temperature", T)
        yield row("test_temperature", metrics.temperature(*test))
        yield row("valid_nll", metrics.nll(*run.logits("valid")))
    size = len(test.y)
    s = run.settings
    number = min(size, OOD_IMAGES)
    foreign = other_images(run.task, s.data, number, s.generated, context.data_dir)
    yield row("ood_auroc", metrics.ood_auroc(test.logits, run.logits_of(foreign.to(run.device))))
    for place, images in (("other", foreign), ("train", run.task.train.x)):
        yield row(f"laplacian_{place}", laplacian_at(run, images))
    yield row("laplacian_joint", joint_laplacian(run, foreign))
    yield row("reg_strength", run.history[-1]["reg_strength"])  # λ of the last step
    yield row("seconds_per_step", _seconds_per_step(run))
    yield from curves(run, kind)


def _seconds_per_step(run: ImageRun) -> float:
    """Median over epochs, evaluation and checkpoints included; compilation is in the first."""
    times = [float(line["seconds"]) for line in run.history]
    epochs = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(epochs or times) / run.steps_per_epoch


def curves(run: ImageRun, kind: Kind) -> Iterator[Measured]:
    """How R, λ and the held-out temperature went, epoch by epoch."""
    row = rows_of(run, kind)
    traced = ("laplacian_other", "laplacian_joint")
    for name in (*traced, "reg_strength", "valid_temperature", "valid_accuracy", "loss"):
        known = [line for line in run.history if name in line]
        if known:
            epochs = [line["epoch"] for line in known]
            yield row(f"{name}_curve", [line[name] for line in known], at=epochs)


def laplacian_at(run: ImageRun, images: Tensor, points: int = LAPLACIAN_POINTS) -> float:
    """R(θ) of the deployed network at the first of some images given as bytes."""
    x = run.task.normalize(images[:points].to(run.device))
    return laplacian(run.module, x, probes=2)[0]


def shown(metric: str, value: float) -> float:
    """A value in the unit of the paper's tables."""
    return 100 * value if metric in PERCENT else value


NARROW = 16
"""Networks up to this width are too small for two threads."""


class ImageExperiment(Experiment):
    """An experiment whose units are training runs."""

    device = "gpu"
    group = "images"
    selecting: ClassVar[tuple[str, ...]] = SELECTING
    departures: ClassVar[tuple[str, ...]] = (
        "D' of FashionMNIST: the 10,000 test images of KMNIST",
        "D' of CIFAR-10: all images of CIFAR-100, without its split",
        "the gradient is clipped to norm 1, where the authors clip the update",
        "selective prediction is a normalized area; the paper's numbers are rescaled to it",
    )

    def run(self, config: Any, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Measure a unit; a narrow network on a CPU computes on one thread, a second would spin."""
        narrow = context.device.type == "cpu" and config.width <= NARROW
        with one_thread() if narrow else nullcontext():
            yield from self.measure(config, unit, context)

    def measure(self, config: Any, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Train and measure one unit."""
        kind = self.kind(unit)
        run = trained(config, Run(unit["dataset"], kind, unit["seed"]), context)
        return measured(run, kind, context)

    def kind(self, unit: dict[str, Any]) -> Kind:
        """What a unit trains: a row of ``image-table``."""
        return kind_of(unit["row"])


class RowsExperiment(ImageExperiment):
    """An image experiment whose units are rows of ``image-table``."""

    selecting: ClassVar[tuple[str, ...]] = (*SELECTING, "rows")

    def units(self, config: Any) -> list[dict[str, Any]]:
        """One training run each: seeds outermost, so that an interrupted table is balanced."""
        return [
            {"dataset": dataset, "row": row, "seed": seed}
            for dataset in config.datasets
            for seed in range(config.seeds)
            for row in config.rows
            if dataset == "fmnist" or row not in BASELINES
        ]
