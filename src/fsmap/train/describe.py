"""A run in plain values, so that two runs can be compared: what a checkpoint belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsmap.functional import Functional
from fsmap.train.checkpoint import tensor_bytes
from fsmap.types import ModelFn, Params

DEPTH = 8  # terms hold terms that hold distributions; deeper objects are told apart by their type
SHOWN = 8  # numbers of a tensor that are written out; larger ones are told apart by their hash


def describe(value: Any, depth: int = DEPTH) -> Any:
    """A value as JSON, the same for equal values in every process: no addresses, no hash order.

    Args:
        value: A number, tensor, term, distribution or function, a dict or a sequence of these.
        depth: How far to look into objects.

    Returns:
        Numbers, strings, lists and dicts.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, Mapping):
        return {str(k): describe(v, depth - 1) for k, v in value.items()} if depth else len(value)
    if hasattr(value, "_asdict"):
        return {"type": _name(type(value)), **describe(value._asdict(), depth)}
    if isinstance(value, list | tuple | range):
        return [describe(item, depth - 1) for item in value] if depth else len(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return _name(value)
    state = getattr(value, "__dict__", None)
    if state and depth:
        return {"type": _name(type(value)), **describe(state, depth - 1)}
    return _name(type(value))


def describe_model(f: ModelFn, params: Params) -> dict[str, Any]:
    """The architecture as far as it can be seen: the module's text, shapes and dtypes."""
    text = repr(f.module) if isinstance(f, Functional) else describe(f)
    shapes = {n: f"{p.dtype} {list(p.shape)}".removeprefix("torch.") for n, p in params.items()}
    return {"module": text, "parameters": shapes}


def _tensor(value: Tensor) -> Any:
    value = value.detach()
    if value.ndim == 0:
        return value.item()
    kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value.numel() <= SHOWN:
        return f"{kind} {value.tolist()}"
    return f"{kind} sha256 {hashlib.sha256(tensor_bytes(value)).hexdigest()[:16]}"


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
