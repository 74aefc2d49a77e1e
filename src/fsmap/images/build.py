"""Settings of an image run, the data and model that they name, and the model of a checkpoint.

Settings are checked once; two runs with equal settings take equal steps.
"""

from __future__ import annotations

import ast
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsmap.data.catalogue import Folder, locate
from fsmap.data.images import ImageSet, ImageTask, Normalization, facts_of, load_task, one_spelling
from fsmap.errors import CheckpointError, FsmapError, InputError, UnsupportedModuleError
from fsmap.functional import evaluation_mode
from fsmap.linalg.estimators import by_name
from fsmap.lmap.options import MODES, check_mode
from fsmap.models.resnet import resnet18, resnet50_imagenet
from fsmap.train import checkpoint

PRECISIONS = ("fp32", "tf32", "bf16")
CHOICES = {"method": ("ps-map", "l-map"), "precision": PRECISIONS, "decay": ("cosine", "none")}
LEAST = {
    **dict.fromkeys(("epochs", "batch_size", "num_points", "every", "width"), 1),
    **dict.fromkeys(("lr", "weight_decay", "momentum", "reg_strength", "reg_nats"), 0),
    **dict.fromkeys(("sam", "warmup_epochs"), 0),
}
FILE = "checkpoint.safetensors"
PRETRAINED = "resnet50-imagenet"  # a model whose weights are in the catalogue
BLOCK = 16  # channels that oneDNN takes at a time, at most

OURS: dict[str, Callable[..., nn.Module]] = {"resnet18": resnet18, PRETRAINED: resnet50_imagenet}
SYNONYMS = {"classes": ("classes", "num_classes"), "channels": ("channels", "in_chans")}


@dataclass(frozen=True)
class ImageSettings:
    """One run of PS-MAP or L-MAP on images; the defaults are the paper's."""

    data: str = "fmnist"  #: fmnist, mnist, cifar10, cifar100, or a folder (``fsmap.data.images``)
    method: str = "l-map"  #: ps-map, or l-map: cross-entropy + λR
    px: str = "train"  #: train, kmnist, cifar100, white-noise, or a mixture (fsmap.data.images)
    model: str = "resnet18"  #: resnet18 or an import path (:func:`make_model`)
    width: int = 64  #: channels of the first stage, for resnet18
    epochs: int = 50  #: passes over the data; rows that do not fill a batch are left out
    batch_size: int = 128  #: B, over all processes together
    lr: float = 0.1  #: of SGD
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4  #: added after clipping
    decay: str = "cosine"  #: of the learning rate to 0, or none
    warmup_epochs: float = 0.0  #: linear rise of the learning rate
    clip: float | None = 1.0  #: largest global norm of the gradient; None: no clipping
    label_smoothing: float = 0.0  #: of the cross-entropy; a baseline
    sam: float = 0.0  #: radius ρ of SAM, for both methods; 0: none
    reg_strength: float = 1e-6  #: λ; ``run.reg_strength`` may be changed while training
    reg_nats: float | None = None  #: strength in nats instead of λ; see :class:`fsmap.LogTrace`
    num_points: int = 128  #: S of :class:`fsmap.LMAP`, over all processes together
    estimator: str = "jvp"  #: of :class:`fsmap.LMAP`, as are the next three
    beta: float = 1e-3
    batchnorm: str = "auto"  #: a run has the mode that it means for the model
    every: int = 1
    label_noise: float = 0.0  #: fraction of training labels drawn anew
    label_noise_seed: int = 0
    valid: int | None = None  #: held-out images; None: the protocol's number
    split_seed: int = 0  #: seed of the choice of held-out images
    augment: bool | None = None  #: crop and flip; None: the protocol's
    limit: int | None = None  #: use at most this many training images
    generated: bool = False  #: generated images, which need no data
    seed: int = 0  #: seed of weights, order, augmentation, evaluation points and ψ
    precision: str = "fp32"  #: fp32, tf32 or bf16 (autocast, which fd and fd_central leave)
    channels_last: bool = True  #: memory layout, where it is safe
    compile: bool = False  #: ``torch.compile`` the passes
    graph: bool = False  #: capture the whole step in a CUDA graph
    deterministic: bool = False  #: on CUDA too, a resumed run has the same bits

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", one_spelling(self.data))
        by_name(self.estimator)
        check_mode(self.batchnorm, ("auto", *MODES))
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise InputError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        for name, least in LEAST.items():
            value = getattr(self, name) or 0
            if not least <= value < math.inf:
                raise InputError(f"{name} must be finite and at least {least}, got {value}")
        smoothing, clip = self.label_smoothing, 1.0 if self.clip is None else self.clip
        late = self.warmup_epochs >= self.epochs
        wrong = {
            f"momentum must be less than 1, got {self.momentum:g}": self.momentum >= 1,
            f"warmup_epochs must be less than epochs, got {self.warmup_epochs:g}": late,
            "nesterov needs momentum > 0": self.nesterov and not self.momentum,
            f"clip must be > 0, or None (--clip 0), got {self.clip}": not clip > 0,
            f"label_smoothing must lie in [0, 1), got {smoothing:g}": not 0 <= smoothing < 1,
            f"beta must be > 0 and finite, got {self.beta:g}": not 0 < self.beta < math.inf,
        }
        for message, holds in wrong.items():
            if holds:
                raise InputError(message)

    @property
    def regularized(self) -> bool:
        """Whether the loss has the term R."""
        return self.method == "l-map"

    def describe(self) -> dict[str, Any]:
        """The settings that must agree on resume: those that change the result of a step."""
        ignored = {"compile", "graph", "deterministic"}
        return {k: v for k, v in asdict(self).items() if k not in ignored}


