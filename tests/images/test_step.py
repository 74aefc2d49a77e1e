"""One step: the gradient is the definition's, compiled too; plain steps are torch's."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap
from fsmap.images import ImageRun
from fsmap.images.build import layout_of
from image_cases import TINY, trained
from oracles import laplacian_slow

STEP = 6


def prepared(**changes: object) -> ImageRun:
    run = ImageRun(dataclasses.replace(TINY, clip=None, **changes))
    with torch.no_grad():  # statistics and weights that are not those of the start
        run.module.bn.running_mean.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
        run.module.bn.weight.uniform_(1, 2, generator=torch.Generator().manual_seed(1))
    return run


def gradient_slow(run: ImageRun, at: dict[str, Tensor] | None = None) -> tuple[Tensor, list]:
    """R and the gradient of cross-entropy + λR at the prepared step, by definition."""
    x, y, points = run.feeder.assemble()
    module = copy.deepcopy(run.module)
    f, params = fsmap.functional(module)
    params = {n: p.detach().clone().requires_grad_() for n, p in (at or params).items()}
    R = torch.zeros(())
    joint = run.settings.batchnorm == "joint" and run.stepper.lm is not None
    out = f(params, torch.cat([x, points]) if joint else x)[: len(x)]
    loss = F.cross_entropy(out, y)
    if run.stepper.lm is not None:
        run.stepper.lm.step = STEP
        psi = {n: p[0] for n, p in run.stepper.lm.regularizer.stream().psi(params).items()}
        R = laplacian_slow(f, params, torch.cat([x, points]) if joint else points, psi)
    total = loss + run.reg_strength * R
    return R, list(torch.autograd.grad(total, list(params.values())))


@pytest.mark.parametrize("estimator", ["jvp", "fd_central"])
@pytest.mark.parametrize("batchnorm", ["joint", "batch"])
def test_the_gradient_is_the_definition_s(batchnorm: str, estimator: str):
    run = prepared(batchnorm=batchnorm, estimator=estimator, beta=1e-5, channels_last=False)
    run.feeder.prepare(STEP)
    R, expected = gradient_slow(run)
    run.stepper(STEP, lr=0.0, reg_strength=run.reg_strength)
    tolerance = 1e-9 if estimator == "jvp" else 1e-5
    grads = [p.grad for p in run.module.parameters()]
    torch.testing.assert_close(grads, expected, rtol=tolerance, atol=tolerance / 100)
    assert float(run.stepper.totals[1]) == pytest.approx(R.item(), rel=1e-5)


def test_frozen_is_the_deployed_function():
    run = prepared(batchnorm="frozen", channels_last=False)
    run.stepper(STEP, lr=0.0, reg_strength=run.reg_strength)
    f, params = fsmap.functional(copy.deepcopy(run.module).eval())  # after this step's statistics
    psi = {n: p[0] for n, p in run.stepper.lm.regularizer.stream().psi(params).items()}
    slow = laplacian_slow(f, params, run.feeder.assemble().points, psi)
    assert float(run.stepper.totals[1]) == pytest.approx(slow.item(), rel=1e-5)


@pytest.mark.parametrize("method", ["ps-map", "l-map"])
def test_sam_looks_uphill(method: str):
    run = prepared(method=method, sam=0.1, channels_last=False)
    run.feeder.prepare(STEP)
    _, first = gradient_slow(run)
    scale = 0.1 / torch.cat([g.reshape(-1) for g in first]).norm()
    params = dict(run.module.named_parameters())
    there = {n: p + scale * g for (n, p), g in zip(params.items(), first, strict=True)}
    _, expected = gradient_slow(run, there)
    module = copy.deepcopy(run.module)
    run.stepper(STEP, lr=0.0, reg_strength=run.reg_strength)
    grads = [p.grad for p in params.values()]
    torch.testing.assert_close(grads, expected, rtol=1e-8, atol=1e-10)
    batch = run.feeder.assemble()
    module(batch.x if method == "ps-map" else torch.cat([batch.x, batch.points]))
    buffers = [[*net.buffers()] for net in (run.module, module)]
    torch.testing.assert_close(*buffers, rtol=1e-12, atol=1e-12)  # one update a step


@pytest.mark.parametrize("mode", ["frozen", "batch"])
def test_no_strength_is_plain_training(mode: str):
    plain = trained(dataclasses.replace(TINY, method="ps-map")).stepper.tensors()
    none = trained(dataclasses.replace(TINY, batchnorm=mode, reg_strength=0.0)).stepper.tensors()
    torch.testing.assert_close(none, plain, rtol=0, atol=0)


def test_a_plain_step_is_torchs():
    run = ImageRun(dataclasses.replace(TINY, method="ps-map", epochs=1, nesterov=True))
    module = copy.deepcopy(run.module)
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    sgd = torch.optim.SGD(module.parameters(), **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, run.steps)
    for step in range(run.steps):
        run.feeder.prepare(step)
        batch = run.feeder.assemble()
        sgd.zero_grad()
        F.cross_entropy(module(batch.x), batch.y).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        sgd.step()
        schedule.step()
    run.train(progress=False)
    ours, theirs = dict(run.module.state_dict()), dict(module.state_dict())
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize(
    "change", [{}, {"batchnorm": "frozen", "every": 2}, {"method": "ps-map", "sam": 0.05}]
)
def test_the_compiled_step_is_the_eager_one(change: dict, fresh_compiler: None):
    settings = dataclasses.replace(TINY, epochs=1, **change)
    eager = trained(settings).stepper.tensors()
    compiled = trained(dataclasses.replace(settings, compile=True)).stepper.tensors()
    torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=1e-10)


def test_bf16_is_near(float32: None):
    settings = dataclasses.replace(TINY, epochs=1)
    a = trained(settings).history[0]
    b = trained(dataclasses.replace(settings, precision="bf16")).history[0]
    assert b["laplacian"] == pytest.approx(a["laplacian"], rel=0.05)
    assert b["loss"] == pytest.approx(a["loss"], rel=0.02)


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NARROW = """
from fsmap.images import ImageRun, ImageSettings

settings = ImageSettings(data="cifar10", px="train", generated=True, width={width}, limit=64,
                         valid=32, epochs=1, batch_size=16, num_points=8)
row = ImageRun(settings).train(progress=False)[0]
print(row["loss"], row["laplacian"])
"""


@pytest.mark.parametrize("width", [2, 8])
def test_a_narrow_network_trains_without_avx512(width: int):
    """The processor of many a laptop; without the exception torch crashes here."""
    run = [sys.executable, "-c", NARROW.format(width=width)]
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    loss, laplacian = map(float, done.stdout.split())
    assert 0 < loss < 10
    assert laplacian > 0


@pytest.mark.parametrize(
    ("layer", "safe"),
    [
        (nn.Conv2d(4, 8, 1, stride=2), False),
        (nn.Conv2d(32, 64, 1, stride=2, groups=4), False),
        (nn.Conv2d(4, 8, 1, stride=(1, 2)), False),
        (nn.Conv2d(16, 32, 1, stride=2), True),
        (nn.Conv2d(4, 8, 1), True),
        (nn.Conv2d(4, 8, 3, stride=2), True),
        (nn.Linear(4, 8), True),
    ],
)
def test_only_strided_points_of_few_channels_are_unsafe(layer: nn.Module, safe: bool):
    module = nn.Sequential(nn.Identity(), nn.Sequential(layer))
    assert (layout_of(module, True, CPU) == torch.channels_last) is safe
    assert layout_of(module, True, CUDA) == torch.channels_last
    assert layout_of(module, False, CPU) == torch.contiguous_format
