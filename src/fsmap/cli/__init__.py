"""The command ``fsmap``: its parser, and what its commands share.

A command is a module of this package with a table ``OPTIONS`` and ``run(arguments)``, which returns
the exit code, or None for 0. Its docstring is the help: a summary and examples.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from fsmap import __version__
from fsmap.errors import FsmapError, InputError, did_you_mean, require
from fsmap.functional import as_device

COMMANDS = "list run report fit predict train assess landscape doctor data".split()

EPILOG = """\
Examples:
  fsmap list                      all experiments
  fsmap run fourier --quick       one figure of the paper, in seconds
  fsmap report runs               a page with our results beside the paper's

`fsmap COMMAND --help` shows the options of a command.
"""


class Parser(argparse.ArgumentParser):
    """A parser that reports errors as commands do: one line on stderr, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print the error and how to get help."""
        self.exit(2, f"fsmap: {message}\nSee `{self.prog} --help`.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an unknown option first, even if a required one is missing."""
        known = self._option_string_actions
        for word in [] if self._subparsers else takewhile("--".__ne__, args or ()):
            name = word.partition("=")[0]
            if name.startswith("--") and not any(one.startswith(name) for one in known):
                self.error(f"there is no option {name}.{did_you_mean(name, known)}")
        return super().parse_known_args(args, namespace)


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of all commands, or only of the command that the first word names."""
    parser = Parser(
        prog="fsmap",
        description="Learn the most likely function of a model, not its most likely parameters.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fsmap {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    first = next((word for word in words if word != "--debug"), "")
    for name in [first] if first in COMMANDS else COMMANDS:
        command = importlib.import_module(f"{__name__}.{name}")
        add_command(subparsers, name, command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with ``argv``, by default the arguments of the process.

    The exit code is 0 if done, 1 for a bug, 2 for an error that the message explains, 130 if
    interrupted, 143 if training got SIGTERM.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = build_parser(words)
    first = next((word for word in words if not word.startswith("-")), COMMANDS[0])
    if first not in COMMANDS:
        hint = did_you_mean(first, [*COMMANDS, "--help", "--version"])
        parser.error(f"there is no command {first!r}.{hint}")
    for text in words:
        if text != text.encode(errors="replace").decode():
            parser.error(f"{ascii(text)} is not UTF-8. Choose another name.")
    arguments = parser.parse_args(words)
    if not hasattr(arguments, "handler"):
        parser.print_help()
        return 0
    try:
        check_places(arguments)
        arguments.command = shlex.join(["fsmap", *words])
        return int(arguments.handler(arguments) or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `fsmap list | head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (FsmapError, OSError) as error:
        if arguments.debug:
            traceback.print_exc()
        sys.stderr.write(f"fsmap: {error}\n")
        return error.exit_code if isinstance(error, FsmapError) else 2


# --- options of commands, as tables

FLAG = {"action": "store_true", "default": False}
TOGGLE = {"action": argparse.BooleanOptionalAction}
MANY = {"action": "append", "default": []}

RESULTS = [Path("runs"), Path("results")]  # folders with runs, if none is named
DEVICE = {"--device NAME": (str, "auto, cpu, cuda … (default: auto)", "auto")}
DATA_DIR = {"--data-dir DIR": (Path, "where to look for data first")}
CLASSIFIER = {  # of commands that read a checkpoint of ``fsmap train``
    **DATA_DIR,
    **DEVICE,
    "--model PATH": (str, "as in `fsmap train --model`, for a model of your own; its code is run"),
}


def add_command(subparsers: Any, name: str, command: ModuleType) -> None:
    """Add a command whose help ends with examples and which takes ``--debug``."""
    summary, _, examples = (command.__doc__ or "").partition("\n\n")
    parser = subparsers.add_parser(
        name,
        help=summary.rstrip("."),
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=command.run)
    hidden = argparse.SUPPRESS
    parser.add_argument("--debug", action="store_true", default=hidden, help=hidden)
    add_options(parser, command.OPTIONS)


def add_options(parser: Any, table: Mapping[str, Any]) -> None:
    """Add options: ``--name VALUE`` to its type, help and default; a title to a table of its own.

    In place of a type there can be choices, or keywords of argparse. ``VALUE+``, ``VALUE*`` and
    ``VALUE?`` stand for several values, ``LOW HIGH`` for two.
    """
    for words, row in table.items():
        if isinstance(row, dict):
            add_options(parser.add_argument_group(words), row)
            continue
        kind, text, *default = row
        name, *metavars = words.split()
        own: dict[str, Any] = {"help": text, "default": default[0] if default else None}
        if len(metavars) > 1:
            own |= {"metavar": tuple(metavars), "nargs": len(metavars)}
        elif metavars:
            own["metavar"] = metavars[0].rstrip("+*?")
            if metavars[0][-1] in "+*?":
                own["nargs"] = metavars[0][-1]
        if isinstance(kind, tuple):
            kind = {"choices": kind}
        parser.add_argument(name, **(own | (kind if isinstance(kind, dict) else {"type": kind})))


def check_places(arguments: argparse.Namespace) -> None:
    """Raise InputError for a device or a data folder that cannot be used."""
    if getattr(arguments, "device", None) is not None:
        as_device(arguments.device)
        folder = getattr(arguments, "data_dir", None)
        if folder is not None and not folder.is_dir():
            raise InputError(f"--data-dir: there is no folder {folder}")


def check_installed(*modules: str, extra: str) -> None:
    """Raise MissingExtraError if a module is missing, before the work starts."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            require(module, extra=extra)


def number(text: str, least: float = -math.inf) -> float:
    """The type of an option that is a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        more = "" if math.isinf(least) else f", {least:g} or more"
        raise argparse.ArgumentTypeError(f"must be a finite number{more}, got {text!r}")
    return value


def count(text: str, least: int = 1, most: float = math.inf) -> int:
    """The type of an option that counts something."""
    value = number(text)
    if not (value.is_integer() and least <= value <= most):
        limit = "or more" if math.isinf(most) else f"to {most}"
        raise argparse.ArgumentTypeError(f"must be a whole number, {least} {limit}, got {text!r}")
    return int(value)


def seed(text: str) -> int:
    """The type of a seed; numpy takes no larger ones."""
    return count(text, 0, 2**32 - 1)


# --- output: lines and columns, in color on a terminal

GREEN, RED, DIM, BOLD = "32", "31", "2", "1"  # codes of ANSI


def styled(text: str, style: str) -> str:
    """Text in a color, on a terminal."""
    return f"\x1b[{style}m{text}\x1b[0m" if sys.stdout.isatty() else text


def say(text: str = "") -> None:
    """Print a line of the result to standard output."""
    print(text, flush=True)


def note(text: str) -> None:
    """Print a note on progress to standard error."""
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
