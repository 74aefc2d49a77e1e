"""What each step reads, as a function of (seed, epoch, step, rank): a resumed run reads the same.

Order, crops and evaluation points are drawn for an epoch at a time and moved to the device once;
within the epoch a step copies its row into fixed tensors, which a captured graph reads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsmap.data.images.augment import Shifts
from fsmap.data.images.evaluation import Picks
from fsmap.data.images.task import ImageTask
from fsmap.errors import InputError
from fsmap.linalg.probes import Stream, generator, integer, rademacher
from fsmap.train.images.gradient import REGULARIZED, Feed
from fsmap.train.images.parallel import Group
from fsmap.train.images.settings import ImageSettings
from fsmap.types import Params


class Feeder:
    """Indices on the device, images out of them, and ψ."""

    def __init__(
        self, task: ImageTask, settings: ImageSettings, params: Params, group: Group
    ) -> None:
        """Make the fixed tensors.

        Args:
            task: The data, on the device of the run.
            settings: Of the run.
            params: The parameters.
            group: The processes that share the work.

        Raises:
            InputError: If the batch does not divide over the processes, or exceeds the data.
        """
        for name in ("batch_size", "num_points"):
            if getattr(settings, name) % group.size:
                message = (
                    f"{name}={getattr(settings, name)} does not divide over {group.size} processes"
                )
                raise InputError(message)
        if settings.batch_size > len(task.train.x):
            message = (
                f"batch_size={settings.batch_size} is larger than the training set, "
                f"{len(task.train.x)} images. Use a smaller one."
            )
            raise InputError(message)
        self.task, self.settings, self.group = task, settings, group
        self.device = task.train.x.device
        self.dtype = next(iter(params.values())).dtype
        self.batch = settings.batch_size // group.size
        self.points = settings.num_points // group.size
        self.steps_per_epoch = len(task.train.x) // settings.batch_size
        self.epoch = -1
        self._source = torch.Generator(self.device)
        self.draws: dict[str, Tensor] = {}  # of the epoch, [steps, ...]
        self.now: dict[str, Tensor] = {}  # of the step
        self.psi = self._probe_buffers(params) if settings.regularized else {}
        self.reg_strength = torch.zeros((), dtype=self.dtype, device=self.device)
        self.scale = torch.ones((), dtype=self.dtype, device=self.device)
        self._load(0)
        self.now = {name: t[0].clone() for name, t in self.draws.items()}

    def prepare(self, step: int, kind: str) -> None:
        """Put the draws of a step where :meth:`feed` reads them.

        Args:
            step: Its number.
            kind: Of the step: ψ is drawn where R is evaluated.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            self._load(epoch)
        torch._foreach_copy_(list(self.now.values()), [t[place] for t in self.draws.values()])
        if kind == REGULARIZED:
            self._draw_probe(step)

    def feed(self, kind: str) -> Feed:
        """The images of the prepared step; runs inside a captured graph."""
        task, now = self.task, self.now
        images = task.train.x[now["rows"]]
        if task.augment is not None:
            shifts = Shifts(now["down"], now["right"], now["flip"])
            images = task.augment.apply(images, shifts)
        x = task.normalize(images, self.dtype)
        points = x[:0]
        if kind != "plain":
            assert task.px is not None
            shifts = Shifts(now["px_down"], now["px_right"], now["px_flip"])
            picks = Picks(now["px_component"], now["px_row"], shifts)
            points = self._layout(task.px.take(picks, self.dtype))
        psi = self.psi if kind == REGULARIZED else {}
        return Feed(
            self._layout(x), task.train.y[now["rows"]], points, psi, self.reg_strength, self.scale
        )

    def _layout(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if self.settings.channels_last else x

    def _load(self, epoch: int) -> None:
        """Draw an epoch: one order for all processes, crops and points for each its own."""
        settings, group, steps = self.settings, self.group, self.steps_per_epoch
        order = torch.randperm(
            len(self.task.train.x), generator=generator(settings.seed, epoch, "epoch")
        )
        rows = order[: steps * settings.batch_size].reshape(steps, group.size, self.batch)
        draws = {"rows": rows[:, group.rank].clone()}
        if self.task.augment is not None:
            own = generator(settings.seed, epoch, "augment", group.rank)
            draws |= self.task.augment.draw((steps, self.batch), own)._asdict()
        if settings.regularized:
            assert self.task.px is not None
            own = generator(settings.seed, epoch, "points", group.rank)
            component, row, shifts = self.task.px.draw((steps, self.points), own)
            draws |= {"px_component": component, "px_row": row}
            draws |= {f"px_{name}": t for name, t in shifts._asdict().items()}
        self.draws = {name: t.to(self.device) for name, t in draws.items()}
        self.epoch = epoch

    def _probe_buffers(self, params: Params) -> Params:
        settings = self.settings
        if settings.estimator == "exact":
            return {}
        if settings.estimator == "vjp":
            number = self.points + (self.batch if settings.batchnorm == "joint" else 0)
            zeros = torch.zeros(number * self.task.classes, dtype=self.dtype, device=self.device)
            return {"signs": zeros}
        return {n: torch.zeros(p.shape, dtype=p.dtype, device=p.device) for n, p in params.items()}

    def _draw_probe(self, step: int) -> None:
        """ψ of :class:`fsmap.linalg.probes.Stream`, the same on every rank; signs are a rank's."""
        seed, rank = self.settings.seed, self.group.rank
        if self.settings.estimator == "vjp":
            own = generator(seed, step, "signs", rank)
            self.psi["signs"].copy_(rademacher(1, len(self.psi["signs"]), own, self.scale)[0])
        elif self.device.type != "cuda":
            drawn = Stream(seed, step).psi(self.psi)
            torch._foreach_copy_(list(self.psi.values()), [p[0] for p in drawn.values()])
        else:  # the same numbers, without making tensors and generators
            for name, buffer in self.psi.items():
                self._source.manual_seed(integer(seed, step, name))
                buffer.normal_(generator=self._source)


def trainable(module: nn.Module) -> Params:
    """Trainable parameters by name, live."""
    return {n: p for n, p in module.named_parameters() if p.requires_grad}
