"""The options of ``fsmap train``: one for every field of the settings."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.errors import InputError

if TYPE_CHECKING:
    import torch

    from fsmap.train.images import ImageSettings

QUICK: dict[str, Any] = {
    "generated": True,
    "limit": 256,
    "width": 8,
    "epochs": 3,
    "batch_size": 32,
    "num_points": 32,
}
"""A run of seconds on a CPU, through the same code; what is given on the command line wins."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; a setting that is not given keeps its default.

    Args:
        parser: Where to.
    """
    _add_model(parser)
    _add_optimizer(parser)
    _add_regularizer(parser)
    _add_how(parser)
    _add_files(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data and model")
    group.add_argument(
        "--data",
        default="fmnist",
        help="fmnist (default), mnist, cifar10, or a folder of your own images with one sub-folder "
        "per class (photos, photos?size=64)",
    )
    group.add_argument(
        "--model",
        help="resnet18 (default), or package.module:factory?key=value, torchvision's and timm's "
        "included; its code is imported and run",
    )
    group.add_argument("--width", type=int, help="channels of resnet18's first stage (64)")
    group.add_argument("--valid", type=int, metavar="N", help="images held out (the protocol's)")
    group.add_argument("--split-seed", type=int, help="which images are held out (0)")
    group.add_argument("--label-noise", type=float, metavar="SHARE", help="labels drawn anew (0)")
    group.add_argument("--label-noise-seed", type=int, help="seed of that (0)")
    group.add_argument(
        "--augment",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="crop and flip (as the protocol has it)",
    )
    group.add_argument(
        "--limit", type=int, metavar="N", help="use only N training and N test images"
    )
    group.add_argument(
        "--generated",
        action="store_true",
        default=None,
        help="generated images of the same shape: needs no data",
    )


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer: SGD; the defaults are the paper's")
    group.add_argument("--epochs", type=int, help="passes over the data (50)")
    group.add_argument("--batch-size", type=int, metavar="B", help="over all processes (128)")
    group.add_argument("--lr", type=float, help="learning rate (0.1)")
    group.add_argument("--momentum", type=float, help="(0.9)")
    group.add_argument("--nesterov", action="store_true", default=None, help="Nesterov's form")
    group.add_argument("--weight-decay", type=float, help="(5e-4)")
    group.add_argument("--decay", help="of the learning rate: cosine (default) or none")
    group.add_argument("--warmup-epochs", type=float, help="linear rise of it (0)")
    group.add_argument(
        "--clip", type=float, help="largest global norm of the gradient (1); 0: no clipping"
    )
    group.add_argument("--label-smoothing", type=float, help="baseline (0)")
    group.add_argument(
        "--sam", type=float, metavar="RHO", help="SAM's radius, with either method (0)"
    )


def _add_regularizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the regularizer R")
    group.add_argument("--method", default="l-map", help="ps-map or l-map (default)")
    group.add_argument(
        "--px",
        help="evaluation images: train (default), kmnist, cifar100, white-noise, or a mixture such "
        "as 0.8*train+0.2*white-noise (weights are relative)",
    )
    group.add_argument(
        "--reg-strength",
        type=_strength,
        metavar="LAMBDA",
        help="lambda (1e-6)",
    )
    group.add_argument(
        "--reg-nats",
        type=_strength,
        metavar="C",
        help="strength in nats per training image instead of lambda, such as 0.05 (fsmap.LogTrace)",
    )
    group.add_argument("--num-points", type=int, metavar="S", help="evaluation images a step (128)")
    group.add_argument("--estimator", help="jvp (default), fd, fd_central, vjp, exact")
    group.add_argument("--beta", type=float, help="step of the differences (1e-3)")
    group.add_argument("--batchnorm", help="joint (default), frozen, batch")
    group.add_argument("--every", type=int, metavar="K", help="R on every K-th step (1)")


def _add_how(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it is computed")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 …")
    group.add_argument(
        "--precision", help="fp32, tf32, bf16 (default: bf16 on CUDA, fp32 on a CPU)"
    )
    group.add_argument(
        "--bf16", dest="precision", action="store_const", const="bf16", help="--precision bf16"
    )
    for name, text in (
        ("compile", "compile the step with inductor"),
        ("graph", "capture the step in a CUDA graph"),
        ("channels-last", "memory layout"),
    ):
        group.add_argument(
            f"--{name}",
            action=argparse.BooleanOptionalAction,
            default=None,
            help=f"{text} (default: {'yes' if name == 'channels-last' else 'on CUDA'})",
        )
    group.add_argument(
        "--deterministic",
        action="store_true",
        default=False,
        help="the same bits every time on CUDA too, slower",
    )
    group.add_argument("--quick", action="store_true", help="a run of seconds, generated images")


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files and time")
    group.add_argument("--seeds", default="0", metavar="N,N", help="one run each (default: 0)")
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="checkpoint.safetensors and log.jsonl go there"
    )
    group.add_argument("--resume", action="store_true", help="go on from the checkpoint, if any")
    group.add_argument(
        "--checkpoint-every",
        type=_steps,
        metavar="STEPS",
        help="(default: at the end of an epoch, at most once a minute)",
    )
    group.add_argument(
        "--max-seconds",
        type=_seconds,
        default=math.inf,
        metavar="T",
        help="stop with a checkpoint after T seconds; exit code 3",
    )
    group.add_argument("--data-dir", type=Path, metavar="DIR", help="where to look for data first")
    group.add_argument("--silent", action="store_true", help="no progress bar")


def settings_of(arguments: argparse.Namespace, seed: int, device: torch.device) -> ImageSettings:
    """The settings that were asked for.

    Args:
        arguments: The options of the command.
        seed: Of this run.
        device: Decides the defaults of how it is computed.

    Returns:
        The settings.
    """
    from fsmap.train.images import ImageSettings

    cuda = device.type == "cuda"
    chosen: dict[str, Any] = QUICK.copy() if arguments.quick else {}
    chosen |= {"precision": "bf16", "compile": True, "graph": True} if cuda else {}
    given = {name: getattr(arguments, name, None) for name in ImageSettings.names()}
    chosen |= {name: value for name, value in given.items() if value is not None}
    if chosen.get("clip") == 0:
        chosen["clip"] = None
    return ImageSettings(**{**chosen, "seed": seed})


def device_of(name: str) -> torch.device:
    """A device by name; auto is CUDA where there is one.

    Args:
        name: What was given.

    Returns:
        The device.

    Raises:
        InputError: If there is no such device.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        message = f"--device: torch knows no {name!r}; there are auto, cpu, cuda, cuda:1 …"
        raise InputError(message) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        message = "--device cuda: torch sees no CUDA device here. Use --device cpu."
        raise InputError(message)
    return device


def _strength(text: str) -> float:
    value = _number(text)
    if not math.isfinite(value):
        message = f"must be a finite number, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not value >= 0:
        message = f"must be a number of seconds, 0 or more, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return value


def _steps(text: str) -> int:
    value = _number(text)
    if not (value >= 1 and value.is_integer()):
        message = f"must be a whole number of steps, 1 or more, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(value)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
