"""The collapse guard in numbers, and the last good state."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fsmap.errors import InputError
from fsmap.train.guard import PATIENCE, Guard, Health, health
from fsmap.train.snapshot import Snapshot


def test_health_of_a_classifier():
    y = torch.tensor([0, 1, 2, 0])
    z = torch.tensor([[3.0, 0, 0], [0, 3, 0], [0, 3, 0], [3, 0, 0]])
    found = health(z + 7, y)
    assert (found.score, found.chance) == (0.75, 0.5)
    assert found.spread > 0
    assert health(torch.arange(4.0)[:, None].expand(4, 3), y).spread == 0  # a shift is no output


def test_health_of_a_regression():
    y = torch.linspace(-1, 1, 9)[:, None]
    assert_close(health(y, y), Health(1.0, 0.0, float(y.var(correction=0))))
    assert health(torch.zeros(9, 1), y).score == pytest.approx(0.0)
    assert health(torch.zeros(9), y[:, 0]).spread == 0
    with pytest.raises(InputError, match=r"shape of the outputs \[9, 2\], got torch.float64"):
        health(torch.zeros(9, 2), y)


def test_health_of_what_diverged():
    found = health(torch.full((4, 2), math.nan), torch.zeros(4).long())
    assert Guard().judge(found) == "collapsed"


def seen(*scores: float, spread: float = 1.0) -> list[str]:
    guard = Guard()
    return [guard.judge(Health(score, 0.1, spread)) for score in scores]


def test_falls_of_accuracy():
    assert seen(0.1, 0.5, 0.9, 0.85) == ["good"] * 4
    assert seen(0.9, 0.1)[-1] == "collapsed"
    assert seen(0.9, 0.45)[-1] == "suspect"
    assert seen(0.9, 0.45, 0.8)[-1] == "good"  # one dip is normal at a large learning rate
    assert seen(0.9, 0.45, 0.45)[-1] == "collapsed"
    assert seen(0.1, 0.12, 0.1) == ["good"] * 3  # nothing learned yet


def test_learned_is_relative_to_what_is_left_above_chance():
    guard = Guard()
    guard.judge(Health(0.981, 0.98, 1.0))  # nearly all points have one label
    assert not guard.learned
    guard.judge(Health(0.985, 0.98, 1.0))
    assert guard.learned


def test_outputs_that_are_constant():
    guard = Guard()
    assert guard.judge(Health(0.12, 0.1, 2.0)) == "good"
    assert guard.judge(Health(0.1, 0.1, 1e-4)) == "collapsed"
    assert guard.spread == 2.0


def test_state_of_the_guard():
    guard, other = Guard(), Guard()
    guard.judge(Health(0.9, 0.1, 1.0))
    guard.judge(Health(0.4, 0.1, 1.0))
    other.load_state_dict(guard.state_dict())
    assert other.judge(Health(0.4, 0.1, 1.0)) == "collapsed"


def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 12).reshape(4, 3)).square().sum().backward()
    optimizer.step()


def test_snapshot_comes_back_into_the_same_storages(seeded: None):
    model, optimizer = trained(2)
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    places = [p.data_ptr() for p in model.parameters()]
    step(model, optimizer)
    assert snapshot.restore()
    after = (model.state_dict(), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert [p.data_ptr() for p in model.parameters()] == places


def test_snapshot_from_before_the_first_step(seeded: None):
    """Momentum that did not exist then becomes zero."""
    model, optimizer = trained(0)
    snapshot = Snapshot(model, optimizer)
    assert not snapshot.restore()
    snapshot.take()
    step(model, optimizer)
    snapshot.restore()
    assert all(not s["momentum_buffer"].any() for s in optimizer.state.values())


def test_snapshot_travels(seeded: None):
    model, optimizer = trained(2)
    snapshot, other = Snapshot(model, optimizer), Snapshot(model, optimizer)
    snapshot.take()
    other.load(snapshot.tensors)
    kept = model[0].weight.detach().clone()
    step(model, optimizer)
    other.restore()
    assert_close(model[0].weight.detach(), kept, rtol=0, atol=0)


def test_a_state_that_has_faded_is_not_kept():
    """Or a slow decline would end in a state from which every step looks like a collapse."""
    guard = Guard()
    assert guard.judge(Health(0.9, 0.1, 1.0)) == "good"
    assert guard.keep
    assert guard.judge(Health(0.6, 0.1, 1.0)) == "good"  # steering goes on
    assert not guard.keep


def test_collapses_in_a_row_are_not_the_fault_of_lambda():
    guard = Guard()
    guard.judge(Health(0.9, 0.1, 1.0))
    verdicts = [guard.judge(Health(0.15, 0.1, 1.0)) for _ in range(PATIENCE + 1)]
    assert verdicts == ["collapsed"] * PATIENCE + ["good"]
    assert guard.judge(Health(0.2, 0.1, 1.0)) == "good"  # measured against the new best
    again = Guard()
    again.load_state_dict(guard.state_dict())
    assert again.state_dict() == guard.state_dict()
    assert all(guard.judge(Health(-math.inf, 0.1, 1.0)) == "collapsed" for _ in range(9))
