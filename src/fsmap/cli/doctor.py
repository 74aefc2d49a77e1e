"""Is J(theta; p_X) singular for this module, why, and which jitter helps?

Examples:
  fsmap doctor mymodel:make                              # p_X = N(0, I)
  fsmap doctor 'mymodel:make?width=8' --px uniform --range -2 2
  fsmap doctor mymodel:Net --px images.pt --points 64    # your own points
  fsmap doctor mymodel:Net --shape 3,32,32 --weights net.safetensors --json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from fsmap import cli
from fsmap.doctor.doctor import doctor
from fsmap.errors import CheckpointError, InputError, MissingDataError
from fsmap.functional import as_device, check_points, num_points, take_points
from fsmap.images.build import make_model
from fsmap.px import Normal, Uniform
from fsmap.types import Inputs

NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts put the weights
COLORS = {"[ok]": cli.GREEN, "[!!]": cli.RED, "[??]": cli.DIM}

OPTIONS = {
    "target MODULE:FACTORY": (str, "makes the module; the current folder is searched, too"),
    "--px PX": (str, "normal (default), uniform, or a file: .pt .safetensors .npy .csv", "normal"),
    "--points N": (cli.count, "number of points (default: 256, or all points of the file)"),
    "--shape D,D,…": (str, "shape of one point, for normal, uniform"),
    "--range LOW HIGH": (float, "range of uniform (-1 1)", (-1.0, 1.0)),
    "--weights FILE": (Path, "a state_dict to load first"),
    "--jitter EPS": (float, "an epsilon to evaluate"),
    "--num-data N": (int, "number of training points, for lambda"),
    "--train-mode": (cli.FLAG, "examine it in training mode (default: eval)"),
    "--device NAME": (str, "cpu, cuda, cuda:1 … (default: cpu)", "cpu"),
    "--seed N": (cli.seed, "seed of the factory and of the points", 0),
    "--json": (cli.FLAG, "JSON instead of the page"),
}


def run(arguments: argparse.Namespace) -> None:
    """Examine a module."""
    module = make_model(arguments.target, {}, seed=arguments.seed)
    if arguments.weights is not None:
        _load_weights(module, arguments.weights)
    module.to(as_device(arguments.device)).train(arguments.train_mode)
    x = _points(module, arguments)
    diagnosis = doctor(module, x, jitter=arguments.jitter, num_data=arguments.num_data)
    if arguments.json:
        cli.say(diagnosis.to_json())
        return
    for line in str(diagnosis).splitlines():
        mark, rest = line[:4], line[4:]
        cli.say(cli.styled(mark, COLORS[mark]) + rest if mark in COLORS else line)


def _points(module: nn.Module, arguments: argparse.Namespace) -> Inputs:
    """Points drawn from p_X, or the points of a file, or a random sample of those."""
    number, px = arguments.points, arguments.px
    generator = torch.Generator().manual_seed(arguments.seed)
    if px in ("normal", "uniform"):
        shape = _shape(module, arguments.shape)
        low, high = arguments.range
        drawn = Normal(shape=shape) if px == "normal" else Uniform(low, high, shape=shape)
        return drawn.sample(256 if number is None else number, generator)
    x = _read(Path(px))
    x = tuple(x) if isinstance(x, list) else x
    check_points(x)
    S = num_points(x)
    if number is None or number == S:
        return x
    if number > S:
        raise InputError(f"--points {number}: there are {S} points in {px}")
    return take_points(x, torch.randperm(S, generator=generator)[:number])


def _shape(module: nn.Module, given: str | None) -> tuple[int, ...]:
    if given is not None:
        try:
            return tuple(int(size) for size in given.split(","))
        except ValueError as error:
            raise InputError(f"--shape must be numbers like 3,32,32, got {given!r}") from error
    first = next((m for m in module.modules() if [*m.parameters(recurse=False)]), None)
    if isinstance(first, nn.Linear):
        return (first.in_features,)
    raise InputError(
        f"the shape of a point cannot be guessed: the first layer is {type(first).__name__}. Give "
        "--shape (like 3,32,32), or points in files with --px FILE."
    )


def _load_weights(module: nn.Module, file: Path) -> None:
    state = _read(file)
    for key in NESTED:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} holds {type(state).__name__}, not a state_dict")
    try:
        module.load_state_dict(state)
    except (RuntimeError, AttributeError, TypeError) as error:
        first = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{file} does not fit {type(module).__name__}: {first}") from error


def _read(file: Path) -> Any:
    if not file.is_file():
        raise MissingDataError(f"there is no file {file}")
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
        kind = file.suffix or "a torch file"
        raise CheckpointError(f"{file} cannot be read as {kind}: {first}") from error


def _csv(file: Path) -> Any:
    """Numbers, with or without a first line of names."""
    try:
        return np.loadtxt(file, delimiter=",", ndmin=2)
    except ValueError:
        return np.loadtxt(file, delimiter=",", ndmin=2, skiprows=1)
