"""How many members to vectorize at a time: as many as fit; on a CPU only where it is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsmap.errors import InputError, MemoryLimitError
from fsmap.functional import count
from fsmap.linalg.memory import SHARE, free_bytes
from fsmap.objective.compose import Objective
from fsmap.objective.geometry import LogDet, Variational
from fsmap.types import Batch, Draws, ModelFn, Params

CPU_WORK = 3e7
"""P·B above which a CPU gains nothing by vectorizing: the arithmetic of one member keeps it busy.
Measured by ``python -m benchmarks.population``."""
COPIES = (
    8  # tensors like the parameters that live during a step: gradients, moments, ψ, shifted copies
)
PASSES = (
    4  # as much as a training pass that a pass over evaluation points keeps, derivative included
)


def choose(
    chunk: int | str,
    members: int,
    f: ModelFn,
    params: Params,
    batch: Batch,
    objective: Objective,
    draws: Draws,
) -> int:
    """The number of members to vectorize at a time.

    Args:
        chunk: A number, or ``"auto"``.
        members: M.
        f: The model function.
        params: Parameters of one member.
        batch: A batch of one member.
        objective: The objective of one member.
        draws: Its draws.

    Returns:
        Between 1 and M. 1 means one by one, without ``vmap``.

    Raises:
        InputError: If ``chunk`` is neither a positive number nor ``"auto"``.
        MemoryLimitError: If not even one member fits.
    """
    if not getattr(f, "pointwise", True):
        return 1  # random layers are seeded member by member
    if chunk != "auto":
        if not isinstance(chunk, int) or chunk < 1:
            message = f"chunk must be a number of members >= 1, or 'auto', got {chunk!r}"
            raise InputError(message)
        return min(chunk, members)
    device = next(iter(params.values())).device
    if device.type == "cpu" and count(params) * len(batch.y) > CPU_WORK:
        return 1
    needed = member_bytes(f, params, batch, objective, draws)
    limit = int(SHARE * free_bytes(device))
    if needed > limit:
        message = (
            f"one member needs about {needed / 1e9:.2f} GB, {limit / 1e9:.2f} GB may be used on "
            f"{device}. Use a smaller batch_size or num_points."
        )
        raise MemoryLimitError(message)
    return even(members, max(1, min(members, limit // needed)))


def even(members: int, most: int) -> int:
    """The chunk size that cuts M into as few chunks as ``most`` allows, of nearly equal size."""
    chunks = -(-members // most)
    return -(-members // chunks)


def member_bytes(
    f: ModelFn, params: Params, batch: Batch, objective: Objective, draws: Draws
) -> int:
    """Roughly the memory that one member needs during a step; one forward pass is made to find out.

    Args:
        f: The model function.
        params: Parameters of one member.
        batch: A batch of one member.
        objective: Its objective.
        draws: Its draws.

    Returns:
        Bytes.
    """
    first = next(iter(params.values()))
    needed = COPIES * count(params) * first.element_size()
    made, _ = _made(f, params, batch.x)
    needed += made
    if draws.x is not None:
        made, outputs = _made(f, params, draws.x)
        needed += PASSES * made
        if isinstance(objective.geometry, LogDet | Variational):
            needed += (
                3 * outputs * count(params) * first.element_size()
            )  # the Jacobian and its gradient
    return needed


def _made(f: ModelFn, params: Params, x: Any) -> tuple[int, int]:
    """Bytes of everything a forward pass makes, and the number of its outputs."""
    with torch.no_grad(), _Counter() as counter:
        out = f({n: p.detach() for n, p in params.items()}, x)
    return counter.bytes, out.numel()


class _Counter(TorchDispatchMode):
    """Adds up the sizes of what operations return, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and _address(t) not in given:
                self.bytes += t.numel() * t.element_size()
        return result


def _address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
