"""Options of commands as tables; types of options; checks that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fsmap.cli import console
from fsmap.errors import InputError
from fsmap.images import load_model
from fsmap.types import as_device

FLAG = {"action": "store_true", "default": False}
TOGGLE = {"action": argparse.BooleanOptionalAction}
MANY = {"action": "append", "default": []}

DEVICE = {"--device NAME": (str, "auto, cpu, cuda … (default: auto)", "auto")}
DATA_DIR = {"--data-dir DIR": (Path, "where to look for data first")}
CLASSIFIER = {  # of commands that read a checkpoint of ``fsmap train``
    **DATA_DIR,
    **DEVICE,
    "--model PATH": (
        str,
        "the import path given to `fsmap train --model`, if the checkpoint is of a model of "
        "your own; its code is imported and run",
    ),
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
    add(parser, command.OPTIONS)


def add(parser: Any, table: Mapping[str, Any]) -> None:
    """Add options: ``--name VALUE`` to its type, help and default; a title to a table of its own.

    In place of a type there can be choices, or keywords of argparse. ``VALUE+``, ``VALUE*`` and
    ``VALUE?`` stand for several values, ``LOW HIGH`` for two.
    """
    for words, row in table.items():
        if isinstance(row, dict):
            add(parser.add_argument_group(words), row)
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


def check(arguments: argparse.Namespace) -> None:
    """Raise InputError for a device or a data folder that cannot be used."""
    if getattr(arguments, "device", None) is not None:
        as_device(arguments.device)
        folder = getattr(arguments, "data_dir", None)
        if folder is not None and not folder.is_dir():
            raise InputError(f"--data-dir: there is no folder {folder}")


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


def load_classifier(path: Path, given: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """Load a network, and say so if its training has not come to its end."""
    module, progress = load_model(path, as_device(given.device), model=given.model)
    epochs, done = progress["settings"].epochs, len(progress["history"])
    if done < epochs:
        console.note(f"{path} is unfinished: {done} of {epochs} epochs")
    return module, progress
