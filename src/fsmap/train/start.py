"""Where training starts: parameters that a seed decides."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import Functional, functional
from fsmap.linalg.probes import integer
from fsmap.types import ModelFn, Params

Init = Callable[[int], Params | nn.Module] | Params


def initialize(module: nn.Module, seed: int) -> Params:
    """Fresh parameters for an architecture, as its own layers initialize themselves.

    Args:
        module: The architecture; not changed.
        seed: Decides the parameters; torch's own generator is left as it was.

    Returns:
        Parameters, named as in ``functional(module)``.

    Raises:
        UnsupportedModuleError: If a submodule has parameters but no ``reset_parameters``.
    """
    places = {n: p.device for n, p in module.named_parameters()}
    fresh = copy.deepcopy(module).cpu()  # so that a seed means the same on every device
    with _seeded(seed):
        for name, part in fresh.named_modules():
            if not any(p.requires_grad for p in part.parameters(recurse=False)):
                continue
            reset = getattr(part, "reset_parameters", None) or getattr(
                part, "_reset_parameters", None
            )
            if reset is None:
                message = (
                    f"cannot initialize {name or 'the module'!r} ({type(part).__name__}) from a "
                    "seed: it has parameters but no reset_parameters(). Give init=, a function "
                    "from seed to parameters or to a module."
                )
                raise UnsupportedModuleError(message)
            reset()
    return {n: p.to(places[n]) for n, p in _detached(functional(fresh)[1]).items()}


def start(init: Init | None, f: ModelFn, seed: int) -> Params:
    """The parameters that one seed starts from.

    Args:
        init: A function from the seed to parameters or to a module, parameters for every seed, or
            None: the layers of ``f``'s module initialize themselves.
        f: The model function.
        seed: The seed. A function that uses torch's own generator finds it seeded.

    Returns:
        Detached copies.

    Raises:
        InputError: If there is nothing to start from.
    """
    if init is None:
        if not isinstance(f, Functional):
            message = (
                "f is a plain function, so give init=: parameters, or a function from seed to them"
            )
            raise InputError(message)
        return initialize(f.module, seed)
    made: object = init
    if callable(init):
        with _seeded(seed):
            made = init(seed)
    if isinstance(made, nn.Module):
        made = functional(made)[1]
    if not isinstance(made, dict) or not made:
        message = f"init must give a dict of parameters or a module, got {type(made).__name__}"
        raise InputError(message)
    return _detached(made)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Torch's own generators, seeded, and put back afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(integer(seed, "init"))
        if devices:
            torch.cuda.manual_seed(integer(seed, "init"))
        yield


def _detached(params: Params) -> Params:
    return {n: p.detach().clone() for n, p in params.items()}
