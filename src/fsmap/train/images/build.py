"""The data and the model that settings name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsmap.data.images.read import Folder
from fsmap.data.images.task import ImageTask, facts_of, load_task
from fsmap.data.sources import locate
from fsmap.errors import InputError
from fsmap.models.by_name import make_model
from fsmap.train.images.settings import ImageSettings

PRETRAINED = "resnet50-imagenet"  # a model whose weights are in the catalogue


def load_data(settings: ImageSettings, data_dir: Folder = None, px: str | None = None) -> ImageTask:
    """The data that settings name.

    Args:
        settings: Of a run.
        data_dir: A folder to look in first.
        px: Evaluation set, where one is needed.

    Returns:
        Training, held-out and test images, as bytes.
    """
    return load_task(
        settings.data,
        px=px,
        valid=settings.valid,
        split_seed=settings.split_seed,
        label_noise=settings.label_noise,
        label_noise_seed=settings.label_noise_seed,
        limit=settings.limit,
        generated=settings.generated,
        augment=settings.augment,
        data_dir=data_dir,
    )


def build_model(
    settings: ImageSettings, *, initial: bool = True, data_dir: Folder = None
) -> nn.Module:
    """The model that the settings name.

    Args:
        settings: Of the run.
        initial: Whether weights trained elsewhere are read; not where others follow at once.
        data_dir: A folder to look for them first.

    Returns:
        The model with its initial weights.
    """
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


def training_model(
    settings: ImageSettings, module: nn.Module | None, device: torch.device, data_dir: Folder
) -> nn.Module:
    """The model of a run, in training mode.

    Args:
        settings: Of the run.
        module: A model to use instead of what they name. If it is in training mode already, layers
            of it in ``eval()`` mode are frozen and stay so.
        device: Where it goes.
        data_dir: A folder to look for weights first.

    Returns:
        The model.
    """
    if module is None:
        module = build_model(settings, data_dir=data_dir).train()
    elif not module.training:
        module.train()
    return placed(module, settings, device)


def placed(module: nn.Module, settings: ImageSettings, device: torch.device) -> nn.Module:
    """A module on its device, in the memory layout it is trained in."""
    layout = layout_of(module, settings.channels_last, device)
    return module.to(device, memory_format=layout)  # type: ignore[call-overload,no-any-return]


def check_model(
    forward: Callable[[Tensor], Tensor], two: Tensor, settings: ImageSettings, classes: int
) -> None:
    """Refuse a model that does not give one logit per class.

    Args:
        forward: Logits of images.
        two: Two images.
        settings: Of the run.
        classes: K.

    Raises:
        InputError: If it cannot take the images, or the shape is another one.
    """
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


BLOCK = 16  # channels that oneDNN takes at a time, at most


def layout_of(module: nn.Module, channels_last: bool, device: torch.device) -> torch.memory_format:
    """Channels last where that is wanted and safe.

    On a CPU with AVX2, oneDNN writes past the end of a buffer when it differentiates a strided
    1 × 1 convolution by its weights, if its input has fewer channels than a block and has them
    last (https://github.com/uxlfoundation/oneDNN/issues/6035): a crash, or a wrong gradient. A
    narrow ResNet has such shortcuts.

    Args:
        module: The model.
        channels_last: Whether it is wanted.
        device: Where it is trained.

    Returns:
        ``torch.channels_last``, or torch's own layout.
    """
    safe = device.type != "cpu" or not any(map(_overruns, module.modules()))
    return torch.channels_last if channels_last and safe else torch.contiguous_format


def _overruns(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.Conv2d):
        return False
    point, strided = max(layer.kernel_size) == 1, max(layer.stride) > 1
    return point and strided and layer.in_channels // layer.groups < BLOCK
