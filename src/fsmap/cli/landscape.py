"""Training loss along filter-normalized random directions, as in Fig. 6.

Examples:
  fsmap landscape runs/a runs/b                  # two networks in one picture
  fsmap landscape runs/a --reach 1 --steps 21    # nearer to the minimum
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsmap import cli
from fsmap.assess.landscape import Landscape, check_walk, flatness, landscape
from fsmap.cli.assess import load_classifier, load_images
from fsmap.errors import InputError
from fsmap.files import make_folder, plain, write_whole
from fsmap.paper.report.figures import landscape_figure, save, style

OPTIONS = {
    "checkpoints CKPT+": (Path, "files, or their folders"),
    "--out DIR": (Path, "output folder (default: landscape)", Path("landscape")),
    "--directions N": (cli.count, "number of directions (20)", 20),
    "--steps N": (int, "number of steps, odd (41)", 41),
    "--reach X": (float, "largest step, in filter norms (5)", 5.0),
    "--images N": (cli.count, "number of training images (2000)", 2_000),
    "--seed N": (cli.seed, "seed of the directions (0)", 0),
    **cli.CLASSIFIER,
}


def run(arguments: argparse.Namespace) -> None:
    """Measure, plot, and print how much the loss rises."""
    cli.check_installed("matplotlib", extra="report")
    check_walk(arguments.steps, arguments.reach, dashes="--")
    if len(set(arguments.checkpoints)) < len(arguments.checkpoints):
        raise InputError("the same network is given twice")
    loaded = {str(path): load_classifier(path, arguments) for path in arguments.checkpoints}
    make_folder(arguments.out)
    found = {name: _walk(name, *one, arguments) for name, one in loaded.items()}
    described = {name: one._asdict() | {"mean": one.mean} for name, one in found.items()}
    write_whole(arguments.out / "landscape.json", json.dumps(plain(described)) + "\n")
    with style():
        save(landscape_figure(found), arguments.out, "landscape")
    within = min(max(1.0, 2 * arguments.reach / (arguments.steps - 1)), arguments.reach)
    lines = [[name, f"{flatness(one, within):.4g}"] for name, one in found.items()]
    cli.table(["", f"mean rise of the loss, steps up to {within:g}"], lines)
    cli.say(f"{arguments.out}/landscape.json, .svg and .png written")


def _walk(
    name: str, module: nn.Module, progress: dict[str, Any], arguments: argparse.Namespace
) -> Landscape:
    device = next(module.parameters()).device
    task = load_images(Path(name), progress, arguments.data_dir)
    images = task.train.take(slice(arguments.images))
    cli.note(f"{name}: {arguments.directions} directions, {arguments.steps} steps")
    return landscape(
        module,
        task.normalize(images.x.to(device)),
        images.y.to(device),
        steps=torch.linspace(-arguments.reach, arguments.reach, arguments.steps),
        directions=arguments.directions,
        generator=torch.Generator().manual_seed(arguments.seed),
    )
