"""A run: data and model made from settings, steps taken, checkpoints written, hooks called."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsmap.data.images.read import Folder, Images
from fsmap.data.images.task import ImageTask
from fsmap.errors import InputError
from fsmap.images import state as files
from fsmap.images.build import check_model, load_data, training_model
from fsmap.images.feed import Feeder
from fsmap.images.kernels import kernels
from fsmap.images.log import LOOK_EVERY, Log, epoch_row, in_short, totals_of
from fsmap.images.parallel import Group
from fsmap.images.predict import logits_of
from fsmap.images.settings import ImageSettings
from fsmap.images.step import Step
from fsmap.progress import progress as progress_bar

CHECKPOINT_SECONDS = 60.0  # writing one takes most of a second
TIME_EVERY = 5  # steps between looks at the clock

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
        """Make data, model and step, or take them up where a checkpoint left them.

        ``folder`` is where ``checkpoint.safetensors`` and ``log.jsonl`` go (None: nothing is
        written), ``task`` and ``module`` (changed in place) replace what the settings name, and
        ``about`` is written into the log.
        """
        self.settings, self.group = settings, group or Group()
        self.device = torch.device(device)
        px = settings.px if settings.regularized else None
        self.task = (task or load_data(settings, data_dir, px)).to(self.device)
        self.module = training_model(settings, module, self.device, data_dir)
        self.hooks = list(hooks)
        self.feeder = Feeder(self.task, settings, self.module, self.group)
        self.taken = Step(self.module, settings, self.feeder, self.group)
        check_model(self.logits_of, self.task.train.x[:2], settings, self.task.classes)
        self.history: list[Row] = []
        self._stopping = False
        self.step = 0
        self.reg_strength = 0.0  # λ; a factor on the strength if that is given in nats
        if settings.regularized:
            nats = settings.reg_nats is not None
            self.reg_strength = 1.0 if nats else settings.reg_strength
        self.lr_used = self.reg_strength_used = 0.0  # of the last step taken
        self.seconds = 0.0  # of training, over all pieces
        self.first_seconds = 0.0  # of the first step of this process: compiling and capturing
        self.seconds_here = 0.0  # of the last call
        self.path = None if folder is None else Path(folder) / files.FILE
        self.config = {
            "kind": "images",
            "settings": settings.describe(),
            "data": (task or self.task).fingerprint() if self.path else {},
        }
        if self.path is not None and self.path.exists():
            files.restore(self, self.path, resume=resume)
        first = self.group.rank == 0 and folder is not None
        self.log = Log(Path(folder), self, about or {}) if first and folder is not None else None

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.step // self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch."""
        return self.feeder.steps_per_epoch

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.settings.epochs * self.steps_per_epoch

    @property
    def done(self) -> bool:
        """Whether the last step has been taken."""
        return self.step >= self.steps

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        schedule = self.settings.schedule(self.steps_per_epoch)
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
            message = f"checkpoint_every must be at least 1 step, got {checkpoint_every}"
            raise InputError(message)
        end = self.steps if until_epoch is None else until_epoch * self.steps_per_epoch
        end = min(end, self.steps)
        start = saved = time.perf_counter()
        before = self.seconds
        label = f"{self.settings.data} {self.settings.method} seed {self.settings.seed}"
        silent = not progress or self.group.rank != 0
        with progress_bar(self.steps, label, silent=silent) as bar, self._kernels():
            while self.step < end:
                self.lr_used, self.reg_strength_used = self.lr, self.reg_strength
                self.taken(self.step, lr=self.lr_used, reg_strength=self.reg_strength_used)
                self.step += 1
                if not self.first_seconds:
                    self.taken.totals.cpu()  # waits
                    self.first_seconds = time.perf_counter() - start
                self._after_step()
                self.seconds_here = time.perf_counter() - start
                self.seconds = before + self.seconds_here
                over = self._over(start, max_seconds)
                whole = self.step % self.steps_per_epoch == 0
                if whole:
                    self._after_epoch()
                    bar.update(self.step, in_short(self.history[-1]))
                elif self.step % LOOK_EVERY == 0:
                    bar.update(self.step)
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

    def logits(self, split: str = "valid", limit: int | None = None) -> tuple[Tensor, Tensor]:
        """Logits ``[N, K]`` and labels of ``train`` (not augmented), ``valid`` or ``test``."""
        parts = {"train": self.task.train, "valid": self.task.valid, "test": self.task.test}
        if split not in parts:
            message = f"split must be one of {', '.join(parts)}, got {split!r}"
            raise InputError(message)
        part: Images = parts[split].take(slice(limit))
        return self.logits_of(part.x), part.y

    def logits_of(self, images: Tensor, half: torch.dtype | None = None) -> Tensor:
        """Logits of images given as bytes ``[N, C, H, W]``, or as normalized numbers."""
        with self._kernels():
            layout = self.feeder.layout
            return logits_of(self.module, images, self.task.normalize, layout, half=half)

    def save(self) -> None:
        """Write the checkpoint; process 0 does, the others go on."""
        if self.path is not None and self.group.rank == 0:
            files.save(self, self.path)

    def stop(self) -> None:
        """End :meth:`train` after the present step, with a checkpoint; for a single process."""
        self._stopping = True

    def _kernels(self) -> AbstractContextManager[None]:
        s = self.settings
        tf32 = s.precision != "fp32"
        return kernels(self.device, deterministic=s.deterministic, tf32=tf32)

    def _after_step(self) -> None:
        if self.step % LOOK_EVERY == 0:
            totals_of(self)
        for hook in self.hooks:
            getattr(hook, "on_step", lambda _: None)(self)

    def _after_epoch(self) -> None:
        totals = totals_of(self)
        self.taken.totals.zero_()
        row = epoch_row(self, totals)
        self.history.append(row)
        for hook in self.hooks:
            getattr(hook, "on_epoch", hook)(self)
        if self.log is not None:
            self.log.write(row)

    def _over(self, start: float, max_seconds: float) -> bool:
        """Whether time is up for any process: then it is for all."""
        if max_seconds == math.inf or self.step % TIME_EVERY:
            return self._stopping
        late = torch.tensor(float(time.perf_counter() - start > max_seconds), device=self.device)
        self.group.average([late])
        return self._stopping or bool(late > 0)
