"""A progress bar: rich's on a terminal, with the time left; else plain lines.

Only one bar is shown at a time. A bar that is opened inside another one (``fit`` inside an
experiment) is silent, so nothing fights for the last line of the terminal.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

PLAIN_SECONDS = 10.0
"""Least time between two plain lines: a log should tell that work goes on, not fill up."""

_active: list[str] = []  # the label of the bar on the screen, if any


class Silent:
    """Counts and shows nothing; what a caller moves."""

    def __init__(self, total: float = 0.0, label: str = "") -> None:
        self.total, self.label = total, label
        self.done, self.text = 0.0, ""

    def advance(self, steps: float = 1.0) -> None:
        """Count some more of the total."""
        self.update(self.done + steps)

    def update(self, done: float | None = None, text: str | None = None) -> None:
        """Set how much of the total is done, or what is said beside the bar."""
        self.done = self.done if done is None else done
        self.text = self.text if text is None else text
        self.show()

    def show(self) -> None:
        """Show where the work stands."""


class Plain(Silent):
    """Writes a line now and then."""

    def __init__(self, total: float, label: str, stream: TextIO) -> None:
        super().__init__(total, label)
        self.stream = stream
        self.start = self.said = time.monotonic()

    def show(self) -> None:
        """Write a line if the last one is old enough."""
        now = time.monotonic()
        if now - self.said >= PLAIN_SECONDS:
            self.said = now
            share = min(self.done / self.total, 1.0) if self.total else 0.0
            line = f"{self.label}  {share:4.0%}  {duration(now - self.start)}  {self.text}"
            self.stream.write(line.rstrip() + "\n")
            self.stream.flush()


class Rich(Silent):
    """A bar of rich's."""

    def __init__(self, bars: Any, total: float, label: str) -> None:
        super().__init__(total, label)
        self.bars, self.task = bars, bars.add_task(label, total=total, text="")

    def show(self) -> None:
        """Move it."""
        self.bars.update(self.task, completed=self.done, text=self.text)


def duration(seconds: float) -> str:
    """Seconds in words.

    Examples:
        >>> duration(0.42), duration(12.3), duration(185), duration(7800)
        ('0.4 s', '12 s', '3 min 05 s', '2 h 10 min')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _rich_bars(stream: TextIO) -> Any:
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}", style="bold", markup=False),
        rich.BarColumn(bar_width=28),
        rich.TaskProgressColumn(),
        rich.TimeRemainingColumn(elapsed_when_finished=True),
        rich.TextColumn("{task.fields[text]}", style="dim", markup=False),
    )
    return rich.Progress(*columns, console=Console(file=stream), transient=True)


@contextmanager
def progress(
    total: float, label: str, *, silent: bool = False, stream: TextIO | None = None
) -> Iterator[Silent]:
    """Show on ``stream``, by default standard error, how far some work of ``total`` is."""
    if silent or _active:
        yield Silent(total, label)
        return
    stream = sys.stderr if stream is None else stream
    _active.append(label)
    try:
        if stream.isatty() and importlib.util.find_spec("rich") is not None:
            with _rich_bars(stream) as bars:
                yield Rich(bars, total, label)
        else:
            yield Plain(total, label, stream)
    finally:
        _active.clear()
