"""What each step reads, as a function of (seed, epoch, step, rank): a resumed run reads the same.

Order, crops and evaluation points are drawn for an epoch at a time, as one table of integers, and
moved to the device once. A step copies its row of the table into a fixed tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fsmap.data.images.augment import Shifts
from fsmap.data.images.evaluation import Picks
from fsmap.data.images.task import ImageTask
from fsmap.errors import InputError
from fsmap.images.kernels import layout_of
from fsmap.images.parallel import Group
from fsmap.images.settings import ImageSettings
from fsmap.linalg.probes import generator


class Batch(NamedTuple):
    """The images of one step."""

    x: Tensor  # [B, C, H, W]
    y: Tensor  # [B]
    points: Tensor  # [S, C, H, W], none of them without p_X


class Feeder:
    """Indices on the device, and images out of them."""

    def __init__(
        self, task: ImageTask, settings: ImageSettings, module: nn.Module, group: Group
    ) -> None:
        """Draw the first epoch."""
        _check_sizes(task, settings, group)
        self.task, self.settings, self.group = task, settings, group
        self.device = task.train.x.device
        self.layout = layout_of(module, settings.channels_last, self.device)
        self.dtype = next(module.parameters()).dtype
        self.batch = settings.batch_size // group.size
        self.points = settings.num_points // group.size
        self.steps_per_epoch = len(task.train.x) // settings.batch_size
        self.epoch = -1
        self.widths: dict[str, int] = {}  # columns of the table, by what they hold
        self.table = torch.empty(0)  # int64 [steps, columns], of the epoch
        self._load(0)
        self.now = self.table[0].clone()

    def prepare(self, step: int) -> None:
        """Copy the draws of a step to where :meth:`assemble` reads them."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            self._load(epoch)
        self.now.copy_(self.table[place])

    def assemble(self) -> Batch:
        """The images of the prepared step."""
        task, parts = self.task, self.now.split(list(self.widths.values()))
        now = dict(zip(self.widths, parts, strict=True))
        images = task.train.x[now["rows"]]
        if task.augment is not None:
            shifts = Shifts(now["down"], now["right"], now["flip"].bool())
            images = task.augment.apply(images, shifts)
        x = task.normalize(images, self.dtype).contiguous(memory_format=self.layout)
        points = x[:0]
        if task.px is not None and "px_row" in now:
            shifts = Shifts(now["px_down"], now["px_right"], now["px_flip"].bool())
            picks = Picks(now["px_component"], now["px_row"], shifts)
            points = task.px.take(picks, self.dtype).contiguous(memory_format=self.layout)
        return Batch(x, task.train.y[now["rows"]], points)

    def _load(self, epoch: int) -> None:
        """Draw an epoch: one order for all processes, crops and points for each its own."""
        settings, group, steps = self.settings, self.group, self.steps_per_epoch
        order = torch.randperm(
            len(self.task.train.x), generator=generator(settings.seed, epoch, "epoch")
        )
        rows = order[: steps * settings.batch_size].reshape(steps, group.size, self.batch)
        draws = {"rows": rows[:, group.rank]}
        if self.task.augment is not None:
            own = generator(settings.seed, epoch, "augment", group.rank)
            draws |= self.task.augment.draw((steps, self.batch), own)._asdict()
        if settings.regularized:
            assert self.task.px is not None
            own = generator(settings.seed, epoch, "points", group.rank)
            component, row, shifts = self.task.px.draw((steps, self.points), own)
            draws |= {"px_component": component, "px_row": row}
            draws |= {f"px_{name}": t for name, t in shifts._asdict().items()}
        self.widths = {name: t.shape[1] for name, t in draws.items()}
        self.table = torch.cat([t.long() for t in draws.values()], dim=1).to(self.device)
        self.epoch = epoch


def _check_sizes(task: ImageTask, settings: ImageSettings, group: Group) -> None:
    for name in ("batch_size", "num_points"):
        value = getattr(settings, name)
        if value % group.size:
            message = f"{name}={value} does not divide over {group.size} processes"
            raise InputError(message)
    if settings.batch_size > len(task.train.x):
        message = (
            f"batch_size={settings.batch_size} is larger than the training set, "
            f"{len(task.train.x)} images. Use a smaller one."
        )
        raise InputError(message)
