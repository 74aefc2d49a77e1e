"""What the doctor works on: a float64 copy of a module, without dropout, that nobody else sees."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import DROP_RATES, Forward, Functional, functional
from fsmap.linalg import points
from fsmap.linalg.jacobian import outputs
from fsmap.types import Inputs, Params


@contextmanager
def own_randomness(module: nn.Module) -> Iterator[None]:
    """Whatever random layers draw in here is drawn again by the user's next pass."""
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        yield


@contextmanager
def quiet(module: nn.Module, notes: list[str]) -> Iterator[nn.Module]:
    """A copy of the module, without dropout."""
    functional(module)  # refuses modules without trainable parameters, before anything is copied
    try:
        twin = copy.deepcopy(module)
    except Exception as error:
        message = (
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}), and the "
            "doctor works on a copy. Build the module anew, load its state_dict, and examine that."
        )
        raise UnsupportedModuleError(message) from error
    silenced = 0
    for m in twin.modules():
        for name in DROP_RATES:
            rate = getattr(m, name, None)
            if m.training and isinstance(rate, int | float) and 0 < rate <= 1:
                setattr(m, name, 0.0)
                silenced += 1
    if silenced:
        notes.append("dropout is active in this module; it was switched off for the examination")
    yield twin


def prepare(
    module: nn.Module, x: Inputs, forward: Forward | None, notes: list[str]
) -> tuple[Functional, Params, Inputs]:
    """The module as a function in float64; in its own precision where it insists on that.

    Args:
        module: The module; copied again, because its dtype changes.
        x: Points.
        forward: How to call it.
        notes: What has to be said is added here.

    Returns:
        Function, parameters and points in one precision.
    """
    first = next(p for p in module.parameters() if p.requires_grad)
    own = first.dtype
    device = first.device if first.device.type in ("cpu", "cuda") else torch.device("cpu")
    try:
        return _in(torch.float64, module, x, forward, device)
    except InputError as error:
        ready = _in(own, module, x, forward, device)  # raises if it is not the precision
        name, why = str(own).removeprefix("torch."), str(error.__cause__ or error).splitlines()[0]
        notes.append(
            f"the module does not run in float64 ({why[:80]}); it was examined in {name}, where "
            "null directions are less certain"
        )
        return ready


def _in(
    dtype: torch.dtype, module: nn.Module, x: Inputs, forward: Forward | None, device: torch.device
) -> tuple[Functional, Params, Inputs]:
    f, params = functional(copy.deepcopy(module).to(device, dtype), forward=forward)
    cast = points.to(x, device=device, dtype=dtype)
    with torch.no_grad():
        out = outputs(f, params, points.take(cast, slice(0, 4)))
    if not bool(torch.isfinite(out).all()):
        message = "the module returns NaN or inf at these points. Initialize or train it first."
        raise InputError(message)
    return f, params, cast
