"""What R would add to a training step, measured before training starts."""

from __future__ import annotations

import copy
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsmap.errors import InputError
from fsmap.functional import accumulate
from fsmap.lmap.core import Regularizer
from fsmap.lmap.inplace import InPlacePenalty
from fsmap.lmap.module import LMAP, LaplacianPenalty
from fsmap.types import Inputs

EVERY = (1, 2, 4, 8)
Term = LMAP | LaplacianPenalty | InPlacePenalty
PATIENCE = 4.0  # seconds of repeating the measurement


class StepCost(NamedTuple):
    """Seconds and peak bytes of a training step, forward and backward; ``print`` it.

    Attributes:
        plain: Seconds of a step of the model alone.
        idle: Seconds of a step on which ``every`` leaves R out (in ``joint`` a larger batch).
        active: Seconds of a step with R.
        plain_bytes: Most bytes that a step of the model alone holds at once, parameters excluded.
        active_bytes: The same for a step with R.
        every: R is evaluated on every so many steps.
        settings: What was measured, in words.
        spread: Largest (max − min)/median of one of the three, over the rounds.
    """

    plain: float
    idle: float
    active: float
    plain_bytes: int
    active_bytes: int
    every: int
    settings: str
    spread: float = 0.0

    def seconds(self, every: int | None = None) -> float:
        """Seconds of a step on average, with R on every so many of them."""
        k = self.every if every is None else every
        return self.active / k + self.idle * (1 - 1 / k)

    @property
    def factor(self) -> float:
        """How many times as long training takes."""
        return self.seconds() / self.plain

    @property
    def extra_bytes(self) -> int:
        """Bytes that R adds to the peak."""
        return max(0, self.active_bytes - self.plain_bytes)

    def __str__(self) -> str:
        lines = [
            self.settings,
            f"{'step':<14}{'time':>10}{'factor':>8}{'peak memory':>13}",
            _line("without R", self.plain, 1.0, self.plain_bytes),
        ]
        for k in sorted({*EVERY, self.every}):
            name = f"every={k}" + (" (set)" if k == self.every else "")
            lines.append(
                _line(name, self.seconds(k), self.seconds(k) / self.plain, self.active_bytes)
            )
        lines.append(f"medians of steps measured in turns; spread up to {self.spread:.0%}")
        return "\n".join(lines)


def estimate_cost(
    term: Any,
    x: Inputs,
    *,
    loss: Callable[[Tensor], Tensor] | None = None,
    repeats: int = 10,
) -> StepCost:
    """Measure a training step with and without R; the model stays as it is.

    Args:
        term: The LMAP, LaplacianPenalty or InPlacePenalty that will train the model. Call this
            inside ``torch.autocast`` if you train so; under FSDP or DDP on all ranks.
        x: A training batch.
        loss: Loss of an output; by default its mean square. The optimizer's own step is not part of
            the measurement: it is the same with and without R.
        repeats: Rounds: in each all three kinds of step are measured; fewer if they take long.

    Returns:
        Seconds and bytes; ``print`` shows what other values of ``every`` would cost.

    Raises:
        InputError: If ``term`` is none of them.

    Example:
        >>> import torch, fsmap
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 2))
        >>> lm = fsmap.LMAP(model, fsmap.px.Normal(shape=(8,)), num_points=32)
        >>> cost = fsmap.estimate_cost(lm, torch.zeros(32, 8))
        >>> cost.seconds(every=4) < cost.seconds(every=1)
        True
    """
    if not isinstance(term, LMAP | LaplacianPenalty | InPlacePenalty):
        message = (
            "estimate_cost takes an LMAP, a LaplacianPenalty or an InPlacePenalty, got "
            f"{type(term).__name__}"
        )
        raise InputError(message)
    reg = _inner(term)
    objective = loss or (lambda out: accumulate(out).square().mean())

    def plain() -> None:
        reg.module.zero_grad()
        objective(reg.f.plain(x)).backward()

    def with_term(strength: float) -> None:
        reg.steps.step = 0
        if isinstance(term, InPlacePenalty):
            plain()
            term.backward(strength)
            return
        reg.module.zero_grad()
        if isinstance(term, LMAP):
            out, value = term(x, reg_strength=strength)
        else:
            out, value = reg.f.plain(x), term(strength)
        (objective(out) + value).backward()

    device = next(p for p in reg.module.parameters() if p.requires_grad).device
    runs = (plain, lambda: with_term(0.0), lambda: with_term(1.0))
    with _as_it_was(term, device):
        seconds, spread = _in_turns(runs, device, repeats)
        peaks = [_peak(run, device) for run in (runs[0], runs[2])]
    settings = (
        f"{reg.options.estimator.name}, num_points={reg.options.num_points}, "
        f"probes={reg.options.probes}, batchnorm={term.batchnorm!r}, {str(device)}"
    )
    return StepCost(
        seconds[0], seconds[1], seconds[2], peaks[0], peaks[1], reg.options.every, settings, spread
    )


def _line(name: str, seconds: float, factor: float, size: int) -> str:
    return f"{name:<14}{1e3 * seconds:>7.1f} ms{factor:>7.2f}x{size / 1e6:>10.1f} MB"


def _inner(term: Term) -> Regularizer | InPlacePenalty:
    return term if isinstance(term, InPlacePenalty) else term.regularizer


@contextmanager
def _as_it_was(term: Term, device: torch.device) -> Iterator[None]:
    """Training mode; afterwards gradients, mode, buffers, steps and random state as before."""
    reg = _inner(term)
    module: nn.Module = term if isinstance(term, LMAP) else reg.module
    modes = {part: part.training for part in module.modules()}
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    grads = [(p, p.grad) for p in module.parameters()]
    for p, _ in grads:
        p.grad = None
    steps = copy.copy(reg.steps.__dict__)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            if not module.training:
                module.train()
            yield
    finally:
        reg.steps.__dict__.update(steps)
        for p, grad in grads:
            p.grad = grad
        for part, training in modes.items():
            part.training = training
        with torch.no_grad():
            for name, b in module.named_buffers():
                b.copy_(buffers[name])


def _in_turns(
    runs: Sequence[Callable[[], object]], device: torch.device, repeats: int
) -> tuple[list[float], float]:
    """Median seconds of each, measured in turns, and the largest relative spread of one."""
    for run in runs:
        run()  # warm-up
    rounds: list[list[float]] = []
    while not rounds or (len(rounds) < repeats and sum(map(sum, rounds)) < PATIENCE):
        found = []
        for run in runs:
            start = _now(device)
            run()
            found.append(_now(device) - start)
        rounds.append(found)
    times = list(zip(*rounds, strict=True))
    medians = [statistics.median(each) for each in times]
    spreads = [
        (max(each) - min(each)) / median for each, median in zip(times, medians, strict=True)
    ]
    return medians, max(spreads)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak(run: Callable[[], object], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    with _Alive() as alive:
        run()
    return int(alive.peak)


class _Alive(TorchDispatchMode):
    """Bytes of the tensors that operations made and that are still alive, and their maximum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            self._count(leaf, made=False)  # was there before: parameters, inputs
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            self._count(leaf, made=True)
        return out

    def _count(self, leaf: Any, *, made: bool) -> None:
        if not isinstance(leaf, Tensor):
            return
        storage = leaf.untyped_storage()
        key, size = storage._cdata, storage.nbytes() * made
        if key in self._known:
            return

        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self.now -= size

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
