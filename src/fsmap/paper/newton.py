"""Newton's method for a smooth function of few parameters, to machine precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsmap.errors import DivergedError
from fsmap.paper.descent import one_thread

TOLERANCE = 1e-9
"""The step after one of this length is its square: below rounding."""


def maximize(
    objective: Callable[[Tensor], Tensor], start: Tensor, *, steps: int = 100, radius: float = 2.0
) -> Tensor:
    """Climb to a local maximum.

    Curvatures enter by their absolute value, so that every step goes uphill, and a step is halved
    until the objective rises. The Hessian is formed: meant for hundreds of parameters at most.

    Args:
        objective: ``[P]`` to ``[]``.
        start: Where to start, ``[P]``.
        steps: At most.
        radius: Longest step.

    Returns:
        The maximum, ``[P]``.

    Raises:
        DivergedError: If the last step was still long.
    """
    theta, length = start.detach().clone(), float("inf")
    gradient, hessian = torch.func.grad(objective), torch.func.hessian(objective)
    with one_thread():
        for _ in range(steps):
            curvature, axes = torch.linalg.eigh(-hessian(theta))
            scale = curvature.abs().clamp_min(1e-12)
            step = axes @ ((axes.mT @ gradient(theta)) / scale)
            step = step * min(1.0, radius / max(float(step.norm()), 1e-300))
            step = _backtrack(objective, theta, step)
            theta, length = theta + step, float(step.norm())
            if length < TOLERANCE * (1 + float(theta.norm())):
                return theta
    message = (
        f"Newton's method has not settled after {steps} steps: the last one was {length:.1e} long. "
        "Start nearer to the maximum, or allow more steps."
    )
    raise DivergedError(message)


def _backtrack(objective: Callable[[Tensor], Tensor], theta: Tensor, step: Tensor) -> Tensor:
    """Halve the step until the objective does not fall."""
    before = objective(theta)
    for _ in range(40):
        if objective(theta + step) >= before:
            return step
        step = step / 2
    return torch.zeros_like(step)  # rounding decides: this is the top
