"""Trained image classifiers as commands take them: a checkpoint, or the folder it is in."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.cli import console
from fsmap.cli.train_options import device_of

if TYPE_CHECKING:
    from torch import nn


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, for checkpoints of models that are not of this package."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="the import path given to `fsmap train --model`, if the checkpoint is of a model of "
        "your own; its code is imported and run",
    )


def load_classifier(path: Path, device: str, model: str | None) -> tuple[nn.Module, dict[str, Any]]:
    """Load a network, and say so if its training has not come to its end.

    Args:
        path: The file, or its folder.
        device: As the option has it.
        model: Import path of a model that is not of this package.

    Returns:
        As :func:`fsmap.train.images.load_model`.
    """
    from fsmap.train.images import load_model

    module, progress = load_model(path, device_of(device), model=model)
    epochs, done = progress["settings"].epochs, len(progress["history"])
    if done < epochs:
        console.note(f"{path} is unfinished: {done} of {epochs} epochs")
    return module, progress
