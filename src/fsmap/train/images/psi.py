"""ψ of every step in fixed tensors; on CUDA the next one is drawn while the last one is used."""

from __future__ import annotations

import torch

from fsmap.linalg.probes import Stream, generator, integer, rademacher
from fsmap.train.images.settings import ImageSettings
from fsmap.types import Params

SIGNS = "signs"  # the name under which the cotangent of ``vjp`` travels


class Psi:
    """The probes of :class:`fsmap.linalg.probes.Stream`: functions of (seed, step, name)."""

    def __init__(self, settings: ImageSettings, params: Params, num_signs: int, rank: int) -> None:
        """Make the tensors.

        Args:
            settings: Of the run.
            params: Parameters; ψ has their shapes.
            num_signs: Length of the cotangent of ``vjp``.
            rank: Of this process: ψ is the same on all, the cotangent is its own.
        """
        self.seed, self.every, self.rank = settings.seed, settings.every, rank
        first = next(iter(params.values()))
        self.now: Params = {}
        if settings.regularized and settings.estimator == "vjp":
            self.now = {SIGNS: first.new_zeros(num_signs)}
        elif settings.regularized and settings.estimator != "exact":
            self.now = {n: p.new_zeros(p.shape) for n, p in params.items() if p.requires_grad}
        self.cuda = first.is_cuda and SIGNS not in self.now and bool(self.now)
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
        elif SIGNS in self.now:
            own = generator(self.seed, step, SIGNS, self.rank)
            self.now[SIGNS].copy_(rademacher(1, len(self.now[SIGNS]), own, self.now[SIGNS])[0])
        elif self.now:
            drawn = Stream(self.seed, step).psi(self.now)
            torch._foreach_copy_(list(self.now.values()), [p[0] for p in drawn.values()])

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
        torch._foreach_copy_(list(self.now.values()), list(self.next.values()))
        self.taken.record(main)

    def _fill(self, step: int) -> None:
        """The numbers of ``Stream.psi``, without making tensors and generators."""
        with torch.cuda.stream(self.stream):
            for name, t in self.next.items():
                self.source.manual_seed(integer(self.seed, step, name))
                t.normal_(generator=self.source)
        self.next_step = step
