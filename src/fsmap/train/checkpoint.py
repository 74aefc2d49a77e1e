"""Checkpoints: one safetensors file with a checksum; a kill at any moment leaves a good one behind.

Tensors are named ``group/name``. The metadata of the file holds JSON: what run this is, where it
stands, versions, and the SHA-256 of everything else. Nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fsmap.errors import CheckpointError
from fsmap.train.files import write_whole

FORMAT = "fsmap-checkpoint-1"
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
        "config": json.dumps(checkpoint.config, sort_keys=True),
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
    return Checkpoint(tensors, json.loads(about["config"]), json.loads(about["progress"]))


def check_same_run(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse to resume another run.

    Args:
        path: Where the checkpoint is, for the message.
        saved: Its config.
        here: The config of this run.

    Raises:
        CheckpointError: If they differ, with what differs.
    """
    old, new = _flat(saved), _flat(json.loads(json.dumps(here)))
    keys = [k for k in {**old, **new} if old.get(k, "absent") != new.get(k, "absent")]
    if keys:
        lines = [_differ(k, old.get(k, "absent"), new.get(k, "absent")) for k in keys[:8]]
        more = f"; and {len(keys) - 8} more" if len(keys) > 8 else ""
        message = (
            f"the checkpoint {path} belongs to another run. {'; '.join(lines)}{more}. "
            "Use the settings it was made with, or another path."
        )
        raise CheckpointError(message)


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
