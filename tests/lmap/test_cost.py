"""What a step costs: measured, in proportion, and without leaving a trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fsmap
from fsmap.errors import InputError
from fsmap.lmap.measure import StepCost, _Alive

PX = fsmap.px.Normal(shape=(16,))


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(16, 128), nn.BatchNorm1d(128), nn.Dropout(0.1), nn.Tanh(), nn.Linear(128, 4)
        )


@pytest.mark.parametrize("mode", ["joint", "frozen"])
@pytest.mark.usefixtures("seeded")
def test_the_model_stays_as_it_is(mode: str) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    lm = fsmap.LMAP(module, PX, num_points=32, batchnorm=mode, every=3).attach(optimizer)
    lm.step = 4
    lm(torch.ones(8, 16))[0].sum().backward()
    module[1].eval()
    before = copy.deepcopy(lm.state_dict())
    grads = [p.grad.clone() for p in module.parameters()]
    stream, noise = lm.regularizer.stream(), torch.get_rng_state()
    fsmap.estimate_cost(lm, torch.randn(32, 16, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(v, before[n]) for n, v in lm.state_dict().items())
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, module.parameters(), strict=True))
    assert lm.regularizer.stream() == stream
    assert torch.equal(noise, torch.get_rng_state())
    assert module.training
    assert not module[1].training


def test_more_points_cost_more_time_and_memory() -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    small, large = (
        fsmap.estimate_cost(fsmap.LaplacianPenalty(network(), PX, num_points=n), x)
        for n in (8, 2048)
    )
    assert 1 < small.factor < large.factor
    assert 0 < small.extra_bytes < large.extra_bytes
    assert large.seconds(every=8) < large.seconds(every=2) < large.seconds(every=1) == large.active


@pytest.mark.usefixtures("seeded")
def test_a_penalty_in_place() -> None:
    module = network()
    penalty = fsmap.InPlacePenalty(module, PX, num_points=256, every=2)
    penalty.backward(1.0)
    before = copy.deepcopy(module.state_dict())
    grads = [p.grad.clone() for p in module.parameters()]
    cost = fsmap.estimate_cost(penalty, torch.zeros(64, 16))
    assert cost.settings.startswith("fd, num_points=256, probes=1")
    assert cost.active > cost.idle
    assert cost.every == 2
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, module.parameters(), strict=True))
    assert penalty.step == 1


@pytest.mark.usefixtures("seeded")
def test_sampled_outputs_save_the_memory_of_the_others() -> None:
    module = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2_000))
    peaks = []
    for outputs in (None, 20):
        px = fsmap.px.Normal(shape=(2,))
        penalty = fsmap.LaplacianPenalty(module, px, num_points=200, outputs=outputs)
        penalty()  # the first call looks at the whole output once
        with _Alive() as alive:
            penalty().backward()
        peaks.append(alive.peak)
    assert peaks[0] > 3 * 8 * 200 * 2_000  # value, tangent and their gradients
    assert peaks[1] < 0.1 * peaks[0]


def test_the_table() -> None:
    cost = StepCost(2e-3, 2e-3, 8e-3, 10_000_000, 30_000_000, 4, "jvp, num_points=64")
    assert cost.seconds() == pytest.approx(3.5e-3)
    assert cost.factor == pytest.approx(1.75)
    assert cost.extra_bytes == 20_000_000
    lines = str(cost).splitlines()
    assert lines[0] == "jvp, num_points=64"
    assert lines[2].split() == ["without", "R", "2.0", "ms", "1.00x", "10.0", "MB"]
    assert lines[3].split() == ["every=1", "8.0", "ms", "4.00x", "30.0", "MB"]
    assert lines[5].split() == ["every=4", "(set)", "3.5", "ms", "1.75x", "30.0", "MB"]


def test_bytes_are_counted_once_and_given_back() -> None:
    x = torch.zeros(1000)  # 8 kB that were there before
    with _Alive() as alive:
        a = x + 1
        b = a.view(10, 100)[2:]
        del a
        c = b * 2  # 800 of 1000 numbers
        del b
        x.add_(1)
        d = x.view(-1)
    assert alive.peak == 8_000 + 6_400
    assert alive.now == 6_400
    del c, d


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="LaplacianPenalty or an InPlacePenalty, got Sequential"):
        fsmap.estimate_cost(network(), torch.zeros(2, 16))
