"""A budget on R instead of a strength: the λ at which training holds R(θ) at a given value."""

from __future__ import annotations

import math

from torch import Tensor

from fsmap.errors import InputError

RANGE = 1e6
"""λ stays within this factor of where it started: a λ that vanished could not come back in time."""


class Budget:
    r"""Finds λ while training so that R stays at a budget: dual ascent in log λ.

    Minimizing the loss subject to $R(\theta) \le b$ has the Lagrangian loss + λ(R − b). Its
    multiplier rises while R is above the budget and falls while it is below:

    $\log\lambda \leftarrow \log\lambda + \eta\,\mathrm{clip}(\log(\bar R / b), -1, 1)$

    with $\bar R$ a running mean, because one draw of R is noisy. Where the loss alone keeps R below
    the budget, λ falls towards zero and costs nothing.

    Args:
        limit: b > 0, the budget, in the unit of R.
        start: The first λ, for instance from :func:`fsmap.suggest_strength`.
        rate: η, the largest change of log λ per update.
        memory: How many updates the running mean remembers.

    Under DDP hand every rank the same R (averaged over ranks), or their λ drift apart.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> budget = Budget(100.0, start=1e-3, rate=0.5, memory=1)
        >>> [f"{budget.update(R):.2g}" for R in (1000.0, 1000.0, 100.0)]  # above, above, at b
        ['0.0016', '0.0027', '0.0027']
    """

    def __init__(
        self, limit: float, /, *, start: float, rate: float = 0.02, memory: int = 20
    ) -> None:
        for name, value in (("limit", limit), ("start", start), ("rate", rate)):
            if not 0 < value < math.inf:
                message = f"{name} must be positive and finite, got {value:g}"
                raise InputError(message)
        if memory < 1:
            message = f"memory must be at least 1 update, got {memory}"
            raise InputError(message)
        self.limit, self.start, self.rate, self.memory = limit, start, rate, memory
        self.strength = float(start)
        self.R: float | None = None

    def update(self, R: float | Tensor) -> float:
        """Look at R and move λ.

        Args:
            R: This step's R(θ), not λR.

        Returns:
            λ for the next step, also in ``strength``.

        Raises:
            InputError: If R is not finite.
        """
        value = float(R.detach() if isinstance(R, Tensor) else R)
        if not math.isfinite(value):
            message = f"R is {value:g}: training has diverged. Lower the learning rate or λ."
            raise InputError(message)
        keep = 0.0 if self.R is None else 1 - 1 / self.memory
        self.R = keep * (self.R or 0.0) + (1 - keep) * value
        excess = math.log(max(self.R, 1e-300) / self.limit)
        moved = self.strength * math.exp(self.rate * min(max(excess, -1.0), 1.0))
        self.strength = min(max(moved, self.start / RANGE), self.start * RANGE)
        return self.strength

    def state_dict(self) -> dict[str, float | None]:
        """What a checkpoint must hold."""
        return {"strength": self.strength, "R": self.R}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Restore λ and the running mean."""
        self.strength, self.R = float(state["strength"] or self.start), state["R"]

    def __repr__(self) -> str:
        seen = "not seen yet" if self.R is None else f"{self.R:.4g}"
        return f"Budget({self.limit:g}, λ={self.strength:.3g}, R={seen})"
