"""Output of the commands: rich on a terminal where it is installed, plain text elsewhere."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

GREEN, RED, DIM, BOLD = "green", "red", "dim", "bold"
CODES = {GREEN: "32", RED: "31", DIM: "2", BOLD: "1"}


def add_command(
    subparsers: Any,
    name: str,
    handler: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    examples: Sequence[str],
) -> argparse.ArgumentParser:
    """A subcommand whose help ends with examples and which takes ``--debug``."""
    lines = "\n".join(f"  {example}" for example in examples)
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler)
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    return parser


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """Text in a color, on a terminal."""
    stream = sys.stdout if stream is None else stream
    return f"\x1b[{CODES[style]}m{text}\x1b[0m" if stream.isatty() else text


def say(text: str = "") -> None:
    """A line on standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line on standard error: what is going on, not the result."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Columns."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _rich_table(header, lines)
    else:
        _plain_table(header, lines)


def _rich_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="dim")
    for place, name in enumerate(header):
        last = place == len(header) - 1
        grid.add_column(name, no_wrap=not last, overflow="fold" if last else "ellipsis")
    for line in lines:
        if len(line) == 1:
            grid.add_row()
            grid.add_row(Text(line[0], style="bold"))
        else:
            grid.add_row(*(Text.from_ansi(cell) for cell in line))
    Console().print(grid)


def _plain_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    full = [line for line in lines if len(line) > 1]
    widths = [max(len(line[i]) for line in [header, *full]) for i in range(len(header))]
    for line in [header, *lines]:
        if len(line) == 1:
            say(f"\n{line[0]}")
        else:
            padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            say("  ".join(padded).rstrip())
