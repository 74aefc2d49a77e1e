"""Training runs of the image experiments: sizes, rows of ``image-table``, and what is measured."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fsmap import metrics
from fsmap.assess.landscape import draw_psi, laplacian
from fsmap.assess.shift import Predictions, measure
from fsmap.data.catalogue import locate
from fsmap.data.images import GENERATED_TEST, facts_of, generate, load_task, read_others
from fsmap.errors import InputError, MissingDataError, did_you_mean
from fsmap.images import ImageRun, ImageSettings
from fsmap.images.build import PRECISIONS
from fsmap.lmap.module import NATS
from fsmap.paper.engine import Context, Experiment, Measured
from fsmap.paper.rows import Row, Unit
from fsmap.types import Params

OTHER = {"fmnist": "kmnist", "cifar10": "cifar100"}  # the paper's D' of each training set
COMPUTED = ("compile", "graph", "trace_points")  # change no number; the last is of older rows
SELECTING = ("datasets", "seeds", *COMPUTED)  # see Experiment.selecting


class Kind(NamedTuple):
    """A kind of run: the settings other than data set and seed."""

    name: str  # as tables call it
    method: str = "l-map"  # ps-map, l-map, or the name of a baseline
    px: str | None = None  # p_X: train, white-noise, other (D'), or None
    changes: Mapping[str, Any] = {}  # settings that differ from the config's


LOG_TRACE = {"reg_nats": NATS, "estimator": "jvp", "num_points": 32, "every": 2}
"""The defaults of ``fsmap train``, at about half the cost of the paper's L-MAP."""

SAM_RADIUS = 0.05  # ρ of sharpness-aware minimization, its authors' value for CIFAR-10

KINDS = {
    kind.name: kind
    for kind in (
        Kind("ps-map", "ps-map"),
        Kind("white-noise", px="white-noise"),
        Kind("train", px="train"),
        Kind("other", px="other"),
        Kind("nats", px="train", changes=LOG_TRACE),
        Kind("label-smoothing", "label-smoothing", changes={"label_smoothing": 0.05}),
        Kind("sam", "sam", changes={"sam": SAM_RADIUS}),
        Kind("sam+nats", px="train", changes={**LOG_TRACE, "sam": SAM_RADIUS}),
    )
}
"""Rows of ``image-table``. The first four are the paper's; ``nats`` is L-MAP with LogTrace."""

ROWS = tuple(KINDS)
COMPARED = ("ps-map", "other", "nats")  # rows of the figures: PS-MAP, L-MAP with D', LogTrace

CHANGES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "wd": ("weight_decay", float),
    "lambda": ("reg_strength", float),
    "nats": ("reg_nats", float),
    "valid": ("valid", int),
}
"""Changes of a row: ``other@lambda-1e-5@wd-1e-3``, ``ps-map@valid-0`` (nothing held out)."""


def _parts(name: str) -> list[str]:
    """A row and its changes; ``wd-1e-3`` is short for ``ps-map@wd-1e-3``."""
    return (f"ps-map@{name}" if name.startswith("wd-") else name).split("@")


def base_of(name: str) -> str:
    """A row without its changes."""
    return _parts(name)[0]


def kind_of(name: str) -> Kind:
    """The kind of run of a row of the table and its changes."""
    base, *texts = _parts(name)
    changes = {}
    try:
        kind = KINDS[base]
        for text in texts:
            key, _, value = text.partition("-")
            field, parse = CHANGES[key]
            changes[field] = parse(value)
    except (KeyError, ValueError):
        hint = did_you_mean(base, ROWS)
        raise InputError(
            f"rows: no {name!r}; there are {', '.join(ROWS)}, changed by @wd-1e-3, @lambda-1e-5, "
            f"@nats-0.1 or @valid-0.{hint}"
        ) from None
    return kind._replace(name=name, changes={**kind.changes, **changes})


