"""A progress bar: rich's on a terminal, with the time left; else plain lines.

Only one bar is shown at a time: a bar inside another one (``fit`` in an experiment) is silent.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

PLAIN_SECONDS = 10.0  # least time between two plain lines
Show = Callable[["Bar"], None]

_active = False  # whether a bar is on the screen


class Bar:
    """Counts the part of the work that is done, and calls ``show`` with itself after a change."""

    def __init__(self, total: float, label: str, show: Show = lambda _: None) -> None:
        self.total, self.label, self.show = total, label, show
        self.done, self.text = 0.0, ""

    def advance(self, steps: float = 1.0) -> None:
        """Add to the part that is done."""
        self.update(self.done + steps)

    def update(self, done: float | None = None, text: str | None = None) -> None:
        """Set the part that is done, or the text beside the bar."""
        self.done = self.done if done is None else done
        self.text = self.text if text is None else text
        self.show(self)


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


def _plain(stream: TextIO) -> Show:
    """Writes a line if the last one is old enough."""
    start = said = time.monotonic()

    def show(bar: Bar) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= PLAIN_SECONDS:
            said = now
            share = min(bar.done / bar.total, 1.0) if bar.total else 0.0
            line = f"{bar.label}  {share:4.0%}  {duration(now - start)}  {bar.text}"
            print(line.rstrip(), file=stream, flush=True)

    return show


@contextmanager
def progress(
    total: float, label: str, *, silent: bool = False, stream: TextIO | None = None
) -> Iterator[Bar]:
    """Context manager: a bar for work of ``total`` on ``stream``, by default standard error."""
    global _active
    if silent or _active:
        yield Bar(total, label)
        return
    stream = sys.stderr if stream is None else stream
    _active = True
    try:
        if not stream.isatty() or importlib.util.find_spec("rich") is None:
            yield Bar(total, label, _plain(stream))
            return
        from rich import progress as rich
        from rich.console import Console

        columns = (
            rich.TextColumn("{task.description}", style="bold", markup=False),
            rich.BarColumn(bar_width=28),
            rich.TaskProgressColumn(),
            rich.TimeRemainingColumn(elapsed_when_finished=True),
            rich.TextColumn("{task.fields[text]}", style="dim", markup=False),
        )
        with rich.Progress(*columns, console=Console(file=stream), transient=True) as bars:
            task = bars.add_task(label, total=total, text="")
            yield Bar(total, label, lambda b: bars.update(task, completed=b.done, text=b.text))
    finally:
        _active = False
