"""Which kernels a run may use: torch's global switches, set for a while and put back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fsmap.errors import InputError
from fsmap.train.images.settings import ImageSettings

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def kernels(settings: ImageSettings, device: torch.device) -> Iterator[None]:
    """Choose kernels by precision and determinism.

    Args:
        settings: ``precision`` other than fp32 allows TF32, ``deterministic`` allows only kernels
            that give the same bits every time.
        device: Where the run computes; a CPU needs none of this.

    Yields:
        Nothing.

    Raises:
        InputError: If deterministic cuBLAS was asked for and its workspace is not configured.
    """
    if device.type != "cuda":
        yield
        return
    if settings.deterministic and WORKSPACE not in os.environ:
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
    cudnn.benchmark = not settings.deterministic  # the search itself is not reproducible
    cudnn.deterministic = settings.deterministic
    cudnn.allow_tf32 = matmul.allow_tf32 = settings.precision != "fp32"
    if settings.deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = before
        torch.use_deterministic_algorithms(strict, warn_only=warn)
