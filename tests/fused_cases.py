"""A population of small perceptrons with everything that a gradient needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

import fsmap
from fsmap.models.mlp import MLP
from fsmap.train.fused.layout import Layout
from fsmap.types import Batch, Draws, Params

SIGMA, BETA, NUM_DATA = 0.5**0.5, 1e-3, 333


class Case(NamedTuple):
    """Inputs of a stacked gradient, and the gradient by ``vmap`` of the pure loss."""

    layout: Layout
    theta: Tensor
    group: Tensor
    scales: Tensor
    x: Tensor
    y: Tensor
    psi: Tensor | None
    grads: Params
    terms: dict[str, Tensor]

    @property
    def arguments(self) -> tuple[Layout, Tensor, Tensor, Tensor, float]:
        """Of both gradients' constructors."""
        return self.layout, self.theta.clone(), self.group, self.scales, BETA

    def to(self, device: str, dtype: torch.dtype) -> Case:
        """The inputs elsewhere; what they are compared with stays."""

        def move(t: Tensor | None) -> Tensor | None:
            return t if t is None else t.to(device, dtype if t.is_floating_point() else t.dtype)

        names = ("theta", "group", "scales", "x", "y", "psi")
        return self._replace(**{name: move(getattr(self, name)) for name in names})


def make(
    sizes: tuple[int, ...], *, members: int = 4, groups: int = 2, points: int = 50, batch: int = 70
) -> Case:
    """Members with different strengths and priors; ``points=0`` is PS-MAP."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    modules = [MLP(sizes, "relu", init="lecun", generator=generator) for _ in range(members)]
    f, names = fsmap.functional(modules[0])
    params = {
        n: torch.stack([dict(m.named_parameters())[n].detach() for m in modules]).double()
        for n in names
    }
    params = {n: p + 0.01 * randn(*p.shape) for n, p in params.items()}
    layout = Layout(sizes, members, batch, points)
    group = torch.arange(members) % groups
    train, y = randn(groups, batch, sizes[0]), randn(groups, batch)
    strength = torch.logspace(-4, -1, members, dtype=torch.float64)
    strength[0] = 0.0
    prior = torch.linspace(0.3, 1.0, members, dtype=torch.float64)
    x = torch.zeros(groups, layout.rows, layout.inputs, dtype=torch.float64)
    x[:, :batch, : sizes[0]] = train
    psi, draws, dims = None, Draws(), Draws()
    if points:
        evaluated = randn(groups, points, sizes[0])
        x[:, batch : batch + points, : sizes[0]] = evaluated
        x[:, layout.rows_plain : layout.rows_plain + points, : sizes[0]] = evaluated
        psi = {n: randn(groups, *p.shape[1:]) for n, p in params.items()}
        draws = Draws(evaluated[group], {n: p[group][:, None] for n, p in psi.items()})
        dims = Draws(0, dict.fromkeys(psi, 0))

    def loss(params, hypers, batch, draws):
        return objective(sizes[0], points, **hypers).loss(f, params, batch, draws)

    hypers = {"prior": prior, "strength": strength}
    gradient = vmap(grad_and_value(loss, has_aux=True), in_dims=(0, 0, 0, dims))
    grads, (_, terms) = gradient(params, hypers, Batch(train[group], y[group, :, None]), draws)
    scales = torch.stack(
        [torch.full_like(prior, 1 / SIGMA**2), strength, 1 / (prior**2 * NUM_DATA)]
    )
    packed = None if psi is None else layout.pack(psi)
    return Case(layout, layout.pack(params), group, scales, x, y, packed, grads, terms)


def objective(features: int, points: int, prior: Tensor, strength: Tensor) -> fsmap.Objective:
    """What ``make`` differentiates."""
    noise, normal = fsmap.Gaussian(SIGMA), fsmap.Normal(prior)
    if not points:
        return fsmap.ps_map(noise, normal, num_data=NUM_DATA)
    return fsmap.l_map(
        noise,
        normal,
        fsmap.px.Normal(shape=features),
        num_points=points,
        num_data=NUM_DATA,
        reg_strength=strength,
        estimator="fd",
        beta=BETA,
    )