SMALL: dict[str, Any] = {
    **{"width": 4, "limit": 256, "batch": 16, "points": 8, "lr": 0.1, "reg_strength": 1e-4},
    **{"fmnist_epochs": 2, "cifar10_epochs": 2, "seeds": 1, "estimator": "jvp"},
}
"""Quick sizes, the same in all experiments, so that they can share models."""


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """Config of all image experiments; the defaults are the paper's."""

    datasets: tuple[str, ...] = ("fmnist", "cifar10")  # fmnist, cifar10
    seeds: int = 3  # runs of each kind
    fmnist_epochs: int = 50  # length of a FashionMNIST run
    cifar10_epochs: int = 200  # length of a CIFAR-10 run
    batch: int = 128  # B
    points: int = 128  # S
    width: int = 64  # channels of the first stage of ResNet-18
    lr: float = 0.1  # of SGD with momentum 0.9, cosine to zero
    # on FashionMNIST: the best of 5e-4, 1e-3 and 2e-3 for PS-MAP on held-out images, 50 epochs
    fmnist_weight_decay: float = 2e-3
    cifar10_weight_decay: float = 5e-4  # on CIFAR-10
    estimator: str = "fd"  # of R: fd is the authors', jvp has no step size
    batchnorm: str = "joint"  # joint (the authors'), frozen, batch
    every: int = 1  # R on every k-th step
    reg_strength: float = 1e-6  # λ of L-MAP
    precision: str = "bf16"  # on CUDA; on the CPU it is fp32
    compile: bool = True  # on CUDA
    graph: bool = True  # on CUDA
    limit: int | None = None  # use only so many training and test images; None: all
    generated: bool = False  # generated images even where the data are there

    def __post_init__(self) -> None:
        check_choice("datasets", self.datasets, tuple(OTHER))
        check_choice("precision", (self.precision,), PRECISIONS)

    @classmethod
    def small(cls, **changes: Any) -> Self:
        """The quick size."""
        return cls(**{**SMALL, **changes})


@dataclasses.dataclass(frozen=True)
class RowsConfig(ImageConfig):
    rows: tuple[str, ...] = COMPARED  # of KINDS: ps-map, other (L-MAP with D'), nats, …

    def __post_init__(self) -> None:
        super().__post_init__()
        for row in self.rows:
            kind_of(row)


def check_choice(name: str, given: Sequence[object], allowed: Sequence[object]) -> None:
    """Raise InputError for a value that is not allowed, before training."""
    known = [str(value) for value in allowed]
    for value in given:
        if value not in allowed:
            hint = did_you_mean(str(value), known)
            raise InputError(f"{name}: no {value!r}; there are {', '.join(known)}.{hint}")


MEASUREMENTS = 50  # of R in a long run, approximately
JOINT = 128  # B and S of R in training mode, the paper's
LAPLACIAN_POINTS = 256  # images at which R of the deployed network is measured


