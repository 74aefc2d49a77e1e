"""How images and weights lie in memory while a model is trained."""

from __future__ import annotations

import torch
from torch import nn

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
