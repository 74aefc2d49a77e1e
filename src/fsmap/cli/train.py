"""``fsmap train``: image classifiers with PS-MAP and L-MAP, resumable, alone or under torchrun."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fsmap.cli import console
from fsmap.cli.train_options import add_options, device_of, settings_of
from fsmap.errors import FsmapError, InputError
from fsmap.train.lock import exclusive
from fsmap.train.progress import duration

if TYPE_CHECKING:
    from fsmap.train.images import ImageRun, ImageSettings
    from fsmap.train.parallel import Group


LOCK = ".lock"
"""In the folder of a run; held while it is written to."""


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
            "fsmap train --data cifar10 --px cifar100 --reg-strength 1e-6 --seeds 0,1,2",
            "fsmap train --data fmnist --quick                # seconds on a CPU",
            "fsmap train ... --max-seconds 480 --resume       # in pieces",
            "torchrun --nproc-per-node 2 -m fsmap train --data cifar10 ...",
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
    from fsmap.train.parallel import LostPeerError, processes, torchrun_device

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
    from fsmap.paper.rows import circumstances
    from fsmap.train.images import ImageRun

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
    if len(set(seeds)) < len(seeds):
        message = f"--seeds names a seed twice: {arguments.seeds}"
        raise InputError(message)
    return seeds


def _folder(
    arguments: argparse.Namespace, settings: ImageSettings, seed: int, *, many: bool
) -> Path:
    from fsmap.train.images.state import FILE

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
    parts = [
        f"{s.data}{' (generated images)' * s.generated}: {len(task.train.x)} training, "
        f"{len(task.valid.x)} held-out, {len(task.test.x)} test images; "
        f"{s.model} with {size:,} parameters",
        s.method + (_about_r(run) if s.regularized else ""),
        f"{where} on {run.device}, {s.precision}; writing {folder}",
    ]
    return "\n".join(parts)


def _about_r(run: ImageRun) -> str:
    s = run.settings
    slow = ""
    if s.estimator == "exact" and s.batchnorm != "frozen":
        points = s.num_points + (s.batch_size if s.batchnorm == "joint" else 0)
        slow = f" (slow: every output of {points} images is differentiated by itself)"
    strength = f"λ {s.reg_strength:g}" if s.reg_nats is None else f"{s.reg_nats:g} nats"
    return f", {strength}, p_X = {s.px}, {s.estimator}, {s.batchnorm}{slow}"


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
    from fsmap.train.images.state import FILE

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
