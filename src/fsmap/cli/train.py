"""``fsmap train``: image classifiers with PS-MAP and L-MAP, resumable, alone or under torchrun."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fsmap.cli import console
from fsmap.cli.options import check_seed, count, number, seconds
from fsmap.errors import FsmapError, InputError
from fsmap.files import exclusive
from fsmap.progress import duration

if TYPE_CHECKING:
    import torch

    from fsmap.images import ImageRun, ImageSettings
    from fsmap.images.step import Group

QUICK: dict[str, Any] = {
    "generated": True,
    "limit": 256,
    "width": 8,
    "epochs": 3,
    "batch_size": 32,
    "num_points": 32,
}
"""A run of seconds on a CPU, through the same code; what is given on the command line wins."""

LOCK = ".lock"
"""In the folder of a run; held while it is written to."""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = console.add_command(
        subparsers,
        "train",
        run,
        summary="train an image classifier with PS-MAP or L-MAP",
        examples=[
            "fsmap train --data fmnist --method l-map --px kmnist --reg-strength 1e-6",
            "fsmap train --data cifar10 --method ps-map --epochs 200 --bf16 --out runs/ps",
            "fsmap train --data cifar10 --px cifar100 --reg-strength 1e-6 --seeds 0,1,2",
            "fsmap train --data fmnist --quick                # seconds on a CPU",
            "fsmap train ... --max-seconds 480 --resume       # in pieces",
            "torchrun --nproc-per-node 2 -m fsmap train --data cifar10 ...",
        ],
    )
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train."""
    if arguments.deterministic:  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from fsmap.images.step import LostPeerError, processes, torchrun_device
    from fsmap.types import as_device

    if arguments.reg_nats is not None and arguments.reg_strength is not None:
        message = "--reg-nats and --reg-strength are two ways to say how strong: give one of them"
        raise InputError(message)
    device = torchrun_device(as_device(arguments.device))
    seeds = _seeds(arguments)
    with processes(device) as group:
        complete = True
        left = arguments.max_seconds
        for seed in seeds:
            settings = settings_of(arguments, seed, device)
            folder = _folder(arguments, settings, seed, many=len(seeds) > 1)
            try:
                run = _train(arguments, settings, folder, device, group, left)
            except (LostPeerError, TerminatedError) as error:
                message = f"{error}. {_how_to_resume(folder)}"
                raise type(error)(message) from error
            except KeyboardInterrupt:
                if group.rank == 0:
                    console.say(f"interrupted. {_how_to_resume(folder)}")
                raise
            complete &= run.done
            left -= run.seconds_here
            if not run.done:
                if group.rank == 0:
                    console.say(f"time is up. {_how_to_resume(folder)}")
                break
    return 0 if complete else 3


def _train(
    arguments: argparse.Namespace,
    settings: ImageSettings,
    folder: Path,
    device: Any,
    group: Group,
    left: float,
) -> ImageRun:
    """One run, from its checkpoint or from the start."""
    from fsmap.images import ImageRun
    from fsmap.paper.rows import circumstances

    about = {"commit": circumstances("cpu").commit, "command": shlex.join(["fsmap", *sys.argv[1:]])}
    with exclusive(folder / LOCK, folder) if group.rank == 0 else nullcontext():
        run = ImageRun(
            settings,
            device=device,
            folder=folder,
            resume=arguments.resume,
            data_dir=arguments.data_dir,
            group=group,
            about=about,
        )
        if group.rank == 0:
            console.say(_opening(run, folder))
        with _signals(run):
            run.train(
                max_seconds=left,
                checkpoint_every=arguments.checkpoint_every,
                progress=not arguments.silent,
            )
    if run.done and group.rank == 0:
        console.say(_closing(run))
    return run


def _seeds(arguments: argparse.Namespace) -> list[int]:
    try:
        seeds = [int(word) for word in str(arguments.seeds).split(",")]
    except ValueError as error:
        message = f"--seeds is written 0 or 0,1,2, got {arguments.seeds!r}"
        raise InputError(message) from error
    for seed in seeds:
        check_seed(seed, "seeds")
    if len(set(seeds)) < len(seeds):
        message = f"--seeds names a seed twice: {arguments.seeds}"
        raise InputError(message)
    return seeds


def _folder(
    arguments: argparse.Namespace, settings: ImageSettings, seed: int, *, many: bool
) -> Path:
    from fsmap.images.build import FILE

    if arguments.out is None:
        px = f"-{settings.px.replace('*', '').replace('+', '-')}" if settings.regularized else ""
        px += "-generated" if settings.generated else ""
        data = Path(settings.data.partition("?")[0]).name
        return Path("runs") / "train" / f"{data}-{settings.method}{px}-seed{seed}"
    if many and (arguments.out / FILE).exists():
        message = (
            f"{arguments.out} holds a single run; those of several seeds go into folders in it. "
            f"Choose another --out, or move its files to {arguments.out}/seedN if it is of seed N."
        )
        raise InputError(message)
    return arguments.out / f"seed{seed}" if many else Path(arguments.out)


