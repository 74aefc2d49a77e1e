"""Time and peak memory of several ways to do the same work, in turns."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

Work = Callable[[], Tensor]
SECONDS = 1.0  # spent on one way, about; at least LEAST_RUNS runs
LEAST_RUNS, MOST_RUNS = 3, 30
ONCE = 3.0  # seconds; what takes longer runs once
MOST_PAIRS = 200


class Measured(NamedTuple):
    """One way to do the work."""

    seconds: list[float]
    values: list[float]
    peak_bytes: int | None

    @property
    def median(self) -> float:
        """Median of the times."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile of the times."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def in_turns(ways: dict[str, Work], module: nn.Module, *, gradient: bool) -> dict[str, Measured]:
    """Run all ways, alternating, so that a busy machine slows all of them."""
    runs = {name: (lambda work=work: run(work, module, gradient)) for name, work in ways.items()}
    first = {name: _first(run) for name, run in runs.items()}  # warm-up: caches, memory, its peak
    found = {name: Measured([], [], peak) for name, (_, _, peak) in first.items()}
    for name, (seconds, value, _) in first.items():
        if seconds > ONCE:  # too long to be repeated: this was it
            found[name].seconds.append(seconds)
            found[name].values.append(value)
    names = [name for name in runs if not found[name].seconds]
    total = sum(first[name][0] for name in names) or 1.0
    num = max(LEAST_RUNS, min(MOST_RUNS, int(SECONDS * len(names) / total)))
    for turn in range(num):
        for name in names if turn % 2 == 0 else reversed(names):
            seconds, value = runs[name]()
            found[name].seconds.append(seconds)
            found[name].values.append(value)
    return found


def ratio(ours: Work, other: Work, module: nn.Module, *, gradient: bool, once: float) -> float:
    """Median over pairs of runs, one right after the other, of the other's time over ours.

    A busy machine slows both of a pair; ``once`` is about what a pair takes, at most ``ONCE``.
    """
    num = max(1, min(MOST_PAIRS, int(2 * SECONDS / once)))
    found = []
    for turn in range(num):
        order = (ours, other) if turn % 2 == 0 else (other, ours)
        seconds = {id(work): run(work, module, gradient)[0] for work in order}
        found.append(seconds[id(other)] / seconds[id(ours)])
    return statistics.median(found)


def run(work: Work, module: nn.Module, gradient: bool) -> tuple[float, float]:
    start = time.perf_counter()
    value = work()
    if gradient:
        torch.autograd.grad(value, list(module.parameters()), allow_unused=True)
    number = float(value.detach())  # waits for the device
    return time.perf_counter() - start, number


def _first(run: Callable[[], tuple[float, float]]) -> tuple[float, float, int | None]:
    before = _start_of_peak()
    seconds, value = run()
    return seconds, value, None if before is None else _peak() - before


def _start_of_peak() -> int | None:
    """Forget the peak so far; returns what is held now, None where that is not possible."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    return None


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(field)
