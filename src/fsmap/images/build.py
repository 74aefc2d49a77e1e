"""The settings of an image run, the data and the model they name, and the model of a checkpoint.

Settings are checked once; two runs with equal settings take equal steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsmap.data.catalogue import Folder, locate
from fsmap.data.images import ImageTask, Normalization, facts_of, load_task
from fsmap.errors import CheckpointError, InputError
from fsmap.functional import evaluation_mode
from fsmap.linalg.estimators import by_name
from fsmap.lmap.options import MODES, check_mode
from fsmap.models.by_name import is_ours, make_model
from fsmap.train import checkpoint

PRECISIONS = ("fp32", "tf32", "bf16")
CHOICES = {"method": ("ps-map", "l-map"), "precision": PRECISIONS, "decay": ("cosine", "none")}
LEAST = {
    **dict.fromkeys(("epochs", "batch_size", "num_points", "every", "width"), 1),
    **dict.fromkeys(("lr", "weight_decay", "momentum", "reg_strength", "reg_nats"), 0),
    **dict.fromkeys(("sam", "warmup_epochs"), 0),
}
FILE = "checkpoint.safetensors"
PRETRAINED = "resnet50-imagenet"  # a model whose weights are in the catalogue
BLOCK = 16  # channels that oneDNN takes at a time, at most


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
        by_name(self.estimator)
        check_mode(self.batchnorm, MODES)
        wrong: dict[str, bool] = {}
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            message = f"{name} must be one of {', '.join(allowed)}, got {value!r}"
            wrong[message] = value not in allowed
        for name, least in LEAST.items():
            value = getattr(self, name) or 0
            finite = " and finite" if value == math.inf else ""
            message = f"{name} must be at least {least}{finite}, got {value}"
            wrong[message] = not least <= value < math.inf
        smoothing, clip = self.label_smoothing, 1.0 if self.clip is None else self.clip
        late = self.warmup_epochs >= self.epochs
        wrong |= {
            f"momentum must be less than 1, got {self.momentum:g}": self.momentum >= 1,
            f"warmup_epochs must be less than epochs, got {self.warmup_epochs:g}": late,
            "nesterov needs momentum > 0": self.nesterov and not self.momentum,
            f"clip must be > 0, or None (--clip 0), got {self.clip}": not clip > 0,
            f"label_smoothing must lie in [0, 1), got {smoothing:g}": not 0 <= smoothing < 1,
            f"beta must be > 0 and finite, got {self.beta:g}": not 0 < self.beta < math.inf,
        }
        for message in (text for text, holds in wrong.items() if holds):
            raise InputError(message)

    @property
    def regularized(self) -> bool:
        """Whether there is an R at all."""
        return self.method == "l-map"

    def describe(self) -> dict[str, Any]:
        """What must agree on resume: everything that decides which steps are taken."""
        how = {"compile", "graph", "deterministic"}
        return {k: v for k, v in asdict(self).items() if k not in how}


def load_data(settings: ImageSettings, data_dir: Folder = None, px: str | None = None) -> ImageTask:
    """The data that settings name."""
    names = "valid split_seed label_noise label_noise_seed limit generated augment".split()
    options: dict[str, Any] = {name: getattr(settings, name) for name in names}
    return load_task(settings.data, px=px, data_dir=data_dir, **options)


def build_model(
    settings: ImageSettings, *, initial: bool = True, data_dir: Folder = None
) -> nn.Module:
    """The model that the settings name."""
    facts = facts_of(settings.data)
    offered: dict[str, Any] = {
        "classes": facts.classes,
        "channels": facts.shape[0],
        "width": settings.width,
        "mean": facts.normalize.mean,
        "std": facts.normalize.std,
    }
    if settings.model.partition("?")[0] == PRETRAINED and initial:
        offered["files"] = locate(PRETRAINED, data_dir)
    return make_model(settings.model, offered, seed=settings.seed)


def place(module: nn.Module, settings: ImageSettings, device: torch.device) -> nn.Module:
    """A module on its device, in the memory layout it is trained in."""
    layout = layout_of(module, settings.channels_last, device)
    return module.to(device, memory_format=layout)  # type: ignore[call-overload,no-any-return]


def layout_of(module: nn.Module, channels_last: bool, device: torch.device) -> torch.memory_format:
    """Channels last if that is asked for and safe.

    On a CPU with AVX2, oneDNN writes past the end of a buffer when it differentiates a strided
    1 × 1 convolution by its weights, if its input has fewer channels than a block and has them
    last (https://github.com/uxlfoundation/oneDNN/issues/6035): a crash, or a wrong gradient. A
    narrow ResNet has such shortcuts.
    """
    safe = device.type != "cpu" or not any(map(_overruns, module.modules()))
    return torch.channels_last if channels_last and safe else torch.contiguous_format


def _overruns(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.Conv2d):
        return False
    point, strided = max(layer.kernel_size) == 1, max(layer.stride) > 1
    return point and strided and layer.in_channels // layer.groups < BLOCK


def check_model(
    forward: Callable[[Tensor], Tensor], two: Tensor, settings: ImageSettings, classes: int
) -> None:
    """Raise InputError if a model does not give one logit per class."""
    try:
        logits = forward(two)
    except RuntimeError as error:
        shape = tuple(two.shape[1:])
        raise InputError(
            f"{settings.model} cannot take images of {settings.data}, {shape}: {error}"
        ) from error
    if tuple(logits.shape) != (2, classes):
        raise InputError(
            f"{settings.model} returned shape {tuple(logits.shape)} for 2 images; "
            f"{settings.data} needs (2, {classes})"
        )


def autocast(device: torch.device, half: torch.dtype | None) -> AbstractContextManager[Any]:
    """Matrix products in half precision within, or nothing."""
    return nullcontext() if half is None else torch.autocast(device.type, half, cache_enabled=False)


@torch.no_grad()
def logits_of(
    module: nn.Module,
    images: Tensor,
    normalize: Normalization,
    layout: torch.memory_format = torch.channels_last,
    batch: int = 1_000,
    half: torch.dtype | None = None,
) -> Tensor:
    """Logits in ``eval()`` mode, in the precision of the parameters unless told otherwise."""
    first = next(module.parameters())
    found = []
    with evaluation_mode(module), autocast(first.device, half):
        for part in images.split(batch):
            part = part.to(first.device)
            whole = part.dtype == torch.uint8
            x = normalize(part, first.dtype) if whole else part.to(first.dtype)
            found.append(module(x.contiguous(memory_format=layout)).to(first.dtype))
    return torch.cat(found)


def load_model(
    path: str | Path, device: torch.device | str = "cpu", *, model: str | nn.Module | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a checkpoint, as it would be deployed.

    A file never decides which code runs: models of this package are built by name, any other one
    only if the caller names it again.

    Args:
        path: The file, or the folder it is in.
        device: Where to put the model.
        model: The model of the checkpoint, if it is not one of this package: the import path that
            was given to ``fsmap train --model`` (importing it runs its code), or a module.

    Returns:
        The module in ``eval()`` mode, and the progress of its run: ``step``, ``history``,
        ``reg_strength``, and under ``settings`` the :class:`ImageSettings` it was made with.

    Raises:
        CheckpointError: If it is damaged, not of an image run, of another model, or of a model that
            has to be named by the caller.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    saved = checkpoint.load(path, hint="Restore a copy, or name another one.")
    if saved.config.get("kind") != "images":
        raise CheckpointError(
            f"{path} is a checkpoint of {saved.config.get('kind')!r}, not of an image run"
        )
    described: Any = saved.config.get("settings")
    try:
        settings = ImageSettings(**described)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} describes settings that this version does not know: {error}"
        ) from error
    if model is None and not is_ours(settings.model):
        raise CheckpointError(
            f"{path} is of {settings.model!r}, which is not a model of this package, and a file "
            "must not decide which code runs. If you trust it, name the model yourself: "
            f"--model {settings.model!r}, or load_model(..., model=...)"
        )
    if isinstance(model, str) and model != settings.model:
        raise CheckpointError(f"{path} is of {settings.model!r}, not of {model!r}")
    module = model if isinstance(model, nn.Module) else build_model(settings, initial=False)
    state = saved.group("params") | saved.group("buffers")
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not hold the weights of this model: {error}") from error
    module = place(module, settings, torch.device(device)).eval()
    return module, {**saved.progress, "settings": settings}
