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


@contextmanager
def fresh_statistics(
    module: nn.Module,
    batches: Iterable[Tensor],
    average: Callable[[list[Tensor]], object] = lambda _: None,
) -> Iterator[None]:
    """Running statistics are those of some batches within, and what they were afterwards.

    Args:
        module: The model. Layers in ``eval()`` mode keep their statistics; dropout is off while
            those of the others are measured.
        batches: Inputs, each normalized by itself; statistics are the mean over batches.
        average: Averages tensors over processes, in place.

    Yields:
        Nothing.
    """
    norms = [
        m
        for m in module.modules()
        if isinstance(m, _BatchNorm) and m.track_running_stats and m.training
    ]
    if not norms:
        yield
        return
    buffers = [b for m in norms for b in m.buffers(recurse=False)]
    kept = [b.clone() for b in buffers]
    momenta = [m.momentum for m in norms]
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            for m in norms:
                m.reset_running_stats()
                m.momentum = None  # the mean over batches
                m.training = True
            for x in batches:
                module(x)
            average([b for b in buffers if b.is_floating_point()])
        for layer, mode in modes:
            layer.training = mode
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode
        for m, momentum in zip(norms, momenta, strict=True):
            m.momentum = momentum
        with torch.no_grad():
            for b, before in zip(buffers, kept, strict=True):
                b.copy_(before)
