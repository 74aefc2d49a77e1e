"""Predictions of an image model as it would be deployed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fsmap.data.images.augment import Normalization


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
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    found = []
    try:
        with autocast(first.device, half):
            for part in images.split(batch):
                part = part.to(first.device)
                whole = part.dtype == torch.uint8
                x = normalize(part, first.dtype) if whole else part.to(first.dtype)
                found.append(module(x.contiguous(memory_format=layout)).to(first.dtype))
    finally:
        for m, mode in modes:
            m.training = mode
    return torch.cat(found)
