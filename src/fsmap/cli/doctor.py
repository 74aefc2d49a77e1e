"""``fsmap doctor``: is J(theta; p_X) singular for this module, why, and what would it cost?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from fsmap.cli import console
from fsmap.cli.options import count
from fsmap.errors import CheckpointError, InputError, MissingDataError
from fsmap.functional import check_points, num_points, take_points
from fsmap.types import Inputs, as_device

NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts put the weights
COLORS = {"[ok]": console.GREEN, "[!!]": console.RED, "[??]": console.DIM}


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = console.add_command(
        subparsers,
        "doctor",
        run,
        summary="is J(theta; p_X) singular for this module, why, and what would it cost?",
        examples=[
            "fsmap doctor mymodel:make                              # p_X = N(0, I)",
            "fsmap doctor 'mymodel:make?width=8' --px uniform --range -2 2",
            "fsmap doctor mymodel:Net --px images.pt --points 64    # your own points",
            "fsmap doctor mymodel:Net --shape 3,32,32 --weights net.safetensors --json",
        ],
    )
    parser.add_argument(
        "target",
        metavar="MODULE:FACTORY",
        help="what makes the module; looked for in the current folder too",
    )
    parser.add_argument(
        "--px",
        default="normal",
        help="normal (default), uniform, or a file of points: .pt .safetensors .npy .csv",
    )
    parser.add_argument(
        "--points", type=count, metavar="N", help="how many points (default: 256; of a file, all)"
    )
    parser.add_argument("--shape", metavar="D,D,…", help="shape of one point, for normal, uniform")
    parser.add_argument(
        "--range", type=float, nargs=2, default=(-1.0, 1.0), metavar=("LOW", "HIGH")
    )
    parser.add_argument("--weights", type=Path, metavar="FILE", help="a state_dict to load first")
    parser.add_argument("--jitter", type=float, metavar="EPS", help="an epsilon to judge")
    parser.add_argument("--num-data", type=int, metavar="N", help="training points, for lambda")
    parser.add_argument(
        "--train-mode", action="store_true", help="examine it in training mode (default: eval)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 … (default: cpu)")
    parser.add_argument("--seed", type=int, default=0, help="of the factory and of the points")
    parser.add_argument("--json", action="store_true", help="JSON instead of the page")


def run(arguments: argparse.Namespace) -> int:
    """Examine a module; the exit code is 0."""
    from fsmap.doctor.doctor import doctor
    from fsmap.models.by_name import make_model

    module = make_model(arguments.target, {}, seed=arguments.seed)
    if arguments.weights is not None:
        load_weights(module, arguments.weights)
    module.to(as_device(arguments.device)).train(arguments.train_mode)
    diagnosis = doctor(
        module,
        _points(module, arguments),
        jitter=arguments.jitter,
        num_data=arguments.num_data,
    )
    if arguments.json:
        console.say(diagnosis.to_json())
    else:
        for line in str(diagnosis).splitlines():
            console.say(_colored(line))
    return 0


def _points(module: nn.Module, arguments: argparse.Namespace) -> Inputs:
    if arguments.px not in ("normal", "uniform"):
        return load_points(Path(arguments.px), arguments.points, arguments.seed)
    from fsmap.px import Normal, Uniform

    shape = _shape(module, arguments.shape)
    generator = torch.Generator().manual_seed(arguments.seed)
    low, high = arguments.range
    px = Normal(shape=shape) if arguments.px == "normal" else Uniform(low, high, shape=shape)
    return px.sample(256 if arguments.points is None else arguments.points, generator)


def _shape(module: nn.Module, given: str | None) -> tuple[int, ...]:
    if given is not None:
        try:
            return tuple(int(size) for size in given.split(","))
        except ValueError as error:
            message = f"--shape must be numbers like 3,32,32, got {given!r}"
            raise InputError(message) from error
    first = next(
        (m for m in module.modules() if any(True for _ in m.parameters(recurse=False))), None
    )
    if isinstance(first, nn.Linear):
        return (first.in_features,)
    message = (
        f"the shape of a point cannot be guessed: the first layer is {type(first).__name__}. Give "
        "--shape (like 3,32,32), or points in files with --px FILE."
    )
    raise InputError(message)


def _colored(line: str) -> str:
    mark = line[:4]
    if mark in COLORS:
        return console.styled(mark, COLORS[mark]) + line[4:]
    head, colon, rest = line.partition(": ")
    return console.styled(head, console.BOLD) + colon + rest if head.isupper() and colon else line


def load_weights(module: nn.Module, file: Path) -> None:
    """Load a state_dict into a module."""
    state = _read(file)
    for key in NESTED:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        message = f"{file} holds {type(state).__name__}, not a state_dict"
        raise CheckpointError(message)
    try:
        module.load_state_dict(state)
    except (RuntimeError, AttributeError, TypeError) as error:
        first = " ".join(str(error).split())[:300]
        message = f"{file} does not fit {type(module).__name__}: {first}"
        raise CheckpointError(message) from error


def load_points(file: Path, number: int | None, seed: int) -> Inputs:
    """The points of a file, or so many of them at random."""
    x = _read(file)
    x = tuple(x) if isinstance(x, list) else x
    check_points(x)
    S = num_points(x)
    if number is None or number == S:
        return x
    if number > S:
        message = f"--points {number}: there are {S} points in {file}"
        raise InputError(message)
    order = torch.randperm(S, generator=torch.Generator().manual_seed(seed))
    return take_points(x, order[:number])


def _read(file: Path) -> Any:
    if not file.is_file():
        message = f"there is no file {file}"
        raise MissingDataError(message)
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        if file.suffix == ".npy":
            return torch.from_numpy(np.load(file))
        if file.suffix == ".csv":
            return torch.from_numpy(_csv(file))
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # what readers raise for a damaged file has no common base
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        message = f"{file} cannot be read as {file.suffix or 'a torch file'}: {first}"
        raise CheckpointError(message) from error


def _csv(file: Path) -> Any:
    """Numbers, with or without a first line of names."""
    try:
        return np.loadtxt(file, delimiter=",", ndmin=2)
    except ValueError:
        return np.loadtxt(file, delimiter=",", ndmin=2, skiprows=1)