def load_data(settings: ImageSettings, data_dir: Folder = None, px: str | None = None) -> ImageTask:
    """The data that settings name."""
    names = "valid split_seed label_noise label_noise_seed limit generated augment".split()
    options: dict[str, Any] = {name: getattr(settings, name) for name in names}
    return load_task(settings.data, px=px, data_dir=data_dir, **options)


def describe_images(images: ImageTask | ImageSet) -> dict[str, Any]:
    """Shape, classes and normalization, as JSON: what a model is built from."""
    lists = {"shape": images.shape, "names": images.names, **images.normalize._asdict()}
    return {"classes": images.classes, **{name: list(values) for name, values in lists.items()}}


def _check_images(images: Mapping[str, Any]) -> None:
    """Raise if a description from a file is not one of :func:`describe_images`."""
    names, sizes = images["names"], [images["classes"], *images["shape"]]
    right = len(sizes) == 4 and all(type(n) is int and 0 < n < 2**16 for n in sizes)
    right &= all(math.isfinite(number) for number in (*images["mean"], *images["std"]))
    right &= {type(name) for name in names} <= {str} and len(names) in (0, sizes[0])
    if not right:
        raise ValueError("its images are described wrongly")


def build_model(
    settings: ImageSettings,
    images: Mapping[str, Any] | None = None,
    *,
    initial: bool = True,
    data_dir: Folder = None,
) -> nn.Module:
    """The model that the settings name, for ``images`` of :func:`describe_images`."""
    images = images or describe_images(facts_of(settings.data))
    offered: dict[str, Any] = {"classes": images["classes"], "channels": images["shape"][0]}
    offered |= {"width": settings.width, **{n: tuple(images[n]) for n in ("mean", "std")}}
    if settings.model.partition("?")[0] == PRETRAINED and initial:
        offered["files"] = locate(PRETRAINED, data_dir)
    return make_model(settings.model, offered, seed=settings.seed)


