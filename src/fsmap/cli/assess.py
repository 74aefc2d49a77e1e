"""Measure a trained image classifier: accuracy, calibration, shift, OOD, R.

Examples:
  fsmap assess runs/a                              # test images, T, OOD, R
  fsmap assess runs/a --corruptions all            # ten corruptions, five severities
  fsmap assess runs/a --corruptions contrast pixelate --severities 1 5
  fsmap assess runs/a --shift cifar10.1 --json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fsmap import cli
from fsmap.assess import shift
from fsmap.data.images import ImageTask, facts_of, generate, read_others
from fsmap.errors import CheckpointError, MissingDataError
from fsmap.files import make_folder, plain, write_whole
from fsmap.functional import as_device
from fsmap.images import ImageSettings, build, load_model
from fsmap.metrics import TEMPERATURES
from fsmap.paper.report.figures import assessment_figure, save, style
from fsmap.paper.report.tables import number

PERCENT = ("accuracy", "selective", "ece", "ece_scaled")

OPTIONS: dict[str, tuple[Any, ...]] = {
    "checkpoint CKPT": (Path, "a file, or its folder"),
    "--out DIR": (Path, "folder for the JSON and pictures (CKPT's)"),
    "--corruptions NAME*": ({"choices": ["all", *shift.CORRUPTIONS]}, "names, or all", []),
    "--severities N+": ({"type": int, "choices": shift.SEVERITIES}, "1–5", shift.SEVERITIES),
    "--shift NAME*": (str, "other test sets: cifar10.1, or a folder with the same classes", []),
    "--ood NAME*": (str, "out-of-distribution sets or folders (default: by data set)"),
    "--points N": (cli.count, "number of points for R (500)", 500),
    "--limit N": (cli.count, "use the first N test images; writes assessment-N"),
    **cli.CLASSIFIER,
    "--json": (cli.FLAG, "JSON instead of the table"),
}


def run(arguments: argparse.Namespace) -> None:
    """Measure, write the files, print the results."""
    cli.check_installed("matplotlib", extra="report")
    at, data_dir = arguments.checkpoint, arguments.data_dir
    module, progress = load_classifier(at, arguments)
    out = arguments.out or (at if at.is_dir() else at.parent)
    make_folder(out)
    settings: ImageSettings = progress["settings"]
    task = load_images(at, progress, data_dir)
    foreign = _foreign(arguments, settings)
    test = task.test.take(slice(arguments.limit))
    names = shift.CORRUPTIONS if "all" in arguments.corruptions else arguments.corruptions
    found = shift.assess_images(
        shift.Classifier(module, task.normalize),
        test,
        task.valid,
        foreign=foreign,
        shifted={
            n: read_others(n, task.shape, "test", data_dir, task.names) for n in arguments.shift
        },
        corruptions=[(name, severity) for name in names for severity in arguments.severities],
        points={n: x[: arguments.points] for n, x in ({"train": task.train.x} | foreign).items()},
        advance=cli.note,
    )
    about: dict[str, Any] = {"checkpoint": str(at), "settings": settings.describe()}
    about |= {name: progress[name] for name in ("step", "reg_strength")}
    about |= {"epoch": len(progress["history"]), "test_images": len(test.x)}
    described = plain(about | {"points": arguments.points} | found.describe())
    name = "assessment" if arguments.limit is None else f"assessment-{arguments.limit}"
    write_whole(out / f"{name}.json", json.dumps(described, indent=1) + "\n")
    with style():
        save(assessment_figure(found), out, name)
    if arguments.json:
        cli.say(json.dumps(described))
    else:
        _print(found)
        cli.say(f"\n{out}/{name}.json, .svg and .png written")


def _foreign(given: argparse.Namespace, settings: ImageSettings) -> dict[str, Tensor]:
    """Out-of-distribution images: the sets of --ood, or the default one if its files are here."""
    facts, asked = facts_of(settings.data), given.ood
    if settings.generated and asked is None:
        return {"generated": generate(facts.shape, 1_000, seed=2).x}
    names = ([facts.foreign] if facts.foreign else []) if asked is None else asked
    try:
        return {n: read_others(n, facts.shape, "test", given.data_dir).x[:10_000] for n in names}
    except MissingDataError as error:
        if asked is not None:
            raise
        cli.note(f"OOD detection is left out: {error}")
        return {}


def _print(found: shift.Assessment) -> None:
    def cell(values: dict[str, float], metric: str) -> str:
        scale = 100 if metric in PERCENT else 1
        return number(scale * values[metric], 4) if metric in values else ""

    bound = found.temperature in TEMPERATURES
    metrics = [m for m in shift.METRICS if not (bound and m.endswith("_scaled"))]
    header = ["", *(name.replace("_", " ") for name in metrics)]
    cli.table(header, [[name, *(cell(v, m) for m in metrics)] for name, v in found.sets.items()])
    cli.say()
    if found.temperature is not None:
        says = "over-confident" if found.temperature > 1 else "under-confident"
        says = "a bound of the search, so it means nothing" if bound else says
        cli.say(f"T = {found.temperature:.3f} on held-out images: {says}")
    for name, value in found.ood.items():
        cli.say(f"OOD AUROC against {name}: {value:.4f}")
    for name, (value, stderr) in found.laplacian.items():
        cli.say(f"R at {name}: {number(value, 3)} ± {number(stderr, 2)}")
    cli.say("accuracy, selective prediction and ECE in percent; scaled: after T")


def load_classifier(path: Path, given: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """Load a network, with a note if its training is unfinished."""
    module, progress = load_model(path, as_device(given.device), model=given.model)
    epochs, done = progress["settings"].epochs, len(progress["history"])
    if done < epochs:
        cli.note(f"{path} is unfinished: {done} of {epochs} epochs")
    return module, progress


def load_images(path: Path, progress: dict[str, Any], data_dir: Path | None) -> ImageTask:
    """Load the data of a network; CheckpointError if they are not those it was trained on."""
    task, saved = build.load_data(progress["settings"], data_dir), progress["data"]
    if any(saved.get(name, one) != one for name, one in task.fingerprint().items()):
        raise CheckpointError(
            f"{path} was trained on other images than {task.name} has now, so that images for "
            "training could be among the test images. Restore them, or train again."
        )
    return task
