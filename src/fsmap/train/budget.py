"""A budget on R instead of a strength: the λ at which training holds R(θ) at a given value."""

from __future__ import annotations

import math

from torch import Tensor

from fsmap.errors import InputError

RANGE = 1e6
"""λ stays within this factor of where it started: a λ that vanished could not come back in time."""

RESPONSE = 4.0
"""κ: R at twice the budget raises λ by a factor of 2⁴, and R back at the budget takes it back."""

MOST_ANSWERED = 1.0
"""A log ratio beyond ± this is answered as this: κ times it is the farthest that λ jumps."""

MOST_SUMMED = (-0.25, 0.5)
"""Log ratios are summed within these. While R is far from the budget (it grows from small values
in any training, and follows λ with lag) the sum says little about the λ that will be needed."""


class Budget:
    r"""Finds λ while training so that R stays at a budget: proportional and integral control.

    Minimizing the loss subject to $R(\theta) \le b$ has the Lagrangian loss + λ(R − b). Its
    multiplier rises while R is above the budget and falls while it is below. With
    $e = \log(\bar R / b)$ and $\bar R$ a running mean, because one draw of R is noisy:

    $I \leftarrow I + \gamma\,\mathrm{clip}(e, -\tfrac14, \tfrac12), \qquad
    \log\lambda \to \log\lambda_0 + I + \kappa\,\mathrm{clip}(e, \pm 1)$

    and log λ moves there by at most r an update. The integral I finds λ; alone it would swing,
    because R follows λ with lag. The proportional term damps: λ falls as soon as R does. (The rate
    bounds the way to a target and not the change itself, as it does in
    :class:`fsmap.train.steering.Steering`: R is noisy and skewed, a bounded change of it has
    another mean, and λ would drift.) Where the loss alone keeps R below the budget, λ falls towards
    zero and costs nothing.

    Args:
        limit: b > 0, the budget, in the unit of R.
        start: The first λ, for instance from :func:`fsmap.suggest_strength`.
        gain: γ, how fast the integral follows; 1/γ updates should be enough for the model to follow
            a change of λ.
        rate: r, the largest change of log λ per update.
        memory: How many updates the running mean remembers.

    Under DDP hand every rank the same R (averaged over ranks), or their λ drift apart.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> budget = Budget(100.0, start=1e-3, rate=0.5, memory=1)
        >>> [f"{budget.update(R):.2g}" for R in (1000.0, 1000.0, 100.0)]  # above, above, at b
        ['0.0016', '0.0027', '0.0016']
    """

    def __init__(
        self,
        limit: float,
        /,
        *,
        start: float,
        gain: float = 0.01,
        rate: float = 0.1,
        memory: int = 20,
    ) -> None:
        given = {"limit": limit, "start": start, "gain": gain, "rate": rate}
        for name, value in given.items():
            if not 0 < value < math.inf:
                message = f"{name} must be positive and finite, got {value:g}"
                raise InputError(message)
        if memory < 1:
            message = f"memory must be at least 1 update, got {memory}"
            raise InputError(message)
        self.limit, self.start = limit, start
        self.gain, self.rate, self.memory = gain, rate, memory
        self.strength = float(start)
        self.R: float | None = None
        self.integral = 0.0  # I, of log λ

    def update(self, R: float | Tensor) -> float:
        """Look at R and move λ.

        Args:
            R: This step's R(θ), not λR.

        Returns:
            λ for the next step, also in ``strength``.

        Raises:
            InputError: If R is not finite, or negative.
        """
        value = float(R.detach() if isinstance(R, Tensor) else R)
        if not math.isfinite(value):
            message = f"R is {value:g}: training has diverged. Lower the learning rate or λ."
            raise InputError(message)
        if value < 0:
            message = (
                f"R is a squared norm and never negative, got {value:g}. Give R, not the loss."
            )
            raise InputError(message)
        keep = 0.0 if self.R is None else 1 - 1 / self.memory
        self.R = keep * (self.R or 0.0) + (1 - keep) * value
        excess = math.log(max(self.R, 1e-300) / self.limit)
        self.integral = _clip(self.integral + self.gain * _clip(excess, *MOST_SUMMED), *_LOG_RANGE)
        answer = RESPONSE * _clip(excess, -MOST_ANSWERED, MOST_ANSWERED)
        target = _clip(self.integral + answer, *_LOG_RANGE)
        now = math.log(self.strength / self.start)
        self.strength = self.start * math.exp(now + _clip(target - now, -self.rate, self.rate))
        return self.strength

    def state_dict(self) -> dict[str, float | None]:
        """What a checkpoint must hold."""
        return {"strength": self.strength, "R": self.R, "integral": self.integral}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Restore λ, its integral and the running mean."""
        self.strength, self.R = float(state["strength"] or self.start), state["R"]
        self.integral = float(state["integral"] or 0.0)

    def __repr__(self) -> str:
        seen = "not seen yet" if self.R is None else f"{self.R:.4g}"
        return f"Budget({self.limit:g}, λ={self.strength:.3g}, R={seen})"


_LOG_RANGE = (-math.log(RANGE), math.log(RANGE))


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
