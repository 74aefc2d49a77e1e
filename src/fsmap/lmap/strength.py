"""A strength of R that means the same for every model: nats per training point."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fsmap.errors import CollapseWarning, InputError, MissingEveryWarning, NonFiniteWarning
from fsmap.functional import accumulate, number
from fsmap.lmap.core import call_after_steps
from fsmap.objective.geometry import SHARE

NATS = 0.05  # by held-out log loss on four sets: docs/guide/strength.md
"""Default c, in nats per training point."""

MEMORY = 20
"""Steps that the running mean of R remembers: one draw of R varies by tens of percent."""


class LogTrace(nn.Module):
    r"""The penalty c·log(1 + R/R₀) of R = Tr 𝒥: ``loss = criterion(out, y) + penalty(R)``.

    c is given in nats per training point. If R is multiplied by a constant (other units of the
    output, another metric), training stays the same.

    **Why a logarithm.** The exact objective holds ½ log det(I + 𝒥/ε)/N. For any 𝒥 of rank d it is
    at most c·log(1 + R/R₀) with c = d/(2N) and R₀ = dε (proof:
    :class:`fsmap.objective.geometry.TraceBound`, the same term for ``fit``). The first order of
    both in 1/ε is L-MAP, Tr 𝒥/(2εN) = λR with λ = c/R₀.

    **What is computed.** The value is c·log(1 + R/R₀), the gradient c·∇R/(R̄ + R₀). R̄ is the mean of
    R over all optimizer steps up to ``MEMORY`` of them, this one included, then an exponential
    mean. (∇R/R of one draw would be biased: both have the same noise.) R₀ is ``SHARE`` times the
    mean of R over the first ``MEMORY`` steps and constant afterwards.

    - R = None, which :class:`fsmap.LMAP` returns in ``eval()`` and under ``no_grad``, gives 0 under
      ``no_grad`` and in ``penalty.eval()``; otherwise it is an error.
    - With ``LMAP(every=k)`` call ``penalty(R, every=k)``. Without it the penalty is k times too
      weak, and a ``MissingEveryWarning`` is given.
    - Each call is a step, unless :meth:`attach` names the optimizer: then R̄ moves once per
      optimizer step, by the mean over its micro-batches.
    - Under ``torch.distributed`` R is averaged over ranks before it enters R̄.
    - An R that is inf, nan or negative does not enter R̄ and is counted in ``skipped``, with a
      ``NonFiniteWarning``. The value is inf or nan then, so that a ``GradScaler`` skips the step.
    - If R̄ falls below R₀, a ``CollapseWarning`` is given: the network may have become constant.

    Warnings are given once; values are looked at on one call in 5 · ``MEMORY``, and not within
    ``torch.compile`` or a CUDA graph. R̄ and R₀ are float32 buffers: ``state_dict`` resumes to the
    same bits. They move to the device of R on the first call; for ``torch.compile(fullgraph=True)``
    or a CUDA graph move them before.

    Args:
        nats: c ≥ 0; can be changed while training. 0 adds nothing.

    Example:
        >>> import torch, fsmap
        >>> penalty = fsmap.LogTrace(nats=0.05)
        >>> R = torch.tensor(300.0, requires_grad=True)
        >>> value = penalty(R)  # R₀ = 3: 0.05 · log(101)
        >>> value.backward()
        >>> round(value.item(), 4), round(R.grad.item() * 303, 4)
        (0.2308, 0.05)
    """

    mean: Tensor  # R̄ before this step
    first: Tensor  # mean of R over the first MEMORY steps
    steps: Tensor  # optimizer steps that had an R
    sums: Tensor  # sum and number of the R of this step, and how many were left out so far

    def __init__(self, nats: float = NATS) -> None:
        """Check and keep c; see the class."""
        super().__init__()
        self.nats = nats
        self.register_buffer("mean", torch.zeros((), dtype=torch.float32))
        self.register_buffer("first", torch.zeros((), dtype=torch.float32))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sums", torch.zeros(3, dtype=torch.float32))
        self._warned = False
        self._hook: RemovableHandle | None = None
        self._calls = self._idle = 0

    @property
    def nats(self) -> float:
        """The strength c, in nats per training point."""
        return self._nats

    @nats.setter
    def nats(self, nats: float) -> None:
        given: object = nats
        if not (isinstance(given, Real) and 0 <= float(given) < math.inf):
            raise InputError(
                f"nats must be at least 0 and finite, got {nats!r}; 0.01 to 0.1 is usual"
            )
        self._nats = float(nats)

    @property
    def skipped(self) -> int:
        """How many R were not finite or negative, over all ranks; waits for the device."""
        return int(self.sums[2])

    @property
    def reg_strength(self) -> float:
        """The λ = c/(R̄ + R₀) that the gradient amounts to now; waits for the device."""
        below = float(self.mean + SHARE * self.first)
        return self.nats / below if below > 0 else math.nan

    def forward(self, R: Tensor | None, *, every: int = 1) -> Tensor:
        """The penalty in nats per training point, of what ``LMAP(every=every)`` returned."""
        if R is None and self.training and torch.is_grad_enabled():
            raise InputError(
                "R is None: LMAP returns it in eval() and under no_grad, so this step would be "
                "trained without R. Call lm.train() before, or penalty.eval() to leave R out."
            )
        if R is None:
            return torch.zeros_like(self.mean)
        given: object = R
        if not isinstance(given, Tensor) or R.numel() != 1 or every < 1:
            shape = f"of shape {list(R.shape)}" if isinstance(given, Tensor) else type(R).__name__
            raise InputError(
                f"R must be a tensor with one entry (out, R = lm(x)) and every at least 1, got R "
                f"{shape} and every={every}"
            )
        if R.device != self.mean.device:
            self.to(R.device)
        R = accumulate(R.reshape(()))
        now = R.detach() / every
        trains = self.training and torch.is_grad_enabled()
        counts = trains and R.requires_grad  # where R is left out it is a 0 without a graph
        one = self._with(now) if counts else (now.float(), torch.ones_like(self.mean))
        mean, first = self._means(*one)
        below = torch.add(mean, first, alpha=SHARE)
        strength = torch.where(below > 0, self.nats / below, 0.0)
        value = self.nats * (now / (SHARE * first).clamp(min=1e-30)).log1p()
        if counts and self._hook is None:
            self._step(mean, first)
        if trains and not torch.compiler.is_compiling():
            self._warn(idle=every == 1 and not counts)
        return torch.addcmul(value, strength, R - R.detach())

    def attach(self, optimizer: torch.optim.Optimizer) -> LogTrace:
        """Count this optimizer's steps instead of calls; one that a GradScaler skips is no step."""
        after = lambda: self._step(*self._means(*self.sums[:2]))  # noqa: E731
        self._hook = call_after_steps(optimizer, self._hook, after)
        return self

    def detach(self) -> None:
        """Count calls again."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def extra_repr(self) -> str:
        """Settings, for ``print``."""
        return f"nats={self.nats:g}"

    def __getstate__(self) -> dict[str, Any]:
        """A copy counts calls: no optimizer is attached to it."""
        return {**self.__dict__, "_hook": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LogTrace:
        """Move to another device; ``half()`` and the like leave the buffers in float32."""
        kept = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            setattr(self, name, before.to(getattr(self, name).device))
        return self

    def _with(self, R: Tensor) -> tuple[Tensor, Tensor]:
        """Add an R to those of this step; their sum and number over all ranks."""
        valid = R.nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
        found = torch.stack([valid, (valid > 0).to(R.dtype), (valid != R).to(R.dtype)])
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(found)
        self.sums.add_(found)
        return self.sums[0], self.sums[1]

    def _means(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """R̄, and its value in the first steps, after a step with so many R of this sum."""
        weight = (count > 0) / (self.steps + 1).clamp(max=MEMORY)
        mean = torch.lerp(self.mean, total / count.clamp(min=1), weight.to(self.mean.dtype))
        return mean, torch.where(self.steps < MEMORY, mean, self.first)

    @torch.no_grad()
    def _step(self, mean: Tensor, first: Tensor) -> None:
        """An optimizer step is over."""
        self.mean.copy_(mean)
        self.first.copy_(first)
        self.steps.add_(self.sums[1] > 0)
        self.sums[:2].zero_()

    def _warn(self, *, idle: bool) -> None:
        """Warn of R that were left out or fell to almost nothing; once."""
        self._calls += 1
        self._idle += idle
        if self._warned or (self._calls % (5 * MEMORY) and self._idle != 2):
            return
        bad, low = number(self.sums[2]), number(self.mean < SHARE * self.first)
        found: dict[type[Warning], str] = {}
        if bad:
            found[NonFiniteWarning] = (
                f"{bad:g} times R was inf, nan or negative: it did not enter the running mean of "
                "LogTrace. Lower the learning rate or nats, or look for overflow in half precision."
            )
        if self._idle:
            found[MissingEveryWarning] = (
                f"{self._idle} times R had no gradient. With LMAP(every=k) call "
                "penalty(R, every=k): without it the penalty is k times too weak."
            )
        if low:
            found[CollapseWarning] = (
                f"R is below {SHARE:.0%} of what it was at first: the network may have become a "
                "constant. If held-out data say so too, lower nats."
            )
        self._warned = bool(found)
        for kind, message in found.items():
            warnings.warn(message, kind, stacklevel=5)
