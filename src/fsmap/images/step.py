"""One step: images, loss + λR by :class:`fsmap.LMAP`, clipping, SGD, sums for the log.

Several processes (``torchrun``) have the same ψ, evaluation points of their own and shares of each
batch. Gradients and running statistics are averaged in one collective, so that all processes hold
the same weights after every step. BatchNorm normalizes each share by itself, as under
``DistributedDataParallel``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fsmap.data.images import ImageTask, Picks, Shifts
from fsmap.errors import FsmapError, InputError
from fsmap.functional import is_random, seeded
from fsmap.images.build import ImageSettings, autocast, layout_of
from fsmap.linalg.estimators import Probes, by_name, draws_normal
from fsmap.lmap.core import Drawn
from fsmap.lmap.module import LMAP, LogTrace
from fsmap.px import generator, integer
from fsmap.train.capture import CapturedStep
from fsmap.train.loop import OptimizerSpec, set_lr

COLUMNS = ("loss", "laplacian", "correct", "grad_norm", "regularized", "steps")
"""Sums over the steps of an epoch."""


class LostPeerError(FsmapError, RuntimeError):
    """Another process of the job went away."""


class Group(NamedTuple):
    """The processes of a job; one, unless ``torchrun`` started more."""

    rank: int = 0
    size: int = 1

    def average(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their means over all processes."""
        if self.size == 1:
            return
        flat = torch.cat([t.reshape(-1) for t in tensors])
        with self.collective():
            dist.all_reduce(flat)
        flat /= self.size
        parts = flat.split([t.numel() for t in tensors])
        for t, part in zip(tensors, parts, strict=True):
            t.copy_(part.reshape(t.shape))

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Context manager: a failure means that another process went away."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1:
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise LostPeerError(
                f"process {self.rank} of {self.size} lost the others ({reason}): one of them was "
                "killed or failed"
            ) from error


def torchrun_device(device: torch.device) -> torch.device:
    """The device of this process: under ``torchrun`` on CUDA, that of its local rank."""
    local = os.environ.get("LOCAL_RANK")
    bare = device == torch.device("cuda")  # no index: any of them
    return device if local is None or not bare else torch.device("cuda", int(local))


