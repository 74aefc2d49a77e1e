"""The sizes that all image experiments share, and what they have in common as experiments."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.assess.landscape import draw_psi, laplacian
from fsmap.data.images.read import read_images
from fsmap.data.images.task import ImageTask, load_task
from fsmap.errors import InputError, MissingDataError, did_you_mean
from fsmap.images import ImageRun, ImageSettings
from fsmap.images.settings import PRECISIONS
from fsmap.paper.experiment import Context
from fsmap.types import Params

OTHER = {"fmnist": "kmnist", "cifar10": "cifar100"}
"""D', the paper's evaluation set of each training set."""

SELECTING = ("datasets", "seeds", "compile", "graph")
"""Fields that choose runs, or how they are computed, and change none."""

ROWS = ("ps-map", "white-noise", "train", "other")
"""The paper's rows of ``image-table``."""

BASELINES = ("label-smoothing", "sam")
"""Rows of ``image-table`` on FashionMNIST alone."""

COMPARED = ("ps-map", "other")
"""Rows that the figures compare: PS-MAP, and L-MAP with D'."""

SMALL: dict[str, Any] = {
    **{"width": 4, "limit": 256, "batch": 16, "points": 8, "lr": 0.1, "reg_strength": 1e-4},
    **{"fmnist_epochs": 2, "cifar10_epochs": 2, "seeds": 1, "estimator": "jvp", "trace_points": 32},
}
"""Quick sizes; all experiments have the same, so that they can share models."""


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """What all image experiments have in common; the defaults are the paper's."""

    datasets: tuple[str, ...] = ("fmnist", "cifar10")  # fmnist, cifar10
    seeds: int = 3  # runs of each kind
    fmnist_epochs: int = 50  # length of a FashionMNIST run
    cifar10_epochs: int = 200  # length of a CIFAR-10 run
    batch: int = 128  # B
    points: int = 128  # S
    width: int = 64  # channels of the first stage of ResNet-18
    lr: float = 0.1  # of SGD with momentum 0.9, cosine to zero
    # of SGD, on FashionMNIST: the best of 5e-4, 1e-3 and 2e-3 for PS-MAP on held-out images, 50
    # epochs
    fmnist_weight_decay: float = 2e-3
    cifar10_weight_decay: float = 5e-4  # on CIFAR-10
    estimator: str = "fd"  # of R: fd is the authors', jvp has no step size
    batchnorm: str = "joint"  # joint (the authors'), frozen, batch
    every: int = 1  # R on every k-th step
    reg_strength: float = 1e-6  # λ of L-MAP
    precision: str = "bf16"  # on CUDA; on the CPU it is fp32
    compile: bool = True  # on CUDA
    graph: bool = True  # on CUDA
    trace_points: int = 256  # images of D' at which R is measured after every epoch
    limit: int | None = None  # use only so many training and test images; None: all
    generated: bool = False  # generated images even where the data are there

    def __post_init__(self) -> None:
        check_choice("datasets", self.datasets, tuple(OTHER))
        check_choice("precision", (self.precision,), PRECISIONS)
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            if isinstance(given, tuple) and len(set(given)) < len(given):
                message = f"{field.name} names something twice: {', '.join(map(str, given))}"
                raise InputError(message)


@dataclasses.dataclass(frozen=True)
class RowsConfig(ImageConfig):
    """Sizes of an experiment that looks at rows of ``image-table``; see :class:`ImageConfig`."""

    # ps-map, L-MAP with p_X white-noise, train or other (D'), and the baselines
    # label-smoothing and sam (FashionMNIST only)
    rows: tuple[str, ...] = COMPARED

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rows", self.rows, (*ROWS, *BASELINES))


def check_choice(name: str, given: Sequence[object], allowed: Sequence[object]) -> None:
    """Refuse what there is not, before anything is trained."""
    known = [str(value) for value in allowed]
    for value in given:
        if value not in allowed:
            hint = did_you_mean(str(value), known)
            message = f"{name}: no {value!r}; there are {', '.join(known)}.{hint}"
            raise InputError(message)


def quick(kind: type[Any], **changes: Any) -> Any:
    """The quick size of a config."""
    return kind(**{**SMALL, **changes})


LOOKS = 50
"""How often R is measured during a run."""

JOINT = 128
"""B and S of R in training mode, the paper's."""


