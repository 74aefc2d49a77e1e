"""Numbers that are the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor


def average(numbers: Tensor, weight: float, device: torch.device) -> Tensor:
    """Weighted mean over ranks, bit for bit the same on each.

    Every rank collects everybody's numbers and adds them in the same order, which an all-reduce
    does not promise.

    Args:
        numbers: ``[n]``, this rank's.
        weight: How much they count, such as the number of points they were measured on.
        device: Where the process group can reach them.

    Returns:
        ``[n]`` on the CPU; the numbers themselves where nothing is distributed.
    """
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return numbers.cpu()
    mine = torch.cat([numbers.double().cpu(), torch.tensor([float(weight)], dtype=torch.float64)])
    mine = mine.to(device)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    table = torch.stack([one.cpu() for one in all_of_them])  # [ranks, n + 1]
    return (table[:, :-1] * table[:, -1:]).sum(0) / table[:, -1].sum()
