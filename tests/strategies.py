"""Hypothesis strategies: small networks at random parameters, with points to evaluate them at."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from torch import nn

import fsmap
from cases import Case

SEEDS = st.integers(0, 2**32 - 1)
JITTERS = st.floats(-6, 3).map(lambda power: 10.0**power)


def network(seed: int, sizes: list[int], activation: type[nn.Module], num: int) -> Case:
    """An MLP with standard normal parameters and points."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        for fan_in, fan_out in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(fan_in, fan_out), activation()]
        module = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    f, params = fsmap.functional(module)
    return Case(f, params, torch.randn(num, sizes[0], generator=generator), module)


@st.composite
def networks(draw: st.DrawFn, points: tuple[int, int] = (1, 8)) -> Case:
    """MLPs with one or two inputs and outputs, one hidden layer."""
    sizes = [draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 2))]
    activation = draw(st.sampled_from([nn.Tanh, nn.GELU, nn.ReLU]))
    return network(draw(SEEDS), sizes, activation, draw(st.integers(*points)))
