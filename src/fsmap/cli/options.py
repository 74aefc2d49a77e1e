"""Options that several commands have: tables of them, device, seeds, numbers, classifiers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.cli import console
from fsmap.errors import InputError

if TYPE_CHECKING:
    from torch import nn

SEEDS = 2**32
"""Seeds are smaller: numpy takes no larger ones."""

FLAG, TOGGLE, MANY = "flag", "toggle", "many"
"""Kinds of options: without a value, with a ``--no-`` form, and one that can be repeated."""

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


def add(parser: Any, table: Mapping[str, tuple[Any, ...]]) -> None:
    """Add options: ``--name VALUE`` to its kind (or type, or choices), help and default."""
    for words, (kind, text, *default) in table.items():
        name, _, metavar = words.partition(" ")
        own: dict[str, Any] = {"help": text, "default": default[0] if default else None}
        if kind == FLAG:
            own |= {"action": "store_true", "default": False}
        elif kind == TOGGLE:
            own["action"] = argparse.BooleanOptionalAction
        elif kind == MANY:
            own |= {"action": "append", "default": [], "metavar": metavar}
        elif isinstance(kind, tuple):
            own["choices"] = kind
        else:
            own |= {"type": kind, "metavar": metavar}
        parser.add_argument(name, **own)


def check(arguments: argparse.Namespace) -> None:
    """Raise InputError for a seed, a device or a data folder that cannot be used."""
    for name in ("seed", "split_seed", "label_noise_seed"):
        check_seed(getattr(arguments, name, None), name)
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


def number(text: str, least: float = -math.inf) -> float:
    """The type of an option that is a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        more = "" if math.isinf(least) else f", {least:g} or more"
        message = f"must be a finite number{more}, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return value


def count(text: str) -> int:
    """The type of an option that counts something."""
    value = number(text)
    if value < 1 or not value.is_integer():
        message = f"must be a whole number, 1 or more, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(value)


def seconds(text: str) -> float:
    """The type of an option that is a time."""
    return number(text, 0)


def load_classifier(path: Path, device: str, model: str | None) -> tuple[nn.Module, dict[str, Any]]:
    """Load a network, and say so if its training has not come to its end."""
    from fsmap.images import load_model
    from fsmap.types import as_device

    module, progress = load_model(path, as_device(device), model=model)
    epochs, done = progress["settings"].epochs, len(progress["history"])
    if done < epochs:
        console.note(f"{path} is unfinished: {done} of {epochs} epochs")
    return module, progress
