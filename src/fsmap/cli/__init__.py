"""The command ``fsmap``.

A command is a module of this package with a table ``OPTIONS`` and ``run(arguments)``, which returns
the exit code. Its docstring is the help: a summary and examples.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from fsmap import __version__
from fsmap.cli import options
from fsmap.errors import FsmapError

COMMANDS = "list run report fit predict train assess landscape doctor data".split()

EPILOG = """\
Examples:
  fsmap list                      what there is to run
  fsmap run fourier --quick       one figure of the paper, in seconds
  fsmap report runs               a page with ours beside the paper's

`fsmap COMMAND --help` says more.
"""


class Parser(argparse.ArgumentParser):
    """Errors in the form of all others: one line on stderr, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is."""
        self.exit(2, f"fsmap: {message}\nSee `{self.prog} --help`.\n")


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser with all commands; with that of the first word only, if it is one."""
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
        options.add_command(subparsers, name, command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with ``argv``, by default the arguments of the process.

    The exit code is 0 done, 1 a bug, 2 a mistake the message explains, 130 interrupted, 143
    training was asked to terminate.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = build_parser(words)
    for text in words:
        if text != text.encode(errors="replace").decode():
            parser.error(f"{ascii(text)} is not UTF-8. Choose another name.")
    arguments = parser.parse_args(words)
    if not hasattr(arguments, "handler"):
        parser.print_help()
        return 0
    try:
        options.check(arguments)
        arguments.command = shlex.join(["fsmap", *words])
        return int(arguments.handler(arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `fsmap list | head`: the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (FsmapError, OSError) as error:
        if arguments.debug:
            traceback.print_exc()
        sys.stderr.write(f"fsmap: {error}\n")
        return error.exit_code if isinstance(error, FsmapError) else 2
