r"""How the figures are solved: ``fit_population`` on basis models, and Newton's method.

A basis model is $f = A\,\sigma(\theta)$ with rows of the design matrix A as data, and its geometry
is a closed form of the log-determinant (:class:`~fsmap.objective.closed_form.LogDetBasis`): no
Jacobian is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsmap.errors import DivergedError
from fsmap.objective.closed_form import Form, LogDetBasis, Squash
from fsmap.objective.objective import Gaussian, NoGeometry, Objective, Prior
from fsmap.train.loop import Schedule, adam
from fsmap.train.population import Grid, fit_population
from fsmap.types import Batch, Draws, ModelFn, Params

Advance = Callable[[float], None]


def double(seed: int) -> dict[str, Any]:
    """Options of what draws: a generator with this seed, and float64."""
    return {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}


def on_rows(squash: Squash) -> ModelFn:
    """The model as a function of rows of its design matrix, ``[N, P]`` to ``[N]``."""
    return lambda params, rows: rows @ squash.value(params["theta"])


def objective_of(
    squash: Squash,
    noise_std: float | Tensor,
    prior: Prior,
    form: Form | None,
    num_data: int | Tensor,
) -> Objective:
    """FS-MAP with the log-determinant in closed form; PS-MAP without a form."""
    geometry = NoGeometry() if form is None else LogDetBasis(form, squash.log_slope)
    return Objective(Gaussian(noise_std), prior, geometry, num_data)


def log_density(objective: Objective, squash: Squash, theta: Tensor, rows: Batch) -> Tensor:
    """The sum of the terms of an objective in nats, ``[P]`` to ``[]``."""
    parts = objective.parts(on_rows(squash), {"theta": theta}, rows, Draws())
    return torch.stack(list(parts.values())).sum()


class FromZero(Schedule):
    """Linear warm-up whose first step does not move, as in the authors' code."""

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by."""
        return min(step / self.warmup, 1.0) if self.warmup else 1.0


def solve(
    build: Callable[..., Objective],
    squash: Squash,
    members: Sequence[Mapping[str, float]],
    data: Sequence[Batch],
    start: Tensor,
    *,
    lr: float,
    steps: int,
    warmup: int = 0,
    advance: Advance = lambda _: None,
) -> Tensor:
    """Train a population with full-batch Adam; the last parameters, ``[M, P]``.

    ``build`` makes the objective from the numbers of a member, whose ``split`` is the place of its
    ``data``: rows of the design matrix and targets. ``start`` is ``[P]``, or ``[M, P]``.
    """

    def tell(step: int, _: Params) -> None:
        if step % 50 == 0:
            advance(step / steps)

    each = start.ndim == 2
    grid = [{**m, "seed": k if each else 0} for k, m in enumerate(members)]
    states, _ = fit_population(
        build,
        Grid(grid),
        on_rows(squash),
        list(data),
        steps=steps,
        init=lambda seed: {"theta": start[seed] if each else start},
        optimizer=adam(lr),
        schedule=FromZero(warmup),
        callback=tell,
        log_every=steps,
        chunk=len(grid),
        progress=False,
    )
    return states.params["theta"]


def maximize(
    objective: Callable[[Tensor], Tensor], start: Tensor, *, steps: int = 100, radius: float = 2.0
) -> Tensor:
    """Climb to a local maximum by Newton's method, to machine precision, ``[P]`` to ``[P]``.

    Curvatures enter by their absolute value, so that every step goes uphill, and a step (of length
    ``radius`` at most) is halved until the objective rises. DivergedError if the last step was
    still long.
    """
    theta, length = start.detach().clone(), float("inf")
    gradient, hessian = torch.func.grad(objective), torch.func.hessian(objective)
    for _ in range(steps):
        curvature, axes = torch.linalg.eigh(-hessian(theta))
        scale = curvature.abs().clamp_min(1e-12)
        step = axes @ ((axes.mT @ gradient(theta)) / scale)
        step = step * min(1.0, radius / max(float(step.norm()), 1e-300))
        before = objective(theta)
        halved = (step / 2**k for k in range(40))
        uphill = (step for step in halved if objective(theta + step) >= before)
        step = next(uphill, torch.zeros_like(step))  # no step: rounding decides, at the top
        theta, length = theta + step, float(step.norm())
        if length < 1e-9 * (1 + float(theta.norm())):  # the next one is its square
            return theta
    raise DivergedError(f"Newton's method: step {steps} was still {length:.1e} long. Start nearer.")
