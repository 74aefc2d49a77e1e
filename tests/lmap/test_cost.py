"""What a step costs: measured, in proportion, and without leaving a trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fsmap

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


def test_more_points_cost_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [0.0]  # points, in place of seconds
    monkeypatch.setattr("fsmap.lmap.measure.clock", lambda device: passed[0])
    x, costs = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)), []
    for n in (8, 2048):
        net = network()
        net[0].register_forward_hook(lambda _, __, out: passed.append(passed.pop() + len(out)))
        costs.append(fsmap.estimate_cost(fsmap.LaplacianPenalty(net, PX, num_points=n), x))
    small, large = costs
    assert "1088000.0 ms  17.00x" in str(large)  # every=2
    assert 1 < small.factor < large.factor
    assert small.active_bytes is None  # on a CPU
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
