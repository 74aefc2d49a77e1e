"""Two moons: the network, the objectives and the grid of points that the figures share.

200 points of scikit-learn's two moons, an MLP 2-16-16-2 with tanh and two logits, prior N(0, I),
p_X = 1600 points of a 40 × 40 grid on [-5, 5]². All jitters of one method and seed are trained as
one population.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsmap.data.synthetic import moons
from fsmap.functional import functional
from fsmap.linalg.logdet import whitened_rows
from fsmap.models.mlp import MLP
from fsmap.objective.likelihood import Categorical
from fsmap.objective.objective import Objective, fs_map, l_map, ps_map
from fsmap.objective.prior import Normal
from fsmap.paper.descent import one_thread
from fsmap.paper.networks.scaled_networks import square
from fsmap.px import Lattice, generator
from fsmap.train.grid import Grid
from fsmap.train.optim import adam
from fsmap.train.population import fit_population
from fsmap.types import Batch, ModelFn, Params

PRIOR_STD = 1.0
"""The paper does not say; N(0, I)."""

METHODS = ("ps-map", "fs-map", "l-map")


@dataclasses.dataclass(frozen=True)
class MoonsConfig:
    """Sizes."""

    steps: int = 10_000  # steps of Adam, all data on each
    lr: float = 1e-3  # learning rate
    grid: int = 40  # points of p_X along each side
    lap_points: int = 400  # points a step for L-MAP, with one ψ
    det_points: int = 64  # points a step for FS-MAP
    seeds: int = 2  # runs; a seed decides the first values, the points and ψ

    def deviations(self, method: str) -> tuple[str, ...]:
        """Where the protocol of these sizes departs from the paper's."""
        found = [] if method == "ps-map" else ["fresh points of p_X at every step, not all 1600"]
        if self.steps != 10_000:
            found.append(f"{self.steps} steps at learning rate {self.lr:g}")
        return tuple(found)

    def px(self) -> Lattice:
        """The evaluation distribution."""
        return square(self.grid)


def network(seed: int) -> MLP:
    """The network with the first values of a seed, as ``nn.Linear`` draws them, in float64."""
    model = MLP([2, 16, 16, 2], "tanh", generator=generator("moons", seed))
    return model.double()


def builder(config: MoonsConfig, method: str, num_data: int) -> Callable[..., Objective]:
    """What makes a method's objective from a jitter (PS-MAP: from nothing)."""
    terms = Categorical(), Normal(PRIOR_STD)
    px = config.px()

    def build(jitter: Tensor | None = None) -> Objective:
        if method == "ps-map":
            return ps_map(*terms, num_data=num_data)
        if method == "fs-map":
            assert jitter is not None
            points = min(config.det_points, len(px))
            return fs_map(*terms, px, num_points=points, jitter=jitter, num_data=num_data)
        points = min(config.lap_points, len(px))
        return l_map(
            *terms, px, num_points=points, jitter=jitter, num_data=num_data, estimator="fd"
        )

    return build


class Fitted(NamedTuple):
    """One trained member."""

    member: dict[str, Any]  # jitter (absent for PS-MAP) and seed
    f: ModelFn
    params: Params
    data: Batch

    def logit(self, x: Tensor) -> Tensor:
        """Logit of class 1, ``[S]``."""
        with torch.no_grad():
            out = self.f(self.params, x)  # [S, 2]
        return out[:, 1] - out[:, 0]

    def accuracy(self) -> float:
        """Share of training points on the right side."""
        right = (self.logit(self.data.x) > 0) == (self.data.y == 1)
        return float(right.double().mean())

    def nll(self) -> float:
        """Mean negative log-likelihood of the training points, in nats."""
        sign = 2.0 * self.data.y - 1
        return float(torch.nn.functional.softplus(-sign * self.logit(self.data.x)).mean())

    def eigenvalues(self, x: Tensor) -> Tensor:
        """All eigenvalues of 𝒥 on these points, ``[P]``."""
        with torch.no_grad():
            rows, _ = whitened_rows(self.f, self.params, x)  # [S·K, P]
        eigenvalues: Tensor = torch.linalg.eigvalsh(rows.mT @ rows)
        return eigenvalues.clamp(min=0)


def train(
    config: MoonsConfig,
    method: str,
    jitters: Sequence[float],
    seed: int,
    advance: Callable[[float], None],
    *,
    start: Params | None = None,
) -> Iterator[Fitted]:
    """Train all jitters of a method as one population."""
    data = moons(dtype=torch.float64)
    f, params = functional(network(seed))
    axes: dict[str, Sequence[Any]] = {} if method == "ps-map" else {"jitter": list(jitters)}
    grid = Grid(**axes, seed=[seed])
    with one_thread():
        states, _ = fit_population(
            builder(config, method, len(data.y)),
            grid,
            f,
            data,
            steps=config.steps,
            init=params if start is None else start,
            optimizer=adam(config.lr),
            callback=lambda step, _: advance(step / config.steps),
            log_every=config.steps,
            progress=False,
        )
    for index, member in enumerate(grid):
        yield Fitted(member, f, states.member(index).params, data)
