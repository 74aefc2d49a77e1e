"""Measurements before training: the cost of R per step, and values of λ to try."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsmap.errors import InputError, UnseenStatisticsWarning
from fsmap.functional import accumulate, check_derivatives, clock, plain_points, seeded, tensor_of
from fsmap.lmap.batchnorm import unchanged
from fsmap.lmap.inplace import InPlacePenalty
from fsmap.lmap.module import LMAP, LaplacianPenalty
from fsmap.lmap.options import batchnorm_layers
from fsmap.types import Inputs

Wrapper = LMAP | LaplacianPenalty | InPlacePenalty
EVERY = (1, 2, 4, 8)
MEASURE_SECONDS = 4.0  # no further round is started after this time
SHARES = (0.01, 0.1, 1.0)  # λR / loss


class StepCost(NamedTuple):
    """Seconds of a training step, forward and backward, and on CUDA its peak bytes; ``print`` it.

    Peaks leave out parameters. An idle step is one on which ``every`` leaves R out (in ``joint`` a
    larger batch).
    """

    plain: float  # seconds of a step of the model alone
    idle: float
    active: float  # seconds of a step with R
    plain_bytes: int | None  # None on a CPU
    active_bytes: int | None
    every: int
    settings: str  # what was measured, in words
    spread: float = 0.0  # largest (max − min)/median of one of the three, over the rounds

    def seconds(self, every: int | None = None) -> float:
        """Mean seconds of a step if R is evaluated on every ``every``-th one."""
        k = self.every if every is None else every
        return self.active / k + self.idle * (1 - 1 / k)

    @property
    def factor(self) -> float:
        """Training time relative to that without R."""
        return self.seconds() / self.plain

    def __str__(self) -> str:
        steps = [("without R", self.plain, self.plain_bytes)]
        for k in sorted({*EVERY, self.every}):
            name = f"every={k}" + (" (set)" if k == self.every else "")
            steps.append((name, self.seconds(k), self.active_bytes))
        lines = [self.settings, f"{'step':<14}{'time':>10}{'factor':>8}"]
        for name, seconds, size in steps:
            peak = "" if size is None else f"{size / 1e6:>10.1f} MB"
            lines.append(f"{name:<14}{1e3 * seconds:>7.1f} ms{seconds / self.plain:>7.2f}x{peak}")
        lines.append(f"medians of steps measured in turns; spread up to {self.spread:.0%}")
        return "\n".join(lines)


def estimate_cost(
    term: Any, x: Inputs, *, loss: Callable[[Tensor], Tensor] | None = None, repeats: int = 10
) -> StepCost:
    """Measure a training step with and without R; the model stays as it is.

    Args:
        term: The LMAP, LaplacianPenalty or InPlacePenalty that will train the model. Call this
            inside ``torch.autocast`` if you train so; under FSDP or DDP on all ranks.
        x: A training batch.
        loss: Loss of an output; by default its mean square. The optimizer's own step is not part of
            the measurement: it is the same with and without R.
        repeats: Rounds: in each all three kinds of step are measured; fewer if they take long.

    Example:
        >>> import torch, fsmap
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 2))
        >>> lm = fsmap.LMAP(model, fsmap.px.Normal(shape=(8,)), num_points=32)
        >>> cost = fsmap.estimate_cost(lm, torch.zeros(32, 8))
        >>> cost.seconds(every=4) < cost.seconds(every=1)
        True
    """
    if repeats < 1:
        raise InputError(f"repeats must be at least 1, got {repeats}")
    _check_term(term, Wrapper, "estimate_cost")
    check_derivatives("estimate_cost")
    reg = term.regularizer
    plain_pass = term.f.plain if isinstance(term, InPlacePenalty) else reg.f.plain
    objective = loss or (lambda out: accumulate(out).square().mean())

    def plain() -> None:
        reg.module.zero_grad()
        objective(plain_pass(x)).backward()

    def with_term(strength: float) -> None:
        reg.step = 0
        if isinstance(term, InPlacePenalty):
            plain()
            term.backward(strength)
            return
        reg.module.zero_grad()
        if isinstance(term, LMAP):
            out, value = term(x, reg_strength=strength)
        else:
            out, value = plain_pass(x), term(strength)
        (objective(tensor_of(out)) + value).backward()

    device = next(p for p in reg.module.parameters() if p.requires_grad).device
    runs = (plain, lambda: with_term(0.0), lambda: with_term(1.0))
    with _unchanged(term, device):
        seconds, spread = _in_turns(runs, device, repeats)
        peaks = [_peak(run, device) for run in (runs[0], runs[2])]
    o = reg.options
    settings = (
        f"{o.estimator.name}, num_points={o.num_points}, probes={o.probes}, "
        f"batchnorm={o.batchnorm!r}, {device}"
    )
    cost: Any = (*seconds, *peaks, o.every, settings, spread)
    return StepCost(*cost)


@contextmanager
def _unchanged(term: Wrapper, device: torch.device) -> Iterator[None]:
    """Training mode; afterwards gradients, mode, buffers, steps and random state as before."""
    reg = term.regularizer
    module: nn.Module = term if isinstance(term, LMAP) else reg.module
    grads = [(p, p.grad) for p in module.parameters()]
    for p, _ in grads:
        p.grad = None
    counted = (reg.step, reg._micro, reg._counts_passes)
    try:
        with unchanged(module), seeded(None, device), torch.enable_grad():
            if not module.training:
                module.train()
            yield
    finally:
        reg.step, reg._micro, reg._counts_passes = counted
        for p, grad in grads:
            p.grad = grad


def _in_turns(
    runs: Sequence[Callable[[], object]], device: torch.device, repeats: int
) -> tuple[list[float], float]:
    """Median seconds of each, measured in turns, and the largest relative spread of one."""
    for run in runs:
        run()  # warm-up
    rounds: list[list[float]] = []
    while not rounds or (len(rounds) < repeats and sum(map(sum, rounds)) < MEASURE_SECONDS):
        found = []
        for run in runs:
            start = clock(device)
            run()
            found.append(clock(device) - start)
        rounds.append(found)
    times = list(zip(*rounds, strict=True))
    medians = [statistics.median(each) for each in times]
    return medians, max((max(t) - min(t)) / m for t, m in zip(times, medians, strict=True))


def _peak(run: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that a step adds to what is allocated; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


class Strength(NamedTuple):
    """R, the loss, and the values of λ to try; ``print`` it."""

    R: float  # mean over the draws
    stderr: float
    loss: float
    num_data: int | None = None  # N

    @property
    def choices(self) -> dict[float, float]:
        """λ at which λR is 1, 10 and 100 percent of the loss, by share."""
        return {share: share * self.loss / self.R for share in SHARES}

    def __str__(self) -> str:
        lines = [f"R = {self.R:.4g} ± {self.stderr:.2g}, loss = {self.loss:.4g}"]
        for share, strength in self.choices.items():
            line = f"λ = {strength:.2g}: λR is {share:.0%} of the loss"
            if self.num_data is not None:
                line += f" (ε = {1 / (2 * strength * self.num_data):.2g})"
            lines.append(line)
        return "\n".join(lines)


def suggest_strength(
    term: LMAP | LaplacianPenalty,
    *,
    loss: float | Tensor,
    num_data: int | None = None,
    x: Inputs = None,
    draws: int = 16,
) -> Strength:
    r"""Measure R beside the loss, and return the λ at which λR is 1, 10 and 100 percent of it.

    R is averaged over draws of evaluation points and ψ, without gradients; nothing is changed.
    Before training this gives values of λ to try: the best one on held-out data can lie anywhere
    between 1 and 100 percent, and R grows while a network is trained. With ``frozen`` statistics
    of a BatchNorm layer that has seen no data R can be wrong by orders of magnitude, and
    :class:`fsmap.errors.UnseenStatisticsWarning` is given.

    Args:
        term: The LMAP or LaplacianPenalty that will train the model.
        loss: Your training loss now, without λR: a mean over points, greater than zero.
        num_data: N, to translate λ to ε = 1/(2λN).
        x: A training batch. Only ``LMAP(batchnorm="joint")`` needs it: its R averages over both.
        draws: How often R is estimated.

    Example:
        >>> import torch, fsmap
        >>> model, px = torch.nn.Linear(3, 1), fsmap.px.Normal(shape=(3,))
        >>> penalty = fsmap.LaplacianPenalty(model, px, num_points=4096, estimator="exact")
        >>> found = fsmap.suggest_strength(penalty, loss=0.5)  # R = E‖x‖² + 1 = 4
        >>> round(found.R), round(found.choices[0.01], 5)
        (4, 0.00125)
    """
    value = float(loss.detach().mean() if isinstance(loss, Tensor) else loss)
    if not 0 < value < math.inf:
        raise InputError(
            f"loss must be positive and finite, got {value:g}. If your loss is a log-density that "
            "can be negative, give it without its constants, such as the squared error."
        )
    if not draws > 0:
        raise InputError(f"draws must be positive, got {draws:g}")
    _check_term(term, LMAP | LaplacianPenalty, "suggest_strength")
    if term.batchnorm == "frozen":
        _warn_if_unseen(term.regularizer.module)
    found = _draws(term, x, draws)
    R = float(found.mean())
    if not 0 < R < math.inf:
        raise InputError(
            f"R is {R:g} at this p_X, so no λ can be suggested. A model whose output does not "
            "depend on its parameters has R = 0; points far outside the data can make it infinite."
        )
    stderr = float(found.std()) / math.sqrt(draws) if draws > 1 else math.nan
    return Strength(R, stderr, value, num_data)


def _check_term(term: object, allowed: Any, function: str) -> None:
    if not isinstance(term, allowed):
        raise InputError(
            f"{function} takes an {allowed.__args__[0].__name__} or a penalty around your model, "
            f"got {type(term).__name__}"
        )


def _warn_if_unseen(module: nn.Module) -> None:
    """Warn if running statistics are still those of a new layer."""
    stats: list[Any] = [(n, m.running_mean, m.running_var) for n, m in batchnorm_layers(module)]
    unseen = [n for n, m, v in stats if m is not None and not m.any() and bool((v == 1).all())]
    if unseen:
        message = (
            f"R is measured with running statistics, and {len(unseen)} BatchNorm layers (the first "
            f"is {unseen[0]!r}) have not seen data: mean 0, variance 1. R of the model in training "
            "can differ by orders of magnitude. Train for some steps first, or measure within "
            "fsmap.fresh_statistics(model, [x])."
        )
        warnings.warn(message, UnseenStatisticsWarning, stacklevel=3)


def _draws(term: LMAP | LaplacianPenalty, x: Inputs, draws: int) -> Tensor:
    """R of several draws, ``[draws]``; steps and buffers are left as they were."""
    reg, joint = term.regularizer, term.batchnorm == "joint"
    if joint and x is None:
        why = 'LMAP(batchnorm="joint") averages R over training and evaluation points'
        raise InputError(f"{why}: give x, a training batch")
    kept, found = reg.step, []
    try:
        with torch.no_grad():
            for draw in range(draws):
                reg.step = draw * reg.every
                with reg.own_noise():
                    found.append(reg(plain_points(x) if joint else None).R / reg.every)
        return torch.stack(found).double().cpu()
    finally:
        reg.step = kept
