"""Train an image classifier with PS-MAP or L-MAP, resumable, alone or under torchrun.

Examples:
  fsmap train --data path/to/folder                # your images, 0.05 nats
  fsmap train --data cifar10 --method ps-map --epochs 200 --bf16 --out runs/ps
  fsmap train --data fmnist --px kmnist --reg-strength 1e-6 --seeds 0,1,2  # the paper's
  fsmap train --data fmnist --quick                # seconds on a CPU
  fsmap train ... --max-seconds 480 --resume       # in pieces
  torchrun --nproc-per-node 2 -m fsmap train --data cifar10 ...
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import torch

from fsmap import cli, metrics
from fsmap.data.images import is_folder
from fsmap.errors import FsmapError, InputError
from fsmap.files import commit, exclusive
from fsmap.functional import as_device
from fsmap.images import ImageRun, ImageSettings
from fsmap.images.build import FILE, load_data
from fsmap.images.step import Group, LostPeerError, processes, torchrun_device
from fsmap.progress import duration

QUICK: dict[str, Any] = {"generated": True, "limit": 256, "width": 8, "epochs": 3}
QUICK |= {"batch_size": 32, "num_points": 32}
"""Settings of ``--quick``, seconds on a CPU; options on the command line overrule them."""

NATS: dict[str, Any] = {"reg_nats": 0.05, "num_points": 32, "every": 2}
"""The settings of L-MAP if no strength is given."""

SETTINGS = {
    "data and model": {
        "--data NAME": "fmnist (default), mnist, cifar10, cifar100 (not the official split), or a "
        "folder of your own images with one sub-folder per class (photos, photos?size=64)",
        "--model PATH": "resnet18 (default), or package.module:factory?key=value; its code is run",
        "--width N": "channels of the first stage of resnet18 (64)",
        "--valid N": "number of held-out images (the protocol's)",
        "--split-seed N": "which images are held out (0)",
        "--label-noise SHARE": "share of labels drawn anew (0)",
        "--label-noise-seed N": "seed of the label noise (0)",
        "--augment": "crop and flip (default: the protocol's)",
        "--limit N": "use only N training and N test images",
        "--generated": "use generated images of the same shape; needs no data",
    },
    "optimizer: SGD; the defaults are the paper's": {
        "--epochs N": "passes over the data (50)",
        "--batch-size B": "images a step, over all processes (128; of fewer training images, the "
        "largest power of 2 up to a quarter of them)",
        "--lr X": "learning rate (0.1)",
        "--momentum X": "momentum of SGD (0.9)",
        "--nesterov": "use Nesterov momentum",
        "--weight-decay X": "weight decay of SGD (5e-4)",
        "--decay NAME": "decay of the learning rate: cosine (default) or none",
        "--warmup-epochs X": "epochs of linear warm-up (0)",
        "--clip X": "largest global norm of the gradient (1); 0: no clipping",
        "--label-smoothing X": "label smoothing, a baseline (0)",
        "--sam RHO": "radius of SAM, for either method (0)",
    },
    "the regularizer R": {
        "--method NAME": "ps-map or l-map (default)",
        "--px PX": "evaluation images: train (default), kmnist, cifar100, white-noise, a folder, "
        "or a mixture such as 0.8*train+0.2*white-noise (weights are relative)",
        "--reg-nats C": "strength in nats per training image (0.05), see fsmap.LogTrace",
        "--reg-strength LAMBDA": "instead of nats: the paper's lambda, such as 1e-6",
        "--num-points S": "evaluation images a step (32; with --reg-strength 128)",
        "--estimator NAME": "jvp (default), fd, fd_central, vjp, exact",
        "--beta X": "step of the differences (1e-3)",
        "--batchnorm MODE": "joint (default with BatchNorm), frozen (default without), batch",
        "--every K": "R on every K-th step (2; with --reg-strength 1)",
    },
    "how it is computed": {
        "--precision NAME": "fp32, tf32, bf16 (default: bf16 on CUDA, fp32 on a CPU)",
        "--compile": "compile the step with inductor (default: on CUDA)",
        "--graph": "capture the step in a CUDA graph (default: on CUDA)",
        "--channels-last": "memory layout (default: yes)",
        "--deterministic": "the same bits on every run on CUDA; slower",
    },
}
"""Help of the options that are fields of ``ImageSettings``; one not given keeps its default."""

TYPES = get_type_hints(ImageSettings)
OF_R = ("px", "num_points", "estimator", "beta", "batchnorm", "every")  # not used by PS-MAP
NAMED = ("reg_nats", "reg_strength", "sam", "label_smoothing", "weight_decay", "label_noise")


def _kind(words: str) -> Any:
    name = words.split()[0].removeprefix("--").replace("-", "_")
    if name.endswith("seed"):
        return cli.seed
    kind = next(iter(get_args(TYPES[name])), TYPES[name])  # int of `int | None`
    return {bool: cli.TOGGLE, float: cli.number}.get(kind, kind)


def _seeds(text: str) -> list[int]:
    seeds = [cli.seed(word) for word in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"names a seed twice: {text}")
    return seeds


SECONDS = partial(cli.number, least=0)
OPTIONS: dict[str, dict[str, Any]] = {
    title: {words: (_kind(words), text) for words, text in rows.items()}
    for title, rows in SETTINGS.items()
}
OPTIONS["how it is computed"] |= {
    "--bf16": ({"dest": "precision", "action": "store_const", "const": "bf16"}, "--precision bf16"),
    **cli.DEVICE,
    "--quick": (cli.FLAG, "a trial, replaced by the next; generated images if --data is no folder"),
}
OPTIONS["files and time"] = {
    "--seeds N,N": (_seeds, "one run each (default: 0)", [0]),
    "--out DIR": (Path, "folder of the run (default: in runs/train, by data, method, seed …)"),
    "--resume": (cli.FLAG, "continue from the checkpoint, if any"),
    "--checkpoint-every STEPS": (cli.count, "steps between checkpoints (an epoch, over a minute)"),
    "--max-seconds T": (SECONDS, "stop with a checkpoint after T seconds; exit code 3", math.inf),
    **cli.DATA_DIR,
    "--silent": (cli.FLAG, "no progress bar"),
}

LOCK = ".lock"  # in the folder of a run; held while it is written to


def run(arguments: argparse.Namespace) -> int:
    """Train."""
    if arguments.deterministic:  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if arguments.reg_nats is not None and arguments.reg_strength is not None:
        raise InputError("--reg-nats and --reg-strength both set the strength: give one of them")
    if arguments.method == "ps-map" and (arguments.reg_nats or arguments.reg_strength):
        raise InputError("--reg-nats and --reg-strength are strengths of l-map, not of ps-map")
    unused = [f"--{n.replace('_', '-')}" for n in OF_R if getattr(arguments, n) is not None]
    device = arguments.device = torchrun_device(as_device(arguments.device))
    seeds, left = arguments.seeds, arguments.max_seconds
    with processes(device) as group:
        say = cli.say if group.rank == 0 else lambda _: None
        if arguments.method == "ps-map" and unused and group.rank == 0:
            cli.note(f"no effect with ps-map, which has no R: {', '.join(unused)}")
        for seed in seeds:
            settings = settings_of(arguments, seed, device)
            folder = _folder(arguments, settings)
            try:
                run = _train(arguments, settings, folder, group, left)
            except (LostPeerError, TerminatedError) as error:
                raise type(error)(f"{error}. {_how_to_resume(folder)}") from error
            except KeyboardInterrupt:
                say(f"interrupted. {_how_to_resume(folder)}")
                raise
            if not run.done:
                say(f"time is up. {_how_to_resume(folder)}")
                return 3
            left -= run.seconds_here
    return 0


def _train(
    arguments: argparse.Namespace, settings: ImageSettings, folder: Path, group: Group, left: float
) -> ImageRun:
    with exclusive(folder / LOCK, folder) if group.rank == 0 else nullcontext():
        if arguments.quick and arguments.out is None and not arguments.resume:
            (folder / FILE).unlink(missing_ok=True)
        px = settings.px if settings.regularized else None
        task = load_data(settings, arguments.data_dir, px)
        images, usual = len(task.train.x), settings.batch_size
        if arguments.batch_size is None and images < usual:
            size = max(2, 1 << (images // 4).bit_length() >> 1)
            points = max(2, size // 4) if arguments.num_points is None else settings.num_points
            settings = replace(settings, batch_size=size, num_points=points)
            if group.rank == 0:
                cli.say(f"fewer training images than {usual}: --batch-size {size}")
        own: dict[str, Any] = {n: getattr(arguments, n) for n in ("device", "resume", "data_dir")}
        own["about"] = {"commit": commit(), "command": arguments.command}
        run = ImageRun(settings, task=task, folder=folder, group=group, **own)
        if group.rank == 0:
            cli.say(_opening(run, folder))
        every, shown = arguments.checkpoint_every, not arguments.silent
        with _signals(run):
            run.train(max_seconds=left, checkpoint_every=every, progress=shown)
    if run.done and group.rank == 0:
        cli.say(_closing(run))
    return run


def _folder(arguments: argparse.Namespace, settings: ImageSettings) -> Path:
    many, seed = len(arguments.seeds) > 1, f"seed{settings.seed}"
    out: Path | None = arguments.out
    if out is None:
        px = re.sub(r"[^\w.]+", "-", f"-{settings.px.replace('*', '')}") * settings.regularized
        usual = {**vars(ImageSettings), **NATS, "reg_strength": None}
        given = ((n, getattr(arguments, n)) for n in NAMED)
        px += "".join(f"-{n}-{v:g}" for n, v in given if v not in (None, usual[n]))
        px += "-quick" if arguments.quick else "-generated" * settings.generated
        path = Path(settings.data.partition("?")[0])
        parts = (part for part in path.parts[-2:] if part not in ("..", "/"))
        data = "-".join(parts) or path.resolve().name  # more than one folder is "photos"
        return Path("runs") / "train" / f"{data}-{settings.method}{px}-{seed}"
    if many and (out / FILE).exists():
        raise InputError(
            f"{out} holds a single run; those of several seeds go into folders in it. "
            f"Choose another --out, or move its files to {out}/seedN if it is of seed N."
        )
    return out / seed if many else out


def _opening(run: ImageRun, folder: Path) -> str:
    s, task = run.settings, run.task
    size = sum(p.numel() for p in run.module.parameters())
    where = f"from step {run.step} of {run.steps}" if run.step else f"{run.steps} steps"
    strength = f"λ {s.reg_strength:g}" if s.reg_nats is None else f"{s.reg_nats:g} nats"
    about_r = f"{strength}, p_X = {s.px}, {s.estimator}, {s.batchnorm}, S = {s.num_points}"
    about_r = f", {about_r}, every = {s.every}" * s.regularized
    shares = {"SAM": s.sam, "label smoothing": s.label_smoothing, "label noise": s.label_noise}
    more = "".join(f", {name} {share:g}" for name, share in shares.items() if share)
    sizes = task.train.y.bincount(minlength=task.classes).tolist()
    classes = ", ".join(f"{name} {n}" for name, n in zip(task.names, sizes, strict=False))
    classes = f"training images by class: {classes}\n" if classes else ""
    return (
        f"{s.data}{' (generated images)' * s.generated}: {len(task.train.x)} training, "
        f"{len(task.valid.x)} held-out, {len(task.test.x)} test images; "
        f"{s.model} with {size:,} parameters\n{classes}{s.method}{about_r}{more}\n"
        f"{s.epochs} epochs in batches of {s.batch_size}, learning rate {s.lr:g}, "
        f"weight decay {s.weight_decay:g}, seed {s.seed}\n"
        f"{where} on {run.device}, {s.precision}; writing {folder}"
    )


def _closing(run: ImageRun) -> str:
    logits, y = run.logits("test")
    with_r = run.settings.regularized and bool(run.history)
    scaled = ""
    if len(run.task.valid.x):
        T = metrics.temperature(*run.logits("valid"))
        scaled = f", NLL {metrics.nll(logits / T, y):.4f} after temperature scaling (T {T:.2f})"
        if T in metrics.TEMPERATURES:
            scaled = f", no temperature (T {T:g} is a bound of the search and means nothing)"
    strength = f", λ {run.history[-1]['reg_strength']:.2g} at the end" if with_r else ""
    return (
        f"test: accuracy {100 * metrics.accuracy(logits, y):.2f} %, NLL "
        f"{metrics.nll(logits, y):.4f}, ECE {100 * metrics.ece(logits, y):.2f} %{scaled}; "
        f"{duration(run.seconds)} of training (first step {run.first_seconds:.0f} s){strength}"
    )


def _how_to_resume(folder: Path) -> str:
    path = folder / FILE
    if not path.exists():
        return f"No checkpoint was written to {folder} yet."
    return f"The last checkpoint is {path}; the same command with --resume goes on from it."


@contextmanager
def _signals(run: ImageRun) -> Iterator[None]:
    """Context manager: on Ctrl-C or SIGTERM end a run after this step, with a checkpoint."""
    several, seen = run.group.size > 1, list[int]()

    def end(kind: int) -> NoReturn:
        if kind == signal.SIGINT:
            raise KeyboardInterrupt
        died = ", as when another process of the job died" if several else ""
        raise TerminatedError(f"asked to terminate (SIGTERM){died}")

    def stop(kind: int, _: object) -> None:
        if seen or several:  # torchrun sends SIGTERM if a process died: the step would wait for it
            end(kind)
        seen.append(kind)
        run.stop()
        cli.note("stopping after this step and writing a checkpoint; press again to stop now")

    before = {kind: signal.signal(kind, stop) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    if seen and not run.done:
        end(seen[0])


class TerminatedError(FsmapError):
    """The process was asked to end."""

    exit_code = 128 + signal.SIGTERM


def settings_of(arguments: argparse.Namespace, seed: int, device: torch.device) -> ImageSettings:
    """The settings of one seed, from the command line."""
    cuda = device.type == "cuda"
    nats = arguments.reg_strength is None and arguments.method != "ps-map"
    chosen: dict[str, Any] = (NATS if nats else {}) | (QUICK if arguments.quick else {})
    chosen |= {"precision": "bf16", "compile": True, "graph": True} if cuda else {}
    given = {name: getattr(arguments, name, None) for name in ImageSettings.__dataclass_fields__}
    if given["data"] and is_folder(given["data"]):
        chosen.pop("generated", None)  # --quick uses the folder
    chosen |= {name: value for name, value in given.items() if value is not None}
    if chosen.get("clip") == 0:
        chosen["clip"] = None
    return ImageSettings(**{**chosen, "seed": seed})
