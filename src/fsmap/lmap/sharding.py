"""Parameters that are cut over processes: who refuses them, and how to move them in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsmap.errors import UnsupportedModuleError


def refuse_sharded(module: nn.Module) -> None:
    """Refuse a functional pass where it would ignore the parameters that it is given.

    Raises:
        UnsupportedModuleError: If parameters are sharded.
    """
    if _is_sharded(module):
        message = (
            "the parameters are sharded (FSDP): a functional pass would ignore ψ and return R = 0 "
            "without an error. Under FSDP2 (fully_shard) use fsmap.InPlacePenalty, which moves the "
            "shards themselves (docs/guide/distributed.md); move from FSDP1 "
            "(FullyShardedDataParallel) to FSDP2 first, or use DDP."
        )
        raise UnsupportedModuleError(message)


def _is_sharded(module: nn.Module) -> bool:
    """Whether a trainable parameter is a DTensor, or FSDP manages a part from inside or outside."""
    if any(is_cut(p) for p in module.parameters() if p.requires_grad):
        return True
    # FSDP marks what it manages for the compiler: the only trace that a wrapper outside leaves
    return any(getattr(m, "_is_fsdp_managed_module", False) for m in module.modules())


def _is_fsdp1(part: nn.Module) -> bool:
    return type(part).__name__ == "FullyShardedDataParallel"


def is_cut(p: Tensor) -> bool:
    """Whether this rank holds only a part of it."""
    return hasattr(p, "placements")


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, whose names are those of an undistributed run.

    Args:
        module: What the loop calls.

    Returns:
        The model.

    Raises:
        UnsupportedModuleError: For FSDP1, whose flat parameters cannot be moved by name.
    """
    if any(_is_fsdp1(part) for part in module.modules()):
        message = (
            "FullyShardedDataParallel (FSDP1) keeps flat parameters that cannot be moved by name. "
            "Use torch.distributed.fsdp.fully_shard (FSDP2)."
        )
        raise UnsupportedModuleError(message)
    inner = getattr(module, "module", None)
    wrapper = isinstance(module, nn.parallel.DistributedDataParallel)
    return inner if wrapper and isinstance(inner, nn.Module) else module


def local(p: Tensor) -> Tensor:
    """What this rank holds of a parameter: memory that is shared with it."""
    part: Any = p
    held: Tensor = part.to_local() if is_cut(p) else p
    return held


def whole_like(p: Tensor) -> Tensor:
    """A tensor of the parameter's full shape, dtype and device that takes no memory."""
    return torch.empty((), dtype=p.dtype, device=p.device).expand(p.shape)


def own_part(whole: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has in full; nothing is sent."""
    if not is_cut(p):
        return whole
    from torch.distributed.tensor import distribute_tensor

    like: Any = p
    placed = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    part: Tensor = placed.to_local()
    return part


def forget_gathered(module: nn.Module) -> None:
    """Drop full parameters that FSDP2 still holds, so that the next pass sees the shards."""
    for part in module.modules():
        reshard = getattr(part, "reshard", None)
        if reshard is not None and hasattr(part, "unshard"):
            reshard()
