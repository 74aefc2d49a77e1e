"""Objectives: scale, sign, and the properties that make FS-MAP what it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import case
from tests.oracles import trace_slow
from torch import nn
from torch.testing import assert_close

import fsmap
from fsmap.objective.objective import Gaussian, Normal, Reparametrized
from fsmap.px import Stream
from fsmap.types import Batch, Draws

N = 30


def data(seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(N, 1, generator=g), torch.randn(N, 1, generator=g))


def terms():
    return Gaussian(0.5), Normal(2.0)


def fs(px=None, jitter: float = 0.1) -> fsmap.Objective:
    px = fsmap.px.Uniform(-1, 1) if px is None else px
    return fsmap.fs_map(*terms(), px, num_points=20, jitter=jitter, num_data=N)


def test_jitter_and_strength_are_two_names_of_one_number() -> None:
    m, batch = case("tanh_mlp"), data()
    px, eps = fsmap.px.Uniform(-1, 1), 0.7
    common = {"num_points": 20, "num_data": N, "estimator": "exact"}
    by_jitter = fsmap.l_map(*terms(), px, jitter=eps, **common)
    by_strength = fsmap.l_map(*terms(), px, reg_strength=1 / (2 * eps * N), **common)
    draws = by_jitter.draw(m.f, m.params, Stream(0, 0))
    loss, same = (o.loss(m.f, m.params, batch, draws)[0] for o in (by_jitter, by_strength))
    assert same.item() == pytest.approx(loss.item(), rel=1e-12)
    plain = fsmap.ps_map(*terms(), num_data=N).loss(m.f, m.params, batch, Draws())[0]
    R = trace_slow(m.f, m.params, draws.x)
    assert (loss - plain).item() == pytest.approx((R / (2 * eps * N)).item(), rel=1e-9)  # λR


def test_strength_zero_is_ps_map_itself() -> None:
    px = fsmap.px.Uniform(-1, 1)
    objective = fsmap.l_map(*terms(), px, num_points=5, num_data=N, reg_strength=0)
    assert objective == fsmap.ps_map(*terms(), num_data=N)


class Sinh(nn.Module):
    """f in θ' with θ = asinh(θ'/scale): the same functions, other coordinates."""

    def __init__(self, f, params, scale: float) -> None:
        super().__init__()
        self.f, self.scale = f, scale
        self.names = list(params)
        self.flat = nn.ParameterList(scale * p.detach().sinh() for p in params.values())

    def forward(self, x):
        theta = [(p / self.scale).asinh() for p in self.flat]
        return self.f(dict(zip(self.names, theta, strict=True)), x)


@given(seed=st.integers(0, 10**6), scale=st.floats(0.3, 3.0))
@settings(max_examples=20, deadline=None)
def test_fs_map_is_invariant_to_reparametrization_and_ps_map_is_not(
    seed: int, scale: float
) -> None:
    m, batch = case("tanh_mlp", seed), data()
    x = torch.linspace(-2, 2, 25)[:, None]
    f2, params2 = fsmap.functional(Sinh(m.f, m.params, scale))
    prior = Normal(2.0)
    prior2 = Reparametrized(prior, lambda t: (t / scale).asinh())

    def value(build, f, params, prior) -> float:
        return sum(build(prior).parts(f, params, batch, Draws(x)).values()).item()

    def fs(prior):
        px = fsmap.px.Uniform(-2, 2)
        return fsmap.fs_map(Gaussian(0.5), prior, px, num_points=25, jitter=0.0, num_data=N)

    def ps(prior):
        return fsmap.ps_map(Gaussian(0.5), prior, num_data=N)

    sigma = torch.linalg.svdvals(fsmap.linalg.logdet.whitened_rows(m.f, m.params, x))
    if sigma[-1] < 1e-5 * sigma[0]:  # rounding would be larger than what is tested
        return
    here, there = value(fs, m.f, m.params, prior), value(fs, f2, params2, prior2)
    assert there == pytest.approx(here, rel=1e-6, abs=1e-4)
    here_ps, there_ps = value(ps, m.f, m.params, prior), value(ps, f2, params2, prior2)
    assert abs(there_ps - here_ps) > 1e-3


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("mode", ["batch", "joint", "frozen"])
def test_r_falls_as_the_layer_before_batchnorm_grows(mode: str):
    """The derivative of R in the log of the layer's size is -2 times the layer's part of R."""
    module = nn.Sequential(
        nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4, eps=1e-12), nn.Tanh(), nn.Linear(4, 2)
    )
    x = torch.randn(12, 3)
    module[1].momentum = 1.0
    module(x)  # running statistics that fit the points
    options = {"num_points": len(x), "estimator": "exact", "batchnorm": mode}
    px = fsmap.px.as_px(lambda n, _: x[:n])
    whole = fsmap.LMAP(module, px, **options)(x)[1]
    for other in (module[1], module[3]):
        other.requires_grad_(False)
    part = fsmap.LMAP(module, px, **options)(x)[1]
    weight = module[0].weight
    (gradient,) = torch.autograd.grad(whole, weight)
    assert_close((gradient * weight).sum(), -2 * part, rtol=1e-6, atol=0)
