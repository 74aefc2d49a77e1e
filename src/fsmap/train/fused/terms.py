"""Which objectives can be written out: Gaussian noise, a Normal prior, R by differences or none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.functional import Functional
from fsmap.models.mlp import MLP
from fsmap.objective.compose import Objective
from fsmap.objective.geometry import Laplacian, NoGeometry
from fsmap.objective.hyper import LOG_SQRT_2PI
from fsmap.objective.likelihood import Gaussian
from fsmap.objective.prior import Normal
from fsmap.objective.px import EvalDistribution
from fsmap.types import ModelFn


class Terms(NamedTuple):
    """The numbers of all members' objectives.

    Attributes:
        noise: σ, ``[M]``.
        prior: α, ``[M]``.
        strength: λ, ``[M]``.
        num_data: N.
        px: p_X, or None where there is no geometry term.
        num_points: S, or 0.
        beta: β.
    """

    noise: Tensor
    prior: Tensor
    strength: Tensor
    num_data: int
    px: EvalDistribution | None
    num_points: int
    beta: float

    def scales(self, like: Tensor) -> Tensor:
        """1/σ², λ and 1/(α²N): what the gradient is made of, ``[3, M]``."""
        prior = 1 / (self.prior.square() * self.num_data)
        return torch.stack([1 / self.noise.square(), self.strength, prior]).to(like)

    def weights(self, batch: int, num_params: int, like: Tensor) -> Tensor:
        """The terms in nats as weights of (squared errors, R, ‖θ‖², 1), ``[4, 4, M]``.

        Args:
            batch: B.
            num_params: P.
            like: Decides device and dtype.

        Returns:
            Loss, likelihood, prior and geometry, one after another.
        """
        N, zero = self.num_data, torch.zeros_like(self.noise)
        likelihood = [
            -N / (2 * batch * self.noise.square()),
            zero,
            zero,
            -N * (self.noise.log() + LOG_SQRT_2PI),
        ]
        normal = -num_params * (self.prior.log() + LOG_SQRT_2PI)
        prior = [zero, zero, -1 / (2 * self.prior.square()), normal]
        geometry = [zero, -N * self.strength, zero, zero]
        terms = torch.stack([torch.stack(t) for t in (likelihood, prior, geometry)])  # [3, 4, M]
        return torch.cat([-terms.sum(0, keepdim=True) / N, terms]).to(like)


def read_terms(objectives: Sequence[Objective]) -> Terms:
    """Take objectives apart.

    Args:
        objectives: One per member, on plain numbers.

    Returns:
        Their numbers.

    Raises:
        InputError: If one of them is made of other terms.
    """
    geometries = [objective.geometry for objective in objectives]
    plain = all(isinstance(g, NoGeometry) for g in geometries)
    for objective in objectives:
        _check_objective(objective, plain=plain)
    noise = _column(objective.likelihood.std for objective in objectives)  # type: ignore[attr-defined]
    prior = _column(objective.prior.std for objective in objectives)  # type: ignore[attr-defined]
    N = objectives[0].num_data
    if plain:
        return Terms(noise, prior, torch.zeros_like(noise), N, None, 0, 1.0)
    first = geometries[0]
    assert isinstance(first, Laplacian)
    strength = 1 / (2 * N * _column(g.jitter for g in geometries))  # type: ignore[attr-defined]
    return Terms(noise, prior, strength, N, first.px, first.num_points, first.estimator.beta)  # type: ignore[attr-defined]


def _column(values: object) -> Tensor:
    return torch.tensor([float(v) for v in values], dtype=torch.float64)  # type: ignore[attr-defined]


def _check_objective(objective: Objective, *, plain: bool) -> None:
    noise, prior, geometry = objective.likelihood, objective.prior, objective.geometry
    wrong = None
    if not (isinstance(noise, Gaussian) and _is_number(noise.std)):
        wrong = f"the likelihood {noise!r}; it takes Gaussian(std) with one number"
    elif not (isinstance(prior, Normal) and prior.mean is None and _is_number(prior.std)):
        wrong = f"the prior {prior!r}; it takes Normal(std) with one number and no mean"
    elif isinstance(geometry, Laplacian):
        estimator = geometry.estimator
        usual = (estimator.name, geometry.probes, geometry.metric, geometry.every)
        if usual != ("fd", 1, None, 1) or getattr(estimator, "antithetic", False):
            wrong = (
                f"estimator={estimator.name!r} with probes={geometry.probes} and its options; "
                "it takes estimator='fd' with one plain probe on every step"
            )
    elif not (plain and isinstance(geometry, NoGeometry)):
        wrong = f"{type(geometry).__name__} beside other terms; it takes l_map, or ps_map for all"
    if wrong:
        message = f"engine='fused' does not know {wrong}. Use engine='vmap'."
        raise InputError(message)


def check_model(f: ModelFn) -> tuple[int, ...]:
    """The sizes of the perceptron behind a model function.

    Args:
        f: The model function.

    Returns:
        Units of every layer.

    Raises:
        InputError: If it is not a ReLU perceptron with biases and one output.
    """
    module = f.module if isinstance(f, Functional) else None
    if not isinstance(module, MLP) or not _is_plain(module):
        shown = f if module is None else module
        message = (
            "engine='fused' is for fsmap.models.mlp.MLP with ReLU, biases, at least one hidden "
            f"layer and one output, got {shown!r}. Use engine='vmap'."
        )
        raise InputError(message)
    return module.sizes


def _is_plain(module: MLP) -> bool:
    biased = all(f"layers.{n}.bias" in module.state_dict() for n in range(len(module.sizes) - 1))
    relu = module.activation is torch.relu
    return relu and biased and len(module.sizes) > 2 and module.sizes[-1] == 1


def kernels_fit(sizes: Sequence[int]) -> bool:
    """Whether the kernels know these hidden layers: powers of two between 16 and 512 units."""
    hidden = sizes[1:-1]
    return all(16 <= u <= 512 and math.log2(u).is_integer() for u in hidden) and sizes[0] <= 128


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)
