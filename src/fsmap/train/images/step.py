"""One step: feed, gradient, average over processes, clip, SGD in place, numbers added up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from fsmap.train.images.feed import Feeder, trainable
from fsmap.train.images.gradient import (
    JOINED,
    PLAIN,
    REGULARIZED,
    Gradient,
    half_precision,
    laid_out_as,
    make_gradient,
)
from fsmap.train.images.parallel import Group
from fsmap.train.images.settings import ImageSettings
from fsmap.types import Params

COLUMNS = ("loss", "laplacian", "correct", "grad_norm", "regularized", "skipped", "steps")
"""Sums over steps: what the gradient measured, and counts of kinds of steps."""
REGULARIZED_STEPS, SKIPPED, STEPS = 4, 5, 6

FIRST_SCALE, LOWEST_SCALE, GROWTH_STEPS = 2.0**12, 1.0, 1_000  # of the loss in fp16


GradientOfInputs = Callable[[Params, dict[str, Tensor], dict[str, Tensor]], Gradient]


class Step:
    """The step in its plain form; the definition that a captured one is compared with."""

    def __init__(
        self, module: nn.Module, settings: ImageSettings, feeder: Feeder, group: Group
    ) -> None:
        """Build the optimizer and the gradient functions.

        Args:
            module: On its device, in training mode.
            settings: Of the run.
            feeder: Gives the images.
            group: The processes that share the work.
        """
        self.module, self.settings, self.feeder, self.group = module, settings, feeder, group
        self.params = trainable(module)
        self.buffers = dict(module.named_buffers())
        first = next(iter(self.params.values()))
        self.cuda = first.is_cuda
        self.optimizer: Optimizer = settings.optimizer().build(
            self.params.values(), capturable=self.cuda
        )
        for p in self.params.values():
            if settings.momentum:  # what torch makes at the first step
                self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.half = half_precision(settings, first.device)
        self.scaled = self.half == torch.float16
        self.steady = torch.zeros((), device=first.device)  # steps since the scale changed
        self.found_inf = torch.zeros((), device=first.device)
        self.totals = torch.zeros(len(COLUMNS), device=first.device, dtype=torch.float32)
        self.restart()
        self.gradients: dict[str, GradientOfInputs] = {}

    def kind(self, step: int, reg_strength: float) -> str:
        """Which of the three kinds of step this is."""
        if not self.settings.regularized:
            return PLAIN
        if reg_strength != 0 and step % self.settings.every == 0:
            return REGULARIZED
        return JOINED if self.settings.batchnorm == "joint" else PLAIN

    def __call__(self, step: int, *, lr: float, reg_strength: float) -> None:
        """Take a step.

        Args:
            step: Its number, from 0.
            lr: Learning rate.
            reg_strength: λ.
        """
        kind = self.kind(step, reg_strength)
        self.feeder.prepare(step, kind)
        self.feeder.reg_strength.fill_(reg_strength)
        for options in self.optimizer.param_groups:
            if isinstance(options["lr"], Tensor):
                options["lr"].fill_(lr)
            else:
                options["lr"] = lr
        self.advance(kind)
        if kind == REGULARIZED:
            self.feeder.psi.ahead(step)

    def advance(self, kind: str) -> None:
        """Everything after the draws are in place; what a graph captures."""
        self.update(self.differentiate(kind), kind)

    def differentiate(self, kind: str) -> Gradient:
        """The gradient of this process's share."""
        if kind not in self.gradients:
            self.gradients[kind] = self.make(kind)
        return self.gradients[kind](self.params, self.buffers, self.feeder.inputs(kind))

    def make(self, kind: str) -> GradientOfInputs:
        """One kind of step, from draws to gradient, as a pure function."""
        gradient = make_gradient(self.module, self.settings, kind, self.half)

        def whole(params: Params, buffers: Params, inputs: dict[str, Tensor]) -> Gradient:
            return gradient(params, buffers, self.feeder.assemble(inputs, kind))

        return whole

    @torch.no_grad()
    def update(self, found: Gradient, kind: str) -> None:
        """Average, clip, move parameters and running statistics."""
        floats = [n for n, b in found.buffers.items() if b.is_floating_point()]
        self.group.average([*found.grads, *(found.buffers[n] for n in floats)])
        self.group.average([found.measured])
        norm = get_total_norm(found.grads)
        for p, g in zip(self.params.values(), found.grads, strict=True):
            p.grad = laid_out_as(p, g)  # once more: a compiler may have chosen otherwise
        if self.settings.clip is not None:
            clip_grads_with_norm_(self.params.values(), self.settings.clip, norm)
        skipped = self._rescale(norm)
        self.optimizer.step()
        self._keep(found.buffers, floats, skipped)
        self._count(found.measured, norm, skipped, kind)

    def _rescale(self, norm: Tensor) -> Tensor:
        """In fp16 a gradient that overflowed is skipped and the scale halved; else it grows."""
        if not self.scaled:
            return self.found_inf
        found = ~torch.isfinite(norm)
        self.found_inf.copy_(found)
        self.optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        grow = self.steady >= GROWTH_STEPS
        factor = torch.where(found, 0.5, torch.where(grow, 2.0, 1.0))
        self.feeder.scale.mul_(factor).clamp_(min=LOWEST_SCALE)
        self.steady.add_(1).mul_(~(found | grow))
        return self.found_inf

    @property
    def lost(self) -> bool:
        """Whether no scale helps: what overflows in fp16 without one is not finite at all."""
        return self.scaled and bool(self.found_inf) and bool(self.feeder.scale <= LOWEST_SCALE)

    def restart(self) -> None:
        """The weights are others now: sums that are not finite begin anew, and so does the scale.

        A scale that is too large is halved soon.
        """
        if self.lost or not self.totals.isfinite().all():
            self.totals.zero_()
        if self.scaled:
            self.feeder.scale.fill_(FIRST_SCALE)
            self.steady.zero_()
            self.found_inf.zero_()

    def _keep(self, found: Params, floats: list[str], skipped: Tensor) -> None:
        """Take running statistics over, but not those of a step that overflowed."""
        whole = [n for n in found if n not in floats]
        new = {n: found[n] for n in (*floats, *whole)}
        if self.scaled:
            off = skipped.bool()
            new |= {n: torch.where(off, self.buffers[n], found[n]) for n in floats}
        for names in filter(None, (floats, whole)):  # one kernel for each type
            torch._foreach_copy_([self.buffers[n] for n in names], [new[n] for n in names])

    def _count(self, measured: Tensor, norm: Tensor, skipped: Tensor, kind: str) -> None:
        row = torch.cat([measured, norm.float()[None]])  # [4]
        one: Tensor | float = 1.0
        if self.scaled:  # what overflowed does not count
            row = torch.where(skipped.bool(), 0.0, row)
            self.totals[SKIPPED] += skipped
            one = 1 - skipped
        self.totals[: len(row)] += row
        self.totals[STEPS:] += one
        if kind == REGULARIZED:
            self.totals[REGULARIZED_STEPS] += one
