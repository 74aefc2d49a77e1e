"""LMAP and LaplacianPenalty against the slow definition, in every BatchNorm mode and state."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsmap
from fsmap.errors import (
    FallbackWarning,
    IgnoredProbesWarning,
    InputError,
    NonFiniteWarning,
    UnsupportedModuleError,
)
from fsmap.px import Stream
from fsmap.train.capture import _no_waiting

S, B = 5, 4
MODES = ("joint", "frozen", "batch")
PX = fsmap.px.Normal(shape=(2,))


def bn_net(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)
        )


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, 2, generator=g), torch.randint(0, 3, (B,), generator=g)


@pytest.mark.parametrize("estimator", ["fd", "fd_central", "jvp", "vjp", "exact"])
@pytest.mark.parametrize("mode", MODES)
def test_running_statistics(mode: str, estimator: str) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.passes = net.passes + 1  # a buffer that is set anew
        return net(x)

    module, (x, _) = bn_net(), batch()
    module.register_buffer("passes", torch.zeros(()))
    plain, options = copy.deepcopy(module), {"estimator": estimator, "forward": forward}
    lm = fsmap.LMAP(module, PX, num_points=S, batchnorm=mode, **options)
    x_eval = PX.sample(S, Stream(0, 0).points())
    out, _ = lm(x)
    expected = forward(plain, torch.cat([x, x_eval]) if mode == "joint" else x)[:B]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for name, buffer in plain.named_buffers():
        if mode == "joint":  # moments by arithmetic that has all derivatives
            torch.testing.assert_close(buffer, module.get_buffer(name), rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(buffer, module.get_buffer(name)), name


def test_eval_and_no_grad() -> None:
    module, (x, _) = bn_net(), batch()
    lm = fsmap.LMAP(module, PX, num_points=S)
    with torch.no_grad():
        out, value = copy.deepcopy(lm)(x)
    assert value is None
    assert lm.step == 0
    out, value = lm.eval()(x)
    assert value is None
    assert torch.equal(out, module(x))
    module.train()  # of the model, not of what is around it
    assert lm(x)[1] is not None
    penalty = fsmap.LaplacianPenalty(module, PX, num_points=S)
    with torch.no_grad():
        number = penalty()
    assert number.item() > 0
    assert not number.requires_grad
    assert penalty.state_dict() == {"step": 0}


def test_every_is_unbiased_over_time_and_free_in_between() -> None:
    module, (x, _) = bn_net(), batch()
    lm = fsmap.LMAP(module, PX, num_points=S, every=3, batchnorm="frozen")
    passes: list[int] = []
    module[0].register_forward_hook(lambda *_: passes.append(1))
    values = [lm(x)[1].item() for _ in range(6)]
    assert [v > 0 for v in values] == [True, False, False, True, False, False]
    assert len(passes) == 6 + 2
    one = fsmap.LMAP(bn_net(), PX, num_points=S, batchnorm="frozen")(x)[1].item()
    assert values[0] == pytest.approx(3 * one, rel=1e-12)


def test_attached_to_an_optimizer_psi_is_the_same_over_micro_batches() -> None:
    module, (x, _) = bn_net(), batch()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    penalty = fsmap.LaplacianPenalty(module, PX, num_points=S).attach(optimizer)
    reg = penalty.regularizer
    psi, points = [], []
    for _ in range(2):
        psi.append(reg.stream().psi(reg.params())["0.weight"])
        points.append(reg.draw().points)
        penalty()
    assert torch.equal(psi[0], psi[1])  # one ψ a step ...
    assert not torch.equal(points[0], points[1])  # ... and fresh points in each micro-batch
    optimizer.step()
    assert not torch.equal(psi[0], reg.stream().psi(reg.params())["0.weight"])
    with pytest.raises(InputError, match="optimizer"):
        penalty.attach(optimizer)
    with pytest.raises(InputError, match="least"):
        penalty.step = -1
    free = copy.deepcopy(penalty)  # belongs to another model: counts its own passes again
    free(), free()
    assert free.state_dict()["step"] == penalty.state_dict()["step"] + 2
    lm = fsmap.LMAP(module, PX, num_points=S).attach(optimizer)
    lm(x), lm(x)
    assert lm.step == 0
    optimizer.step()
    assert lm.step == 1


def test_detached_another_optimizer_or_a_trainer_may_count() -> None:
    module = bn_net()
    first, second = (torch.optim.SGD(module.parameters(), lr=0.0) for _ in range(2))
    penalty = fsmap.LaplacianPenalty(module, PX, num_points=S).attach(first)
    first.step()
    penalty.detach()
    penalty.attach(second)
    penalty()
    first.step()  # is not counted any more
    assert penalty.state_dict()["step"] == 1
    second.step()
    assert penalty.state_dict()["step"] == 2
    penalty.step = 7
    penalty(), penalty()
    assert penalty.state_dict()["step"] == 7
    lm = fsmap.LMAP(module, PX, num_points=S)
    lm.step = 3  # from now on the loop counts
    streams = []
    for step in (3, 3, 4):
        lm.step = penalty.step = step
        streams.append(lm.regularizer.stream()[1:])
        lm(batch()[0])
    assert streams == [(3, 0, 0), (3, 0, 1), (4, 0, 0)]  # step, rank, micro-batch
    masks = {Stream(0, *stream).noise() for stream in streams}
    assert len(masks) == 3  # dropout masks of their own
    assert penalty.step == 4


@pytest.mark.parametrize("way", [fsmap.LMAP, fsmap.LaplacianPenalty])
def test_state_dict_restores_the_stream(way: Any) -> None:
    (x, _), module = batch(), bn_net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    first, other = (way(module, PX, num_points=S).attach(optimizer) for _ in range(2))
    first.step = 2
    state = first.state_dict()
    for term in (first, other):
        arguments = (x,) if way is fsmap.LMAP else ()
        term(*arguments)  # a micro-batch, which the state is not in the middle of
        term.load_state_dict(state)
    assert first.regularizer.stream() == other.regularizer.stream() == Stream(0, 2)
    assert torch.equal(first.regularizer.draw().points, other.regularizer.draw().points)


@pytest.mark.parametrize("estimator", ["exact", "jvp"])
@pytest.mark.usefixtures("seeded")
def test_layers_that_are_replaced_later_are_seen(estimator: str) -> None:
    module, (x, _) = nn.Sequential(nn.Linear(2, 6), nn.Linear(6, 3)), batch()
    options = {"num_points": S, "batchnorm": "batch", "estimator": estimator, "outputs": 2}
    lm = fsmap.LMAP(module, PX, **options)
    lm(x)
    module[1] = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    other = fsmap.LMAP(copy.deepcopy(module), PX, **options)
    other.step = lm.step
    torch.testing.assert_close(lm(x), other(x))


def sequences(m: nn.Sequential, x: Tensor) -> Tensor:
    h = m[0](x)[:, None]
    return m[2](m[1](*[h] * (1 if isinstance(m[1], nn.LSTM) else 3))[0][:, 0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.MultiheadAttention])
@pytest.mark.filterwarnings("ignore::fsmap.errors.FallbackWarning")
@pytest.mark.usefixtures("seeded", "float32")
def test_the_first_pass_draws_as_every_other(kind: Any) -> None:
    """Two passes are made; a resumed run has the dropout masks of an uninterrupted one."""
    module = nn.Sequential(nn.Dropout(0.3), kind(2, 2, batch_first=True), nn.Linear(2, 3))
    lm = fsmap.LMAP(module, PX, num_points=S, forward=sequences)
    noise, outputs = torch.get_rng_state(), []
    for _ in range(2):
        torch.set_rng_state(noise)
        outputs.append((lm(torch.ones(B, 2))[0], torch.get_rng_state()))
    torch.testing.assert_close(outputs[1], outputs[0])


@pytest.mark.usefixtures("seeded", "float32")
def test_forward_mode_missing_falls_back_with_one_warning() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2, batch_first=True), nn.Linear(2, 3))
    options = {"num_points": 3, "forward": sequences}
    penalty = fsmap.LaplacianPenalty(module, PX, **options)
    with pytest.warns(FallbackWarning, match="fd_central"):
        value = penalty()
    expected = fsmap.LaplacianPenalty(module, PX, estimator="fd_central", **options)()
    assert value.item() == expected.item()
    assert penalty().item() > 0  # warnings are errors here: none came


@pytest.mark.parametrize("estimator", ["fd", "fd_central", "jvp", "vjp", "exact"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's
@pytest.mark.usefixtures("seeded")
def test_checkpointing_is_refused_by_name(reentrant: bool, estimator: str) -> None:
    """Recomputation finds the perturbed parameters gone: gradients would be silently wrong."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(3, 2))
    forward = lambda m, x: m[2](checkpoint(m[1], m[0](x), use_reentrant=reentrant))  # noqa: E731
    options = {"num_points": 3, "estimator": estimator, "forward": forward}
    penalty = fsmap.LaplacianPenalty(module, PX, **options)
    with pytest.raises(UnsupportedModuleError, match="activation checkpointing"):
        penalty()
    x = torch.zeros(4, 2, requires_grad=True)
    forward(module, x).sum().backward()  # the refusal leaves ordinary use alone
    assert module[1].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("mode", MODES)
