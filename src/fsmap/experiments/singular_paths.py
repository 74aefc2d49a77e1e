r"""Ways into a singular configuration: along a straight path, and by an optimizer that is let go.

Where two hidden units become equal, exchanging them changes nothing (Theorem 2): $\mathcal J$ is
singular there and the unjittered $-\tfrac12\log\det\mathcal J$ is infinite. Close to it, small
eigenvalues drown in the rounding of $\mathcal J$; the objective without jitter is therefore
computed from singular values of the Jacobian ($\log\det\mathcal J = 2\sum_i\log\sigma_i$).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.data.synthetic import moons
from fsmap.errors import DivergedWarning
from fsmap.functional import functional
from fsmap.linalg.logdet import whitened_rows
from fsmap.linalg.probes import Stream, generator
from fsmap.models.mlp import MLP
from fsmap.objective.likelihood import Bernoulli, Gaussian, Likelihood
from fsmap.objective.objective import Objective, fs_map
from fsmap.objective.prior import Normal
from fsmap.px import Lattice
from fsmap.train.descent import one_thread
from fsmap.train.grid import Grid
from fsmap.train.optim import adam
from fsmap.train.population import fit_population
from fsmap.types import Batch, ModelFn, Params

IN, OUT = "layers.0.", "layers.1.weight"
"""Parameters of hidden units: what comes in (first dimension: the unit), what goes out (last)."""


class Problem(NamedTuple):
    """A small network with data."""

    sizes: tuple[int, ...]
    bias: bool
    data: Batch
    likelihood: Likelihood
    px: Lattice

    def network(self, seed: int) -> MLP:
        """The network with the first values of a seed, in float64."""
        source = generator("singular-paths", self.sizes, seed)
        model = MLP(self.sizes, "tanh", bias=self.bias, init="lecun", generator=source)
        return model.double()

    def f(self) -> ModelFn:
        """The model function."""
        return functional(self.network(0))[0]

    def objective(self, jitter: float) -> Objective:
        """FS-MAP on all points of p_X; without jitter from singular values."""
        return fs_map(
            self.likelihood,
            Normal(1.0),
            self.px,
            num_points=len(self.px),
            jitter=jitter,
            num_data=len(self.data.y),
            method="dense" if jitter else "svd_clip",  # with ε = 0 nothing is clipped
        )


def four_parameters() -> Problem:
    """The network of appendix B.6, w₂ᵀ tanh(w₁x), on noisy values of one with unequal units."""
    x = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]
    noise = torch.randn(20, 1, generator=generator("four-parameters"), dtype=torch.float64)
    y = torch.tanh(2 * x) - 0.5 * torch.tanh(0.5 * x) + 0.3 * noise
    return Problem((1, 2, 1), False, Batch(x, y), Gaussian(0.3), _grid(1, 3.0, 41))


def two_moons() -> Problem:
    """A 2-4-1 network with one logit on the two moons."""
    data = moons(dtype=torch.float64)
    batch = Batch(data.x, data.y[:, None].double())
    return Problem((2, 4, 1), True, batch, Bernoulli(), _grid(2, 5.0, 12))


PROBLEMS: dict[str, Callable[[], Problem]] = {"1-2-1": four_parameters, "2-4-1": two_moons}


def merged(params: Params) -> Params:
    """The same network with its first two hidden units replaced by their mean.

    Args:
        params: Of a network with one hidden layer.

    Returns:
        A fixed point of the exchange of these units.
    """
    result = {name: p.clone() for name, p in params.items()}
    for name, p in result.items():
        if name.startswith(IN):
            p[:2] = p[:2].mean(0, keepdim=True)
    result[OUT][:, :2] = result[OUT][:, :2].mean(1, keepdim=True)
    return result


def between(start: Params, end: Params, t: float) -> Params:
    """The point of a straight path that is ``t`` away from its end, in units of its length."""
    return {name: end[name] + t * (start[name] - end[name]) for name in start}


def path(problem: Problem, jitter: float, distances: list[float]) -> Tensor:
    """The objective on the way from a random network to the one with two units merged.

    Args:
        problem: Network and data.
        jitter: ε; 0 is the unjittered objective.
        distances: Where to look, as shares of the whole way.

    Returns:
        Nats for the whole data set, up to a constant, ``[len(distances)]``.
    """
    f, params = functional(problem.network(0))
    start = {name: p.detach() for name, p in params.items()}
    end = merged(start)
    objective = problem.objective(jitter)
    draws = objective.draw(f, start, Stream(0, 0))
    values = []
    with torch.no_grad():
        for t in distances:
            loss, _ = objective.loss(f, between(start, end, t), problem.data, draws)
            values.append(-loss * objective.num_data)
    return torch.stack(values)


class Climb(NamedTuple):
    """What an optimizer did, at the recorded steps."""

    step: Tensor  # [T]
    objective: Tensor  # [T, M]  nats
    ratio: Tensor  # [T, M]  smallest eigenvalue of 𝒥 over the largest


def climb(
    problem: Problem,
    jitter: float,
    *,
    seeds: int,
    steps: int,
    stages: int,
    lr: float,
    every: int,
    advance: Callable[[float], None],
) -> Climb:
    """Maximize the objective with Adam, in stages of ten times smaller steps.

    Adam's steps have the size of the learning rate, however steep the objective is. So the distance
    to a singularity that it can keep is about one learning rate, and each stage shows what a
    tenth of the distance is worth.

    Args:
        problem: Network and data.
        jitter: ε; 0 is the unjittered objective.
        seeds: M, random first values.
        steps: Steps per stage.
        stages: How many.
        lr: Learning rate of the first stage.
        every: Steps between two records.
        advance: Takes the share that is done.

    Returns:
        The records, ``steps·stages/every`` of them.
    """
    f = problem.f()
    x = problem.px.all()
    current = {seed: _values(problem.network(seed)) for seed in range(seeds)}
    records: list[tuple[int, Tensor, Tensor]] = []
    objective = problem.objective(jitter)
    for stage in range(stages):

        def look(step: int, stacked: Params, before: int = stage * steps) -> None:
            advance((before + step) / (steps * stages))
            if step % every:
                return
            for seed in current:
                one = {name: p.detach()[seed].clone() for name, p in stacked.items()}
                if all(torch.isfinite(p).all() for p in one.values()):
                    current[seed] = one
            values = [_values_at(objective, f, p, problem.data) for p in current.values()]
            ratios = [_ratio(f, p, x) for p in current.values()]
            records.append((before + step, torch.stack(values), torch.stack(ratios)))

        with one_thread(), warnings.catch_warnings():
            # to reach an infinite objective is what is asked for
            warnings.simplefilter("ignore", DivergedWarning)
            fit_population(
                lambda: objective,
                Grid(seed=list(current)),
                f,
                problem.data,
                steps=steps,
                init=current.__getitem__,
                optimizer=adam(lr * 0.1**stage),
                callback=look,
                log_every=steps,
                progress=False,
            )
    step, values, ratios = zip(*records, strict=True)
    return Climb(torch.tensor(step), torch.stack(values), torch.stack(ratios))


def _grid(dimensions: int, half_width: float, side: int) -> Lattice:
    corner = torch.full((dimensions,), half_width, dtype=torch.float64)
    return Lattice(-corner, corner, side)


def _values(model: MLP) -> Params:
    return {name: p.detach() for name, p in model.named_parameters()}


def _values_at(objective: Objective, f: ModelFn, params: Params, data: Batch) -> Tensor:
    with torch.no_grad():
        draws = objective.draw(f, params, Stream(0, 0))
        return -objective.loss(f, params, data, draws)[0] * objective.num_data


def _ratio(f: ModelFn, params: Params, x: Tensor) -> Tensor:
    with torch.no_grad():
        rows, _ = whitened_rows(f, params, x)
    singular: Tensor = torch.linalg.svdvals(rows)
    return (singular[-1] / singular[0]).square()
