"""Statistics of normalization measured anew, at the weights as they are.

Running statistics are averages over the last dozen steps. At a high learning rate the weights have
moved on by then, and a network in ``eval()`` mode is not the one that is trained: its held-out
accuracy jumps by tens of percent from one epoch to the next. A few batches give the statistics that
belong to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsmap.errors import InputError
from fsmap.lmap.batchnorm import unfrozen


@contextmanager
def fresh_statistics(
    module: nn.Module,
    batches: Iterable[Tensor],
    average: Callable[[list[Tensor]], object] = lambda _: None,
) -> Iterator[None]:
    """Within, the module is in ``eval()`` mode with the statistics of some batches.

    Afterwards modes and running statistics are what they were.

    Example:
        >>> import torch
        >>> model = torch.nn.BatchNorm1d(1)
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> with fresh_statistics(model, [x]):
        ...     model(torch.tensor([[2.0]])).item()
        0.0
        >>> model.running_mean, model.training
        (tensor([0.]), True)
    """
    norms = [m for m in unfrozen(module) if m.track_running_stats]
    buffers = [b for m in norms for b in m.buffers(recurse=False)]
    kept = [b.clone() for b in buffers]
    momenta = [m.momentum for m in norms]
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        if norms:
            _measure(module, norms, batches)
            average([b for b in buffers if b.is_floating_point()])
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode
        for m, momentum in zip(norms, momenta, strict=True):
            m.momentum = momentum
        with torch.no_grad():
            for b, before in zip(buffers, kept, strict=True):
                b.copy_(before)


@torch.no_grad()
def _measure(module: nn.Module, norms: list[_BatchNorm], batches: Iterable[Tensor]) -> None:
    for m in norms:
        m.reset_running_stats()
        m.momentum = None  # the mean over batches
        m.training = True
    measured = False
    for x in batches:
        module(x)
        measured = True
    if not measured:
        message = "fresh_statistics needs at least one batch; was the iterator used up before?"
        raise InputError(message)
    for m in norms:
        m.training = False