def make_model(name: str, offered: Mapping[str, Any], *, seed: int) -> nn.Module:
    """Build a model; torch's own generator is left as it was.

    Args:
        name: ``resnet18``, or ``package.module:factory`` with options behind a question mark, such
            as ``mynet:make?depth=3&act='gelu'``. The current folder is looked into as well.
        offered: What the caller knows, such as ``classes``, ``channels``, ``width``: passed where
            the factory has a parameter of that name (or ``num_classes``, ``in_chans``) and the
            options do not say otherwise.
        seed: Of the initial weights.

    Example:
        >>> make_model("torch.nn:Linear?in_features=2&out_features=3", {}, seed=0)
        Linear(in_features=2, out_features=3, bias=True)
    """
    factory, options = _resolve(name)
    options = {**_accepted(factory, offered), **options}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            module = factory(**options)
        except Exception as error:  # whatever the model's code raises
            raise UnsupportedModuleError(
                f"{name} could not be built with {options}: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(module, nn.Module):
        raise UnsupportedModuleError(f"{name} made a {type(module).__name__}, not an nn.Module")
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


def _accepted(factory: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The ``offered`` values that the factory has a parameter for."""
    try:
        known = inspect.signature(factory).parameters
    except ValueError:  # builtins without a signature
        return {}
    spelled = ((s, value) for key, value in offered.items() for s in SYNONYMS.get(key, (key,)))
    return {name: value for name, value in spelled if name in known}


def place(module: nn.Module, settings: ImageSettings, device: torch.device) -> nn.Module:
    """A module on its device, in the memory layout it is trained in."""
    layout = layout_of(module, settings.channels_last, device)
    return module.to(device, memory_format=layout)  # type: ignore[call-overload,no-any-return]


def layout_of(module: nn.Module, channels_last: bool, device: torch.device) -> torch.memory_format:
    """Channels last if requested and safe.

    On a CPU with AVX2, oneDNN writes past the end of a buffer (a crash, or a wrong gradient) when
    it differentiates a strided 1 × 1 convolution of fewer channels than a block by its weights
    (https://github.com/uxlfoundation/oneDNN/issues/6035). A narrow ResNet has such shortcuts.
    """
    safe = device.type != "cpu" or not any(map(_overruns, module.modules()))
    return torch.channels_last if channels_last and safe else torch.contiguous_format


def _overruns(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.Conv2d):
        return False
    point, strided = max(layer.kernel_size) == 1, max(layer.stride) > 1
    return point and strided and layer.in_channels // layer.groups < BLOCK


def check_model(
    forward: Callable[[Tensor], Tensor], pair: Tensor, settings: ImageSettings, classes: int
) -> None:
    """Raise InputError if a model does not give one logit per class for two images."""
    try:
        logits = forward(pair)
    except FsmapError:
        raise
    except Exception as error:  # whatever the model's code raises
        shape = tuple(pair.shape[1:])
        raise InputError(
            f"{settings.model} cannot take images of {settings.data}, {shape}, and return logits: "
            f"{type(error).__name__}: {error}"
        ) from error
    if tuple(logits.shape) != (2, classes):
        raise InputError(
            f"{settings.model} returned shape {tuple(logits.shape)} for 2 images; "
            f"{settings.data} needs (2, {classes})"
        )


def autocast(device: torch.device, half: torch.dtype | None) -> AbstractContextManager[Any]:
    """``torch.autocast`` to ``half``; None: no autocast."""
    return nullcontext() if half is None else torch.autocast(device.type, half, cache_enabled=False)


@torch.no_grad()
def logits_of(
    module: nn.Module,
    images: Tensor,
    normalize: Normalization,
    layout: torch.memory_format = torch.channels_last,
    half: torch.dtype | None = None,
) -> Tensor:
    """Logits in ``eval()`` mode, in the precision of the parameters unless told otherwise."""
    first = next(module.parameters())
    found = []
    with evaluation_mode(module), autocast(first.device, half):
        for part in images.split(1_000):
            part = part.to(first.device)
            is_bytes = part.dtype == torch.uint8
            x = normalize(part, first.dtype) if is_bytes else part.to(first.dtype)
            found.append(module(x.contiguous(memory_format=layout)).to(first.dtype))
    return torch.cat(found)


def load_model(
    path: str | Path, device: torch.device | str = "cpu", *, model: str | nn.Module | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a checkpoint, as it would be deployed.

    Args:
        path: The file, or the folder it is in.
        device: Where to put the model.
        model: The model of the checkpoint, if it is not one of this package, for a file must not
            decide which code runs: its import path (importing it runs its code), or a module.

    Returns:
        The module in ``eval()`` mode, and the progress of its run: ``step``, ``history``,
        ``reg_strength``, ``settings``, under ``images`` their shape, classes, normalization and, of
        a folder, the names of the classes, and under ``data`` their checksums.

    Raises:
        CheckpointError: If it is damaged, not of an image run, or of another model.
    """
    path = Path(path)
    inside = ", ".join(str(one.parent) for one in sorted(path.glob(f"*/{FILE}"))[:8])
    path = path / FILE if path.is_dir() else path
    if inside and not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}. Folders that have one: {inside}")
    saved = checkpoint.load(path, hint="Restore a copy, or name another one.")
    if saved.config.get("kind") != "images":
        raise CheckpointError(
            f"{path} is a checkpoint of {saved.config.get('kind')!r}, not of an image run"
        )
    described: Any = saved.config.get("settings")
    try:
        settings = ImageSettings(**described)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} describes settings that this version does not know: {error}"
        ) from error
    name, _, query = settings.model.partition("?")
    ours = name in OURS and "files" not in query  # building it runs no other code
    if model is None and not ours:
        raise CheckpointError(
            f"{path} is of {settings.model!r}, which is not a model of this package, and a file "
            "must not decide which code runs. If you trust it, name the model yourself: "
            f"--model {settings.model!r}, or load_model(..., model=...)"
        )
    if isinstance(model, str) and model != settings.model:
        raise CheckpointError(f"{path} is of {settings.model!r}, not of {model!r}")
    with checkpoint.readable(path):
        data = dict(saved.config["data"])
        images: Any = saved.config.get("images")  # older files have none
        if images is not None:
            _check_images(images)
    module = model if isinstance(model, nn.Module) else build_model(settings, images, initial=False)
    state = saved.group("params") | saved.group("buffers")
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not hold the weights of this model: {error}") from error
    module = place(module, settings, torch.device(device)).eval()
    return module, {**saved.progress, "settings": settings, "images": images, "data": data}
