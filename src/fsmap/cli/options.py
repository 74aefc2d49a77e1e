"""Options that several commands have: device, seeds, numbers, trained classifiers."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.cli import console
from fsmap.errors import InputError

if TYPE_CHECKING:
    from torch import nn

SEEDS = 2**32
"""Seeds are smaller: numpy takes no larger ones."""

UNITS = 100_000
"""Most units of a hidden layer."""


def check(arguments: argparse.Namespace) -> None:
    """Raise InputError for a seed, a layer, a device or a data folder that cannot be used."""
    for name in ("seed", "split_seed", "label_noise_seed"):
        check_seed(getattr(arguments, name, None), name)
    for units in (getattr(arguments, "hidden", None) or "").split(","):
        if units.strip().isdecimal() and int(units) > UNITS:
            message = f"--hidden: a layer has at most {UNITS:,} units, got {units.strip()}"
            raise InputError(message)
    if getattr(arguments, "device", None) is not None:
        from fsmap.types import as_device

        as_device(arguments.device)
        folder = getattr(arguments, "data_dir", None)
        if folder is not None and not folder.is_dir():
            message = f"--data-dir: there is no folder {folder}"
            raise InputError(message)


def check_seed(seed: int | None, name: str) -> None:
    """Raise InputError for a seed that torch or numpy does not take."""
    if seed is not None and not 0 <= seed < SEEDS:
        message = f"--{name.replace('_', '-')} must lie in 0..{SEEDS - 1}, got {seed}"
        raise InputError(message)


def number(text: str) -> float:
    """The type of an option that is a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        message = f"must be a finite number, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return value


def count(text: str) -> int:
    """The type of an option that counts something."""
    value = number(text)
    if not (value >= 1 and value.is_integer()):
        message = f"must be a whole number, 1 or more, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(value)


def seconds(text: str) -> float:
    """The type of an option that is a time."""
    value = number(text)
    if value < 0:
        message = f"must be a number of seconds, 0 or more, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return value


def add_classifier_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that read a checkpoint of ``fsmap train``."""
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where to look for data first")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda … (default: auto)")
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="the import path given to `fsmap train --model`, if the checkpoint is of a model of "
        "your own; its code is imported and run",
    )


def load_classifier(path: Path, device: str, model: str | None) -> tuple[nn.Module, dict[str, Any]]:
    """Load a network, and say so if its training has not come to its end."""
    from fsmap.images import load_model
    from fsmap.types import as_device

    module, progress = load_model(path, as_device(device), model=model)
    epochs, done = progress["settings"].epochs, len(progress["history"])
    if done < epochs:
        console.note(f"{path} is unfinished: {done} of {epochs} epochs")
    return module, progress