def test_r_is_unbiased(mode: str) -> None:
    module, (x, _) = bn_net(), batch()
    common = {"num_points": S, "batchnorm": mode}

    def values(seeds: int, **options) -> Tensor:
        made = []
        for seed in range(seeds):
            lm = fsmap.LMAP(copy.deepcopy(module), fixed, seed=seed, **common, **options)
            made.append(lm(x)[1].item())
        return torch.tensor(made)

    points = torch.randn(S, 2, generator=torch.Generator().manual_seed(0))
    fixed = lambda n, g: points  # noqa: E731
    exact = fsmap.LMAP(copy.deepcopy(module), fixed, estimator="exact", **common)(x)[1].item()
    found = values(150)
    assert abs(found.mean() - exact) < 5 * found.std() / math.sqrt(len(found))
    for estimator in ("fd", "fd_central"):
        some = values(5, estimator=estimator, beta=1e-5)
        torch.testing.assert_close(some, found[:5], rtol=1e-3, atol=0)


@pytest.mark.usefixtures("seeded")
def test_the_mode_that_is_chosen_for_a_model() -> None:
    x, plain = torch.randn(B, 2), nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    for module, mode in ((plain, "frozen"), (bn_net(), "joint")):
        default, named = (
            fsmap.LMAP(copy.deepcopy(module), PX, num_points=S, **how)
            for how in ({}, {"batchnorm": mode})
        )
        assert default.batchnorm == mode
        torch.testing.assert_close(default(x), named(x), rtol=0, atol=0)


