"""Wall-clock time that waits for a device to finish."""

from __future__ import annotations

import time

import torch

from fsmap.types import Params


def now(where: torch.device | Params) -> float:
    """Seconds; on CUDA after all that was started there is done.

    Args:
        where: A device, or parameters that live on one.

    Returns:
        A reading, of use in differences.
    """
    device = where if isinstance(where, torch.device) else next(iter(where.values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
