"""One step against autograd written out, purity checks, and the noise of random layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsmap
from cases import case
from fsmap.errors import UnsupportedModuleError
from fsmap.linalg.probes import Stream
from fsmap.train.optim import sgd
from fsmap.train.step import check_pure, layer_noise, make_loss, update
from fsmap.types import Batch


def test_a_step_of_gradient_descent(generator: torch.Generator):
    it = case("wide")
    y = torch.randn(5, 3, generator=generator)
    objective = fsmap.ps_map(fsmap.Gaussian(0.5), fsmap.Normal(2.0), num_data=20)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in it.params.items()}
    moving = sgd(0.01).build(leaves.values())
    loss = make_loss(it.f, lambda: objective)
    row = update(loss, leaves, {}, Batch(it.x, y), fsmap.types.Draws(), optimizer=moving, clip=None)

    twin = {n: p.detach().clone().requires_grad_() for n, p in it.params.items()}
    theta = torch.cat([p.reshape(-1) for p in twin.values()])
    noise, prior = torch.distributions.Normal(0, 0.5), torch.distributions.Normal(0, 2.0)
    likelihood = 4 * noise.log_prob(y - it.f(twin, it.x)).sum()  # 5 of 20 points
    value = -(likelihood + prior.log_prob(theta).sum()) / 20
    value.backward()
    for n, p in twin.items():
        torch.testing.assert_close(leaves[n], p - 0.01 * p.grad, rtol=1e-12, atol=1e-14)
    norm = torch.cat([p.grad.reshape(-1) for p in twin.values()]).norm()
    expected = torch.stack([value, likelihood, prior.log_prob(theta).sum(), torch.zeros(()), norm])
    torch.testing.assert_close(row, expected.detach())


def test_clipping_shortens_the_step(generator: torch.Generator):
    it = case("linear")
    objective = fsmap.ps_map(fsmap.Gaussian(0.01), fsmap.Flat(), num_data=6)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in it.params.items()}
    batch = Batch(it.x, torch.randn(6, 1, generator=generator))
    loss = make_loss(it.f, lambda: objective)
    row = update(
        loss,
        leaves,
        {},
        batch,
        fsmap.types.Draws(),
        optimizer=sgd(1.0).build(leaves.values()),
        clip=0.3,
    )
    moved = torch.cat([(leaves[n] - p).detach().reshape(-1) for n, p in it.params.items()]).norm()
    assert float(moved) == pytest.approx(0.3, rel=1e-6)
    assert row[-1] > 100  # the history tells the norm before clipping


def test_a_parameter_that_is_not_used_stays():
    leaves = {"w": torch.ones(1, requires_grad=True), "idle": torch.ones(2, requires_grad=True)}
    objective = fsmap.ps_map(fsmap.Gaussian(1.0), fsmap.Flat(), num_data=2)
    loss = make_loss(lambda p, x: x * p["w"], lambda: objective)
    batch = Batch(torch.ones(2, 1), torch.zeros(2, 1))
    update(
        loss,
        leaves,
        {},
        batch,
        fsmap.types.Draws(),
        optimizer=sgd(0.1).build(leaves.values()),
        clip=None,
    )
    assert leaves["idle"].tolist() == [1.0, 1.0]
    assert leaves["w"].item() == pytest.approx(0.9)


def test_active_batchnorm_is_refused_by_name():
    it = case("batchnorm_train")
    with pytest.raises(
        UnsupportedModuleError, match=r"'1' \(BatchNorm1d\).*running_mean.*\.eval\(\).*fsmap\.LMAP"
    ):
        check_pure(it.f, it.params, it.x)
    it.module.eval()
    check_pure(it.f, it.params, it.x)


def test_many_owners_are_counted(seeded: None):
    body = nn.Sequential(nn.Linear(2, 3), *(nn.BatchNorm1d(3) for _ in range(5)))
    f, params = fsmap.functional(body)
    with pytest.raises(UnsupportedModuleError, match=r"'3' \(BatchNorm1d\) and 2 more"):
        check_pure(f, params, torch.arange(8.0).reshape(4, 2))


def test_a_plain_function_has_no_buffers_to_lose():
    check_pure(lambda p, x: x * p["w"], {"w": torch.ones(1)}, torch.ones(2, 1))


def test_random_layers_follow_seed_and_step(seeded: None):
    f, params = fsmap.functional(nn.Sequential(nn.Linear(2, 50), nn.Dropout(0.5)))
    x = torch.ones(4, 2)
    state = torch.random.get_rng_state()

    def masked(seed: int, step: int) -> torch.Tensor:
        with layer_noise(f, Stream(seed, step), torch.device("cpu")):
            return f(params, x).detach()

    assert torch.equal(masked(0, 3), masked(0, 3))
    assert not torch.equal(masked(0, 3), masked(0, 4))
    assert not torch.equal(masked(0, 3), masked(1, 3))
    assert torch.equal(torch.random.get_rng_state(), state)
