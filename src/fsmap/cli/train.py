"""``fsmap train``: image classifiers with PS-MAP and L-MAP, resumable, alone or under torchrun."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.cli import console
from fsmap.cli.train_options import add_options, device_of, settings_of
from fsmap.errors import FsmapError
from fsmap.train.progress import duration

if TYPE_CHECKING:
    from fsmap.train.images import ImageRun, ImageSettings
    from fsmap.train.images.parallel import Group


def add_parser(subparsers: Any) -> None:
    """Add the command.

    Args:
        subparsers: Where to.
    """
    parser = console.add_command(
        subparsers,
        "train",
        run,
        summary="train an image classifier with PS-MAP or L-MAP",
        examples=[
            "fsmap train --data fmnist --method l-map --px kmnist --reg-strength 1e-6",
            "fsmap train --data cifar10 --method ps-map --epochs 200 --bf16 --out runs/ps",
            "fsmap train --data cifar10 --px cifar100 --reg-strength auto --seeds 0,1,2",
            "fsmap train --data fmnist --quick                # seconds on a CPU",
            "fsmap train ... --max-seconds 480 --resume       # in pieces",
            "torchrun --nproc-per-node 2 -m fsmap.cli train --data cifar10 ...",
        ],
    )
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train.

    Args:
        arguments: The options of the command.

    Returns:
        0 when all runs are complete, 3 when time was up before that.

    Raises:
        error: With how to resume, if another process of the job went away.
        KeyboardInterrupt: After saying how to resume.
    """
    if arguments.deterministic:  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from fsmap.train.images.parallel import LostPeerError, processes, torchrun_device

    device = torchrun_device(device_of(arguments.device))
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
    from fsmap.report.circumstances import circumstances
    from fsmap.train.images import ImageRun

    about = {"commit": circumstances("cpu").commit, "command": shlex.join(["fsmap", *sys.argv[1:]])}
    run = ImageRun(
        settings,
        device=device,
        folder=folder,
        resume=arguments.resume,
        hooks=_hooks(arguments),
        data_dir=arguments.data_dir,
        group=group,
        about=about,
    )
    if group.rank == 0:
        console.say(_opening(run, folder))
    with _terminated():
        run.train(
            max_seconds=left,
            checkpoint_every=arguments.checkpoint_every,
            progress=not arguments.silent,
        )
    if run.done and group.rank == 0:
        console.say(_closing(run))
    return run


def _hooks(arguments: argparse.Namespace) -> Sequence[Any]:
    if arguments.reg_strength != "auto":
        return ()
    from fsmap.train.image_control import SteerStrength

    return (SteerStrength(),)


def _seeds(arguments: argparse.Namespace) -> list[int]:
    from fsmap.errors import InputError

    try:
        return [int(word) for word in str(arguments.seeds).split(",")]
    except ValueError as error:
        message = f"--seeds is written 0 or 0,1,2, got {arguments.seeds!r}"
        raise InputError(message) from error


def _folder(
    arguments: argparse.Namespace, settings: ImageSettings, seed: int, *, many: bool
) -> Path:
    if arguments.out is None:
        px = f"-{settings.px}" if settings.regularized else ""
        px += "-auto" if arguments.reg_strength == "auto" else ""
        return Path("runs") / "train" / f"{settings.data}-{settings.method}{px}-seed{seed}"
    return arguments.out / f"seed{seed}" if many else Path(arguments.out)


def _opening(run: ImageRun, folder: Path) -> str:
    s, task = run.settings, run.task
    size = sum(p.numel() for p in run.module.parameters())
    where = f"from step {run.step} of {run.steps}" if run.step else f"{run.steps} steps"
    parts = [
        f"{s.data}: {len(task.train.x)} training, {len(task.valid.x)} held-out, "
        f"{len(task.test.x)} test images; {s.model} with {size:,} parameters",
        s.method + (_about_r(run) if s.regularized else ""),
        f"{where} on {run.device}, {s.precision}; writing {folder}",
    ]
    return "\n".join(parts)


def _about_r(run: ImageRun) -> str:
    s = run.settings
    steered = any(hasattr(hook, "control") for hook in run.hooks)
    lam = "steered by held-out images" if steered else f"{s.reg_strength:g}"
    return f", λ {lam}, p_X = {s.px}, {s.estimator}, {s.batchnorm}"


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
    return (
        f"test: accuracy {100 * metrics.accuracy(logits, y):.2f} %, NLL "
        f"{metrics.nll(logits, y):.4f}, ECE {100 * metrics.ece(logits, y):.2f} %{temperature}; "
        f"{duration(run.seconds)} of training"
        + (f", λ {run.history[-1]['reg_strength']:.2g} at the end{_status(run)}" if with_r else "")
    )


def _status(run: ImageRun) -> str:
    """What became of a steered λ."""
    for hook in run.hooks:
        if hasattr(hook, "control"):
            return f" ({'warm-up' if hook.control is None else hook.control.status})"
    return ""


def _how_to_resume(folder: Path) -> str:
    from fsmap.train.images.state import FILE

    path = folder / FILE
    if not path.exists():
        return f"No checkpoint was written to {folder} yet."
    return f"The last checkpoint is {path}; the same command with --resume goes on from it."


class _terminated:
    """Within it, SIGTERM (what torchrun sends when another process died) is an error to explain."""

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGTERM, self._stop)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self.before)

    def _stop(self, *_: object) -> None:
        message = "asked to terminate (SIGTERM), as when another process of the job died"
        raise TerminatedError(message)


class TerminatedError(FsmapError):
    """The process was asked to end."""
