"""Residual networks, and models by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_image
from torch import nn

from fsmap.data.catalogue import locate
from fsmap.errors import MissingDataError
from fsmap.images.build import make_model
from fsmap.models import resnet
from fsmap.models.resnet import ResNet, resnet18, resnet50_imagenet


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def resnet50(classes: int, width: int = 64) -> ResNet:
    return ResNet(classes, width=width, stages=resnet.STAGES_50, large=True)


def test_it_is_the_papers_network():
    net = resnet18(generator=generator())
    assert sum(p.numel() for p in net.parameters()) == 11_173_962
    grey = resnet18(channels=1, generator=generator())
    assert sum(p.numel() for p in grey.parameters()) == 11_173_962 - 2 * 64 * 9
    sizes = [tuple(m.weight.shape) for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert (len(sizes), sizes[0]) == (20, (64, 3, 3, 3))
    assert sizes[-1] == (512, 512, 3, 3)


def test_the_generator_decides_and_torchs_own_is_left_alone():
    one, two, other = (resnet18(width=2, generator=generator(s)) for s in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.conv1.weight, other.conv1.weight)
    spread = resnet18(width=16, generator=generator()).blocks[2].conv1.weight.std().item()
    assert spread == pytest.approx((2 / (32 * 9)) ** 0.5, rel=0.05)


def test_resnet50_puts_the_stride_first(seeded: None):
    net = resnet50(5, width=2)
    block = net.blocks[3]
    assert block.conv1.stride == block.shortcut[0].stride == (2, 2)
    assert block.conv2.stride == (1, 1)
    assert net.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 5)
    assert sum(p.numel() for p in resnet50(1000).parameters()) == 25_557_032  # as torchvision's


def keras_files(tmp_path: Path, net: ResNet) -> dict[str, Path]:
    """What the package would hold for a network of ours: biases before every BatchNorm are one."""
    state = net.state_dict()
    arrays: list[tuple[str, np.ndarray]] = []

    def layer(conv: str, norm: str, ours: str, our_norm: str) -> None:
        kernel = state[f"{ours}.weight"]
        kernel = kernel.flip(1) if conv == "conv1" else kernel
        arrays.append((f"{conv}/kernel", kernel.permute(2, 3, 1, 0).numpy()))
        arrays.append((f"{conv}/bias", np.ones(len(kernel))))
        arrays.append((f"{norm}/gamma", state[f"{our_norm}.weight"].numpy()))
        arrays.append((f"{norm}/beta", state[f"{our_norm}.bias"].numpy()))
        arrays.append((f"{norm}/moving_mean", state[f"{our_norm}.running_mean"].numpy() + 1))
        arrays.append((f"{norm}/moving_variance", state[f"{our_norm}.running_var"].numpy()))

    layer("conv1", "bn_conv1", "conv1", "bn1")
    place = 0
    for stage, count in enumerate(resnet.STAGES_50, start=2):
        for letter in "abcdef"[:count]:
            for number, branch in enumerate(("2a", "2b", "2c"), start=1):
                name = f"{stage}{letter}_branch{branch}"
                ours = f"blocks.{place}"
                layer(f"res{name}", f"bn{name}", f"{ours}.conv{number}", f"{ours}.bn{number}")
            if letter == "a":
                name = f"{stage}a_branch1"
                ours = f"blocks.{place}.shortcut"
                layer(f"res{name}", f"bn{name}", f"{ours}.0", f"{ours}.1")
            place += 1
    arrays.append(("fc1000/kernel", state["fc.weight"].T.numpy()))
    arrays.append(("fc1000/bias", state["fc.bias"].numpy()))
    weights = [{"name": n, "shape": list(a.shape), "dtype": "float32"} for n, a in arrays]
    raw = b"".join(np.ascontiguousarray(a, dtype="<f4").tobytes() for _, a in arrays)
    manifest = {"weightsManifest": [{"paths": ["a.bin", "b.bin"], "weights": weights}]}
    (tmp_path / "model.json").write_text(json.dumps(manifest))
    (tmp_path / "a.bin").write_bytes(raw[:1001])
    (tmp_path / "b.bin").write_bytes(raw[1001:])
    return {name: tmp_path / name for name in ("model.json", "a.bin", "b.bin")}


def test_keras_weights_come_back(tmp_path: Path, seeded: None):
    net = resnet50(1000, width=2).float().eval()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.uniform_(-1, 1)
            m.running_var.uniform_(1, 2)
    files = keras_files(tmp_path, net)
    read = resnet50_imagenet(files=files, size=64, width=2).float().eval()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float32)
    torch.testing.assert_close(read(x), net(x), rtol=1e-4, atol=1e-5)
    fresh = resnet50_imagenet(10, files=files, size=64, width=2)
    assert fresh(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(RuntimeError, match="size mismatch"):
        resnet50_imagenet(files=files, width=4)
    files["b.bin"].write_bytes(b"")
    with pytest.raises(MissingDataError, match="shards"):
        resnet.read_keras(files)


def test_small_images_are_normalized_anew(seeded: None):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    net = resnet.Upscaled(nn.Identity(), mean, std, 32)
    rgb = torch.rand(1, 3, 32, 32)
    given = (rgb - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    wanted = 255 * rgb - torch.tensor([123.68, 116.779, 103.939])[:, None, None]
    torch.testing.assert_close(net(given), wanted, rtol=1e-6, atol=1e-4)


def test_imagenet_weights_recognize_photographs(seeded: None):
    try:
        files = locate("resnet50-imagenet")
    except MissingDataError:
        pytest.skip("no ImageNet weights here: fsmap data get resnet50-imagenet")
    net = resnet50_imagenet(files=files).float().eval()
    expected = {"china.jpg": {698, 663}, "flower.jpg": {985, 883}}  # palace, monastery; daisy, vase
    for name, classes in expected.items():
        photo = torch.from_numpy(load_sample_image(name).copy())  # [H, W, 3]
        side = min(photo.shape[:2])
        top, left = ((s - side) // 2 for s in photo.shape[:2])
        x = photo[top : top + side, left : left + side].permute(2, 0, 1)[None].float() / 255
        mean, std = (
            torch.tensor(v, dtype=x.dtype)[:, None, None] for v in (resnet.MEAN, resnet.STD)
        )
        x = nn.functional.interpolate(
            (x - mean) / std, size=(224, 224), mode="bilinear", antialias=True
        )
        with torch.no_grad():
            best = set(net(x)[0].topk(3).indices.tolist())
        assert best & classes, (name, best)


def test_models_by_name():
    net = make_model("resnet18", {"classes": 4, "channels": 1, "width": 2, "other": 0}, seed=0)
    assert net.fc.out_features == 4
    again = make_model("resnet18", {"classes": 4, "channels": 1, "width": 2}, seed=0)
    assert torch.equal(net.conv1.weight, again.conv1.weight)
    linear = make_model("torch.nn:Linear?in_features=3&out_features=2&bias=False", {}, seed=0)
    assert linear.bias is None


def test_a_module_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_own_net.py").write_text(
        "from torch import nn\n"
        "def make(num_classes, act='relu'):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(4, num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert make_model("my_own_net:make?act=gelu", {"classes": 6}, seed=0)[1].out_features == 6
