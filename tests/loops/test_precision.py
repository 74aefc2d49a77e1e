"""GradScaler and fp16 on the CPU, and λ = 0 in every kind of loop."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from tests.loops import cells
from torch import nn

import fsmap

PX = fsmap.px.Normal(shape=(4,))


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).float()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(6, 4, generator=g, dtype=torch.float32)
    return x, torch.randint(0, 3, (6,), generator=g)


@pytest.mark.parametrize("mode", ["joint", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scaled_gradients_are_those_of_full_precision(dtype: torch.dtype, mode: str) -> None:
    x, y = batch()
    grads = []
    for autocast, scale in ((False, 1.0), (True, 2.0**10)):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        lm = fsmap.LMAP(net, PX, num_points=5, batchnorm=mode).attach(optimizer)
        with torch.autocast("cpu", dtype, autocast):
            out, R = lm(x)
            loss = F.cross_entropy(out, y) + 1e-2 * R
        assert R.dtype == torch.float32
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grads.append(torch.cat([p.grad.reshape(-1) for p in net.parameters()]))
        scaler.step(optimizer)
        scaler.update()
        assert lm.step == 1
    wrong = (grads[1] - grads[0]).norm() / grads[0].norm()
    assert 0 < wrong < (0.002 if dtype == torch.float16 else 0.015)


def test_a_step_that_the_scaler_skips_does_not_count() -> None:
    x, y = batch()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)  # R's gradient overflows float32
    lm = fsmap.LMAP(net, PX, num_points=5).attach(optimizer)
    before = copy.deepcopy(net.state_dict())
    seen = []
    for _ in itertools.count():
        optimizer.zero_grad()
        seen.append(lm.regularizer.stream().psi(lm.regularizer.params())["0.weight"])
        out, R = lm(x)
        scaler.scale(F.cross_entropy(out, y) + 1e10 * R).backward()
        scaler.step(optimizer)
        scaler.update()
        if lm.step or len(seen) > 60:
            break
        assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items())
    assert 1 < len(seen) < 60
    assert all(torch.equal(seen[0], psi) for psi in seen)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("bn", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", ["frozen", "batch"])
def test_strength_zero_is_the_plain_loop(
    mode: str, autocast: bool, bn: bool, accumulation: int
) -> None:
    """Bit for bit, outside joint, and with no pass more."""
    trained, passes = [], []
    for wrapped in (False, True):
        net = cells.network(bn).float()
        net[0].register_forward_hook(lambda *_: passes.append(1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        lm = fsmap.LMAP(net, cells.px, num_points=3, batchnorm=mode).attach(optimizer)
        for _ in range(3):
            for micro in range(accumulation):
                x, y = cells.micro_batch(0, micro)
                with torch.autocast("cpu", torch.bfloat16, autocast):
                    out, term = lm(x.float(), reg_strength=0.0) if wrapped else (net(x.float()), 0)
                    loss = F.cross_entropy(out, y) + term
                (loss / accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(net.state_dict())
    assert all(torch.equal(v, trained[1][n]) for n, v in trained[0].items())
    assert len(passes) == 2 * 3 * accumulation
