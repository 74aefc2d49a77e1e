"""Which kernels a run may use, and how images and weights lie in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fsmap.errors import InputError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def kernels(device: torch.device, *, deterministic: bool, tf32: bool) -> Iterator[None]:
    """Set torch's global switches by precision and determinism, and put them back."""
    if device.type != "cuda":
        yield
        return
    if deterministic and WORKSPACE not in os.environ:
        message = (
            f"deterministic on CUDA needs the environment variable {WORKSPACE}=:4096:8 before the "
            "program starts; fsmap train --deterministic sets it."
        )
        raise InputError(message)
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32)
    strict, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    cudnn.benchmark = not deterministic  # the search itself is not reproducible
    cudnn.deterministic = deterministic
    cudnn.allow_tf32 = matmul.allow_tf32 = tf32
    if deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = before
        torch.use_deterministic_algorithms(strict, warn_only=warn)


BLOCK = 16  # channels that oneDNN takes at a time, at most


def layout_of(module: nn.Module, channels_last: bool, device: torch.device) -> torch.memory_format:
    """Channels last where that is wanted and safe.

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
