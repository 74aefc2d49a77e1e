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
from fsmap.images.kernels import layout_of
from fsmap.images.settings import ImageSettings
from fsmap.models.by_name import make_model

PRETRAINED = "resnet50-imagenet"  # a model whose weights are in the catalogue


def load_data(settings: ImageSettings, data_dir: Folder = None, px: str | None = None) -> ImageTask:
    """The data that settings name."""
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


def training_model(
    settings: ImageSettings, module: nn.Module | None, device: torch.device, data_dir: Folder
) -> nn.Module:
    """The model of a run, in training mode."""
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
    """Refuse a model that does not give one logit per class."""
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
