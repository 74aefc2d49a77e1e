"""``fsmap assess``: how good and how calibrated is a trained image classifier?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.cli import console
from fsmap.cli.options import CLASSIFIER, add, count, load_classifier
from fsmap.errors import InputError, MissingDataError, require

if TYPE_CHECKING:
    from torch import Tensor

    from fsmap.assess.shift import Assessment
    from fsmap.data.images import Images
    from fsmap.images import ImageSettings

FOREIGN = {
    "fashion-mnist": "kmnist",
    "mnist": "fashion-mnist",
    "cifar10": "cifar100",
    "cifar100": "cifar10",
}
"""The set that a classifier is shown as foreign, unless another is asked for."""

PERCENT = ("accuracy", "selective", "ece", "ece_scaled")


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = console.add_command(
        subparsers,
        "assess",
        run,
        summary="measure a trained image classifier: accuracy, calibration, shift, OOD, R",
        examples=[
            "fsmap assess runs/a                              # test images, T, OOD, R",
            "fsmap assess runs/a --corruptions all            # ten corruptions, five severities",
            "fsmap assess runs/a --corruptions contrast pixelate --severities 1 5",
            "fsmap assess runs/a --shift cifar10.1 --json",
        ],
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a file, or its folder")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="for the JSON and pictures (CKPT's folder)"
    )
    parser.add_argument(
        "--corruptions", nargs="*", default=[], metavar="NAME", help="names, or all"
    )
    every = [1, 2, 3, 4, 5]
    parser.add_argument(
        "--severities", nargs="+", type=int, choices=every, default=every, metavar="N", help="1–5"
    )
    parser.add_argument("--shift", nargs="*", metavar="NAME", help="other test sets: cifar10.1")
    parser.add_argument("--ood", nargs="*", metavar="NAME", help="foreign sets (by data set)")
    parser.add_argument("--points", type=count, default=500, metavar="N", help="points for R (500)")
    parser.add_argument(
        "--limit", type=count, metavar="N", help="only so many test images; writes assessment-N"
    )
    add(parser, CLASSIFIER)
    parser.add_argument("--json", action="store_true", help="JSON instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Measure, write, and say what was found."""
    from fsmap.assess.shift import Classifier, assess_images
    from fsmap.files import make_folder, write_whole
    from fsmap.images.build import load_data
    from fsmap.paper.report.figures import assessment_figure, save, style
    from fsmap.paper.rows import plain

    require("matplotlib", extra="report")
    corruptions = _corruptions(arguments)
    module, progress = load_classifier(arguments.checkpoint, arguments.device, arguments.model)
    at = arguments.checkpoint
    out = arguments.out or (at if at.is_dir() else at.parent)
    make_folder(out)
    settings: ImageSettings = progress["settings"]
    task = load_data(settings, arguments.data_dir)
    foreign = _foreign(arguments, settings)
    test = task.test.take(slice(arguments.limit))
    found = assess_images(
        Classifier(module, task.normalize),
        test,
        task.valid,
        foreign=foreign,
        shifted={n: _images(n, arguments.data_dir, settings) for n in arguments.shift or ()},
        corruptions=corruptions,
        points={"train": task.train.x[: arguments.points]}
        | {name: images[: arguments.points] for name, images in foreign.items()},
        advance=console.note,
    )
    about: dict[str, Any] = {
        "checkpoint": str(at),
        "settings": settings.describe(),
        "step": progress["step"],
        "epoch": len(progress["history"]),
        "reg_strength": progress["reg_strength"],
        "test_images": len(test.x),
        "points": arguments.points,
    }
    described = plain(about | found.describe())
    name = "assessment" if arguments.limit is None else f"assessment-{arguments.limit}"
    write_whole(out / f"{name}.json", json.dumps(described, indent=1) + "\n")
    with style():
        save(assessment_figure(found), out, name)
    if arguments.json:
        console.say(json.dumps(described))
    else:
        _tell(found)
        console.say(f"\n{out}/{name}.json, .svg and .png written")
    return 0


def _corruptions(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    from fsmap.assess.shift import CORRUPTIONS, check_corruption

    names = list(CORRUPTIONS) if arguments.corruptions == ["all"] else arguments.corruptions
    chosen = [(name, severity) for name in names for severity in arguments.severities]
    for one in chosen:
        check_corruption(*one)
    return chosen


def _foreign(arguments: argparse.Namespace, settings: ImageSettings) -> dict[str, Tensor]:
    """Images of other sets: those asked for, or the usual one where it is there."""
    from fsmap.data.catalogue import find
    from fsmap.data.images import facts_of, generate, is_folder

    def first(name: str) -> Tensor:
        return _images(name, arguments.data_dir, settings).x[:10_000]

    if settings.generated:
        return {"generated": generate(facts_of(settings.data).shape, 1_000, seed=2).x}
    if arguments.ood is not None:
        return {name: first(name) for name in arguments.ood}
    if is_folder(settings.data):
        return {}
    usual = FOREIGN[find(settings.data).name]
    try:
        return {usual: first(usual)}
    except MissingDataError as error:
        console.note(f"OOD detection is left out: {error}")
        return {}


def _images(name: str, data_dir: Path | None, settings: ImageSettings) -> Images:
    """Another set, its test images if it has a split, of the shape of the training images."""
    from fsmap.data.catalogue import find
    from fsmap.data.images import READERS, facts_of, read_images

    known = find(name, READERS).name
    splits = READERS[known][0] if known in READERS else ("test",)
    images = read_images(name, "test" if "test" in splits else splits[0], data_dir)
    shape, trained = tuple(images.x.shape[1:]), tuple(facts_of(settings.data).shape)
    if shape != trained:
        message = (
            f"images of {name} have the shape {shape}, those of {settings.data}, on which the "
            f"model was trained, {trained}: name another set"
        )
        raise InputError(message)
    return images


def _tell(found: Assessment) -> None:
    from fsmap.assess.shift import METRICS
    from fsmap.paper.report.tables import number

    def cell(values: dict[str, float], metric: str) -> str:
        scale = 100 if metric in PERCENT else 1
        return number(scale * values[metric], 4) if metric in values else ""

    header = ["", *(name.replace("_", " ") for name in METRICS)]
    sets = found.sets.items()
    console.table(header, [[name, *(cell(values, m) for m in METRICS)] for name, values in sets])
    console.say()
    if found.temperature is not None:
        confident = "over" if found.temperature > 1 else "under"
        console.say(f"T = {found.temperature:.3f} on held-out images: {confident}-confident")
    for name, value in found.ood.items():
        console.say(f"OOD AUROC against {name}: {value:.4f}")
    for name, (value, stderr) in found.laplacian.items():
        console.say(f"R at {name}: {number(value, 3)} ± {number(stderr, 2)}")
    console.say("accuracy, selective prediction and ECE in percent; scaled: after T")
