"""On a GPU: the captured step is the eager one, and a resumed run ends with the same weights."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsmap.linalg.probes import Stream
from fsmap.train.images import ImageRun, ImageSettings

pytestmark = pytest.mark.gpu

SMALL = ImageSettings(
    data="cifar10",
    generated=True,
    limit=128,
    valid=64,
    width=8,
    epochs=3,
    batch_size=32,
    num_points=16,
    px="cifar100+white-noise",
    reg_strength=1e-5,
)


@pytest.fixture(autouse=True)
def single() -> object:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def end(settings: ImageSettings, **options: object) -> dict[str, torch.Tensor]:
    run = ImageRun(settings, device="cuda", **options)
    run.train(progress=False)
    return run.snapshot()


@pytest.mark.parametrize(
    "change",
    [{}, {"estimator": "fd"}, {"batchnorm": "frozen", "every": 2}, {"method": "ps-map"}],
)
def test_the_captured_step_is_the_eager_one(change: dict[str, object]):
    """One step: later ones amplify rounding, as two eager runs do that differ in nothing."""
    settings = dataclasses.replace(SMALL, epochs=1, limit=32, **change)
    eager, graph = end(settings), end(dataclasses.replace(settings, graph=True))
    for name, t in eager.items():
        if t.is_floating_point():
            assert (graph[name] - t).norm() <= 1e-3 * t.norm() + 1e-7, name


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("batchnorm", ["joint", "frozen"])
def test_the_compiled_step_is_the_eager_one(batchnorm: str):
    """In float64: where float32 rounds an input of a ReLU to the other side, gradients jump."""
    torch.set_default_dtype(torch.float64)
    settings = dataclasses.replace(SMALL, epochs=1, limit=32, batchnorm=batchnorm)
    settings = dataclasses.replace(settings, channels_last=False)  # which cuDNN has no doubles for
    eager, graph = end(settings), end(dataclasses.replace(settings, graph=True, compile=True))
    assert eager["params/conv1.weight"].dtype == torch.float64
    for name, t in eager.items():
        if t.is_floating_point():
            assert (graph[name] - t).norm() <= 1e-9 * t.norm() + 1e-12, name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_psi_is_the_librarys_in_the_order_of_memory(precision: str):
    run = ImageRun(dataclasses.replace(SMALL, precision=precision), device="cuda")
    for step in (0, 1, 2, 7):
        run.feeder.prepare(step, "regularized")
        expected = Stream(SMALL.seed, step).psi(dict(run.module.named_parameters()))
        for name, psi in run.feeder.psi.now.items():
            order = psi.permute(0, 2, 3, 1) if psi.ndim == 4 else psi
            drawn = expected[name].flatten().to(psi.dtype)
            assert torch.equal(order.flatten(), drawn), (step, name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, precision: str):
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings = dataclasses.replace(SMALL, graph=True, deterministic=True, precision=precision)
    whole = end(settings)

    class Kill:
        def on_epoch(self, run: ImageRun) -> None: ...

        def on_step(self, run: ImageRun) -> None:
            if run.step == 7:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ImageRun(settings, device="cuda", folder=tmp_path, hooks=[Kill()]).train(
            progress=False, checkpoint_every=2
        )
    again = ImageRun(settings, device="cuda", folder=tmp_path, resume=True)
    assert again.step == 6
    again.train(progress=False)
    for name, t in again.snapshot().items():
        assert torch.equal(t, whole[name]), name


def test_fp16_skips_what_overflows():
    settings = dataclasses.replace(SMALL, estimator="fd", precision="bf16", graph=True)
    run = ImageRun(settings, device="cuda")
    run.feeder.scale.fill_(2.0**40)
    run.train(progress=False)
    assert run.history[0]["skipped"] > 0
    assert run.feeder.scale < 2.0**40
    assert all(bool(torch.isfinite(t).all()) for t in run.snapshot().values())


def test_compiled_kernels_are_kept_for_the_next_process(tmp_path: Path):
    """Compiling takes half a minute a kind of step; a second process takes what the first made."""
    code = (
        "import dataclasses, sys; from fsmap.train.images import ImageRun, ImageSettings; "
        "from torch._dynamo.utils import counters; "
        f"run = ImageRun({dataclasses.replace(SMALL, epochs=1, limit=32, compile=True)!r}, "
        "device='cuda'); run.train(progress=False); "
        "print(counters['inductor']['fxgraph_cache_hit'])"
    )
    where = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    hits = [
        int(subprocess.check_output([sys.executable, "-c", code], env=where, text=True))
        for _ in range(2)
    ]
    assert hits == [0, 1]
