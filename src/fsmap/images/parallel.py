"""Several processes under ``torchrun``: the same ψ, own evaluation points, shares of each batch.

Every process computes the gradient on its share; gradients and running statistics are averaged in
one collective, so that all processes hold the same weights after every step. BatchNorm normalizes
each share by itself, as in ``DistributedDataParallel``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsmap.errors import FsmapError


class LostPeerError(FsmapError, RuntimeError):
    """Another process of the job went away."""


class Group(NamedTuple):
    """The processes of a job; one, unless ``torchrun`` started more."""

    rank: int = 0
    size: int = 1

    def average(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their means over all processes."""
        if self.size == 1:
            return
        flat = torch.cat([t.reshape(-1) for t in tensors])
        try:
            dist.all_reduce(flat)
        except RuntimeError as error:
            message = (
                f"process {self.rank} of {self.size} lost the others ({_first_line(error)}): one "
                "of them was killed or failed"
            )
            raise LostPeerError(message) from error
        flat /= self.size
        parts = flat.split([t.numel() for t in tensors])
        for t, part in zip(tensors, parts, strict=True):
            t.copy_(part.reshape(t.shape))


def torchrun_device(device: torch.device) -> torch.device:
    """The device of this process: under ``torchrun`` on CUDA, that of its local rank."""
    local = os.environ.get("LOCAL_RANK")
    bare = device == torch.device("cuda")  # no index: any of them
    return device if local is None or not bare else torch.device("cuda", int(local))


@contextmanager
def processes(device: torch.device) -> Iterator[Group]:
    """Join the job that ``torchrun`` started, or be alone."""
    if dist.is_available() and dist.is_initialized():
        yield Group(dist.get_rank(), dist.get_world_size())
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Group()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Group(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
