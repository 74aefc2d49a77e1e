"""BatchNorm in the evaluation pass: three named modes.

``joint``: training and evaluation points go through the network as one batch, the loss is
normalised by it too, running statistics are updated from it once. ``batch``: the evaluation points
are normalised by themselves. ``frozen``: by the running statistics, the function that will be
deployed; its R is taken as it is, and the gradient of R knows that statistics follow the weights
(:mod:`fsmap.objective.following`). In ``batch`` and ``frozen`` the evaluation pass never touches
running statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.objective.compiling import never_compiled
from fsmap.objective.syncbatchnorm import sync_batch_norm, synchronizes

MODES = ("joint", "batch", "frozen")


def present(module: nn.Module) -> bool:
    """Whether there is any BatchNorm (SyncBatchNorm included)."""
    return any(isinstance(m, _BatchNorm) for m in module.modules())


def unfrozen(module: nn.Module) -> list[_BatchNorm]:
    """BatchNorm layers that nobody froze: all, but for those in ``eval()`` mode in a live model."""
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    return [m for m in layers if m.training or not module.training]


def check_mode(mode: str, allowed: tuple[str, ...], instead: str = "") -> None:
    """Refuse an unknown mode.

    Raises:
        InputError: With the allowed ones.
    """
    if mode not in allowed:
        message = f"batchnorm must be one of {', '.join(allowed)}, got {mode!r}. {instead}".strip()
        raise InputError(message)


def deployed(module: nn.Module) -> str:
    """The mode of the function that will be deployed."""
    return "batch" if _without_statistics(module) else "frozen"


def check_running(module: nn.Module) -> None:
    """Refuse ``frozen`` where there is nothing to freeze.

    Raises:
        InputError: If a BatchNorm keeps no running statistics.
    """
    bare = _without_statistics(module)
    if bare:
        message = (
            f"batchnorm='frozen' needs running statistics, and {bare} keep none "
            "(track_running_stats=False). Use 'batch' or 'joint'."
        )
        raise InputError(message)


def _without_statistics(module: nn.Module) -> list[str]:
    layers = [(n, m) for n, m in module.named_modules() if isinstance(m, _BatchNorm)]
    return [name for name, layer in layers if layer.running_mean is None]


@contextmanager
def frozen(module: nn.Module, wanted: bool = True) -> Iterator[None]:
    """BatchNorm layers use their running statistics; everything else stays in its mode."""
    active = [m for m in module.modules() if wanted and isinstance(m, _BatchNorm) and m.training]
    for m in active:
        m.training = False
    try:
        yield
    finally:
        for m in active:
            m.training = True


@never_compiled
def write_back(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Give the module the running statistics that a pass on cloned buffers made."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])


@contextmanager
def differentiable_sync(module: nn.Module, estimator: str) -> Iterator[None]:
    """SyncBatchNorm layers, where they synchronize, by arithmetic that has all derivatives.

    Args:
        module: The model.
        estimator: What R is estimated by.

    Raises:
        UnsupportedModuleError: If it goes backwards through the points of one rank: a pass back
            through the layer adds up what the ranks ask for.
    """
    active = [m for m in module.modules() if isinstance(m, nn.SyncBatchNorm) and synchronizes(m)]
    if active and estimator in ("vjp", "exact"):
        message = (
            f"the estimator {estimator!r} cannot go through SyncBatchNorm: a backward pass through "
            "it mixes the outputs of all ranks. Use 'jvp', 'fd' or 'fd_central', or "
            "batchnorm='frozen'."
        )
        raise UnsupportedModuleError(message)
    for m in active:
        m.forward = partial(sync_batch_norm, m)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for m in active:
            del m.forward
