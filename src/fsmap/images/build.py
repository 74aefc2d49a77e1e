"""The data and the model that settings name, the model of a checkpoint, and its predictions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsmap.data.catalogue import Folder, locate
from fsmap.data.images import ImageTask, Normalization, facts_of, load_task
from fsmap.errors import CheckpointError, InputError
from fsmap.functional import evaluation_mode
from fsmap.images.settings import ImageSettings
from fsmap.models.by_name import is_ours, make_model
from fsmap.train import checkpoint

FILE = "checkpoint.safetensors"
PRETRAINED = "resnet50-imagenet"  # a model whose weights are in the catalogue
BLOCK = 16  # channels that oneDNN takes at a time, at most


def load_data(settings: ImageSettings, data_dir: Folder = None, px: str | None = None) -> ImageTask:
    """The data that settings name."""
    names = ("valid", "split_seed", "label_noise", "label_noise_seed", "limit", "generated")
    options: dict[str, Any] = {name: getattr(settings, name) for name in (*names, "augment")}
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
        message = f"{settings.model} cannot take images of {settings.data}, {shape}: {error}"
        raise InputError(message) from error
    if tuple(logits.shape) != (2, classes):
        message = (
            f"{settings.model} returned shape {tuple(logits.shape)} for 2 images; "
            f"{settings.data} needs (2, {classes})"
        )
        raise InputError(message)


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
        message = f"{path} is a checkpoint of {saved.config.get('kind')!r}, not of an image run"
        raise CheckpointError(message)
    described: Any = saved.config.get("settings")
    try:
        settings = ImageSettings(**described)
    except (TypeError, ValueError) as error:
        message = f"{path} describes settings that this version does not know: {error}"
        raise CheckpointError(message) from error
    module = model if isinstance(model, nn.Module) else _named_model(path, settings, model)
    state = saved.group("params") | saved.group("buffers")
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        message = f"{path} does not hold the weights of this model: {error}"
        raise CheckpointError(message) from error
    module = place(module, settings, torch.device(device)).eval()
    return module, {**saved.progress, "settings": settings}


def _named_model(path: Path, settings: ImageSettings, repeated: str | None) -> nn.Module:
    """Build the model of a checkpoint, from this package or as the caller repeats it."""
    if repeated is None and not is_ours(settings.model):
        message = (
            f"{path} is of {settings.model!r}, which is not a model of this package, and a file "
            "must not decide which code runs. If you trust it, name the model yourself: "
            f"--model {settings.model!r}, or load_model(..., model=...)"
        )
        raise CheckpointError(message)
    if repeated not in (None, settings.model):
        message = f"{path} is of {settings.model!r}, not of {repeated!r}"
        raise CheckpointError(message)
    return build_model(settings, initial=False)
