"""The gradient of a step is LMAP's, and the definition's; traced, the same bits."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from fsmap.train.images.captured import TracedStep
from fsmap.train.images.gradient import ImageModel
from fsmap.train.images.psi import SIGNS
from torch import Tensor

import fsmap
from fsmap.linalg.probes import Stream
from fsmap.train.images import ImageRun, traced
from image_cases import TINY, trained
from oracles import laplacian_slow

STEP = 6
MODES = ("joint", "frozen", "batch")


def prepared(**changes: object) -> tuple[ImageRun, str]:
    run = ImageRun(dataclasses.replace(TINY, **changes))
    with torch.no_grad():  # statistics and weights that are not those of the start
        run.module.bn.running_mean.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
        run.module.bn.weight.uniform_(1, 2, generator=torch.Generator().manual_seed(1))
    kind = run._step.kind(STEP, run.reg_strength)
    run.feeder.prepare(STEP, kind)
    run.feeder.reg_strength.fill_(run.reg_strength)
    return run, kind


@pytest.mark.parametrize("batchnorm", MODES)
@pytest.mark.parametrize("estimator", ["jvp", "fd", "fd_central"])
def test_it_is_what_lmap_gives(batchnorm: str, estimator: str):
    run, kind = prepared(batchnorm=batchnorm, estimator=estimator, every=3)
    feed = run.feeder.feed(kind)
    found = run._step.differentiate(kind)
    module = copy.deepcopy(run.module)
    lm = fsmap.LMAP(
        module,
        lambda n, generator: feed.points,
        num_points=TINY.num_points,
        estimator=estimator,
        batchnorm=batchnorm,
        every=3,
        seed=TINY.seed,
    )
    lm.step = STEP
    out, R = lm(feed.x)
    loss = F.cross_entropy(out, feed.y)
    (loss + TINY.reg_strength * R).backward()
    for (name, p), g in zip(module.named_parameters(), found.grads, strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-9, atol=1e-11, msg=name)
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-12, atol=0.0, msg=name)
    expected = torch.stack([loss, R]).float()
    torch.testing.assert_close(found.measured[:2], expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("batchnorm", MODES)
def test_it_is_what_the_definition_gives(batchnorm: str):
    run, kind = prepared(batchnorm=batchnorm)
    feed = run.feeder.feed(kind)
    value = float(run._step.differentiate(kind).measured[1])
    module = copy.deepcopy(run.module)
    x = torch.cat([feed.x, feed.points]) if batchnorm == "joint" else feed.points
    if batchnorm == "frozen":
        module(feed.x)  # R is that of the function with the statistics of this step
        module.eval()
    f, params = fsmap.functional(module)
    slow = laplacian_slow(f, params, x, feed.psi)
    assert value == pytest.approx(slow.item(), rel=1e-6)


def test_vjp_estimates_the_same_trace():
    run, kind = prepared(estimator="vjp", batchnorm="frozen")
    values = []
    for step in range(200):
        run.feeder.psi.draw(step)
        values.append(float(run._step.differentiate(kind).measured[1]))
    exact, kind = prepared(estimator="exact", batchnorm="frozen")
    true = float(exact._step.differentiate(kind).measured[1])
    mean = sum(values) / 200
    spread = (sum((v - mean) ** 2 for v in values) / 199 / 200) ** 0.5
    assert abs(mean - true) < 5 * spread
    assert len(run.feeder.psi.now[SIGNS]) == TINY.num_points * 10


def test_steps_between_and_without_strength():
    run = ImageRun(dataclasses.replace(TINY, every=2))
    kinds = [run._step.kind(k, 1e-3) for k in range(3)]
    assert kinds == ["regularized", "joined", "regularized"]
    assert run._step.kind(0, 0.0) == "joined"
    frozen = ImageRun(dataclasses.replace(TINY, every=2, batchnorm="frozen"))
    assert [frozen._step.kind(k, 1e-3) for k in range(2)] == ["regularized", "plain"]


def test_no_strength_is_plain_training():
    plain = trained(dataclasses.replace(TINY, method="ps-map"))
    for mode in ("frozen", "batch"):
        none = trained(dataclasses.replace(TINY, batchnorm=mode, reg_strength=0.0))
        for name, t in plain.snapshot().items():
            assert torch.equal(t, none.snapshot()[name]), name


def test_a_plain_step_is_torchs():
    settings = dataclasses.replace(TINY, method="ps-map", epochs=1, nesterov=True)
    run = ImageRun(settings)
    module = copy.deepcopy(run.module)
    sgd = torch.optim.SGD(
        module.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, run.steps)
    for step in range(run.steps):
        run.feeder.prepare(step, "plain")
        feed = run.feeder.feed("plain")
        sgd.zero_grad()
        F.cross_entropy(module(feed.x), feed.y).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        sgd.step()
        schedule.step()
    run.train(progress=False)
    for (name, p), q in zip(module.named_parameters(), run.module.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-12, msg=name)
    for (name, p), q in zip(module.named_buffers(), run.module.buffers(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-12, atol=0.0, msg=name)


def test_sam_looks_uphill():
    run, _ = prepared(method="ps-map", sam=0.1)
    feed = run.feeder.feed("plain")
    params = {n: p.detach().requires_grad_() for n, p in run.module.named_parameters()}

    def gradient(at: dict[str, Tensor]) -> list[Tensor]:
        f = ImageModel(run.module, dict(run.module.named_buffers()), None)
        return list(torch.autograd.grad(F.cross_entropy(f(at, feed.x), feed.y), at.values()))

    first = gradient(params)
    norm = torch.cat([g.reshape(-1) for g in first]).norm()
    there = {
        n: (p + 0.1 * g / norm).detach().requires_grad_()
        for (n, p), g in zip(params.items(), first, strict=True)
    }
    for g, expected in zip(run._step.differentiate("plain").grads, gradient(there), strict=True):
        torch.testing.assert_close(g, expected, rtol=1e-9, atol=1e-12)


def test_psi_is_the_librarys():
    run, _ = prepared()
    expected = Stream(TINY.seed, STEP).psi(dict(run.module.named_parameters()))
    for name, psi in run.feeder.psi.now.items():
        assert torch.equal(psi, expected[name][0]), name


class Signs(torch.nn.Module):
    """With a parameter of the name under which the cotangent of ``vjp`` travels."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = torch.nn.Parameter(torch.ones(10))
        self.weight = torch.nn.Parameter(torch.full((10, 28 * 28), 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.signs * F.linear(x.flatten(1), self.weight)


def test_a_parameter_may_have_any_name():
    run = ImageRun(TINY, module=Signs())
    run.feeder.prepare(STEP, "regularized")
    expected = Stream(TINY.seed, STEP).psi(dict(run.module.named_parameters()))
    for name, psi in run.feeder.psi.now.items():
        assert torch.equal(psi, expected[name][0]), name


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"data": "cifar10", "px": "cifar100+white-noise"},
        {"estimator": "fd"},
        {"batchnorm": "frozen", "every": 2},
        {"batchnorm": "batch"},
        {"estimator": "vjp"},
        {"method": "ps-map", "sam": 0.05, "label_smoothing": 0.1},
    ],
)
def test_the_traced_step_is_the_eager_one(change: dict[str, object]):
    settings = dataclasses.replace(TINY, epochs=1, **change)
    eager, quick = ImageRun(settings), ImageRun(settings)
    quick._step.__class__ = TracedStep
    for run in (eager, quick):
        run.train(progress=False)
    for name, t in eager.snapshot().items():
        assert torch.equal(t, quick.snapshot()[name]), name


