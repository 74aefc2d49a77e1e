"""Where a number was measured: the code, the version of torch, the device."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2]


class Circumstances(NamedTuple):
    """What a row says about its origin."""

    commit: str
    torch: str
    device: str


def _git(*arguments: str, folder: Path) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@functools.cache
def commit(package: Path = PACKAGE) -> str:
    """The commit of the code that runs, or the installed version where there is no checkout.

    Args:
        package: The folder of the package's source.

    Returns:
        A short hash, with ``+dirty`` if a file of the package differs from it; or ``v0.1.0``.
    """
    # A package installed below somebody else's checkout is not part of it: it is not tracked.
    if _git("ls-files", "--error-unmatch", "errors.py", folder=package) is not None:
        head = _git("rev-parse", "--short", "HEAD", folder=package)
        if head:
            changed = _git("status", "--porcelain", "--", ".", folder=package)
            return f"{head}+dirty" if changed else head
    try:
        return f"v{metadata.version('fsmap')}"
    except metadata.PackageNotFoundError:
        return "unknown"


def circumstances(device: str) -> Circumstances:
    """Collect what every row carries.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` …

    Returns:
        Commit, version of torch, and the device with its name where it has one.
    """
    import torch

    name = device
    if device.startswith("cuda"):
        name = f"{device} ({torch.cuda.get_device_name(device)})"
    return Circumstances(commit(), torch.__version__, name)


def machine() -> dict[str, str | int]:
    """The machine in a few words, for the report.

    Returns:
        Python version, system, processor architecture and number of cores.
    """
    ours = getattr(os, "sched_getaffinity", None)  # not on every system
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": len(ours(0)) if ours else os.cpu_count() or 1,
    }