class Advance:
    """Moves the progress bar."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def on_step(self, run: ImageRun) -> None:
        """Every ten steps."""
        if run.step % 10 == 0:
            self.context.advance(run.step / run.steps)

    def on_epoch(self, run: ImageRun) -> None:
        """Say where it is."""
        self.context.advance(f"epoch {run.epoch} of {run.settings.epochs}")


class TraceLaplacian:
    """R(θ) at fixed images as training goes on (``fig:loss_landscape``).

    After every epoch, or in long runs :data:`LOOKS` times, always with the same ψ; of the deployed
    network at images of D', and in training mode as the authors log it (:func:`joint_laplacian`).
    """

    def __init__(self, images: Tensor) -> None:
        self.images = images
        self.psi: Params = {}

    def on_epoch(self, run: ImageRun) -> None:
        """Add it to the epoch's row."""
        if run.epoch % max(1, run.settings.epochs // LOOKS) and not run.done:
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


DONE = "done"
"""A file that says that the run in its folder is at its end."""


class Kind(NamedTuple):
    """What a run is, apart from its data set and seed."""

    name: str  # as tables call it
    method: str = "l-map"  # ps-map, l-map, or the name of a baseline
    px: str | None = None  # p_X: train, white-noise, other (D'), or None
    changes: Mapping[str, Any] = {}  # settings that differ from the config's


def settings_of(
    config: ImageConfig, dataset: str, kind: Kind, seed: int, context: Context
) -> ImageSettings:
    """The settings of one run."""
    cuda = context.device.type == "cuda"
    changes = {**kind.changes}
    if kind.method == "ps-map" or kind.px is None:
        changes.setdefault("method", "ps-map")
    px = kind.px if kind.px in ("train", "white-noise") or kind.px is None else OTHER[dataset]
    return ImageSettings(
        **{
            "data": dataset,
            "method": "l-map",
            "px": px or "train",
            "epochs": getattr(config, f"{dataset}_epochs"),
            "batch_size": config.batch,
            "num_points": config.points,
            "width": config.width,
            "lr": config.lr,
            "weight_decay": getattr(config, f"{dataset}_weight_decay"),
            "estimator": config.estimator,
            "batchnorm": config.batchnorm,
            "every": config.every,
            "reg_strength": config.reg_strength,
            "limit": config.limit,
            "generated": generated(config, dataset, context),
            "seed": seed,
            "precision": config.precision if cuda else "fp32",
            "compile": config.compile and cuda,
            "graph": config.graph and cuda,
            **changes,
        }
    )


def generated(config: ImageConfig, dataset: str, context: Context) -> bool:
    """Whether generated images stand in for the data: asked for, or quick and the data missing."""
    if config.generated or context.size != "quick":
        return config.generated
    return not (is_here(dataset, context.data_dir) and is_here(OTHER[dataset], context.data_dir))


@functools.cache
def is_here(name: str, data_dir: Path | None) -> bool:
    """Whether a data set's files are there and intact."""
    from fsmap.data.catalogue import locate

    try:
        locate(name, data_dir)
    except MissingDataError:
        return False
    return True


@functools.lru_cache(maxsize=4)
def task_of(
    data: str,
    px: str | None,
    label_noise: float,
    limit: int | None,
    generated: bool,
    data_dir: Path | None,
) -> ImageTask:
    """The data of a run, read once for all runs of a process."""
    return load_task(
        data, px=px, label_noise=label_noise, limit=limit, generated=generated, data_dir=data_dir
    )


def other_images(
    task: ImageTask, dataset: str, number: int, generated: bool, data_dir: Path | None
) -> torch.Tensor:
    """The first images of D' as bytes ``[number, C, H, W]``, for OOD detection and R."""
    source = task.px.sources[0] if task.px is not None else None
    if source is not None and source.name == OTHER[dataset]:
        return source.images[:number]
    return _other(dataset, generated, data_dir)[:number]


@functools.lru_cache(maxsize=2)
def _other(dataset: str, generated: bool, data_dir: Path | None) -> torch.Tensor:
    if generated:
        made = load_task(dataset, px=OTHER[dataset], generated=True).px
        assert made is not None
        return made.sources[0].images
    split = {"kmnist": "test", "cifar100": "all"}[OTHER[dataset]]
    return read_images(OTHER[dataset], split, data_dir).x[:10_000]


def run_name(settings: ImageSettings, kind: Kind) -> str:
    """A folder's name: what one wants to read, and a digest of everything else."""
    about = json.dumps(settings.describe(), sort_keys=True)
    digest = hashlib.sha256(about.encode()).hexdigest()[:10]
    return f"{settings.data}-{kind.name}-{settings.seed}-{digest}"


class Run(NamedTuple):
    """One training run: what an experiment's unit stands for."""

    dataset: str
    kind: Kind
    seed: int


def prepare(config: ImageConfig, run: Run, context: Context) -> ImageRun:
    """A run as its checkpoint left it, or a new one."""
    dataset, kind, seed = run
    settings = settings_of(config, dataset, kind, seed, context)
    px = settings.px if settings.regularized else None
    where = settings.generated, context.data_dir
    task = task_of(settings.data, px, settings.label_noise, settings.limit, *where)
    points = other_images(task, dataset, config.trace_points, *where)
    hooks: list[Any] = [TraceLaplacian(points), Advance(context)]
    folder = _folder(context, run_name(settings, kind))
    return ImageRun(
        settings,
        device=context.device,
        folder=folder,
        resume=True,
        hooks=hooks,
        task=task,
        data_dir=context.data_dir,
    )


def trained(config: ImageConfig, run: Run, context: Context) -> ImageRun:
    """A run, trained to its end."""
    made = prepare(config, run, context)
    made.train(progress=False)  # no step where it is at its end
    assert made.path is not None
    (made.path.parent / DONE).touch()
    return made


def _folder(context: Context, name: str) -> Path:
    """This experiment's folder of a run, or that of another one in ``OUT`` which finished it."""
    mine = context.out / "models" / name
    out = context.out.parent.parent if context.out.parent.name == ".fsmap" else context.out.parent
    own = context.out.name.removesuffix(".new")  # the run that this one replaces: it goes away
    found = sorted(done.parent for done in out.glob(f"*/models/{name}/{DONE}"))
    others = [folder for folder in found if folder.parents[1].name != own]
    return others[0] if others and not mine.exists() else mine


SMOOTHING = 0.05
"""Of the label-smoothing baseline."""

SAM_RADIUS = 0.05
"""ρ of sharpness-aware minimization, as its authors have it for CIFAR-10."""


def kind_of(name: str) -> Kind:
    """A row of the table as a kind of run."""
    if name == "ps-map":
        return Kind(name, "ps-map")
    if name == "label-smoothing":
        return Kind(name, name, changes={"label_smoothing": SMOOTHING})
    if name == "sam":
        return Kind(name, name, changes={"sam": SAM_RADIUS})
    if name in ROWS:
        return Kind(name, px=name)
    message = f"no row {name!r}; there are {', '.join((*ROWS, *BASELINES))}"
    raise InputError(message)
