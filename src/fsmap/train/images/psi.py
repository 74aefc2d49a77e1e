"""ψ of every step in fixed tensors; on CUDA the next one is drawn while the last one is used."""

from __future__ import annotations

import torch

from fsmap.linalg.probes import Stream, generator, integer, rademacher
from fsmap.train.images.settings import ImageSettings
from fsmap.types import Params

SIGNS = "signs"  # the name under which the cotangent of ``vjp`` travels


class Psi:
    """Functions of (seed, step, name), as the probes of :class:`fsmap.linalg.probes.Stream`.

    On a CPU they are those, rounded where half precision is used; on CUDA they are drawn in the
    order and the precision in which they lie in memory.
    """

    def __init__(
        self,
        settings: ImageSettings,
        params: Params,
        num_signs: int,
        rank: int,
        half: torch.dtype | None,
    ) -> None:
        """Make the tensors.

        Args:
            settings: Of the run.
            params: Parameters; ψ has their shapes and layouts.
            num_signs: Length of the cotangent of ``vjp``.
            rank: Of this process: ψ is the same on all, the cotangent is its own.
            half: Precision of matrix products: ``jvp`` rounds the tangents of matrices to it, so
                that they are kept in it.
        """
        self.seed, self.every, self.rank = settings.seed, settings.every, rank
        self.params = {n: p for n, p in params.items() if p.requires_grad}
        first = next(iter(params.values()))
        self.now: Params = {}
        self.signs = settings.regularized and settings.estimator == "vjp"
        if self.signs:
            self.now = {SIGNS: first.new_zeros(num_signs)}
        elif settings.regularized and settings.estimator != "exact":
            rounded = half if settings.estimator == "jvp" else None
            self.now = {
                n: torch.zeros_like(p.detach(), dtype=rounded if p.ndim > 1 else None)
                for n, p in self.params.items()
            }
        self.cuda = first.is_cuda and not self.signs and bool(self.now)
        if self.cuda:
            self.next = {n: torch.zeros_like(t) for n, t in self.now.items()}
            self.next_step = -1
            self.source = torch.Generator(first.device)
            self.stream = torch.cuda.Stream(first.device)
            self.stream.wait_stream(torch.cuda.current_stream(first.device))
            self.taken = torch.cuda.Event()  # when the last draw was copied away

    def draw(self, step: int) -> None:
        """Draw ψ of a step.

        Args:
            step: Its number.
        """
        if self.cuda:
            self._take(step)
        elif self.signs:
            own = generator(self.seed, step, SIGNS, self.rank)
            self.now[SIGNS].copy_(rademacher(1, len(self.now[SIGNS]), own, self.now[SIGNS])[0])
        elif self.now:
            drawn = Stream(self.seed, step).psi(self.params)
            _copy({name: p[0] for name, p in drawn.items()}, self.now)

    def ahead(self, step: int) -> None:
        """Start drawing for the step after this one; call it when this one is under way.

        Args:
            step: The number of this one.
        """
        if self.cuda:
            self.stream.wait_event(self.taken)
            self._fill(step + self.every)

    def _take(self, step: int) -> None:
        """Take what was drawn on the other stream."""
        main = torch.cuda.current_stream(self.source.device)
        if self.next_step != step:  # the first step, or the first after a resume
            self.stream.wait_event(self.taken)
            self._fill(step)
        main.wait_stream(self.stream)
        _copy(self.next, self.now)
        self.taken.record(main)

    def _fill(self, step: int) -> None:
        """As ``Stream.psi``, without making tensors and generators."""
        with torch.cuda.stream(self.stream):
            for name, t in self.next.items():
                self.source.manual_seed(integer(self.seed, step, name))
                t.normal_(generator=self.source)
        self.next_step = step


def _copy(source: Params, target: Params) -> None:
    """By one kernel for each precision."""
    for dtype in {t.dtype for t in target.values()}:
        names = [name for name, t in target.items() if t.dtype == dtype]
        torch._foreach_copy_([target[n] for n in names], [source[n] for n in names])
