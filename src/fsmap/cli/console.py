"""Output of the commands: lines and columns, in color on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

GREEN, RED, DIM, BOLD = "32", "31", "2", "1"  # codes of ANSI


def styled(text: str, style: str) -> str:
    """Text in a color, on a terminal."""
    return f"\x1b[{style}m{text}\x1b[0m" if sys.stdout.isatty() else text


def say(text: str = "") -> None:
    """A line on standard output."""
    print(text, flush=True)


def note(text: str) -> None:
    """A line on standard error: what is going on, not the result."""
    print(text, file=sys.stderr, flush=True)


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Columns; a line of one cell is a heading, and only last cells may be styled."""
    full = [line for line in lines if len(line) > 1]
    widths = [max(len(line[i]) for line in [header, *full]) for i in range(len(header))]
    for line in [header, *lines]:
        if len(line) == 1:
            say(f"\n{line[0]}")
        else:
            padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            say("  ".join(padded).rstrip())
