"""What each step reads, as a function of (seed, epoch, step, rank): a resumed run reads the same.

Order, crops and evaluation points are drawn for an epoch at a time, as one table of integers, and
moved to the device once. A step copies its row of the table into a fixed tensor; from there on
everything is tensors, and is traced, compiled and captured together with the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fsmap.data.images.augment import Shifts
from fsmap.data.images.evaluation import Picks
from fsmap.data.images.task import ImageTask
from fsmap.errors import InputError
from fsmap.linalg.probes import generator
from fsmap.train.images.gradient import PLAIN, REGULARIZED, Feed, half_precision
from fsmap.train.images.layout import layout_of
from fsmap.train.images.parallel import Group
from fsmap.train.images.psi import Psi
from fsmap.train.images.settings import ImageSettings
from fsmap.types import Params


class Feeder:
    """Indices on the device, images out of them, and ψ."""

    def __init__(
        self, task: ImageTask, settings: ImageSettings, module: nn.Module, group: Group
    ) -> None:
        """Make the fixed tensors.

        Args:
            task: The data, on the device of the run.
            settings: Of the run.
            module: The model.
            group: The processes that share the work.
        """
        _check_sizes(task, settings, group)
        self.task, self.settings, self.group = task, settings, group
        self.device = task.train.x.device
        self.layout = layout_of(module, settings.channels_last, self.device)
        params: Params = dict(module.named_parameters())
        self.dtype = next(iter(params.values())).dtype
        self.batch = settings.batch_size // group.size
        self.points = settings.num_points // group.size
        self.steps_per_epoch = len(task.train.x) // settings.batch_size
        self.reg_strength = torch.zeros((), dtype=self.dtype, device=self.device)
        self.scale = torch.ones((), dtype=self.dtype, device=self.device)
        self.epoch = -1
        self.widths: dict[str, int] = {}  # columns of the table, by what they hold
        self.table = torch.empty(0)  # int64 [steps, columns], of the epoch
        self._load(0)
        self.now = self.table[0].clone()
        number = self.points + (self.batch if settings.batchnorm == "joint" else 0)
        half = half_precision(settings, self.device)
        self.psi = Psi(settings, params, number * task.classes, group.rank, half)

    def prepare(self, step: int, kind: str) -> None:
        """Put the draws of a step where :meth:`inputs` has them.

        Args:
            step: Its number.
            kind: Of the step: ψ is drawn where R is evaluated.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            self._load(epoch)
        self.now.copy_(self.table[place])
        if kind == REGULARIZED:
            self.psi.draw(step)

    def inputs(self, kind: str) -> dict[str, Tensor]:
        """All tensors that the prepared step reads: draws, images, ψ, λ.

        Args:
            kind: Of the step.

        Returns:
            Tensors that stay the same objects over the run; their content changes.
        """
        found = {
            "now": self.now,
            "images": self.task.train.x,
            "labels": self.task.train.y,
            "reg_strength": self.reg_strength,
            "scale": self.scale,
        }
        if kind != PLAIN and self.task.px is not None:
            for number, source in enumerate(self.task.px.sources):
                found[f"px {number}"] = source.images
        if kind == REGULARIZED:
            found |= {f"psi {name}": t for name, t in self.psi.now.items()}
        return found

    def assemble(self, inputs: dict[str, Tensor], kind: str) -> Feed:
        """The images of a step; a pure function.

        Args:
            inputs: What :meth:`inputs` returned.
            kind: Of the step.

        Returns:
            What the gradient reads.
        """
        task = self.task
        names = list(self.widths)
        now = dict(zip(names, inputs["now"].split(list(self.widths.values())), strict=True))
        images = inputs["images"][now["rows"]]
        if task.augment is not None:
            shifts = Shifts(now["down"], now["right"], now["flip"].bool())
            images = task.augment.apply(images, shifts)
        x = task.normalize(images, self.dtype).contiguous(memory_format=self.layout)
        points = x[:0]
        if kind != PLAIN:
            assert task.px is not None
            sources = tuple(
                source._replace(images=inputs[f"px {i}"])
                for i, source in enumerate(task.px.sources)
            )
            shifts = Shifts(now["px_down"], now["px_right"], now["px_flip"].bool())
            picks = Picks(now["px_component"], now["px_row"], shifts)
            points = task.px._replace(sources=sources).take(picks, self.dtype)
            points = points.contiguous(memory_format=self.layout)
        psi = {n.removeprefix("psi "): t for n, t in inputs.items() if n.startswith("psi ")}
        y = inputs["labels"][now["rows"]]
        return Feed(x, y, points, psi, inputs["reg_strength"], inputs["scale"])

    def feed(self, kind: str) -> Feed:
        """The images of the prepared step."""
        return self.assemble(self.inputs(kind), kind)

    def batches(self, step: int, number: int, kind: str) -> Iterator[Tensor]:
        """Inputs of some steps of an epoch, without taking those steps.

        Args:
            step: Whose epoch; the batches follow on its own, from the first again after the last.
            number: How many.
            kind: Of the steps: ``joined`` has the evaluation points in the batch.

        Yields:
            Images ``[B, C, H, W]``, or ``[B + S, C, H, W]``.
        """
        for i in range(number):
            epoch, place = divmod(step, self.steps_per_epoch)
            self.prepare(epoch * self.steps_per_epoch + (place + i) % self.steps_per_epoch, kind)
            found = self.feed(kind)
            yield torch.cat([found.x, found.points])

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


def trainable(module: nn.Module) -> Params:
    """Trainable parameters by name, live."""
    return {n: p for n, p in module.named_parameters() if p.requires_grad}


def _check_sizes(task: ImageTask, settings: ImageSettings, group: Group) -> None:
    for name in ("batch_size", "num_points"):
        if getattr(settings, name) % group.size:
            value = getattr(settings, name)
            message = f"{name}={value} does not divide over {group.size} processes"
            raise InputError(message)
    if settings.batch_size > len(task.train.x):
        message = (
            f"batch_size={settings.batch_size} is larger than the training set, "
            f"{len(task.train.x)} images. Use a smaller one."
        )
        raise InputError(message)
