"""``fsmap landscape``: the training loss along random directions around trained networks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.cli import console
from fsmap.cli.options import CLASSIFIER, add, count, load_classifier
from fsmap.errors import InputError, require

if TYPE_CHECKING:
    from torch import nn

    from fsmap.assess.landscape import Landscape


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = console.add_command(
        subparsers,
        "landscape",
        run,
        summary="training loss along filter-normalized random directions, as in Fig. 6",
        examples=[
            "fsmap landscape runs/a runs/b                  # two networks in one picture",
            "fsmap landscape runs/a --reach 1 --steps 21    # nearer to the minimum",
        ],
    )
    parser.add_argument(
        "checkpoints", nargs="+", type=Path, metavar="CKPT", help="files, or their folders"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("landscape"), metavar="DIR", help="(default: landscape)"
    )
    parser.add_argument("--directions", type=count, default=20, metavar="N", help="how many (20)")
    parser.add_argument("--steps", type=int, default=41, metavar="N", help="odd (41)")
    parser.add_argument("--reach", type=float, default=5.0, help="largest step, filter norms (5)")
    parser.add_argument("--images", type=count, default=2_000, metavar="N", help="training images")
    parser.add_argument("--seed", type=int, default=0, help="of the directions (0)")
    add(parser, CLASSIFIER)


def run(arguments: argparse.Namespace) -> int:
    """Walk, draw, and say how much the loss rises."""
    from fsmap.assess.landscape import check_walk, flatness
    from fsmap.files import make_folder, write_whole
    from fsmap.paper.report.figures import landscape_figure, save, style
    from fsmap.paper.rows import plain

    require("matplotlib", extra="report")
    check_walk(arguments.steps, arguments.reach, dashes="--")
    names = _names(arguments.checkpoints)
    loaded = [  # all of them before any walk
        load_classifier(path, arguments.device, arguments.model) for path in arguments.checkpoints
    ]
    make_folder(arguments.out)
    found = {name: _walk(name, *one, arguments) for name, one in zip(names, loaded, strict=True)}
    described = {name: one._asdict() | {"mean": one.mean} for name, one in found.items()}
    write_whole(arguments.out / "landscape.json", json.dumps(plain(described)) + "\n")
    with style():
        save(landscape_figure(found), arguments.out, "landscape")
    step = 2 * arguments.reach / (arguments.steps - 1)
    within = min(max(1.0, step), arguments.reach)
    lines = [[name, f"{flatness(one, within):.4g}"] for name, one in found.items()]
    console.table(["", f"mean rise of the loss, steps up to {within:g}"], lines)
    console.say(f"{arguments.out}/landscape.json, .svg and .png written")
    return 0


def _names(paths: list[Path]) -> list[str]:
    """Names of the folders, with as many of their parents as it takes to tell them apart."""
    folders = [path if path.is_dir() or not path.suffix else path.parent for path in paths]
    folders = [folder.resolve() for folder in folders]
    for depth in range(1, 1 + max(len(folder.parts) for folder in folders)):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    message = "the same network is given twice"
    raise InputError(message)


def _walk(
    name: str, module: nn.Module, progress: dict[str, Any], arguments: argparse.Namespace
) -> Landscape:
    import torch

    from fsmap.assess.landscape import landscape
    from fsmap.images.build import load_data

    device = next(module.parameters()).device
    task = load_data(progress["settings"], arguments.data_dir)
    images = task.train.take(slice(arguments.images))
    console.note(f"{name}: {arguments.directions} directions, {arguments.steps} steps")
    return landscape(
        module,
        task.normalize(images.x.to(device)),
        images.y.to(device),
        steps=torch.linspace(-arguments.reach, arguments.reach, arguments.steps),
        directions=arguments.directions,
        generator=torch.Generator().manual_seed(arguments.seed),
    )
