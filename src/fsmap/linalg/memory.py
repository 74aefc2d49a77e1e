"""Memory is predicted before it is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from fsmap.errors import MemoryLimitError

ALWAYS = 2**26  # what is taken to fit without asking
SHARE = 0.8  # of what is free: the rest is for the allocator and for everybody else


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, control-group limits included."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + reserved)
    free = _meminfo_available()
    limit, used = _read_int("/sys/fs/cgroup/memory.max"), _read_int("/sys/fs/cgroup/memory.current")
    return min(free, limit - used) if limit is not None and used is not None else free


def fits(needed: int, device: torch.device) -> bool:
    """Whether so many bytes may be allocated; what is small is not looked up."""
    return needed <= ALWAYS or needed <= SHARE * free_bytes(device)


def check_fits(needed: int, device: torch.device, *, what: str, instead: str) -> None:
    """Raise MemoryLimitError if ``what`` does not fit, with what to do ``instead``."""
    if not fits(needed, device):
        limit = int(SHARE * free_bytes(device))
        message = f"{what} needs {_gb(needed)}, {_gb(limit)} may be used on {device}. {instead}"
        raise MemoryLimitError(message)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 * 2**30  # no /proc (macOS, Windows): assume a small laptop


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return None