class Watch:
    """Moves the progress bar, and measures R(θ) at the same images and ψ as training goes on."""

    def __init__(self, context: Context, images: Tensor) -> None:
        self.context, self.images = context, images
        self.psi: Params = {}

    def on_step(self, run: ImageRun) -> None:
        if run.step % 10 == 0:
            self.context.advance(run.step / run.steps)

    def on_epoch(self, run: ImageRun) -> None:
        """Show the epoch on the progress bar, and add R to its row."""
        self.context.advance(f"epoch {run.epoch} of {run.settings.epochs}")
        if run.epoch % max(1, run.settings.epochs // MEASUREMENTS) and not run.done:
            return
        x = run.task.normalize(self.images.to(run.device))
        if not self.psi:  # drawing millions of numbers takes longer than the rest of this
            self.psi = draw_psi(run.module, 1, torch.Generator().manual_seed(0))
        row = run.history[-1]
        row["laplacian_other"] = laplacian(run.module, x, probes=self.psi, batch_size=len(x))[0]
        row["laplacian_joint"] = joint_laplacian(run, self.images, self.psi, batches=1)


def joint_laplacian(
    run: ImageRun, images: Tensor, probes: int | Params = 2, batches: int = 4
) -> float:
    """R(θ) as the authors log it: in training mode, over batches of which half are of D'."""
    half = min(JOINT, len(images), len(run.task.train.x))
    number = min(batches, min(len(images), len(run.task.train.x)) // half)
    sets = [run.task.train.x, images.to(run.device)]
    parts = [s[: number * half].unflatten(0, (number, half)) for s in sets]
    x = run.task.normalize(torch.cat(parts, 1).flatten(0, 1))
    return laplacian(run.module, x, probes=probes, batch_size=2 * half, batch_statistics=True)[0]


DONE = "done"  # a file in the folder of a finished run
SAME = ("width", "lr", "estimator", "batchnorm", "every", "reg_strength", "limit")
"""Fields of a config that settings have by the same name."""


def settings_of(
    config: ImageConfig, dataset: str, kind: Kind, seed: int, context: Context
) -> ImageSettings:
    """The settings of one run."""
    cuda = context.device.type == "cuda"
    px = kind.px if kind.px in ("train", "white-noise") or kind.px is None else OTHER[dataset]
    return ImageSettings(
        **{
            "data": dataset,
            "model": getattr(config, "backbone", "resnet18"),
            "method": "ps-map" if px is None else "l-map",
            "px": px or "train",
            "epochs": getattr(config, f"{dataset}_epochs"),
            "batch_size": config.batch,
            "num_points": config.points,
            "weight_decay": getattr(config, f"{dataset}_weight_decay"),
            "generated": generated(config, dataset, context),
            "seed": seed,
            "precision": config.precision if cuda else "fp32",
            "compile": config.compile and cuda,
            "graph": config.graph and cuda,
            **{name: getattr(config, name) for name in SAME},
            **kind.changes,
        }
    )


def generated(config: ImageConfig, dataset: str, context: Context) -> bool:
    """Whether generated images stand in for the data: asked for, or quick and the data missing."""
    here = (is_here(name, context.data_dir) for name in (dataset, OTHER[dataset]))
    return config.generated or (context.size == "quick" and not all(here))


@functools.cache
def is_here(name: str, data_dir: Path | None) -> bool:
    """Whether a data set's files are there and intact."""
    try:
        locate(name, data_dir)
    except MissingDataError:
        return False
    return True


task_of = functools.lru_cache(maxsize=4)(load_task)  # read once for all runs of a process


@functools.lru_cache(maxsize=2)
def other_images(dataset: str, generated: bool, data_dir: Path | None) -> Tensor:
    """10,000 images of D' as bytes ``[n, C, H, W]``, for OOD detection and R."""
    shape = facts_of(dataset).shape
    if generated:
        return generate(shape, GENERATED_TEST, seed=2).x
    return read_others(OTHER[dataset], shape, data_dir=data_dir).x[:10_000]


def prepare(config: ImageConfig, dataset: str, kind: Kind, seed: int, context: Context) -> ImageRun:
    """A run, restored from its checkpoint if there is one."""
    settings = settings_of(config, dataset, kind, seed, context)
    task = task_of(
        settings.data,
        px=settings.px if settings.regularized else None,
        valid=settings.valid,
        label_noise=settings.label_noise,
        limit=settings.limit,
        generated=settings.generated,
        data_dir=context.data_dir,
    )
    images = other_images(dataset, settings.generated, context.data_dir)
    return ImageRun(
        settings,
        device=context.device,
        folder=_folder(context, settings, kind),
        resume=True,
        hooks=[Watch(context, images[:LAPLACIAN_POINTS])],
        task=task,
        data_dir=context.data_dir,
    )


def trained(config: ImageConfig, dataset: str, kind: Kind, seed: int, context: Context) -> ImageRun:
    """A run, trained to its end."""
    run = prepare(config, dataset, kind, seed, context)
    run.train(progress=False)  # no step if it is finished
    assert run.path is not None
    (run.path.parent / DONE).touch()
    return run


def _folder(context: Context, settings: ImageSettings, kind: Kind) -> Path:
    """This experiment's folder of a run, or that of another one in ``OUT`` which finished it."""
    about = json.dumps(settings.describe(), sort_keys=True)
    digest = hashlib.sha256(about.encode()).hexdigest()[:10]
    name = f"{settings.data}-{kind.name}-{settings.seed}-{digest}"
    mine = context.out / "models" / name
    found = sorted(done.parent for done in context.out.parent.glob(f"*/models/{name}/{DONE}"))
    return found[0] if found and not mine.exists() else mine


PERCENT = ("accuracy", "selective", "ece", "ece_scaled", "ood_auroc")
"""Metrics that tables show in percent, as the paper does; rows hold fractions."""

GENERATED = "generated images in place of the data set, which is not here"
SPLIT = "validation images chosen by us; the authors' choice is not known"


def rows_of(run: ImageRun, kind: Kind, **more: Any) -> Callable[..., Measured]:
    """A function that makes rows with the run's description."""
    s = run.settings
    notes = (GENERATED,) if s.generated else (SPLIT,)
    names = {"white-noise": "N(0, I)", OTHER[s.data]: f"D' = {OTHER[s.data]}"}
    mine = ("estimator", "batchnorm", "num_points", "every", "reg_nats")
    about = {
        "dataset": s.data,
        "row": kind.name,
        "px": names.get(s.px, s.px) if s.regularized else None,
        **{name: getattr(s, name) if s.regularized else None for name in mine},
        "reg_strength": s.reg_strength if s.regularized else 0.0,
        "weight_decay": s.weight_decay,
        "epochs": s.epochs,
        "images": len(run.task.train.x),
        "label_noise": s.label_noise,
        "generated": s.generated,
        **more,
    }

    def row(metric: str, value: Any, **where: Any) -> Measured:
        return Measured(metric, value, kind.method, s.seed, {**about, **where}, notes)

    return row


def held_out_temperature(run: ImageRun) -> float | None:
    """T of the held-out images; None where there are none."""
    return metrics.temperature(*run.logits("valid")) if len(run.task.valid.x) else None


def measured(run: ImageRun, kind: Kind, context: Context) -> Iterator[Measured]:
    """All metrics of a trained run."""
    row = rows_of(run, kind)
    T = held_out_temperature(run)
    test = Predictions(*run.logits("test"))
    for name, value in measure(test, T).items():
        yield row(name, value)
    if T is not None:
        yield row("temperature", T)
        yield row("test_temperature", metrics.temperature(*test))
        yield row("valid_nll", metrics.nll(*run.logits("valid")))
    s = run.settings
    foreign = other_images(s.data, s.generated, context.data_dir)[: len(test.y)]
    yield row("ood_auroc", metrics.ood_auroc(test.logits, run.logits_of(foreign.to(run.device))))
    for place, images in (("other", foreign), ("train", run.task.train.x)):
        x = run.task.normalize(images[:LAPLACIAN_POINTS].to(run.device))
        yield row(f"laplacian_{place}", laplacian(run.module, x, probes=2)[0])
    yield row("laplacian_joint", joint_laplacian(run, foreign))
    yield row("reg_strength", run.history[-1]["reg_strength"])  # λ of the last step
    times = [float(line["seconds"]) for line in run.history]  # compilation is in the first epoch
    epochs = [after - before for before, after in itertools.pairwise(times)]
    yield row("seconds_per_step", statistics.median(epochs or times) / run.steps_per_epoch)


def shown(rows: Iterable[Row]) -> list[Row]:
    """Rows with values in the units of the paper's tables."""
    return [row._replace(value=row.value * (100 if row.metric in PERCENT else 1)) for row in rows]


NARROW = 16  # networks up to this width are too small for two threads


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
        "OOD AUROC of L-MAP with D' is measured on images that were p_X in training",
    )

    def one_thread(self, config: Any) -> bool:
        return bool(config.width <= NARROW)

    def run(self, config: Any, unit: Unit, context: Context) -> Iterator[Measured]:
        return measured(*self.trained(config, unit, context), context)

    def trained(self, config: Any, unit: Unit, context: Context) -> tuple[ImageRun, Kind]:
        """The trained run of a unit, and its kind."""
        kind, dataset = self.kind(unit), unit.get("dataset", "cifar10")
        return trained(config, dataset, kind, unit["seed"], context), kind

    def kind(self, unit: Unit) -> Kind:
        """The kind of run of a unit: a row of ``image-table``."""
        return kind_of(unit["row"])


class RowsExperiment(ImageExperiment):
    """An image experiment whose units are rows of ``image-table``, varied by :meth:`along`."""

    selecting: ClassVar[tuple[str, ...]] = (*SELECTING, "rows")

    def units(self, config: Any) -> list[Unit]:
        """One training run each: seeds outermost, so that an interrupted table is balanced."""
        return [
            {"dataset": dataset, "row": row, "seed": seed, **place}
            for dataset in config.datasets
            for seed in range(config.seeds)
            for place in self.along(config)
            for row in config.rows
        ]

    def along(self, config: Any) -> list[Unit]:
        """Further settings in which units differ."""
        return [{}]
