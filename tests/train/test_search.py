"""One configuration equals fit; several equal the best of the lone runs."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import fsmap
from fsmap.errors import InputError
from fsmap.models.mlp import MLP
from fsmap.train.optim import adam, cosine
from fsmap.train.plan import plan
from fsmap.train.search import Config, Trained, at_edges, objective, strengths, train
from fsmap.types import Batch

PX = fsmap.px.Normal(shape=(2,))
SIZES = plan(40, hidden=(8,), steps=30, batch_size=20, num_points=8, lr=0.02, patience=None)


@pytest.fixture
def net(generator):
    return MLP([2, 8, 1], generator=generator)


@pytest.fixture
def data(generator):
    x = torch.randn(60, 2, generator=generator)
    y = x[:, :1] - x[:, 1:] + 0.1 * torch.randn(60, 1, generator=generator)
    return Batch(x[:40], y[:40]), Batch(x[40:], y[40:])


def run(net, method, data, held, decays, lambdas, sizes=SIZES):
    return train(
        net,
        method,
        data,
        held,
        likelihood=fsmap.Gaussian(0.5),
        by=fsmap.metrics.rmse,
        px=PX,
        weight_decays=decays,
        reg_strengths=lambdas,
        plan=sizes,
        seed=3,
    )


def test_the_loss_is_error_plus_decay_plus_lambda_r(net, data):
    """Against the formula, factor by factor: nats per point, w/2 ‖θ‖², λR."""
    f, params = fsmap.functional(net)
    batch, N = data[0], 40
    found = objective(
        "l-map",
        fsmap.Gaussian(math.sqrt(0.5)),
        PX,
        num_data=N,
        num_points=8,
        weight_decay=0.3,
        reg_strength=0.07,
    )
    draws = found.draw(f, params, fsmap.linalg.probes.Stream(0, 0))
    loss, _ = found.loss(f, params, batch, draws)
    moved = found.loss(f, {n: 0 * p for n, p in params.items()}, batch, draws)[0]  # f = 0, θ = 0
    error = (batch.y - f(params, batch.x)).square().mean()
    norm = sum(p.square().sum() for p in params.values())
    R = fsmap.trace(f, params, draws.x, method="jvp", probes=draws.psi).value
    zeros = {n: 0 * p for n, p in params.items()}
    R0 = fsmap.trace(f, zeros, draws.x, method="jvp", probes=draws.psi).value
    expected = error + 0.5 * 0.3 * norm + 0.07 * R - (batch.y.square().mean() + 0.07 * R0)
    assert_close(loss - moved, expected)


def test_fs_map_takes_the_jitter_that_lambda_stands_for():
    found = objective(
        "fs-map",
        fsmap.Gaussian(1.0),
        PX,
        num_data=40,
        num_points=4,
        weight_decay=0.0,
        reg_strength=0.1,
    )
    assert_close(float(found.geometry.jitter), 1 / (2 * 0.1 * 40))
    assert isinstance(found.prior, fsmap.Flat)


def test_one_configuration_is_fit(net, data):
    found = run(net, "l-map", *data, [1e-3], [1e-2])
    f, params = fsmap.functional(net)
    one = objective(
        "l-map",
        fsmap.Gaussian(0.5),
        PX,
        num_data=40,
        num_points=8,
        weight_decay=1e-3,
        reg_strength=1e-2,
    )
    state, _ = fsmap.fit(
        one,
        f,
        params,
        data[0],
        steps=30,
        optimizer=adam(0.02),
        schedule=cosine(),
        batch_size=20,
        seed=3,
        progress=False,
        validate_every=1,
        validation=lambda p: fsmap.metrics.rmse(f(p, data[1].x), data[1].y),
    )
    assert found.step == state.best.step
    assert_close(found.params, state.best.params)
    assert_close(found.value, state.best.value)
    assert len(found.curve) == 30
    assert min(value for _, value in found.curve) == found.value


def test_several_configurations_are_the_lone_runs_and_the_best_wins(net, data):
    decays, lambdas = [1e-3, 1.0], [1e-4, 1e-1]
    found = run(net, "l-map", *data, decays, lambdas)
    lone = [run(net, "l-map", *data, [w], [s]) for w in decays for s in lambdas]
    assert [line["value"] for line in found.search] == pytest.approx([r.value for r in lone])
    best = min(lone, key=lambda r: r.value)
    assert found.config == best.config
    assert found.step == best.step
    assert_close(found.params, best.params)
    assert found.search[0].keys() == {"weight_decay", "reg_strength", "value", "step"}


def test_ps_map_does_not_look_at_lambda(net, data):
    found = run(net, "ps-map", *data, [1e-3, 1e-2], [1.0, 2.0])
    assert len(found.search) == 2
    assert found.config.reg_strength == 0


def test_without_held_out_points_the_last_parameters_are_kept(net, data):
    found = run(net, "ps-map", data[0], None, [1e-3], [])
    assert (found.step, found.curve, found.config) == (30, [], Config(1e-3, 0.0))
    assert math.isnan(found.value)


def test_a_diverged_configuration_does_not_win(net, data):
    with pytest.warns(fsmap.errors.DivergedWarning, match="1 of 2 members diverged"):
        found = run(net, "ps-map", *data, [1e-3, 1e300], [])
    assert found.config.weight_decay == 1e-3


def test_refusals(net, data):
    with pytest.raises(InputError, match="method must be one of l-map, ps-map, fs-map, got 'sgd'"):
        run(net, "sgd", *data, [1e-3], [1e-3])
    with pytest.raises(
        InputError, match="2 configurations are to be compared and no rows are held"
    ):
        run(net, "ps-map", data[0], None, [1e-3, 1e-2], [])


def test_automatic_strengths_are_shares_of_the_loss(net):
    found = strengths(net, PX, 1.0, seed=0)
    R = fsmap.suggest_strength(net, PX, loss=1.0, seed=0).R
    assert len(found) == 4
    assert [s * R for s in found] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1], rel=0.5)
    assert all(f"{s:.0e}" == f"{s:.1e}".replace(".0", "") for s in found)  # one digit


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (Config(1e-3, 1e-2), []),
        (
            Config(1e-3, 1e-1),
            ["λ = 0.1 is the largest of the 3 tried (0.001 to 0.1): a larger one may do better"],
        ),
        (
            Config(1e-5, 1e-3),
            [
                "weight decay = 1e-05 is the smallest of the 3 tried (1e-05 to 0.01): hardly any "
                "of it helps here",
                "λ = 0.001 is the smallest of the 3 tried (0.001 to 0.1): hardly any of it helps "
                "here",
            ],
        ),
    ],
)
def test_strengths_at_an_end_of_what_was_tried(config, told):
    search = [
        {"weight_decay": w, "reg_strength": s, "value": 1.0, "step": 1}
        for w in (1e-5, 1e-3, 1e-2)
        for s in (1e-3, 1e-2, 1e-1)
    ]
    assert at_edges(Trained({}, config, 1.0, 1, search, [])) == told
    lone = Trained({}, config, 1.0, 1, search[:1], [])
    assert at_edges(lone) == []  # what was given was not searched
