"""λ without a search: steered while training so that held-out predictions are calibrated."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsmap.errors import InputError
from fsmap.lmap.module import LaplacianPenalty
from fsmap.train.guard import COLLAPSED, GOOD, SUSPECT, Guard, Health, health
from fsmap.train.held_out import HeldOut, HeldOutData
from fsmap.train.optim import Authority
from fsmap.train.ranks import average
from fsmap.train.signals import Signal, even_strength, find_signal
from fsmap.train.snapshot import Snapshot
from fsmap.train.steering import Steering
from fsmap.train.strength import first_strength

WARM_UP, STEERING, NOT_NEEDED, CAPPED = "warm-up", "steering", "not needed", "capped"

MARGIN = 0.1
"""log T that is wanted at the largest learning rate of a schedule: less over-confidence than a
network has there by itself."""

ALARM = 0.2
"""log T from which on the ceiling on λR opens earlier: more than is usual halfway in a training.

PS-MAP has 0.12 to 0.28 there on CIFAR-10 (with running statistics, which lag), 1.2 on 300 noisy
points. With 0.3 and an earlier ceiling, a network that memorized 2,000 images in 900 steps ended at
T = 1.28, with 0.2 at 1.15 (and at 1.03 with a later one).
"""


class Observation(NamedTuple):
    """One look at the held-out data, and what followed.

    Attributes:
        update: Its number.
        signal: log T, or what the signal measures.
        score: Held-out accuracy (R² in regression).
        strength: λ from then on.
        verdict: ``good``, ``suspect`` or ``collapsed``.
    """

    update: int
    signal: float
    score: float
    strength: float
    verdict: str


class TemperatureControl:
    """Steers λ so that the temperature on held-out data stays at one.

    As λ grows, an over-confident network becomes calibrated and then under-confident. Every few
    hundred steps :meth:`update` looks at held-out data *that are used for nothing else* and moves
    log λ by integral control (:class:`fsmap.train.steering.Steering`). A collapse is recognized and
    undone (:mod:`fsmap.train.guard`): the last good state comes back, λ falls to a tenth and is
    capped. During the warm-up λ is zero.

    Args:
        model: The model that is trained; an ``LMAP`` (or the penalty) if λ₀ shall be found from it.
        held_out: Pair of inputs and targets, or a function that returns outputs and targets.
            None: you call :meth:`observe` with outputs of your own.
        start: λ₀. None: λR is one percent of the held-out loss before training, which needs
            ``LMAP`` or ``LaplacianPenalty`` as the model.
        loss: Your training loss before training, without λR, from which ``start`` is found; None:
            the cross-entropy of the held-out data.
        signal: ``"temperature"`` (log T), ``"slope"`` (−∂NLL/∂log T at T = 1), ``"residual"``
            (Gaussian regression: log of residual over noise variance), or a function of outputs and
            targets that is positive where λ should grow.
        noise_std: σ of the likelihood, for ``"residual"``.
        optimizer: Its state is restored with the model's after a collapse; its learning rate says
            how much authority is left.
        interval: Epochs between two updates: 0.25 for four updates an epoch. Where epochs are so
            short that a network needs several to follow a change of λ, say less.
        warmup: Updates during which λ is zero; it stays zero until the model beats chance.
        batch_size: Held-out points per pass.
        **steering: ``gain``, ``trend``, ``rate``, ``boost``, ``margin``, ``alarm``,
            ``bounds`` of ``Steering``.

    Under ``torch.distributed`` every rank may look at its own share of the held-out data: the
    numbers are averaged over ranks, so all ranks have the same λ.

    Raises:
        InputError: If an argument is missing or out of range.

    Example:
        >>> import torch, fsmap
        >>> control = fsmap.TemperatureControl(None, None, start=1e-4, warmup=0, interval=1.0)
        >>> y = torch.arange(40) % 2
        >>> guess = torch.where(torch.arange(40) < 10, 1 - y, y)  # one in four is wrong
        >>> sure = 9.0 * torch.nn.functional.one_hot(guess).double()
        >>> _ = control.observe(sure, y)  # over-confident: λ grows, at most 16-fold an epoch
        >>> round(control.strength, 6), control.status
        (0.0016, 'steering')
    """

    def __init__(
        self,
        model: nn.Module | LaplacianPenalty | None,
        held_out: HeldOut | None,
        /,
        *,
        start: float | None = None,
        loss: float | Tensor | None = None,
        signal: str | Signal = "temperature",
        noise_std: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        interval: float = 0.25,
        warmup: int = 4,
        batch_size: int = 1000,
        **steering: Any,
    ) -> None:
        if warmup < 0 or batch_size < 1:
            message = f"need warmup >= 0 and batch_size >= 1, got {warmup=}, {batch_size=}"
            raise InputError(message)
        self.signal = find_signal(signal, noise_std)
        self.held_out, self.warmup = HeldOutData(model, held_out, batch_size), warmup
        self.optimizer = optimizer
        self.steering = Steering(
            first_strength(model, self.held_out, loss) if start is None else start,
            interval=interval,
            **({"margin": MARGIN, "alarm": ALARM} if signal == "temperature" else {}) | steering,
        )
        self.guard = Guard()
        module = self.held_out.module
        _check_trains(optimizer, module)
        self.good = None if module is None else Snapshot(module, optimizer)
        self.authority = Authority()
        self.updates = 0
        self.collapses = 0
        self.history: list[Observation] = []

    @property
    def strength(self) -> float:
        """λ now; zero during the warm-up."""
        return 0.0 if self.warming_up else self.steering.strength

    @property
    def warming_up(self) -> bool:
        """Whether λ is zero: at first, until the model beats chance, and while it is not felt."""
        return self.updates < self.warmup or not self.guard.learned or self.steering.idle

    @property
    def status(self) -> str:
        """``warm-up``, ``steering``, ``capped``, or ``not needed``.

        The last one: under-confident with λ at its lower end, so regularization cannot help.
        """
        if self.warming_up:
            return WARM_UP
        last = self.steering.before
        if self.steering.at_floor and last is not None and last < 0:
            return NOT_NEEDED
        return CAPPED if self.steering.at_cap else STEERING

    def update(
        self, authority: float | None = None, laplacian: float | Tensor | None = None
    ) -> float:
        """Look at the held-out data and move λ; after a collapse, restore the last good state.

        Args:
            authority: Learning rate over its largest value so far; None: the optimizer's, if it was
                given and scheduled.
            laplacian: R as you have it from training, at best its mean over the steps since the
                last update (with ``every=k`` a single step's is zero or k-fold). λR then stays
                below a ceiling: ten times the held-out loss of a classifier at the end of a
                schedule or where log T is twice ``alarm``, in the last 30 epochs what a constant λ
                comes to, before that less, and a ten-thousandth while the learning rate is more
                than half its largest value (there λ is zero). λ does not fall where λR is below
                that. None, zero or not finite: no such limits this time.

        Returns:
            λ from now on.
        """
        out, y = self.held_out.outputs()
        self.observe(out, y, authority, laplacian)
        return self.strength

    def observe(
        self,
        out: Tensor,
        y: Tensor,
        authority: float | None = None,
        laplacian: float | Tensor | None = None,
    ) -> Observation:
        """:meth:`update` for outputs that you have.

        Args:
            out: Held-out outputs; logits ``[N, K]`` for a classifier.
            y: Held-out targets.
            authority: As in :meth:`update`.
            laplacian: As in :meth:`update`.

        Returns:
            What was seen and done. Where ``verdict`` is ``collapsed`` and no model was given, the
            restoring is left to you.

        Raises:
            InputError: If there are no points, or the authority is not in [0, 1].
        """
        if not len(y) or not (authority is None or 0 <= authority <= 1):
            message = (
                f"need at least one held-out point and an authority in [0, 1], got {len(y)} points "
                f"and {authority=}"
            )
            raise InputError(message)
        if authority is None:
            authority = self.authority.of(self.optimizer)
        now = health(out, y)
        finite = math.isfinite(now.score)
        signal = self.signal(out, y) if finite else 0.0
        even = even_strength(out, y, laplacian) if finite else math.inf
        numbers = torch.tensor([signal, 1 / even, *now], dtype=torch.float64)
        signal, inverse, *rest = average(numbers, len(y), out.device).tolist()
        verdict = self.guard.judge(Health(*rest))
        even = 1 / inverse if inverse > 0 else math.inf
        if verdict == COLLAPSED:
            self._recover()
        else:
            self._advance(signal, authority, even, verdict)
        begun = self.guard.learned and self.updates + 1 >= self.warmup
        if begun and verdict != SUSPECT:  # what is suspect says nothing about λ, up or down
            good = (seen.signal for seen in reversed(self.history) if seen.verdict == GOOD)
            last = signal if verdict == GOOD else next(good, 0.0)
            self.steering.hold(even, authority, last, self.updates * self.steering.interval)
        self.updates += 1
        seen = Observation(self.updates - 1, signal, rest[0], self.strength, verdict)
        self.history.append(seen)
        return seen

    def _recover(self) -> None:
        self.collapses += 1
        if self.good is not None:
            self.good.restore()
        if not self.warming_up:  # else λ was zero, and not the reason
            self.steering.fall()

    def _advance(self, signal: float, authority: float | None, even: float, verdict: str) -> None:
        if self.guard.keep and self.good is not None:
            self.good.take()
        if verdict == GOOD and self.guard.learned and self.updates + 1 > self.warmup:
            self.steering.move(signal, authority, even)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold: numbers, and under ``good`` the last good tensors."""
        return {
            "updates": self.updates,
            "largest_lr": self.authority.largest,
            "collapses": self.collapses,
            "steering": self.steering.state_dict(),
            "guard": self.guard.state_dict(),
            "history": [list(seen) for seen in self.history],
            "good": {} if self.good is None else dict(self.good.tensors),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore everything, the last good state included.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            InputError: If it is the state of something else; then nothing has changed.
        """
        lacks = sorted(self.state_dict().keys() - state.keys())
        if lacks:
            message = f"this is no state of a TemperatureControl: it lacks {', '.join(lacks)}"
            raise InputError(message)
        self.updates, self.collapses = int(state["updates"]), int(state["collapses"])
        self.authority.largest = float(state["largest_lr"])
        self.steering.load_state_dict(state["steering"])
        self.guard.load_state_dict(state["guard"])
        self.history = [Observation(*seen) for seen in state["history"]]
        if self.good is not None:
            self.good.load(state["good"])

    def __repr__(self) -> str:
        seen = f", signal={self.history[-1].signal:+.3f}" if self.history else ""
        return f"TemperatureControl({self.status}, λ={self.strength:.3g}{seen})"


def _check_trains(optimizer: torch.optim.Optimizer | None, module: nn.Module | None) -> None:
    """Refuse the optimizer of another model."""
    if optimizer is None or module is None:
        return
    mine = {id(p) for p in module.parameters()}
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if mine and mine.isdisjoint(trained):
        message = (
            "the optimizer holds no parameter of the model. Give the one that trains it; where it "
            "trains copies (averaged weights, master weights), give none, and say "
            "update(authority=lr / largest lr)."
        )
        raise InputError(message)
