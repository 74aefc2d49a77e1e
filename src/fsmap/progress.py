"""A progress bar with the time left: rich on a terminal where installed, else plain lines.

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

TELLING, SECONDS = 0.05, 60.0
"""Share of the work, or seconds, from which on the time left is told: the first steps compile."""

_active: list[str] = []  # the label of the bar on the screen, if any


class Silent:
    """Shows nothing; what a caller moves."""

    def advance(self, steps: float = 1.0) -> None:
        """Count some more of the total."""

    def update(self, done: float | None = None, text: str | None = None) -> None:
        """Set how much of the total is done, or what is said beside the bar."""


class Plain(Silent):
    """Writes a line now and then."""

    def __init__(self, total: float, label: str, stream: TextIO) -> None:
        self.total, self.label, self.stream = total, label, stream
        self.done, self.text = 0.0, ""
        self.start = self.said = time.monotonic()
        self.first: tuple[float, float] | None = None  # seconds and what was done at the first step

    def advance(self, steps: float = 1.0) -> None:
        """Count some more of the total."""
        self.update(self.done + steps)

    def update(self, done: float | None = None, text: str | None = None) -> None:
        """Set what is done and said; write a line if the last one is old enough."""
        self.done = self.done if done is None else done
        self.text = self.text if text is None else text
        now = time.monotonic()
        if self.first is None and self.done > 0:
            self.first = now - self.start, self.done
        if now - self.said >= PLAIN_SECONDS:
            self.said = now
            self.stream.write(self.line(now - self.start) + "\n")
            self.stream.flush()

    def line(self, elapsed: float) -> str:
        """One line of the log."""
        share = min(self.done / self.total, 1.0) if self.total else 0.0
        seconds = self._left(elapsed, share)
        left = "" if seconds is None else f", {duration(seconds)} left"
        text = f"  {self.text}" if self.text else ""
        return f"{self.label}  {share:4.0%}  {duration(elapsed)}{left}{text}"

    def _left(self, elapsed: float, share: float) -> float | None:
        """Seconds left at the speed since the first step: compiling or an earlier run are apart."""
        if not told(share, elapsed):
            return None
        if self.first is not None and self.done > self.first[1]:
            before, done = self.first
            return (elapsed - before) / (self.done - done) * max(self.total - self.done, 0.0)
        return elapsed * (1 - share) / share if share >= 0.01 else None


def told(share: float, elapsed: float) -> bool:
    """Whether enough is done for the time left to be told."""
    return share >= TELLING or elapsed >= SECONDS


class Rich(Silent):
    """A bar of rich's."""

    def __init__(self, bars: Any, task: Any) -> None:
        self.bars, self.task = bars, task

    def advance(self, steps: float = 1.0) -> None:
        """Count some more of the total."""
        self.bars.advance(self.task, steps)

    def update(self, done: float | None = None, text: str | None = None) -> None:
        """Set what is done and what is said."""
        said = {} if text is None else {"text": text}
        self.bars.update(self.task, completed=done, **said)


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


@contextmanager
def _rich_bar(total: float, label: str, stream: TextIO) -> Iterator[Rich]:
    from rich import progress as rich
    from rich.console import Console
    from rich.markup import escape
    from rich.text import Text

    class TimeLeft(rich.TimeRemainingColumn):
        def render(self, task: rich.Task) -> Text:
            share = task.percentage / 100
            return super().render(task) if told(share, task.elapsed or 0.0) else Text("-:--:--")

    columns = (
        rich.TextColumn("[bold]{task.description}"),
        rich.BarColumn(bar_width=28),
        rich.TaskProgressColumn(),
        TimeLeft(elapsed_when_finished=True),
        rich.TextColumn("[dim]{task.fields[text]}", markup=True),
    )
    with rich.Progress(*columns, console=Console(file=stream), transient=True) as bars:
        task = bars.add_task(escape(label), total=total, text="")
        yield Rich(bars, task)


@contextmanager
def progress(
    total: float, label: str, *, silent: bool = False, stream: TextIO | None = None
) -> Iterator[Silent]:
    """Show on ``stream``, by default standard error, how far some work of ``total`` is."""
    if silent or _active:
        yield Silent()
        return
    stream = sys.stderr if stream is None else stream
    _active.append(label)
    try:
        if stream.isatty() and importlib.util.find_spec("rich") is not None:
            with _rich_bar(total, label, stream) as shown:
                yield shown
        else:
            yield Plain(total, label, stream)
    finally:
        _active.clear()
