import math

import pytest
import torch
from torch import nn

from fsmap.models import MLP
from fsmap.train.population import initialize


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_is_what_its_formula_says(generator):
    model = MLP([3, 5, 4, 2], "tanh", generator=generator)
    x = torch.randn(7, 3, generator=generator)
    h = x
    for i in (0, 1):
        h = torch.tanh(h @ model.layers[i].weight.mT + model.layers[i].bias)
    torch.testing.assert_close(model(x), h @ model.layers[2].weight.mT + model.layers[2].bias)


def test_a_generator_decides_the_parameters_and_torchs_own_is_left_alone():
    one, same, other = (MLP([2, 8, 1], generator=seeded(s)) for s in (0, 0, 1))
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    before = [p.clone() for p in one.parameters()]
    one.reset_parameters(seeded(5))
    assert not torch.equal(before[0], one.layers[0].weight)


def test_without_a_generator_it_draws_what_linear_draws(seeded):
    model = MLP([4, 6, 3])
    torch.manual_seed(0)
    for layer, expected in zip(model.layers, [nn.Linear(4, 6), nn.Linear(6, 3)], strict=True):
        torch.testing.assert_close(layer.weight, expected.weight)
        torch.testing.assert_close(layer.bias, expected.bias)


def test_lecun_weights_have_variance_one_over_fan_in_and_zero_biases(generator):
    model = MLP([400, 300, 1], init="lecun", generator=generator)
    weight = model.layers[0].weight
    assert abs(weight.std().item() * math.sqrt(400) - 1) < 0.02
    assert abs(weight.mean().item()) < 5 / 20 / math.sqrt(weight.numel())
    assert all((layer.bias == 0).all() for layer in model.layers)


@pytest.mark.parametrize("init", ["torch", "lecun"])
def test_a_seed_of_a_population_keeps_the_kind_of_initialization(init, generator):
    model = MLP([2, 50, 2], init=init, generator=generator)
    first, again = initialize(model, 3), initialize(model, 3)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert (first["layers.0.bias"] == 0).all() == (init == "lecun")
