"""How the networks of the image experiments are trained: section D's protocol as settings.

One unit of an experiment is one training run, which keeps a checkpoint of its own and goes on from
it when it was killed. Models are kept in ``OUT/ID/models``; an experiment that needs a model which
another one in the same ``OUT`` has trained to its end takes it from there.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsmap.data.images.read import read_images
from fsmap.data.images.task import ImageTask, load_task
from fsmap.errors import MissingDataError
from fsmap.paper.experiment import Context
from fsmap.paper.images.config import OTHER, ImageConfig
from fsmap.paper.images.hooks import Advance, TraceLaplacian
from fsmap.train.images import ImageRun, ImageSettings

DONE = "done"
"""A file that says that the run in its folder is at its end."""


class Kind(NamedTuple):
    """What a run is, apart from its data set and seed.

    Attributes:
        name: As tables call it.
        method: ``ps-map``, ``l-map``, or the name of a baseline.
        px: p_X: ``train``, ``white-noise``, ``other`` (D'), or None.
        changes: Settings that differ from the config's.
    """

    name: str
    method: str = "l-map"
    px: str | None = None
    changes: Mapping[str, Any] = {}


def settings_of(
    config: ImageConfig, dataset: str, kind: Kind, seed: int, context: Context
) -> ImageSettings:
    """The settings of one run.

    Args:
        config: Sizes.
        dataset: Training set.
        kind: What kind of run.
        seed: Of weights, order and draws; the held-out images are the same for all seeds.
        context: Its device decides precision and compilation, its size what stands in for data.

    Returns:
        The settings.
    """
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
    """Whether a data set's files are there and intact.

    Args:
        name: The set.
        data_dir: Where to look first.

    Returns:
        True or False.
    """
    from fsmap.data.sources import locate

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
    """The first images of D' as bytes ``[number, C, H, W]``, for OOD detection and R.

    Args:
        task: Data of a run, which may hold them already.
        dataset: Training set.
        number: How many.
        generated: Whether generated images stand in for the data.
        data_dir: Where to look first.

    Returns:
        The images.
    """
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
    """A run as its checkpoint left it, or a new one.

    Args:
        config: Sizes.
        run: What to train.
        context: Device, folder, progress.

    Returns:
        The run; ``done`` if it was trained to its end before, here or by another experiment.
    """
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
    """A run, trained to its end.

    Args:
        config: Sizes.
        run: What to train.
        context: Device, folder, progress.

    Returns:
        The run.
    """
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
