"""A run on disk: everything the next step depends on, in one checked file that holds no code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsmap.data.images.read import Folder
from fsmap.data.images.task import ImageTask, facts_of, load_task
from fsmap.data.sources import locate
from fsmap.errors import CheckpointError
from fsmap.models.by_name import make_model
from fsmap.train import checkpoint
from fsmap.train.images.settings import ImageSettings

if TYPE_CHECKING:
    from fsmap.train.images.run import ImageRun

FILE = "checkpoint.safetensors"
PRETRAINED = "resnet50-imagenet"  # a model whose weights are in the catalogue
NUMBERS = (int, float, bool, str, list, type(None))


def tensors_of(run: ImageRun) -> dict[str, Tensor]:
    """The live tensors that steps change.

    Args:
        run: The run.

    Returns:
        ``params/…``, ``buffers/…``, ``momentum/…``, the sums of the epoch and the loss scale.
    """
    step = run._step
    more = {"scale": run.feeder.scale, "steady": step.steady, "totals": step.totals}
    return model_tensors_of(run) | {f"step/{name}": t for name, t in more.items()}


def model_tensors_of(run: ImageRun) -> dict[str, Tensor]:
    """Those of them that make the model and its optimizer: what is restored after a collapse."""
    step = run._step
    found = {f"params/{n}": p.detach() for n, p in run.module.named_parameters()}
    found |= {f"buffers/{n}": b for n, b in run.module.named_buffers()}
    for name, p in step.params.items():
        momentum = step.optimizer.state[p].get("momentum_buffer")
        if momentum is not None:
            found[f"momentum/{name}"] = momentum
    return found


def save(run: ImageRun, path: Path) -> None:
    """Write everything.

    Args:
        run: The run.
        path: The file; the old one stays until the new one is complete.
    """
    tensors, plain = _hooks(run)
    progress = {
        "step": run.step,
        "reg_strength": run.reg_strength,
        "seconds": run.seconds,
        "history": run.history,
        "hooks": plain,
    }
    content = {**tensors_of(run), **tensors}
    checkpoint.save(path, checkpoint.Checkpoint(content, run.config, progress))


def restore(run: ImageRun, path: Path, *, resume: bool) -> None:
    """Take a run up where a checkpoint left it.

    Args:
        run: A new run of the same settings.
        path: The file.
        resume: Whether that is wanted.

    Raises:
        CheckpointError: If it is not wanted, or the file is damaged or of another run.
    """
    if not resume:
        message = (
            f"the checkpoint {path} exists already. Resume it, choose another folder, or delete it."
        )
        raise CheckpointError(message)
    saved = checkpoint.load(path)
    checkpoint.check_same_run(path, saved.config, run.config)
    run.step = int(saved.progress["step"])
    run.reg_strength = float(saved.progress["reg_strength"])
    run.seconds = float(saved.progress["seconds"])
    run.history = list(saved.progress["history"])
    live = tensors_of(run)
    missing = live.keys() - saved.tensors.keys()
    if missing:
        message = f"the checkpoint {path} lacks {sorted(missing)[:3]}: it is of another model"
        raise CheckpointError(message)
    with torch.no_grad():
        for name, t in live.items():
            t.copy_(saved.tensors[name])
    for number, hook in enumerate(run.hooks):
        load = getattr(hook, "load_state_dict", None)
        if load is not None:
            state: dict[str, Any] = dict(saved.progress["hooks"].get(str(number), {}))
            load({**state, **saved.group(f"hooks/{number}")})


def load_data(settings: ImageSettings, data_dir: Folder = None, px: str | None = None) -> ImageTask:
    """The data that settings name.

    Args:
        settings: Of a run.
        data_dir: A folder to look in first.
        px: Evaluation set, where one is needed.

    Returns:
        Training, held-out and test images, as bytes.
    """
    return load_task(
        settings.data,
        px=px,
        valid=settings.valid,
        split_seed=settings.split_seed,
        label_noise=settings.label_noise,
        label_noise_seed=settings.label_noise_seed,
        limit=settings.limit,
        generated=settings.generated,
        augment=settings.augment,
        data_dir=data_dir,
    )


def load_model(
    path: str | Path, device: torch.device | str = "cpu"
) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a checkpoint, as it would be deployed.

    Args:
        path: The file, or the folder it is in.
        device: Where to put the model.

    Returns:
        The module in ``eval()`` mode, and the progress of its run: ``step``, ``history``,
        ``reg_strength``, and under ``settings`` the :class:`ImageSettings` it was made with.

    Raises:
        CheckpointError: If it is damaged, or not of an image run.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    saved = checkpoint.load(path)
    if saved.config.get("kind") != "images":
        message = f"{path} is a checkpoint of {saved.config.get('kind')!r}, not of an image run"
        raise CheckpointError(message)
    settings = ImageSettings(**saved.config["settings"])
    module = build_model(settings, initial=False)
    state = saved.group("params") | saved.group("buffers")
    module.load_state_dict(state, strict=True)
    layout = torch.channels_last if settings.channels_last else torch.preserve_format
    module = module.to(device, memory_format=layout).eval()  # type: ignore[call-overload]
    return module, {**saved.progress, "settings": settings}


def build_model(
    settings: ImageSettings, *, initial: bool = True, data_dir: Folder = None
) -> nn.Module:
    """The model that the settings name.

    Args:
        settings: Of the run.
        initial: Whether weights trained elsewhere are read; not where others follow at once.
        data_dir: A folder to look for them first.

    Returns:
        The model with its initial weights.
    """
    facts = facts_of(settings.data)
    offered: dict[str, Any] = {
        "classes": facts.classes,
        "channels": facts.shape[0],
        "width": settings.width,
        "mean": facts.normalize.mean,
        "std": facts.normalize.std,
    }
    if settings.model.partition("?")[0] == PRETRAINED and initial:
        offered["files"] = locate(PRETRAINED, data_dir)
    return make_model(settings.model, offered, seed=settings.seed)


def _hooks(run: ImageRun) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The state of the hooks: tensors, and plain values."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for number, hook in enumerate(run.hooks):
        get = getattr(hook, "state_dict", None)
        for name, value in ({} if get is None else get()).items():
            if isinstance(value, Tensor):
                tensors[f"hooks/{number}/{name}"] = value
            elif isinstance(value, NUMBERS):
                plain.setdefault(str(number), {})[name] = value
            else:
                message = (
                    f"state_dict() of {type(hook).__name__} holds {name!r}, a "
                    f"{type(value).__name__}; a checkpoint takes tensors, numbers, text and lists"
                )
                raise CheckpointError(message)
    return tensors, plain
