"""Options that several commands have: device, seeds, trained classifiers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.cli import console
from fsmap.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

SEEDS = 2**32
"""Seeds are smaller: numpy takes no larger ones."""

UNITS = 100_000
"""Most units of a hidden layer."""


def check(arguments: argparse.Namespace) -> None:
    """Raise InputError for a seed, a device or a size of a layer that cannot be used."""
    for name in ("seed", "split_seed", "label_noise_seed"):
        check_seed(getattr(arguments, name, None), name)
    for units in (getattr(arguments, "hidden", None) or "").split(","):
        if units.strip().isdecimal() and int(units) > UNITS:
            message = f"--hidden: a layer has at most {UNITS:,} units, got {units.strip()}"
            raise InputError(message)
    if getattr(arguments, "device", None) is not None:
        device_of(arguments.device)


def check_seed(seed: int | None, name: str) -> None:
    """Raise InputError for a seed that torch or numpy does not take."""
    if seed is not None and not 0 <= seed < SEEDS:
        message = f"--{name.replace('_', '-')} must lie in 0..{SEEDS - 1}, got {seed}"
        raise InputError(message)


def device_of(name: str) -> torch.device:
    """A device by name; auto is CUDA where there is one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        message = f"--device: torch knows no {name!r}; there are auto, cpu, cuda, cuda:1 …"
        raise InputError(message) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        message = "--device cuda: torch sees no CUDA device here. Use --device cpu."
        raise InputError(message)
    return device


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, for checkpoints of models that are not of this package."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="the import path given to `fsmap train --model`, if the checkpoint is of a model of "
        "your own; its code is imported and run",
    )


def load_classifier(path: Path, device: str, model: str | None) -> tuple[nn.Module, dict[str, Any]]:
    """Load a network, and say so if its training has not come to its end."""
    from fsmap.images import load_model

    module, progress = load_model(path, device_of(device), model=model)
    epochs, done = progress["settings"].epochs, len(progress["history"])
    if done < epochs:
        console.note(f"{path} is unfinished: {done} of {epochs} epochs")
    return module, progress
