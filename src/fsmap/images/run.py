"""A run: data and model made from settings, steps, checkpoints and a log, hooks."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsmap import metrics
from fsmap.data.catalogue import Folder
from fsmap.data.images import ImageTask, one_spelling
from fsmap.errors import CheckpointError, DivergedError, InputError
from fsmap.files import write_whole
from fsmap.images import build
from fsmap.images.build import FILE, ImageSettings
from fsmap.images.step import COLUMNS, Feeder, Group, Step
from fsmap.lmap.options import mode_of
from fsmap.progress import progress as progress_bar
from fsmap.train import checkpoint
from fsmap.train.loop import Schedule

CHECKPOINT_SECONDS = 60.0  # writing one takes most of a second
CLOCK_EVERY = 5  # steps between checks of the elapsed time
CHECK_EVERY = 100  # steps between checks whether the numbers are finite
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
PROGRESS: dict[str, Any] = {"step": int, "reg_strength": float, "seconds": float, "history": list}
WORDS = {"loss": "the cross-entropy", "laplacian": "R", "grad_norm": "the gradient"}

Row = dict[str, Any]


class ImageRun:
    """One training run; see :mod:`fsmap.images`."""

    def __init__(
        self,
        settings: ImageSettings,
        *,
        device: torch.device | str = "cpu",
        folder: str | Path | None = None,
        resume: bool = False,
        hooks: Sequence[Any] = (),
        data_dir: Folder = None,
        task: ImageTask | None = None,
        module: nn.Module | None = None,
        group: Group | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        """Make data, model and optimizer, and restore their state if there is a checkpoint.

        ``folder`` is where ``checkpoint.safetensors`` and ``log.jsonl`` go (None: nothing is
        written), ``task`` and ``module`` (changed in place) replace what the settings name, and
        ``about`` is written into the log.
        """
        self.group = group or Group()
        self.device = torch.device(device)
        px = settings.px if settings.regularized else None
        self.task = (task or build.load_data(settings, data_dir, px)).to(self.device)
        images = build.describe_images(self.task)
        if module is None:
            module = build.build_model(settings, images, data_dir=data_dir)
        if not any(p.requires_grad for p in module.parameters()):
            raise InputError(f"{settings.model} has no parameters to train")
        settings = replace(settings, batchnorm=mode_of(module, settings.batchnorm))
        self.settings = settings
        if not module.training:
            module.train()
        self.module = build.place(module, settings, self.device)
        self.hooks = list(hooks)
        self.feeder = Feeder(self.task, settings, self.module, self.group)
        self.stepper = Step(self.module, self.feeder)
        build.check_model(self.logits_of, self.task.train.x[:2], settings, self.task.classes)
        self.history: list[Row] = []
        self._stopping = False
        self.steps_per_epoch = self.feeder.steps_per_epoch
        self.steps = settings.epochs * self.steps_per_epoch  # of the whole run
        self.step = 0  # steps taken
        strength = settings.reg_strength if settings.reg_nats is None else 1.0
        self.reg_strength = strength * settings.regularized  # λ, or a factor on the nats
        self.lr_used = self.reg_strength_used = 0.0  # of the last step
        self.seconds = 0.0  # of training, over all pieces
        self.first_seconds = 0.0  # of the first step of this process: compiling and capturing
        self.seconds_here = 0.0  # of the last call
        self.path = None if folder is None else Path(folder) / FILE
        self.config = {
            "kind": "images",
            "settings": settings.describe(),
            "images": images,
            "data": (task or self.task).fingerprint() if self.path else {},
        }
        if self.path is not None and self.path.exists():
            self._restore(self.path, resume=resume)
        self.log: Path | None = None
        if folder is not None and self.group.rank == 0:
            self.log = Path(folder) / "log.jsonl"
            self._start_log(self.log, about or {})

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.step // self.steps_per_epoch

    @property
    def done(self) -> bool:
        """Whether the last step was made."""
        return self.step >= self.steps

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        warmup = round(self.settings.warmup_epochs * self.steps_per_epoch)
        schedule = Schedule(warmup, self.settings.decay)
        return self.settings.lr * schedule.factor(self.step, self.steps)

    def train(
        self,
        *,
        max_seconds: float = math.inf,
        until_epoch: int | None = None,
        checkpoint_every: int | None = None,
        progress: bool = True,
    ) -> list[Row]:
        """Take the remaining steps.

        Args:
            max_seconds: Stop after the first step past this time, with a checkpoint.
            until_epoch: Stop when so many epochs are complete; None: at the end.
            checkpoint_every: Steps between checkpoints; None: one at the end of an epoch, unless
                the last is less than ``CHECKPOINT_SECONDS`` old, and one at the end.
            progress: Show a bar with the time left.

        Returns:
            The history: a row per epoch.
        """
        if checkpoint_every is not None and checkpoint_every < 1:
            raise InputError(f"checkpoint_every must be at least 1 step, got {checkpoint_every}")
        end = self.steps if until_epoch is None else until_epoch * self.steps_per_epoch
        end = min(end, self.steps)
        start = saved = time.perf_counter()
        before = self.seconds
        label = f"{self.settings.data} {self.settings.method} seed {self.settings.seed}"
        silent = not progress or self.group.rank != 0
        shown = progress_bar(self.steps, label, silent=silent)
        with shown as bar, kernels(self.device, self.settings):
            while self.step < end:
                self.lr_used, self.reg_strength_used = self.lr, self.reg_strength
                self.stepper(self.step, lr=self.lr_used, reg_strength=self.reg_strength_used)
                self.step += 1
                if not self.first_seconds:
                    self.stepper.totals.cpu()  # waits
                    self.first_seconds = time.perf_counter() - start
                if self.step % CHECK_EVERY == 0:
                    self._totals()
                    bar.update(self.step)
                for hook in self.hooks:
                    getattr(hook, "on_step", lambda _: None)(self)
                self.seconds_here = time.perf_counter() - start
                self.seconds = before + self.seconds_here
                over = self._over(start, max_seconds)
                whole = self.step % self.steps_per_epoch == 0
                if whole:
                    self._after_epoch()
                    bar.update(self.step, _in_short(self.history[-1]))
                if checkpoint_every is None:
                    due = whole and time.perf_counter() - saved > CHECKPOINT_SECONDS
                else:
                    due = self.step % checkpoint_every == 0
                if due or over or self.step == end:
                    self.save()
                    saved = time.perf_counter()
                if over:
                    self._stopping = False
                    break
        return self.history

    def logits(self, split: str = "valid") -> tuple[Tensor, Tensor]:
        """Logits ``[N, K]`` and labels of ``train`` (not augmented), ``valid`` or ``test``."""
        if split not in ("train", "valid", "test"):
            raise InputError(f"split must be one of train, valid, test, got {split!r}")
        part = getattr(self.task, split)
        return self.logits_of(part.x), part.y

    def logits_of(self, images: Tensor, half: torch.dtype | None = None) -> Tensor:
        """Logits of images given as bytes ``[N, C, H, W]``, or as normalized numbers."""
        with kernels(self.device, self.settings):
            layout = self.feeder.layout
            return build.logits_of(self.module, images, self.task.normalize, layout, half=half)

    def save(self) -> None:
        """Write the checkpoint; process 0 does, the others go on."""
        if self.path is None or self.group.rank != 0:
            return
        progress = {name: getattr(self, name) for name in PROGRESS}
        tensors = self.stepper.tensors()
        checkpoint.save(self.path, checkpoint.Checkpoint(tensors, self.config, progress))

    def stop(self) -> None:
        """End :meth:`train` after the present step, with a checkpoint; for a single process."""
        self._stopping = True

    def _restore(self, path: Path, *, resume: bool) -> None:
        if not resume:
            raise CheckpointError(
                f"the checkpoint {path} exists already. Resume it (--resume), choose another "
                "folder (--out), or delete it."
            )
        saved = checkpoint.load(path)
        images = {"images": self.config["images"]}  # older files have none
        with checkpoint.readable(path):  # older files have the name of the data as it was given
            saved.config["settings"]["data"] = one_spelling(saved.config["settings"]["data"])
        checkpoint.check_same_run(path, images | saved.config, self.config)
        with checkpoint.readable(path), torch.no_grad():
            for name, kind in PROGRESS.items():
                setattr(self, name, kind(saved.progress[name]))
            for name, t in self.stepper.tensors().items():
                t.copy_(saved.tensors[name])

    def _start_log(self, path: Path, about: dict[str, Any]) -> None:
        """Write the settings, and the rows that the checkpoint knows."""
        path.parent.mkdir(parents=True, exist_ok=True)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        head = {
            "settings": self.settings.describe(),
            "torch": torch.__version__,
            "device": f"{self.device} ({name})" if name else str(self.device),
            "processes": self.group.size,
            "parameters": sum(p.numel() for p in self.module.parameters()),
            **about,
        }
        write_whole(path, "".join(json.dumps(line) + "\n" for line in (head, *self.history)))

    def _after_epoch(self) -> None:
        row = self._epoch_row(self._totals())
        self.stepper.totals.zero_()
        self.history.append(row)
        for hook in self.hooks:
            getattr(hook, "on_epoch", hook)(self)
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def _totals(self) -> dict[str, float]:
        """The sums of the epoch so far, by name; raises DivergedError if one is not finite."""
        totals = dict(zip(COLUMNS, self.stepper.totals.tolist(), strict=True))
        lost = [words for name, words in WORDS.items() if not math.isfinite(totals[name])]
        if lost:
            nats, factor = self.settings.reg_nats, self.reg_strength
            strength = f"λ {factor:.3g}" if nats is None else f"{nats * factor:.3g} nats"
            raise DivergedError(
                f"training diverged: {lost[0]} is not finite within the {CHECK_EVERY} steps before "
                f"step {self.step} (lr {self.lr:.3g}, {strength}). Lower the learning rate or the "
                "strength of R, or clip the gradient."
            )
        return totals

    def _epoch_row(self, totals: dict[str, float]) -> Row:
        steps, penalty = totals["steps"], self.stepper.penalty
        row: Row = {
            "epoch": self.epoch,
            "step": self.step,
            "lr": self.lr_used,
            "reg_strength": self.reg_strength_used,
            "seconds": self.seconds,
            "loss": totals["loss"] / steps,
            "accuracy": totals["correct"] * self.group.size / (steps * self.settings.batch_size),
            "grad_norm": totals["grad_norm"] / steps,
        }
        if totals["regularized"]:  # on its steps R was counted ``every`` times
            row["laplacian"] = totals["laplacian"] / (totals["regularized"] * self.settings.every)
        if penalty is not None:
            row["reg_strength"] = penalty.reg_strength  # λ that the nats amount to now
            row["skipped"] = penalty.skipped
        if len(self.task.valid.x):
            logits, y = self.logits_of(self.task.valid.x, self.stepper.half), self.task.valid.y
            if bool(torch.isfinite(logits).all()):
                for name in ("accuracy", "nll", "ece", "temperature"):
                    row[f"valid_{name}"] = getattr(metrics, name)(logits, y)
        return row

    def _over(self, start: float, max_seconds: float) -> bool:
        """Whether to stop: time is up for any process, or :meth:`stop` was called."""
        if max_seconds == math.inf or self.step % CLOCK_EVERY:
            return self._stopping
        late = torch.tensor(float(time.perf_counter() - start > max_seconds), device=self.device)
        self.group.average([late])
        return self._stopping or bool(late > 0)


def _in_short(row: Row) -> str:
    """A short text about a row, for the progress bar."""
    parts = [f"epoch {row['epoch']}", f"loss {row['loss']:.3f}"]
    if "valid_accuracy" in row:
        parts.append(f"held-out {100 * row['valid_accuracy']:.1f} %")
    return ", ".join(parts)


@contextmanager
def kernels(device: torch.device, settings: ImageSettings) -> Iterator[None]:
    """Context manager: torch's global switches for precision and determinism."""
    if device.type != "cuda":
        yield
        return
    deterministic = settings.deterministic
    if deterministic and WORKSPACE not in os.environ:
        raise InputError(
            f"deterministic on CUDA needs the environment variable {WORKSPACE}=:4096:8 before the "
            "program starts; fsmap train --deterministic sets it."
        )
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32)
    strict = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn.benchmark = not deterministic  # the search itself is not reproducible
    cudnn.deterministic = deterministic
    cudnn.allow_tf32 = matmul.allow_tf32 = settings.precision != "fp32"
    if deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = before
        torch.use_deterministic_algorithms(strict, warn_only=warn)
