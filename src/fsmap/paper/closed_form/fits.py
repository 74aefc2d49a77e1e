r"""MAP solutions of basis models $f = A\,\sigma(\theta)$ by ``fit_population``.

The data are rows of the design matrix A, and the geometry is a closed form of the log-determinant
(:class:`~fsmap.objective.closed_form.LogDetBasis`): no Jacobian is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fsmap.models.basis import Squash
from fsmap.objective.closed_form import Form, LogDetBasis
from fsmap.objective.geometry import NoGeometry
from fsmap.objective.likelihood import Gaussian
from fsmap.objective.objective import Objective
from fsmap.objective.prior import Prior
from fsmap.paper.descent import one_thread
from fsmap.train.grid import Grid
from fsmap.train.optim import Schedule, adam
from fsmap.train.population import fit_population
from fsmap.types import Batch, Draws, ModelFn, Params

Advance = Callable[[float], None]


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
    """Train a population with full-batch Adam, on one thread.

    Args:
        build: Makes the objective from the numbers of a member.
        squash: σ of the model.
        members: Numbers of each member, and its ``split``: the place of its data.
        data: Rows of the design matrix and targets, each of the same size.
        start: First parameters: ``[P]``, or ``[M, P]`` with those of each member.
        lr: Learning rate.
        steps: How many.
        warmup: Steps of linear warm-up.
        advance: Called now and then with the fraction that is done.

    Returns:
        The last parameters, ``[M, P]``.
    """

    def tell(step: int, _: Params) -> None:
        if step % 50 == 0:
            advance(step / steps)

    each = start.ndim == 2
    grid = [{**m, "seed": k if each else 0} for k, m in enumerate(members)]
    with one_thread():
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