def _opening(run: ImageRun, folder: Path) -> str:
    s, task = run.settings, run.task
    size = sum(p.numel() for p in run.module.parameters())
    where = f"from step {run.step} of {run.steps}" if run.step else f"{run.steps} steps"
    strength = f"λ {s.reg_strength:g}" if s.reg_nats is None else f"{s.reg_nats:g} nats"
    about_r = f", {strength}, p_X = {s.px}, {s.estimator}, {s.batchnorm}" * s.regularized
    parts = [
        f"{s.data}{' (generated images)' * s.generated}: {len(task.train.x)} training, "
        f"{len(task.valid.x)} held-out, {len(task.test.x)} test images; "
        f"{s.model} with {size:,} parameters",
        s.method + about_r,
        f"{where} on {run.device}, {s.precision}; writing {folder}",
    ]
    if task.note:
        parts.insert(1, f"note: {task.note}.")
    return "\n".join(parts)


def _closing(run: ImageRun) -> str:
    from fsmap import metrics

    logits, y = run.logits("test")
    with_r = run.settings.regularized and bool(run.history)
    temperature = ""
    if len(run.task.valid.x):
        T = metrics.temperature(*run.logits("valid"))
        temperature = (
            f", NLL {metrics.nll(logits / T, y):.4f} after temperature scaling (T {T:.2f})"
        )
    strength = f", λ {run.history[-1]['reg_strength']:.2g} at the end" if with_r else ""
    return (
        f"test: accuracy {100 * metrics.accuracy(logits, y):.2f} %, NLL "
        f"{metrics.nll(logits, y):.4f}, ECE {100 * metrics.ece(logits, y):.2f} %{temperature}; "
        f"{duration(run.seconds)} of training (first step {run.first_seconds:.0f} s){strength}"
    )


def _how_to_resume(folder: Path) -> str:
    from fsmap.images.build import FILE

    path = folder / FILE
    if not path.exists():
        return f"No checkpoint was written to {folder} yet."
    return f"The last checkpoint is {path}; the same command with --resume goes on from it."


class _signals:
    """Within it, Ctrl-C and SIGTERM end a run after its present step, with a checkpoint.

    The second one ends it at once, as does the first where there are several processes: there it is
    what torchrun sends when another one died, and the step would wait for that one.
    """

    def __init__(self, run: ImageRun) -> None:
        self.run = run
        self.seen: int | None = None

    def __enter__(self) -> None:
        kinds = (signal.SIGINT, signal.SIGTERM)
        self.before = {kind: signal.signal(kind, self._stop) for kind in kinds}

    def __exit__(self, failed: object, *_: object) -> None:
        for kind, handler in self.before.items():
            signal.signal(kind, handler)
        if self.seen is not None and failed is None and not self.run.done:
            self._raise(self.seen)

    def _stop(self, kind: int, _: object) -> None:
        if self.seen is not None or self.run.group.size > 1:
            self._raise(kind)
        self.seen = kind
        self.run.stop()
        console.note("stopping after this step, with a checkpoint (once more: at once)")

    def _raise(self, kind: int) -> NoReturn:
        if kind == signal.SIGINT:
            raise KeyboardInterrupt
        several = self.run.group.size > 1
        died = ", as when another process of the job died" if several else ""
        message = f"asked to terminate (SIGTERM){died}"
        raise TerminatedError(message)


class TerminatedError(FsmapError):
    """The process was asked to end."""

    exit_code = 128 + signal.SIGTERM


FLAG, TOGGLE = "flag", "toggle"  # an option without a value, and one with a --no- form

