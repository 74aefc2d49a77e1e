"""Checkpoints: one safetensors file with a checksum, which is valid after a kill at any moment.

Tensors are named ``group/name``. The metadata of the file holds JSON: settings of the run, its
progress, versions, and the SHA-256 of everything else. Nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import numbers
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fsmap.errors import CheckpointError
from fsmap.files import write_whole
from fsmap.functional import Functional
from fsmap.types import ModelFn, Params

FORMAT = "fsmap-checkpoint-1"
MADE = "made_with"  # entry of the config that need not agree, but changes the last bits
HINT = "Restore a copy, or delete it to start over."
UNREADABLE = (
    *(AttributeError, LookupError, TypeError, ValueError, ArithmeticError),
    *(RuntimeError, MemoryError),  # of torch: a shape or a size; RecursionError is one, too
)
DEPTH = 8  # nesting depth that is described; deeper objects are compared by type only
SHOWN = 8  # largest tensor whose numbers are written out; larger ones are compared by hash
LONG = 200  # characters of a description that a message shows


class Checkpoint(NamedTuple):
    """The content of a checkpoint file."""

    tensors: dict[str, Tensor]  # "group/name"
    config: dict[str, Any]  # settings of the run: must agree on resume
    progress: dict[str, Any]  # such as the step

    def group(self, name: str) -> dict[str, Tensor]:
        """The tensors of one group, without its name in front."""
        start = f"{name}/"
        return {k.removeprefix(start): t for k, t in self.tensors.items() if k.startswith(start)}


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; an older one stays until the new one is complete on the disk."""
    tensors = {n: t.detach().cpu().contiguous().clone() for n, t in checkpoint.tensors.items()}
    on_cpu = all(t.device.type == "cpu" for t in checkpoint.tensors.values())
    about = {
        "format": FORMAT,
        "config": json.dumps({**checkpoint.config, MADE: _made(on_cpu)}, sort_keys=True),
        "progress": json.dumps(checkpoint.progress, sort_keys=True),
        "torch": torch.__version__,
    }
    about["sha256"] = _digest(tensors, about)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, safetensors.torch.save(tensors, about))


def load(path: Path, *, hint: str = HINT) -> Checkpoint:
    """Read a checkpoint onto the CPU; raises CheckpointError, with a ``hint`` what to do."""
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        reason = f"is truncated or no checkpoint at all ({error})"
        raise CheckpointError(f"{path} {reason}. {hint}") from error
    kind = about.get("format")
    if kind != FORMAT:
        why = f"its format is {kind!r}, not {FORMAT!r}"
        raise CheckpointError(f"{path} is not an fsmap checkpoint: {why}")
    if about.pop("sha256", None) != _digest(tensors, about):
        why = "its checksum does not fit its content"
        raise CheckpointError(f"{path} was altered or damaged: {why}. {hint}")
    with readable(path, hint=hint):
        config, progress = (dict(json.loads(about[k]).items()) for k in ("config", "progress"))
        return Checkpoint(tensors, config, progress)


@contextmanager
def readable(path: Path, *, hint: str = HINT) -> Iterator[None]:
    """Raise CheckpointError if an entry that is read is missing, or of another type or shape."""
    try:
        yield
    except UNREADABLE as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(
            f"{path} does not hold what a checkpoint of this kind holds ({reason}). {hint}"
        ) from error


def check_same_run(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise CheckpointError if two configs differ; warn if the last bits of a run will."""
    made, now = saved.get(MADE), _made(on_cpu=True)
    if isinstance(made, dict) and any(made[k] != now.get(k) for k in made):
        message = (
            f"resuming {path} with {now}, it was made with {made}: sums are taken in another "
            "order, so the last bits of the numbers differ from an uninterrupted run."
        )
        warnings.warn(message, UserWarning, stacklevel=4)
    old = _flat({key: value for key, value in saved.items() if key != MADE})
    new = _flat(json.loads(json.dumps(here)))
    keys = [k for k in {**new, **old} if old.get(k, "absent") != new.get(k, "absent")]
    if keys:
        lines = [_differ(k, old.get(k, "absent"), new.get(k, "absent")) for k in keys[:8]]
        more = f"; and {len(keys) - 8} more" if len(keys) > 8 else ""
        raise CheckpointError(
            f"the checkpoint {path} belongs to another run. {'; '.join(lines)}{more}. "
            "Use the settings and data it was made with, or another path."
        )


def _made(on_cpu: bool) -> dict[str, int]:
    """Settings that change the order of sums, and with it the last bits of a run's numbers."""
    dist = torch.distributed
    spread = dist.is_available() and dist.is_initialized()
    made = {"processes": dist.get_world_size() if spread else 1}
    return made | ({"threads": torch.get_num_threads()} if on_cpu else {})


def _differ(key: str, there: Any, here: Any) -> str:
    """The difference as text; long descriptions are shown from the first difference on."""
    one, two = str(there), str(here)
    if min(len(one), len(two)) > LONG:
        at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0)
        one, two = (f"…{text[max(0, at - 20) :]}" for text in (one, two))
    one, two = (text if len(text) <= LONG else f"{text[:LONG]}…" for text in (one, two))
    return f"{key}: {one} there, {two} here"


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
        found.update(_bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def describe(value: Any, depth: int = DEPTH) -> Any:
    """A value as JSON, the same for equal values in every process: no addresses, no hash order."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, Tensor):
        return _describe_tensor(value.detach())
    if isinstance(value, Mapping):
        return {str(k): describe(v, depth - 1) for k, v in value.items()} if depth else len(value)
    if hasattr(value, "_asdict") and depth:
        return {"type": _name(type(value)), **describe(value._asdict(), depth)}
    if isinstance(value, partial):
        return describe([partial, value.func, value.args, value.keywords], depth)
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
    """The architecture as text: the module's repr, shapes and dtypes."""
    text = repr(f.module) if isinstance(f, Functional) else describe(f)
    shapes = {n: f"{p.dtype} {list(p.shape)}".removeprefix("torch.") for n, p in params.items()}
    return {"module": text, "parameters": shapes}


def _describe_tensor(value: Tensor) -> Any:
    if value.ndim == 0:
        return value.item()
    kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value.numel() <= SHOWN:
        return f"{kind} {value.tolist()}"
    return f"{kind} sha256 {hashlib.sha256(_bytes(value)).hexdigest()[:16]}"


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
