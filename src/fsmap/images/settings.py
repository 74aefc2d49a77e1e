"""The settings of an image run, checked once; two runs with equal settings take equal steps."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from fsmap.errors import InputError
from fsmap.linalg.estimators import by_name
from fsmap.lmap.options import MODES, check_mode
from fsmap.train.optim import OptimizerSpec, Schedule

METHODS = ("ps-map", "l-map")
PRECISIONS = ("fp32", "tf32", "bf16")
DECAYS = ("cosine", "none")


@dataclass(frozen=True)
class ImageSettings:
    """One run of PS-MAP or L-MAP on images; the defaults are the paper's.

    Attributes:
        data: ``fmnist``, ``mnist``, ``cifar10``, or a folder with one sub-folder per class.
        method: ``ps-map``, or ``l-map``: cross-entropy + λR.
        px: Evaluation set: ``train``, ``kmnist``, ``cifar100``, ``white-noise``, or a mixture; see
            :mod:`fsmap.data.images`.
        model: ``resnet18`` or an import path; see :mod:`fsmap.models.by_name`.
        width: Channels of the first stage, for ``resnet18``.
        epochs: Passes over the training images; rows that do not fill a batch are left out.
        batch_size: B, over all processes together.
        lr, momentum, nesterov, weight_decay: Of SGD; weight decay is added after clipping.
        decay: Of the learning rate: ``cosine`` to 0, or ``none``; ``warmup_epochs``: linear rise.
        clip: Largest global norm of the gradient; None: no clipping.
        label_smoothing: Of the cross-entropy; a baseline.
        sam: Radius ρ of sharpness-aware minimization; 0: none. With ``l-map`` both gradients are
            those of cross-entropy + λR.
        reg_strength: λ; ``run.reg_strength`` may be changed while training.
        reg_nats: Strength in nats instead of λ; see :class:`fsmap.LogTrace`.
        num_points, estimator, beta, batchnorm, every: Of :class:`fsmap.LMAP`; S is over all
            processes together.
        label_noise: Fraction of training labels drawn anew, by ``label_noise_seed``.
        valid: Held-out images (None: the protocol's number), chosen by ``split_seed`` alone.
        augment: Crop and flip; None: as the protocol has it.
        limit: Use only so many training images; ``generated``: generated ones.
        seed: Of weights, order, augmentation, evaluation points and ψ.
        precision: ``fp32``, ``tf32`` or ``bf16`` (autocast, which ``fd`` and ``fd_central`` leave).
        channels_last: Memory layout; see :func:`fsmap.images.build.layout_of`.
        compile: ``torch.compile`` the passes; ``graph``: capture the whole step in a CUDA graph.
        deterministic: Deterministic kernels only: a resumed run then equals an uninterrupted one to
            the last bit on CUDA too (on the CPU it always does).
    """

    data: str = "fmnist"
    method: str = "l-map"
    px: str = "train"
    model: str = "resnet18"
    width: int = 64
    epochs: int = 50
    batch_size: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    decay: str = "cosine"
    warmup_epochs: float = 0.0
    clip: float | None = 1.0
    label_smoothing: float = 0.0
    sam: float = 0.0
    reg_strength: float = 1e-6
    reg_nats: float | None = None
    num_points: int = 128
    estimator: str = "jvp"
    beta: float = 1e-3
    batchnorm: str = "joint"
    every: int = 1
    label_noise: float = 0.0
    label_noise_seed: int = 0
    valid: int | None = None
    split_seed: int = 0
    augment: bool | None = None
    limit: int | None = None
    generated: bool = False
    seed: int = 0
    precision: str = "fp32"
    channels_last: bool = True
    compile: bool = False
    graph: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("decay", self.decay, DECAYS)
        by_name(self.estimator)
        check_mode(self.batchnorm, MODES)
        for name in ("epochs", "batch_size", "num_points", "every", "width"):
            _at_least(name, getattr(self, name), 1)
        for name in ("lr", "weight_decay", "momentum", "reg_strength", "sam", "warmup_epochs"):
            _at_least(name, getattr(self, name), 0)
        if self.reg_nats is not None:
            _at_least("reg_nats", self.reg_nats, 0)
        late = self.warmup_epochs >= self.epochs
        wrong = {
            f"momentum must be less than 1, got {self.momentum:g}": self.momentum >= 1,
            f"warmup_epochs must be less than epochs, got {self.warmup_epochs:g}": late,
            "nesterov needs momentum > 0": self.nesterov and not self.momentum,
            f"clip must be > 0, or None (--clip 0), got {self.clip}": self.clip is not None
            and not self.clip > 0,
            f"label_smoothing must lie in [0, 1), got {self.label_smoothing:g}": not (
                0 <= self.label_smoothing < 1
            ),
            f"beta must be > 0 and finite, got {self.beta:g}": not 0 < self.beta < math.inf,
        }
        for message, holds in wrong.items():
            if holds:
                raise InputError(message)

    @property
    def regularized(self) -> bool:
        """Whether there is an R at all."""
        return self.method == "l-map"

    def optimizer(self) -> OptimizerSpec:
        """SGD as described."""
        options = (
            ("momentum", self.momentum),
            ("nesterov", self.nesterov),
            ("weight_decay", self.weight_decay),
        )
        return OptimizerSpec("sgd", self.lr, options)

    def schedule(self, steps_per_epoch: int) -> Schedule:
        """The factor on the learning rate."""
        return Schedule(round(self.warmup_epochs * steps_per_epoch), self.decay)

    def describe(self) -> dict[str, Any]:
        """What must agree on resume: everything that decides which steps are taken."""
        how = {"compile", "graph", "deterministic"}
        return {k: v for k, v in asdict(self).items() if k not in how}

    @classmethod
    def names(cls) -> list[str]:
        """Names of all settings."""
        return [field.name for field in fields(cls)]


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        message = f"{name} must be one of {', '.join(allowed)}, got {value!r}"
        raise InputError(message)


def _at_least(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        finite = " and finite" if value == math.inf else ""
        message = f"{name} must be at least {least}{finite}, got {value}"
        raise InputError(message)
