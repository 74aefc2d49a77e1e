"""Weights and points in files, read without running anything that is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fsmap.errors import CheckpointError, InputError, MissingDataError
from fsmap.linalg import points
from fsmap.types import Inputs

NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts put the weights


def load_weights(module: nn.Module, file: Path) -> None:
    """Load a state_dict into a module.

    Args:
        module: The module; every key has to fit.
        file: ``.safetensors``, or what ``torch.save`` wrote.

    Raises:
        CheckpointError: If the file does not hold tensors that fit.
    """
    state = _read(file)
    while isinstance(state, dict) and not any(isinstance(v, Tensor) for v in state.values()):
        inner = next((state[key] for key in NESTED if key in state), None)
        if inner is None:
            break
        state = inner
    if not isinstance(state, dict):
        message = f"{file} holds {type(state).__name__}, not a state_dict"
        raise CheckpointError(message)
    try:
        module.load_state_dict(state)
    except (RuntimeError, AttributeError, TypeError) as error:
        first = " ".join(str(error).split())[:300]
        message = f"{file} does not fit {type(module).__name__}: {first}"
        raise CheckpointError(message) from error


def load_points(files: list[Path], number: int | None, seed: int) -> Inputs:
    """Points out of files, one after another.

    Args:
        files: ``.pt``, ``.safetensors``, ``.npy``, ``.npz`` or ``.csv``.
        number: How many, drawn without replacement; None: all.
        seed: Of the draw.

    Returns:
        A tensor, or a dict of tensors.

    Raises:
        InputError: If they do not fit together, or are fewer than asked for.
    """
    parts = [_as_points(_read(file), file) for file in files]
    for part in parts:
        points.check(part)
    x = parts[0]
    try:
        for part in parts[1:]:
            x = points.concat(x, part)
    except (ValueError, RuntimeError, TypeError) as error:
        message = f"the points of {', '.join(map(str, files))} do not fit together: {error}"
        raise InputError(message) from error
    S = points.count(x)
    if number is None or number == S:
        return x
    if not 0 < number < S:
        message = f"--points {number}: there are {S} points in {', '.join(map(str, files))}"
        raise InputError(message)
    order = torch.randperm(S, generator=torch.Generator().manual_seed(seed))
    return points.take(x, order[:number])


def _read(file: Path) -> Any:
    if not file.is_file():
        message = f"there is no file {file}"
        raise MissingDataError(message)
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        if file.suffix == ".npy":
            return np.load(file)
        if file.suffix == ".npz":
            return dict(np.load(file))
        if file.suffix == ".csv":
            return _csv(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # what readers raise for a damaged file has no common base
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        message = f"{file} cannot be read as {file.suffix or 'a torch file'}: {first}"
        raise CheckpointError(message) from error


def _csv(file: Path) -> Any:
    """Numbers, with or without a first line of names."""
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    try:
        [float(cell) for cell in lines[0].split(",")] if lines else None
        skip = 0
    except ValueError:
        skip = 1
    return np.loadtxt(lines[skip:], delimiter=",", ndmin=2)


def _as_points(value: Any, file: Path) -> Inputs:
    def tensor(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return torch.from_numpy(np.ascontiguousarray(leaf))
        return leaf

    x = tree_map(tensor, tuple(value) if isinstance(value, list) else value)
    if isinstance(x, Tensor | dict | tuple):
        return x
    message = f"{file} holds {type(value).__name__}, not a tensor or a dict of tensors"
    raise InputError(message)
