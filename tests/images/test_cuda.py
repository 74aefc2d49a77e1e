"""On a GPU: the captured step is the eager one, and a resumed run ends with the same weights."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import fsmap
from fsmap.images import ImageRun, ImageSettings
from image_cases import KillAt

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("seeded", "float32", "fresh_compiler")]

SIZE = {"limit": 128, "valid": 64, "width": 8, "epochs": 3, "batch_size": 32, "num_points": 16}
DATA = {"data": "cifar10", "generated": True, "px": "cifar100+white-noise"}
SMALL = ImageSettings(**DATA, **SIZE, reg_strength=1e-5)


def copied(run: ImageRun) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in run.stepper.tensors().items()}


def end(settings: ImageSettings, **options: object) -> dict[str, torch.Tensor]:
    run = ImageRun(settings, device="cuda", **options)
    run.train(progress=False)
    return copied(run)


def compare(settings: ImageSettings, rtol: float, atol: float, **how: object) -> torch.dtype:
    eager, other = end(settings), end(dataclasses.replace(settings, **how))
    for name, t in eager.items():
        if t.is_floating_point():
            assert (other[name] - t).norm() <= rtol * t.norm() + atol, name
    return eager["params/conv1.weight"].dtype


@pytest.mark.parametrize(
    "change", [{}, {"estimator": "fd"}, {"batchnorm": "frozen", "every": 2}, {"method": "ps-map"}]
)
def test_the_captured_step_is_the_eager_one(change: dict[str, object]):
    """One step: later ones amplify rounding, as two eager runs do that differ in nothing."""
    settings = dataclasses.replace(SMALL, epochs=1, limit=32, **change)
    compare(settings, 1e-3, 1e-7, graph=True)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("batchnorm", ["joint", "frozen"])
def test_the_compiled_step_is_the_eager_one(batchnorm: str):
    """In float64: where float32 rounds an input of a ReLU to the other side, gradients jump."""
    torch.set_default_dtype(torch.float64)
    settings = dataclasses.replace(SMALL, epochs=1, limit=32, batchnorm=batchnorm)
    settings = dataclasses.replace(settings, channels_last=False)  # which cuDNN has no doubles for
    assert compare(settings, 1e-9, 1e-12, graph=True, compile=True) == torch.float64


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, precision: str):
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings = dataclasses.replace(SMALL, graph=True, deterministic=True, precision=precision)
    whole = end(settings)
    cut = ImageRun(settings, device="cuda", folder=tmp_path, hooks=[KillAt(7)])
    with pytest.raises(KeyboardInterrupt):
        cut.train(progress=False, checkpoint_every=2)
    again = ImageRun(settings, device="cuda", folder=tmp_path, resume=True)
    assert again.step == 6
    again.train(progress=False)
    torch.testing.assert_close(copied(again), whole, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("kind", ["mha", "gpt2"])
def test_attention_in_bf16_compiled_and_eager(kind: str, mode: str | None):
    """Forward and backward; R and gradients within rounding of float32."""
    torch.manual_seed(0)
    x: torch.Tensor
    if kind == "gpt2":
        hf = pytest.importorskip("transformers")
        size = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        config = hf.GPT2Config(**size, **off, bos_token_id=0, eos_token_id=0)
        model, x = hf.GPT2LMHeadModel(config), torch.randint(0, 64, (8, 16))
    else:
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.Linear(4, 32), layer, nn.Flatten(), nn.Linear(32 * 16, 3))
        x = torch.randn(8, 16, 4)
    model, x = model.cuda().train(), x.cuda()
    found = []
    for half, compiled in ((False, False), (True, False), (True, True)):
        lm = fsmap.LMAP(model, x, num_points=8, batchnorm="frozen")
        if compiled:
            lm.compile(mode=mode)
        for _ in range(2 if compiled else 1):
            lm.step = 0
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                out, R = lm(x)
            out = getattr(out, "logits", out)
            (out.float().square().mean() + R).backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append((R.item(), torch.cat(grads)))
    (value, grad), *others = found
    for other, rough in others:
        assert other == pytest.approx(value, rel=0.05)
        assert (rough - grad).norm() < 0.1 * grad.norm()
