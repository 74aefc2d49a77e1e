"""The sizes that all image experiments share, and what they have in common as experiments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

from fsmap.errors import InputError, did_you_mean
from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.train.descent import one_thread
from fsmap.train.images.settings import PRECISIONS

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

NARROW = 16
"""Networks up to this width are too small for two threads."""

SMALL: dict[str, Any] = {
    **{"width": 4, "limit": 256, "batch": 16, "points": 8, "lr": 0.1, "reg_strength": 1e-4},
    **{"fmnist_epochs": 2, "cifar10_epochs": 2, "seeds": 1, "estimator": "jvp", "trace_points": 32},
}
"""Quick sizes; all experiments have the same, so that they can share models."""


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """What all image experiments have in common; the defaults are the paper's.

    Attributes:
        datasets: ``fmnist``, ``cifar10``.
        seeds: Runs of each kind.
        fmnist_epochs: Length of a FashionMNIST run.
        cifar10_epochs: Length of a CIFAR-10 run.
        batch: B.
        points: S.
        width: Channels of the first stage of ResNet-18.
        lr: Of SGD with momentum 0.9, cosine to zero.
        fmnist_weight_decay: Of SGD, on FashionMNIST: the best of 5e-4, 1e-3 and 2e-3 for PS-MAP on
            held-out images, 50 epochs.
        cifar10_weight_decay: On CIFAR-10.
        estimator: Of R: ``fd`` is the authors', ``jvp`` has no step size.
        batchnorm: ``joint`` (the authors'), ``frozen``, ``batch``.
        every: R on every k-th step.
        reg_strength: λ of L-MAP.
        precision: On CUDA; on the CPU it is ``fp32``.
        compile: On CUDA.
        graph: On CUDA.
        trace_points: Images of D' at which R is measured after every epoch.
        limit: Use only so many training and test images; None: all.
        generated: Generated images even where the data are there.
    """

    datasets: tuple[str, ...] = ("fmnist", "cifar10")
    seeds: int = 3
    fmnist_epochs: int = 50
    cifar10_epochs: int = 200
    batch: int = 128
    points: int = 128
    width: int = 64
    lr: float = 0.1
    fmnist_weight_decay: float = 2e-3
    cifar10_weight_decay: float = 5e-4
    estimator: str = "fd"
    batchnorm: str = "joint"
    every: int = 1
    reg_strength: float = 1e-6
    precision: str = "bf16"
    compile: bool = True
    graph: bool = True
    trace_points: int = 256
    limit: int | None = None
    generated: bool = False

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
    """Sizes of an experiment that looks at rows of ``image-table``; see :class:`ImageConfig`.

    Attributes:
        rows: ``ps-map``, L-MAP with p_X ``white-noise``, ``train`` or ``other`` (D'), and the
            baselines ``label-smoothing`` and ``sam`` (FashionMNIST only).
    """

    rows: tuple[str, ...] = COMPARED

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rows", self.rows, (*ROWS, *BASELINES))


def check_choice(name: str, given: Sequence[object], allowed: Sequence[object]) -> None:
    """Refuse what there is not, before anything is trained.

    Args:
        name: Field of a config.
        given: Its values.
        allowed: All there are.

    Raises:
        InputError: If one is not among them.
    """
    known = [str(value) for value in allowed]
    for value in given:
        if value not in allowed:
            hint = did_you_mean(str(value), known)
            message = f"{name}: no {value!r}; there are {', '.join(known)}.{hint}"
            raise InputError(message)


def quick(kind: type[Any], **changes: Any) -> Any:
    """The quick size of a config.

    Args:
        kind: A subclass of :class:`ImageConfig`.
        **changes: What differs from :data:`SMALL`.

    Returns:
        The config.
    """
    return kind(**{**SMALL, **changes})


class ImageExperiment(Experiment):
    """An experiment whose units are training runs; subclasses say ``measure``."""

    device = "gpu"
    group = "images"
    selecting: ClassVar[tuple[str, ...]] = SELECTING

    def run(self, config: Any, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Measure a unit; a narrow network on a CPU computes on one thread, a second would spin.

        Args:
            config: Sizes.
            unit: One of ``units(config)``.
            context: Device, progress, folder.

        Yields:
            What was measured.
        """
        narrow = context.device.type == "cpu" and config.width <= NARROW
        with one_thread() if narrow else nullcontext():
            yield from self.measure(config, unit, context)

    def measure(self, config: Any, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Train and measure one unit.

        Args:
            config: Sizes.
            unit: One of ``units(config)``.
            context: Device, progress, folder.

        Returns:
            What was measured.
        """
        raise NotImplementedError


class RowsExperiment(ImageExperiment):
    """An image experiment whose units are rows of ``image-table``."""

    selecting: ClassVar[tuple[str, ...]] = (*SELECTING, "rows")

    def units(self, config: Any) -> list[dict[str, Any]]:
        """One training run each: seeds outermost, so that an interrupted table is balanced.

        Args:
            config: A :class:`RowsConfig`.

        Returns:
            Data set, row and seed of each.
        """
        return [
            {"dataset": dataset, "row": row, "seed": seed}
            for dataset in config.datasets
            for seed in range(config.seeds)
            for row in config.rows
            if dataset == "fmnist" or row not in BASELINES
        ]