SETTINGS: dict[str, dict[str, tuple[Any, str]]] = {
    "data and model": {
        "--data NAME": (
            str,
            "fmnist (default), mnist, cifar10, cifar100 (not the official split), or a folder of "
            "your own images with one sub-folder per class (photos, photos?size=64)",
        ),
        "--model PATH": (
            str,
            "resnet18 (default), or package.module:factory?key=value, torchvision's and timm's "
            "included; its code is imported and run",
        ),
        "--width N": (int, "channels of resnet18's first stage (64)"),
        "--valid N": (int, "images held out (the protocol's)"),
        "--split-seed N": (int, "which images are held out (0)"),
        "--label-noise SHARE": (float, "labels drawn anew (0)"),
        "--label-noise-seed N": (int, "seed of that (0)"),
        "--augment": (TOGGLE, "crop and flip (as the protocol has it)"),
        "--limit N": (int, "use only N training and N test images"),
        "--generated": (FLAG, "generated images of the same shape: needs no data"),
    },
    "optimizer: SGD; the defaults are the paper's": {
        "--epochs N": (int, "passes over the data (50)"),
        "--batch-size B": (int, "over all processes (128)"),
        "--lr X": (float, "learning rate (0.1)"),
        "--momentum X": (float, "(0.9)"),
        "--nesterov": (FLAG, "Nesterov's form"),
        "--weight-decay X": (float, "(5e-4)"),
        "--decay NAME": (str, "of the learning rate: cosine (default) or none"),
        "--warmup-epochs X": (float, "linear rise of it (0)"),
        "--clip X": (float, "largest global norm of the gradient (1); 0: no clipping"),
        "--label-smoothing X": (float, "baseline (0)"),
        "--sam RHO": (float, "SAM's radius, with either method (0)"),
    },
    "the regularizer R": {
        "--method NAME": (str, "ps-map or l-map (default)"),
        "--px PX": (
            str,
            "evaluation images: train (default), kmnist, cifar100, white-noise, or a mixture such "
            "as 0.8*train+0.2*white-noise (weights are relative)",
        ),
        "--reg-strength LAMBDA": (number, "lambda (1e-6)"),
        "--reg-nats C": (
            number,
            "strength in nats per training image instead of lambda, such as 0.05 (fsmap.LogTrace)",
        ),
        "--num-points S": (int, "evaluation images a step (128)"),
        "--estimator NAME": (str, "jvp (default), fd, fd_central, vjp, exact"),
        "--beta X": (float, "step of the differences (1e-3)"),
        "--batchnorm MODE": (str, "joint (default), frozen, batch"),
        "--every K": (int, "R on every K-th step (1)"),
    },
    "how it is computed": {
        "--precision NAME": (str, "fp32, tf32, bf16 (default: bf16 on CUDA, fp32 on a CPU)"),
        "--compile": (TOGGLE, "compile the step with inductor (default: on CUDA)"),
        "--graph": (TOGGLE, "capture the step in a CUDA graph (default: on CUDA)"),
        "--channels-last": (TOGGLE, "memory layout (default: yes)"),
        "--deterministic": (FLAG, "the same bits every time on CUDA too, slower"),
    },
}
"""Options that are fields of ``ImageSettings``; one that is not given keeps its default."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    for title, rows in SETTINGS.items():
        group = parser.add_argument_group(title)
        for words, (kind, text) in rows.items():
            name, _, metavar = words.partition(" ")
            if kind == FLAG:
                group.add_argument(name, action="store_true", default=None, help=text)
            elif kind == TOGGLE:
                toggle = argparse.BooleanOptionalAction
                group.add_argument(name, action=toggle, default=None, help=text)
            else:
                group.add_argument(name, type=kind, metavar=metavar, help=text)
    parser.set_defaults(data="fmnist", method="l-map")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 …")
    group.add_argument(
        "--bf16", dest="precision", action="store_const", const="bf16", help="--precision bf16"
    )
    group.add_argument("--quick", action="store_true", help="a run of seconds, generated images")
    group = parser.add_argument_group("files and time")
    group.add_argument("--seeds", default="0", metavar="N,N", help="one run each (default: 0)")
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="checkpoint.safetensors and log.jsonl go there"
    )
    group.add_argument("--resume", action="store_true", help="go on from the checkpoint, if any")
    group.add_argument(
        "--checkpoint-every",
        type=count,
        metavar="STEPS",
        help="(default: at the end of an epoch, at most once a minute)",
    )
    group.add_argument(
        "--max-seconds",
        type=seconds,
        default=math.inf,
        metavar="T",
        help="stop with a checkpoint after T seconds; exit code 3",
    )
    group.add_argument("--data-dir", type=Path, metavar="DIR", help="where to look for data first")
    group.add_argument("--silent", action="store_true", help="no progress bar")


def settings_of(arguments: argparse.Namespace, seed: int, device: torch.device) -> ImageSettings:
    """The settings that were asked for."""
    from fsmap.images import ImageSettings

    cuda = device.type == "cuda"
    chosen: dict[str, Any] = QUICK.copy() if arguments.quick else {}
    chosen |= {"precision": "bf16", "compile": True, "graph": True} if cuda else {}
    given = {name: getattr(arguments, name, None) for name in ImageSettings.names()}
    chosen |= {name: value for name, value in given.items() if value is not None}
    if chosen.get("clip") == 0:
        chosen["clip"] = None
    return ImageSettings(**{**chosen, "seed": seed})
