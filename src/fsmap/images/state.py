"""A run on disk: everything the next step depends on, in one checked file that holds no code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsmap.errors import CheckpointError
from fsmap.images.build import build_model, placed
from fsmap.images.settings import ImageSettings
from fsmap.models.by_name import is_ours
from fsmap.train import checkpoint

if TYPE_CHECKING:
    from fsmap.images.run import ImageRun

FILE = "checkpoint.safetensors"


def tensors_of(run: ImageRun) -> dict[str, Tensor]:
    """The live tensors that steps change."""
    return run.taken.tensors() | {"step/totals": run.taken.totals}


def save(run: ImageRun, path: Path) -> None:
    """Write everything."""
    progress = {
        "step": run.step,
        "reg_strength": run.reg_strength,
        "seconds": run.seconds,
        "history": run.history,
    }
    checkpoint.save(path, checkpoint.Checkpoint(tensors_of(run), run.config, progress))


def restore(run: ImageRun, path: Path, *, resume: bool) -> None:
    """Take a run up where a checkpoint left it."""
    if not resume:
        message = (
            f"the checkpoint {path} exists already. Resume it (--resume), choose another folder "
            "(--out), or delete it."
        )
        raise CheckpointError(message)
    saved = checkpoint.load(path)
    checkpoint.check_same_run(path, saved.config, run.config)
    with checkpoint.readable(path), torch.no_grad():
        run.step = int(saved.progress["step"])
        run.reg_strength = float(saved.progress["reg_strength"])
        run.seconds = float(saved.progress["seconds"])
        run.history = list(saved.progress["history"])
        for name, t in tensors_of(run).items():
            t.copy_(saved.tensors[name])


def load_model(
    path: str | Path, device: torch.device | str = "cpu", *, model: str | nn.Module | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a checkpoint, as it would be deployed.

    A file never decides which code runs: models of this package are built by name, any other one
    only if the caller names it again.

    Args:
        path: The file, or the folder it is in.
        device: Where to put the model.
        model: The model of the checkpoint, if it is not one of this package: the import path that
            was given to ``fsmap train --model`` (importing it runs its code), or a module.

    Returns:
        The module in ``eval()`` mode, and the progress of its run: ``step``, ``history``,
        ``reg_strength``, and under ``settings`` the :class:`ImageSettings` it was made with.

    Raises:
        CheckpointError: If it is damaged, not of an image run, of another model, or of a model that
            has to be named by the caller.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    saved = checkpoint.load(path, hint="Restore a copy, or name another one.")
    if saved.config.get("kind") != "images":
        message = f"{path} is a checkpoint of {saved.config.get('kind')!r}, not of an image run"
        raise CheckpointError(message)
    settings = _settings(path, saved.config.get("settings"))
    module = model if isinstance(model, nn.Module) else _named_model(path, settings, model)
    state = saved.group("params") | saved.group("buffers")
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        message = f"{path} does not hold the weights of this model: {error}"
        raise CheckpointError(message) from error
    module = placed(module, settings, torch.device(device)).eval()
    return module, {**saved.progress, "settings": settings}


def _settings(path: Path, described: Any) -> ImageSettings:
    try:
        return ImageSettings(**described)
    except (TypeError, ValueError) as error:
        message = f"{path} describes settings that this version does not know: {error}"
        raise CheckpointError(message) from error


def _named_model(path: Path, settings: ImageSettings, repeated: str | None) -> nn.Module:
    """Build the model of a checkpoint, from this package or as the caller repeats it."""
    if repeated is None and not is_ours(settings.model):
        message = (
            f"{path} is of {settings.model!r}, which is not a model of this package, and a file "
            "must not decide which code runs. If you trust it, name the model yourself: "
            f"--model {settings.model!r}, or load_model(..., model=...)"
        )
        raise CheckpointError(message)
    if repeated not in (None, settings.model):
        message = f"{path} is of {settings.model!r}, not of {repeated!r}"
        raise CheckpointError(message)
    return build_model(settings, initial=False)
