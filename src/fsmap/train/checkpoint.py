"""Checkpoints: one safetensors file with a checksum; a kill at any moment leaves a good one behind.

Tensors are named ``group/name``. The metadata of the file holds JSON: what run this is, where it
stands, versions, and the SHA-256 of everything else. Nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fsmap.errors import CheckpointError
from fsmap.functional import Functional
from fsmap.train.files import write_whole
from fsmap.types import ModelFn, Params

FORMAT = "fsmap-checkpoint-1"
PARTS = ("config", "progress")  # JSON objects
MADE = "made_with"  # entry of the config: what does not have to agree, but changes the last bits
UNREADABLE = (
    *(AttributeError, LookupError, TypeError, ValueError, ArithmeticError),
    *(RuntimeError, MemoryError),  # of torch: a shape or a size; RecursionError is one, too
)
DEPTH = 8  # terms hold terms that hold distributions; deeper objects are told apart by their type
SHOWN = 8  # numbers of a tensor that are written out; larger ones are told apart by their hash
SHORT = 4  # parts of a description that a message shows whole


class Checkpoint(NamedTuple):
    """What a file holds."""

    tensors: dict[str, Tensor]  # "group/name"
    config: dict[str, Any]  # what run this is: must agree on resume
    progress: dict[str, Any]  # where it stands

    def group(self, name: str) -> dict[str, Tensor]:
        """The tensors of one group, without its name in front."""
        start = f"{name}/"
        return {k.removeprefix(start): t for k, t in self.tensors.items() if k.startswith(start)}


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; the one that was there stays until the new one is complete on the disk.

    Args:
        path: The file.
        checkpoint: What to write.
    """
    tensors = {n: t.detach().cpu().contiguous().clone() for n, t in checkpoint.tensors.items()}
    about = {
        "format": FORMAT,
        "config": json.dumps({**checkpoint.config, MADE: _made(checkpoint)}, sort_keys=True),
        "progress": json.dumps(checkpoint.progress, sort_keys=True),
        "torch": torch.__version__,
    }
    about["sha256"] = _digest(tensors, about)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, safetensors.torch.save(tensors, about))


def load(path: Path, *, hint: str = "Restore a copy, or delete it to start over.") -> Checkpoint:
    """Read and verify a checkpoint.

    Args:
        path: The file.
        hint: What to do about a damaged one, for the message.

    Returns:
        What it holds, on the CPU.

    Raises:
        CheckpointError: If it is missing, truncated, altered, or something else.
    """
    if not path.is_file():
        message = f"there is no checkpoint at {path}"
        raise CheckpointError(message)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        message = f"{path} is truncated or no checkpoint at all ({error}). {hint}"
        raise CheckpointError(message) from error
    if about.get("format") != FORMAT:
        found = about.get("format")
        message = f"{path} is not an fsmap checkpoint: its format is {found!r}, not {FORMAT!r}"
        raise CheckpointError(message)
    if about.pop("sha256", None) != _digest(tensors, about):
        message = f"{path} was altered or damaged: its checksum does not fit its content. {hint}"
        raise CheckpointError(message)
    with readable(path, hint=hint):
        config, progress = (dict(json.loads(about[part]).items()) for part in PARTS)
        return Checkpoint(tensors, config, progress)


@contextmanager
def readable(
    path: Path, *, hint: str = "Restore a copy, or delete it to start over."
) -> Iterator[None]:
    """Turn the errors of code that reads a checkpoint's entries into one of fsmap's.

    A checksum says that a file is as it was written, not that fsmap wrote it.

    Args:
        path: The file.
        hint: What to do about it, for the message.

    Yields:
        Nothing.

    Raises:
        CheckpointError: If an entry is missing, or of another type or shape.
    """
    try:
        yield
    except UNREADABLE as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        message = f"{path} does not hold what a checkpoint of this kind holds ({reason}). {hint}"
        raise CheckpointError(message) from error


def check_same_run(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse to resume another run.

    Args:
        path: Where the checkpoint is, for the message.
        saved: Its config.
        here: The config of this run.

    Raises:
        CheckpointError: If they differ, with what differs.
    """
    _compare_circumstances(path, saved.get(MADE))
    old = _flat({key: value for key, value in saved.items() if key != MADE})
    new = _flat(json.loads(json.dumps(here)))
    keys = [k for k in {**old, **new} if old.get(k, "absent") != new.get(k, "absent")]
    if keys:
        lines = [_differ(k, old.get(k, "absent"), new.get(k, "absent")) for k in keys[:8]]
        more = f"; and {len(keys) - 8} more" if len(keys) > 8 else ""
        message = (
            f"the checkpoint {path} belongs to another run. {'; '.join(lines)}{more}. "
            "Use the settings it was made with, or another path."
        )
        raise CheckpointError(message)


def _made(checkpoint: Checkpoint) -> dict[str, int]:
    """What changes the order of sums, and with it the last bits of a run's numbers."""
    dist = torch.distributed
    spread = dist.is_available() and dist.is_initialized()
    made = {"processes": dist.get_world_size() if spread else 1}
    if all(t.device.type == "cpu" for t in checkpoint.tensors.values()):
        made["threads"] = torch.get_num_threads()
    return made


def _compare_circumstances(path: Path, made: Any) -> None:
    """Say that a resumed run will differ in its last bits, where it will."""
    here = _made(Checkpoint({}, {}, {}))
    there = made if isinstance(made, dict) else {}
    words = [f"{there[k]} {k} there, {here[k]} here" for k in there if there[k] != here.get(k)]
    if words:
        message = (
            f"resuming {path} in other circumstances ({'; '.join(words)}): sums are taken in "
            "another order, so the last bits of the numbers differ from an uninterrupted run."
        )
        warnings.warn(message, UserWarning, stacklevel=5)


def _differ(key: str, there: Any, here: Any) -> str:
    """What differs; of two long descriptions only the parts that do, of one its beginning."""
    one, other = (str(value).split(", ") for value in (there, here))
    mine, yours = ([part for part in a if part not in b] for a, b in ((one, other), (other, one)))
    if min(len(one), len(other)) > SHORT and (mine or yours):
        one, other = mine, yours
    elif max(len(one), len(other)) > SHORT >= min(len(one), len(other)):
        one, other = ([*some[:SHORT], "…"] if len(some) > SHORT else some for some in (one, other))
    return f"{key}: {', '.join(one)} there, {', '.join(other)} here"


def _flat(tree: Any, name: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping):
        found: dict[str, Any] = {}
        for key, value in tree.items():
            found |= _flat(value, f"{name}.{key}" if name else str(key))
        return found
    if isinstance(tree, list) and any(isinstance(item, list | Mapping) for item in tree):
        return _flat({str(i): item for i, item in enumerate(tree)}, name)
    return {name: tree}


def _digest(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """SHA-256 of metadata, names, types, shapes and bytes."""
    found = hashlib.sha256()
    for key in sorted(about):
        found.update(f"{key}\x1f{about[key]}\x1e".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}\x1e".encode())
        found.update(tensor_bytes(tensor))
    return found.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def describe(value: Any, depth: int = DEPTH) -> Any:
    """A value as JSON, the same for equal values in every process: no addresses, no hash order."""
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
