"""Losses along filter-normalized directions: the batch against a loop, and the normalization."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from fsmap.assess.landscape import (
    Landscape,
    draw_psi,
    filter_normalized,
    flatness,
    landscape,
    laplacian,
)
from fsmap.errors import InputError
from fsmap.functional import functional
from oracles import trace_slow


def network() -> nn.Module:
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(4 * 36, 3)),
    )
    model(torch.randn(16, 1, 6, 6))  # running statistics of something
    return model


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(30, 1, 6, 6, generator=generator), torch.arange(30) % 3


def test_every_filter_has_the_network_s_norm(seeded: None, generator: torch.Generator):
    _, params = functional(network())
    found = filter_normalized(params, 4, generator)
    for name, d in found.items():
        if params[name].dim() < 2:
            assert not d.any()  # biases and BatchNorm stay
        else:
            wanted = params[name].flatten(1).norm(dim=1).expand(4, -1)
            assert_close(d.flatten(2).norm(dim=2), wanted)
    assert sum(bool(d.any()) for d in found.values()) == 2


def test_against_moved_copies(seeded: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fsmap.assess.landscape.BATCH", 11)
    model = network()
    x, y = data()
    steps = torch.tensor([-1.0, 0.0, 0.5])
    options = {"steps": steps, "directions": 3}
    found = landscape(model, x, y, generator=torch.Generator().manual_seed(2), **options)
    assert model.training
    _, params = functional(model)
    line = filter_normalized(params, 3, torch.Generator().manual_seed(2))
    for d in range(3):
        for a, alpha in enumerate(steps):
            moved = copy.deepcopy(model).eval()
            with torch.no_grad():
                for name, p in moved.named_parameters():
                    p += alpha * line[name][d]
                loss = F.cross_entropy(moved(x), y)
            assert_close(found.loss[d, a], loss, rtol=1e-6, atol=1e-7)


def test_a_model_that_fails_is_left_as_it_was(seeded: None, generator: torch.Generator):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3).eval(), nn.Linear(4, 3))
    x, y, options = torch.zeros(5, 2), torch.zeros(5).long(), {"generator": generator}
    with pytest.raises(RuntimeError, match="shapes"):
        landscape(model, x, y, steps=torch.zeros(1), **options)
    assert [m.training for m in model] == [True, False, True]
    with pytest.raises(InputError, match="at least one direction, one point and a row of steps"):
        landscape(model, x, y, steps=torch.zeros(3), directions=0, **options)


def test_flatness_is_the_mean_rise():
    steps = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    found = Landscape(steps, torch.stack([1 + steps.square(), 1 + 3 * steps.square()]))
    assert flatness(found) == pytest.approx(1.0)  # 2 α² at -1, 0, 1: trapezoids
    assert flatness(found, within=2.0) == pytest.approx(3.0)
    assert flatness(found, within=0.5) == 0.0
    turned = torch.tensor([2, 0, 4, 1, 3])
    assert flatness(Landscape(steps[turned], found.loss[:, turned])) == pytest.approx(1.0)
    with pytest.raises(InputError, match=r"must include 0, got \[1.0"):
        flatness(Landscape(steps[3:], found.loss[:, 3:]))


@pytest.mark.parametrize(("reach", "number"), [(1.0, 21), (1.0, 81), (2.0, 41), (5.0, 401)])
def test_flatness_belongs_to_the_network_and_not_to_the_grid(reach: float, number: int):
    steps = torch.linspace(-reach, reach, number)
    found = Landscape(steps, steps.square().expand(3, -1))
    assert flatness(found) == pytest.approx(1 / 3, rel=1e-2)


def test_laplacian_of_the_deployed_function(seeded: None):
    model = network()
    x, _ = data()
    total = float(trace_slow(*functional(model.eval()), x))
    model.train()
    value, stderr = laplacian(model, x, probes=64, batch_size=8)
    assert abs(value - total) < 5 * stderr
    assert stderr < 0.2 * total
    assert model.training
    assert math.isnan(laplacian(model, x, probes=1)[1])


def test_laplacian_in_training_mode(seeded: None):
    """With batch statistics it is the derivative of the pass that training makes."""
    model = network().train()
    x = data()[0][:6]
    before = {n: b.clone() for n, b in model.named_buffers()}
    psi = draw_psi(model, 1, torch.Generator().manual_seed(0))

    def moved(step: float) -> torch.Tensor:
        tensors = {n: p + step * psi[n][0] for n, p in model.named_parameters()}
        buffers = {n: b.clone() for n, b in before.items()}
        return torch.func.functional_call(model, {**tensors, **buffers}, (x,))

    slope = (moved(1e-5) - moved(-1e-5)).detach() / 2e-5
    value, _ = laplacian(model, x, probes=psi, batch_statistics=True)
    assert value == pytest.approx(float(slope.square().sum(1).mean()), rel=1e-5)
    assert value != pytest.approx(laplacian(model, x, probes=psi)[0], rel=0.1)
    assert model.training
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    model[1].eval()  # a frozen layer stays frozen
    frozen = laplacian(model, x, probes=psi, batch_statistics=True)[0]
    assert frozen == laplacian(model, x, probes=psi)[0]
    assert not model[1].training
