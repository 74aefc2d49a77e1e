"""Copies of a model (EMA, SWA, deepcopy): R of a copy is R at the copy's parameters."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsmap

pytestmark = pytest.mark.usefixtures("seeded")

PX = fsmap.px.Normal(shape=(2,))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def term(model: nn.Module, mode: str = "frozen") -> fsmap.LMAP:
    return fsmap.LMAP(model, PX, num_points=7, batchnorm=mode)


def fresh(model: nn.Module, mode: str = "frozen") -> float:
    """R of a model as one that was never averaged would have it: a new term on new tensors."""
    twin = network()
    twin.load_state_dict(model.state_dict())
    return term(twin.train(), mode)(batch()[0])[1].item()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(8, 2, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def train(lm: fsmap.LMAP, average: AveragedModel, source: nn.Module, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.5)
    lm.attach(optimizer)
    x, y = batch()
    for _ in range(steps):
        out, R = lm(x)
        optimizer.zero_grad()
        (F.cross_entropy(out, y) + 0.01 * R).backward()
        optimizer.step()
        average.update_parameters(source)


@pytest.mark.parametrize("mode", ["frozen", "joint", "batch"])
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_average_of_the_wrapped_model(mode, kind):
    model = network()
    lm = term(model, mode)
    rule = get_ema_multi_avg_fn(0.5) if kind == "ema" else None
    average = AveragedModel(lm, multi_avg_fn=rule, use_buffers=kind == "ema")
    train(lm, average, lm)
    copied = average.module
    assert copied.module is not model
    assert copied.regularizer.module is copied.module
    assert copied.step == 0  # the copy was made before training and counts for itself
    expected = fresh(copied.module, mode)
    trained = fresh(model, mode)
    x, _ = batch()
    out, R = average(x)
    assert R.item() == pytest.approx(expected, rel=1e-12)
    assert R.item() != pytest.approx(trained, rel=1e-3)
    before = [p.grad.clone() for p in model.parameters()]
    R.backward()
    assert any(p.grad is not None for p in average.parameters())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    assert average.eval()(x)[1] is None


def test_a_deepcopy_stands_alone():
    lm = term(network())
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.1)
    lm.attach(optimizer)
    twin = copy.deepcopy(lm)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    x, _ = batch()
    for one in (twin, lm):
        expected = fresh(one.module)
        assert one(x)[1].item() == pytest.approx(expected, rel=1e-12)
    optimizer.step()
    assert (lm.step, twin.step) == (1, 1)  # the optimizer counts its own; the copy, its one pass
    penalty = fsmap.LaplacianPenalty(lm.module, PX, num_points=7)
    assert copy.deepcopy(penalty).regularizer.module is not lm.module