def test_bf16_is_near():
    settings = dataclasses.replace(TINY, epochs=1)
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(torch.float32)
        try:
            full = trained(settings)
            half = trained(dataclasses.replace(settings, precision="bf16"))
        finally:
            torch.set_default_dtype(torch.float64)
    a, b = full.history[0], half.history[0]
    assert b["laplacian"] == pytest.approx(a["laplacian"], rel=0.05)
    assert b["loss"] == pytest.approx(a["loss"], rel=0.02)


class Gain(torch.nn.Module):
    """Two of these print alike and compute something else."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain, self.weight = gain, torch.nn.Parameter(torch.full((10, 28 * 28), 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * F.linear(x.flatten(1), self.weight)


def test_a_trace_is_of_one_module(monkeypatch):
    """Not of all that print alike; models made by name from equal settings do share one."""
    monkeypatch.setattr(traced, "_kernels", lambda graph, _: graph)  # no compiler is needed
    settings = dataclasses.replace(TINY, method="ps-map", epochs=1, compile=True)
    losses = []
    for gain in (1.0, 5.0):
        run = ImageRun(settings, module=Gain(gain))
        run.train(progress=False)
        eager = ImageRun(dataclasses.replace(settings, compile=False), module=Gain(gain))
        eager.train(progress=False)
        assert run.history[0]["loss"] == pytest.approx(eager.history[0]["loss"])
        losses.append(run.history[0]["loss"])
    assert abs(losses[1] / losses[0] - 1) > 0.1
    known = len(traced._known)
    for seed in (0, 1):
        ImageRun(dataclasses.replace(settings, seed=seed)).train(progress=False)
    assert len(traced._known) == known + 1