@pytest.mark.usefixtures("seeded")
def test_models_that_a_penalty_cannot_serve() -> None:
    module = bn_net()
    bare = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False))
    assert fsmap.LaplacianPenalty(bare, PX, num_points=S).batchnorm == "batch"
    module[0].weight.placements = ()
    with pytest.raises(UnsupportedModuleError, match="FSDP2"):
        fsmap.LaplacianPenalty(module, PX, num_points=S)()


@pytest.mark.parametrize("strength", [None, 0.5, torch.tensor(torch.inf)])
@pytest.mark.parametrize("way", [fsmap.LMAP, fsmap.LaplacianPenalty, fsmap.InPlacePenalty])
def test_a_value_that_is_not_finite_is_named_once(way: Any, strength: Any) -> None:
    module = bn_net()
    if not isinstance(strength, Tensor):
        with torch.no_grad():
            module[4].weight.fill_(1e200)
    term = way(module, PX, num_points=S)

    def call() -> None:
        if way is fsmap.InPlacePenalty:
            term.backward(1.0 if strength is None else strength)
        else:
            term(batch()[0], reg_strength=strength) if way is fsmap.LMAP else term(strength)

    with pytest.warns(NonFiniteWarning, match="step 0"):
        call()
    call()  # warnings are errors here: none came


class Deaf(nn.Module):
    """Computes with a copy of its weight: whatever parameters it is given, it ignores them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.used = [torch.ones(2, 3)]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.used[0] + 0 * self.weight.sum()


@pytest.mark.parametrize("way", [fsmap.LaplacianPenalty, fsmap.InPlacePenalty])
def test_a_model_that_ignores_its_parameters_is_noticed_once(way: Any) -> None:
    penalty = way(Deaf(), PX, num_points=3)
    call = penalty.backward if way is fsmap.InPlacePenalty else penalty
    with pytest.warns(IgnoredProbesWarning, match="exactly"):
        call()
    assert call().item() == 0  # warnings are errors here: none came


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_cuda_graph_reads_no_random_state(rate, seeded, monkeypatch):
    """torch refuses to read the state of a generator while it captures a graph."""
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(rate), nn.Linear(4, 1))
    lm, x = fsmap.LMAP(net, torch.randn(9, 2), num_points=4), torch.randn(5, 2)
    drawn = lm.draw(x)
    lm(x, drawn=drawn)
    with monkeypatch.context() as patch:
        for module in ("fsmap.functional", "fsmap.lmap.core"):
            patch.setattr(sys.modules[module], "capturing", lambda device: True)
        patch.setattr(torch, "get_rng_state", None)
        assert lm(x, drawn=drawn)[1] > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"outputs": 2}, {"outputs": 2, "batchnorm": "frozen"}]
    + [{"batchnorm": "frozen", "estimator": name} for name in ("jvp", "fd", "vjp")],
)
def test_a_step_does_not_wait_for_the_gpu(options: dict[str, Any], seeded: None) -> None:
    net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3)).cuda()
    x = torch.randn(9, 2, device="cuda")
    lm, penalty = fsmap.LMAP(net, x, num_points=4, **options), fsmap.LogTrace()

    def step() -> None:
        out, R = lm(x)
        (out.square().mean() + penalty(R)).backward()

    step()  # looks at values, once
    with _no_waiting():  # raises where it waits
        step()
