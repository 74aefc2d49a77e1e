"""λ steered by held-out images, as a hook of an image run (``--reg-strength auto``)."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fsmap.errors import InputError
from fsmap.train import steering
from fsmap.train.guard import COLLAPSED, PATIENCE
from fsmap.train.images.log import mean_laplacian
from fsmap.train.temperature import ALARM, MARGIN, TemperatureControl

if TYPE_CHECKING:
    from fsmap.train.images.run import ImageRun

ALMOST_ZERO = 1e-20
"""λ of the warm-up: R is measured, in the BatchNorm mode of the run, and changes nothing."""

LOOKS = 100
"""Looks at the held-out images that a long run needs; two to four an epoch are taken."""

SHARE = 0.01
"""Of the loss that λ₀R makes, if no λ₀ is given."""


FEWEST = 30
"""Held-out images below which accuracy cannot be told from chance, and a temperature is noise."""


class SteerStrength:
    """Hook for :class:`fsmap.train.images.ImageRun` that moves λ several times an epoch.

    The held-out images of the run steer, and should serve nothing else. After the warm-up the first
    λ is ``start``, or the one at which λR is one percent of the loss, both as the warm-up's last
    epoch had them. While the ceiling keeps λ from being felt, R is left out: λ is zero, and a step
    costs what a plain one does (with ``joint`` one of B + S images). A collapse brings weights,
    statistics and momentum of the last good moment back.

    Args:
        start: λ₀; None: found after the warm-up.
        updates: Looks at the held-out images per epoch; None: four in short runs, two in long ones.
        warmup: Epochs of plain training before λ is switched on.
        **options: For :class:`fsmap.TemperatureControl`.

    Raises:
        InputError: If the numbers make no sense.
    """

    def __init__(
        self,
        start: float | None = None,
        *,
        updates: int | None = None,
        warmup: int = 1,
        **options: Any,
    ) -> None:
        if (updates is not None and updates < 1) or warmup < 1:
            message = f"need updates >= 1 and warmup >= 1 epochs, got {updates=}, {warmup=}"
            raise InputError(message)
        if start is not None and not 0 < start < math.inf:
            message = f"start, the first λ, must be positive and finite, got {start:g}"
            raise InputError(message)
        self.start, self.updates, self.warmup, self.options = start, updates, warmup, options
        self._given = {"start": start, "updates": updates, "warmup": warmup}
        self.control: TemperatureControl | None = None
        self.good: dict[str, Tensor] = {}

    def describe(self) -> str:
        """The controller in words, its constants included: a resumed run must have the same."""
        mine = {"share": SHARE, "looks": LOOKS, "margin": MARGIN, "alarm": ALARM}
        options = {**self._given, **mine, **steering.described(), **self.options}
        return f"SteerStrength({', '.join(f'{k}={v!r}' for k, v in options.items())})"

    def on_start(self, run: ImageRun) -> None:
        """Refuse a run that cannot be steered.

        Args:
            run: The run, before its first step.

        Raises:
            InputError: If it has no R, too few held-out images, no time, or a schedule for λ.
        """
        s = run.settings
        reasons = {
            "steering λ is for L-MAP: --method l-map": not s.regularized,
            f"steering λ needs held-out images, {FEWEST} at least, better thousands; there are "
            f"{len(run.task.valid.x)}: --valid N": len(run.task.valid.x) < FEWEST,
            f"steering λ begins after {self.warmup} epochs of warm-up: more --epochs": (
                s.epochs <= self.warmup
            ),
            "a steered λ has no schedule: --reg-schedule constant": s.reg_schedule != "constant",
        }
        for reason, holds in reasons.items():
            if holds:
                raise InputError(reason)
        run.reg_strength = ALMOST_ZERO

    def on_step(self, run: ImageRun) -> None:
        """Keep λ at almost zero while warming up; later, look when it is time.

        Args:
            run: The run.
        """
        if self.control is None:
            run.reg_strength = ALMOST_ZERO
            return
        assert self.updates is not None
        place = run.step % run.steps_per_epoch
        if place * self.updates % run.steps_per_epoch < self.updates:  # evenly, the first at 0
            self._look(run, self.control)

    def on_epoch(self, run: ImageRun) -> None:
        """Begin to steer when the warm-up is over; write what is known into the epoch's row.

        Args:
            run: The run.
        """
        row = run.history[-1]
        if row["reg_strength"] == ALMOST_ZERO:
            row["reg_strength"] = 0.0  # which is what it was meant to be
        known = self.start is not None or "laplacian" in row  # no R in an epoch of few steps
        if self.control is None and run.epoch >= self.warmup and known:
            first = self.start or SHARE * row["loss"] / max(row["laplacian"], 1e-30)
            self.updates = self.updates or min(max(LOOKS // run.settings.epochs, 2), 4)
            self.updates = min(self.updates, run.steps_per_epoch)
            self.control = self._made(first, self.updates)
            self._look(run, self.control)
        if self.control is not None:
            row["control"] = self.control.status
            row["collapses"] = self.control.collapses
            row["signal"] = self.control.history[-1].signal

    def on_diverged(self, run: ImageRun) -> bool:
        """Bring the last good state back, unless it diverges from there again and again.

        Args:
            run: The run, whose numbers are not finite.

        Returns:
            Whether it was brought back.
        """
        if self.control is None or not self.good or self.control.guard.falls >= PATIENCE:
            return False
        return self._look(run, self.control) == COLLAPSED

    def _made(self, start: float, updates: int) -> TemperatureControl:
        interval = {"interval": 1 / updates, "warmup": 0}
        return TemperatureControl(None, None, start=start, **{**interval, **self.options})

    def _look(self, run: ImageRun, control: TemperatureControl) -> str:
        logits, y = run.look()
        seen = control.observe(logits, y, _authority(run), mean_laplacian(run))
        if seen.verdict == COLLAPSED:
            if self.good:
                run.restore(self.good)
        elif control.guard.keep:
            self.good = run.snapshot()
        run.reg_strength = control.strength
        return seen.verdict

    def state_dict(self) -> dict[str, Any]:
        """Numbers as text, tensors of the last good state by name."""
        if self.control is None:
            return {}
        numbers = self.control.state_dict()
        numbers.pop("good")
        kept = {f"good/{name}": tensor for name, tensor in self.good.items()}
        return {"control": json.dumps(numbers), "updates": self.updates, **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as if nothing had happened.

        Args:
            state: What :meth:`state_dict` returned.
        """
        if "control" not in state:
            return
        numbers = json.loads(state["control"])
        self.updates = int(state["updates"])
        self.control = self._made(float(numbers["steering"]["low"]), self.updates)
        self.control.load_state_dict({**numbers, "good": {}})
        start = "good/"
        self.good = {n.removeprefix(start): t for n, t in state.items() if n.startswith(start)}


def _authority(run: ImageRun) -> float | None:
    """Learning rate over the largest of its schedule; None where it has none."""
    # Authority of train.optim knows what it has seen: too little at a first look, after an epoch.
    s = run.settings
    if s.decay == "none":
        return None
    rising = run.step < s.warmup_epochs * run.steps_per_epoch
    return 1.0 if rising or not s.lr else min(run.lr / s.lr, 1.0)
