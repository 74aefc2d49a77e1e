"""λR beside the loss: against a closed form, for every wrapper, with nothing left changed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fsmap
from fsmap.errors import InputError, UnseenStatisticsWarning

PX = fsmap.px.Normal(shape=(3,))


@pytest.fixture
def model(seeded) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def test_a_linear_model_has_a_closed_form(seeded):
    penalty = fsmap.LaplacianPenalty(nn.Linear(3, 2), PX, num_points=256)
    found = fsmap.suggest_strength(penalty, loss=0.6, num_data=50, draws=64)
    exact = 2 * (3 + 1)  # K (E‖x‖² + 1)
    assert abs(found.R - exact) < 5 * found.stderr
    assert found.stderr < 1.0
    assert {s: round(v * found.R / 0.6, 9) for s, v in found.choices.items()} == {
        0.01: 0.01, 0.1: 0.1, 1.0: 1.0,
    }  # fmt: skip
    assert f"ε = {found.R / (2 * 0.6 * 50):.2g}" in str(found)  # 1/(2λN) at λR = loss


def normalized() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def test_statistics_that_never_saw_data_are_named(seeded):
    model, x = normalized(), 100 * torch.randn(64, 3)
    penalty = fsmap.LaplacianPenalty(model, PX, num_points=128, batchnorm="frozen")
    with pytest.warns(UnseenStatisticsWarning, match="'1'"):
        new = fsmap.suggest_strength(penalty, loss=1.0)
    with fsmap.fresh_statistics(model, [x]):
        fresh = fsmap.suggest_strength(penalty, loss=1.0)  # no warning
    assert fresh.R < 0.8 * new.R  # statistics of inputs of a larger scale
    model(x)
    fsmap.suggest_strength(penalty, loss=1.0)  # has seen a batch


@pytest.mark.parametrize("every", [1, 4])
def test_wrappers_are_measured_as_they_are_and_left_as_they_were(model, every):
    plain = fsmap.LaplacianPenalty(model, PX, num_points=16, seed=3)
    bare = fsmap.suggest_strength(plain, loss=1.0, draws=4)
    penalty = fsmap.LaplacianPenalty(model, PX, num_points=16, seed=3, every=every)
    penalty.step = 7
    wrapped = fsmap.suggest_strength(penalty, loss=torch.tensor(1.0, requires_grad=True), draws=4)
    assert penalty.step == 7
    assert math.isfinite(wrapped.stderr)
    if every == 1:
        assert_close(wrapped.R, bare.R)
    # the same mean whatever `every` is: R itself, not R times every
    assert 0.2 < wrapped.R / bare.R < 5


def test_joint_batches_need_training_points_and_keep_statistics(seeded):
    model = normalized()
    lm = fsmap.LMAP(model, PX, num_points=16)
    before = {n: b.clone() for n, b in model.named_buffers()}
    with pytest.raises(InputError, match="give x, a training batch"):
        fsmap.suggest_strength(lm, loss=1.0)
    assert fsmap.suggest_strength(lm, loss=1.0, x=torch.randn(32, 3)).R > 0
    assert lm.step == 0
    assert_close(dict(model.named_buffers()), before)


def test_joint_r_is_what_lmap_returns(model):
    lm = fsmap.LMAP(model, PX, num_points=16, seed=5)
    x = torch.randn(8, 3)
    found = fsmap.suggest_strength(lm, loss=1.0, x=x, draws=3)
    R = torch.stack([lm(x)[1].detach() for _ in range(3)])
    assert_close(found.R, float(R.mean()))