@contextmanager
def processes(device: torch.device) -> Iterator[Group]:
    """Context manager: the process group that ``torchrun`` started, or a single process."""
    if dist.is_available() and dist.is_initialized():
        yield Group(dist.get_rank(), dist.get_world_size())
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Group()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Group(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


class Batch(NamedTuple):
    """The images of one step."""

    x: Tensor  # [B, C, H, W]
    y: Tensor  # [B]
    points: Tensor  # [S, C, H, W], none of them without p_X


class Feeder:
    """The inputs of each step, a function of (seed, epoch, step, rank).

    Order, crops and evaluation points are drawn for an epoch at a time, as one table of integers,
    and moved to the device once. A step copies its row of the table into a fixed tensor.
    """

    def __init__(
        self, task: ImageTask, settings: ImageSettings, module: nn.Module, group: Group
    ) -> None:
        for name in ("batch_size", "num_points"):
            value = getattr(settings, name)
            if value % group.size:
                raise InputError(f"{name}={value} does not divide over {group.size} processes")
        if settings.batch_size > len(task.train.x):
            raise InputError(
                f"batch_size={settings.batch_size} is larger than the training set, "
                f"{len(task.train.x)} images. Use a smaller one (--batch-size)."
            )
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
        """Copy the draws of a step to the tensor that :meth:`assemble` reads."""
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
        """Draw an epoch: one order for all processes; crops and points differ between them."""
        settings, group, steps = self.settings, self.group, self.steps_per_epoch
        shared = generator(settings.seed, epoch, "epoch")
        order = torch.randperm(len(self.task.train.x), generator=shared)
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


class Step:
    """Takes steps; eager, compiled, or captured whole in a CUDA graph."""

    def __init__(self, module: nn.Module, feeder: Feeder) -> None:
        self.module, self.feeder = module, feeder
        self.settings, self.group = feeder.settings, feeder.group
        settings, device = feeder.settings, feeder.device
        _check_compilable(module, settings, device)
        self.params = {n: p for n, p in module.named_parameters() if p.requires_grad}
        names = ("momentum", "nesterov", "weight_decay")
        options = tuple((name, getattr(settings, name)) for name in names)
        spec = OptimizerSpec("sgd", settings.lr, options)
        self.optimizer = spec.build(self.params.values(), capturable=device.type == "cuda")
        if settings.momentum:  # what torch makes at the first step
            for p in self.params.values():
                self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.half = torch.bfloat16 if settings.precision == "bf16" else None
        self.totals = torch.zeros(len(COLUMNS), device=device, dtype=torch.float32)
        self.reg_strength = torch.zeros((), device=device, dtype=feeder.dtype)
        self.lm: LMAP | None = None
        self.penalty: LogTrace | None = None
        self.plain, self.assemble = module.__call__, feeder.assemble
        if settings.regularized:
            self._regularize(settings)
        if settings.compile:
            self.assemble = torch.compile(feeder.assemble)
            if self.lm is None:
                self.plain = torch.compile(module)
        self.noise = 0  # seed of random layers, in this step
        self.captured: dict[bool, CapturedStep] = {}  # without R and with it

    def _regularize(self, settings: ImageSettings) -> None:
        px, feeder = self.feeder.task.px, self.feeder
        assert px is not None
        names = ("batchnorm", "estimator", "beta", "every", "seed")
        options: dict[str, Any] = {name: getattr(settings, name) for name in names}
        self.lm = LMAP(self.module, px, num_points=feeder.points, **options)
        if settings.compile:
            self.lm.compile()
        size = sum(p.numel() for p in self.params.values())
        self.draws_psi = draws_normal(by_name(settings.estimator))
        with autocast(feeder.device, self.half):
            dtype = self.lm.regularizer.psi_dtype(feeder.device)
        self.psi = torch.zeros(1, size, device=feeder.device, dtype=dtype)
        if settings.reg_nats is not None:
            self.penalty = LogTrace(settings.reg_nats).to(feeder.device)

    def __call__(self, step: int, *, lr: float, reg_strength: float) -> None:
        """Take a step."""
        with_r = self.lm is not None and reg_strength != 0 and step % self.settings.every == 0
        self.feeder.prepare(step)
        self.noise = integer(self.settings.seed, step, "layers", self.group.rank)
        self.reg_strength.fill_(reg_strength)
        set_lr(self.optimizer, lr)
        if self.lm is not None:
            self.lm.step = step
            if with_r and self.draws_psi:
                stream = self.lm.regularizer.stream()
                size, device = self.psi.shape[1], self.psi.device
                self.psi.copy_(stream.flat_psi(size, 1, device, self.psi.dtype))
        if not self.settings.graph or self.group.size > 1:
            self.advance(with_r)
            return
        if with_r not in self.captured:
            state = lambda: list(self.tensors().values())  # noqa: E731
            self.captured[with_r] = CapturedStep(lambda: self.advance(with_r), state)
        self.captured[with_r]()

    def advance(self, with_r: bool) -> None:
        """Everything after the draws are in place: fixed tensors in, fixed tensors changed."""
        x, y, points = self.assemble()
        probes: Probes = None
        if with_r:
            assert self.lm is not None
            probes = self.psi if self.draws_psi else self.lm.regularizer.probes(x, points)
        drawn = Drawn(points, probes)
        measured = self._differentiate(x, y, drawn, with_r)
        if self.settings.sam:
            self._sam_gradient(x, y, drawn, with_r)
        self._update(measured, with_r)

    def _differentiate(self, x: Tensor, y: Tensor, drawn: Drawn, with_r: bool) -> Tensor:
        """Fill ``.grad``; returns cross-entropy, R (times ``every``) and the number correct."""
        R: Tensor | None = self.reg_strength.new_zeros(())
        fast = self.settings.compile or self.settings.graph  # without random layers
        noise = nullcontext() if fast else seeded(self.noise, x.device)
        with autocast(x.device, self.half), noise:
            if self.lm is None:
                out = self.plain(x)
            else:
                out, R = self.lm(x, drawn=drawn, reg_strength=None if with_r else 0.0)
        assert R is not None
        out = out.to(self.feeder.dtype)
        loss = F.cross_entropy(out, y, label_smoothing=self.settings.label_smoothing)
        total = loss
        if with_r:
            with self.group.collective():  # LogTrace averages R over the processes
                term = R if self.penalty is None else self.penalty(R, every=self.settings.every)
            total = loss + self.reg_strength * term
        for p in self.params.values():
            p.grad = None
        total.backward()
        right = (out.argmax(1) == y).sum()
        return torch.stack([t.detach().float() for t in (loss, R, right)])

    def _sam_gradient(self, x: Tensor, y: Tensor, drawn: Drawn, with_r: bool) -> None:
        """Sharpness-aware minimization: the gradient at θ + ρ·g/‖g‖, in ``.grad`` of θ."""
        params = list(self.params.values())
        tensors = [*params, *self.module.buffers()]
        tensors += [] if self.penalty is None else list(self.penalty.buffers())
        with torch.no_grad():
            kept = [t.detach().clone() for t in tensors]
            grads = self._grads()
            self.group.average(grads)
            factor = self.settings.sam / (get_total_norm(grads) + 1e-12)
            for p, g in zip(params, grads, strict=True):
                p.add_(g * factor)
        self._differentiate(x, y, drawn, with_r)
        with torch.no_grad():
            for t, before in zip(tensors, kept, strict=True):
                t.copy_(before)

    @torch.no_grad()
    def _update(self, measured: Tensor, with_r: bool) -> None:
        """Average over processes, clip, move the parameters."""
        params, grads = list(self.params.values()), self._grads()
        floats = [b for b in self.module.buffers() if b.is_floating_point()]
        self.group.average([*grads, *floats])
        self.group.average([measured])
        norm = get_total_norm(grads)
        if self.settings.clip is not None:
            clip_grads_with_norm_(params, self.settings.clip, norm)
        self.optimizer.step()
        self.totals[:4] += torch.cat([measured, norm.float()[None]])
        self.totals[4] += with_r
        self.totals[5] += 1

    def _grads(self) -> list[Tensor]:
        for p in self.params.values():
            if p.grad is None:  # the layer was not used
                p.grad = torch.zeros_like(p)
        return [p.grad for p in self.params.values() if p.grad is not None]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that a step changes, live, by its name in a checkpoint."""
        found = {f"params/{n}": p.detach() for n, p in self.module.named_parameters()}
        found |= {f"buffers/{n}": b for n, b in self.module.named_buffers()}
        if self.settings.momentum:
            states = {n: self.optimizer.state[p] for n, p in self.params.items()}
            found |= {f"momentum/{n}": state["momentum_buffer"] for n, state in states.items()}
        if self.penalty is not None:
            found |= {f"penalty/{n}": b for n, b in self.penalty.named_buffers()}
        return found | {"step/totals": self.totals}


def _check_compilable(module: nn.Module, settings: ImageSettings, device: torch.device) -> None:
    """Raise if the step cannot be compiled or captured."""
    if settings.graph and device.type != "cuda":
        raise InputError(f"graph=True needs a CUDA device, got {device}")
    if settings.graph and settings.regularized and by_name(settings.estimator).reverse_mode:
        raise InputError(f"graph=True does not go with the estimator {settings.estimator!r}")
    noisy = sorted({type(m).__name__ for m in module.modules() if is_random(m)})
    if noisy and (settings.graph or settings.compile):
        raise InputError(
            "compile and graph need a model without random layers, and this one has "
            f"{', '.join(noisy)}. Set both to False, or the drop rates to 0."
        )
