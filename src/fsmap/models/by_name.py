"""Models by name: ours, or anybody's by import path."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.models.resnet import resnet18, resnet50_imagenet

OURS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "resnet50-imagenet": resnet50_imagenet,
}


def is_ours(name: str) -> bool:
    """Whether a name stands for a model of this package, so that building it runs no other code."""
    path, _, query = name.partition("?")
    return path in OURS and "files" not in query


def make_model(name: str, offered: Mapping[str, Any], *, seed: int) -> nn.Module:
    """Build a model; torch's own generator is left as it was.

    Args:
        name: ``resnet18``, or ``package.module:factory`` with options behind a question mark:
            ``torchvision.models:resnet18?num_classes=10``, ``mynet:make?depth=3&act='gelu'``. The
            current folder is looked into as well.
        offered: What the caller knows, such as ``classes``, ``channels``, ``width``: passed where
            the factory has a parameter of that name (``num_classes`` and ``in_chans`` are
            understood) and the options do not say otherwise.
        seed: Of the initial weights.

    Example:
        >>> make_model("torch.nn:Linear?in_features=2&out_features=3", {}, seed=0)
        Linear(in_features=2, out_features=3, bias=True)
    """
    factory, options = _resolve(name)
    options = {**_understood(factory, offered), **options}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            module = factory(**options)
        except Exception as error:  # whatever the model's code raises
            raise UnsupportedModuleError(
                f"{name} could not be built with {options}: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(module, nn.Module):
        raise UnsupportedModuleError(
            f"{name} made a {type(module).__name__}, not a torch.nn.Module"
        )
    return module


def _resolve(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    path, _, query = name.partition("?")
    options = dict(_option(part) for part in query.split("&") if part)
    if path in OURS:
        return OURS[path], options
    if not all(path.partition(":")):
        raise InputError(
            f"unknown model {name!r}. Known: {', '.join(OURS)}; or give an import path, "
            "package.module:factory"
        )
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found = pkgutil.resolve_name(path)
    except Exception as error:  # whatever the model's code raises
        raise InputError(
            f"cannot import the model {path!r}: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise InputError(f"{path} is a {type(found).__name__}, not something that can be called")
    return found, options


def _option(part: str) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    if not equals or not key:
        raise InputError(f"options of a model are written key=value&key=value, got {part!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


SYNONYMS = {"classes": ("classes", "num_classes"), "channels": ("channels", "in_chans")}


def _understood(factory: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """What the factory has a parameter for."""
    try:
        known = inspect.signature(factory).parameters
    except ValueError:  # builtins without a signature
        return {}
    return {
        spelled: value
        for key, value in offered.items()
        for spelled in SYNONYMS.get(key, (key,))
        if spelled in known
    }
