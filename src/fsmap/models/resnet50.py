"""ResNet-50 "v1" with the ImageNet weights of Keras 2.2, and the paper's way to use it (Table 3).

In this version the stride stands in the first 1×1 convolution of a block, not in the 3×3 one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsmap.errors import InputError, MissingDataError

STAGES = (3, 4, 6, 3)
EPS = 1e-3  # of its BatchNorm
MEAN = (123.68 / 255, 116.779 / 255, 103.939 / 255)  # of RGB in 0..1
STD = (1 / 255,) * 3
SIZE = 224


class Bottleneck(nn.Module):
    """1×1 (with the stride), 3×3 and 1×1 convolutions, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, *, project: bool) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, stride, bias=False)
        self.bn1 = nn.BatchNorm2d(width, EPS)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width, EPS)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs, EPS)
        self.shortcut: nn.Module = nn.Identity()
        if project:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs, EPS)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Features to features."""
        out = torch.relu(self.bn1(self.conv1(x)))
        out = torch.relu(self.bn2(self.conv2(out)))
        return torch.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


class ResNet50(nn.Module):
    """The network; takes RGB images normalized by :data:`MEAN` and :data:`STD`.

    Args:
        classes: K; another number than 1000 gets a fresh last layer.
        width: Channels of the first stage; 64 is ResNet-50.
    """

    def __init__(self, classes: int = 1000, *, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width, EPS)
        blocks, inputs = [], width
        for stage, count in enumerate(STAGES):
            inner = width * 2**stage
            for place in range(count):
                stride = 2 if stage > 0 and place == 0 else 1
                blocks.append(Bottleneck(inputs, inner, stride, project=place == 0))
                inputs = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, classes)

    def features(self, x: Tensor) -> Tensor:
        """What the last layer reads: ``[B, 2048]``."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.blocks(F.max_pool2d(x, 3, 2, 1))
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[B, 3, H, W]`` to logits ``[B, classes]``."""
        return self.fc(self.features(x))  # type: ignore[no-any-return]


class Upscaled(nn.Module):
    """A network for large images, for small ones: resized, and normalized as it expects.

    Args:
        module: The network.
        mean: What the small images were normalized with.
        std: Likewise.
        size: Side of the large images.
    """

    def __init__(
        self, module: nn.Module, mean: Sequence[float], std: Sequence[float], size: int = SIZE
    ) -> None:
        super().__init__()
        self.module, self.size = module, size
        factor = torch.tensor([s / t for s, t in zip(std, STD, strict=True)])
        shift = torch.tensor([(m - n) / t for m, n, t in zip(mean, MEAN, STD, strict=True)])
        self.register_buffer("factor", factor[:, None, None])
        self.register_buffer("shift", shift[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        """Small images to logits."""
        x = x * self.factor.to(x) + self.shift.to(x)  # type: ignore[operator]
        x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=False)
        return self.module(x)  # type: ignore[no-any-return]


def resnet50_imagenet(
    classes: int = 1000,
    *,
    files: Mapping[str, Path] | None = None,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    size: int = SIZE,
    width: int = 64,
) -> nn.Module:
    """ResNet-50 with ImageNet weights, for images of any size."""
    net = ResNet50(classes, width=width)
    if files is not None:
        state = read_keras(files)
        if classes != 1000:
            state = {n: t for n, t in state.items() if not n.startswith("fc.")}
        missing, unexpected = net.load_state_dict(state, strict=False)
        wrong = [n for n in missing if not n.startswith("fc.") and "num_batches" not in n]
        if wrong or unexpected:
            message = f"the weights do not fit: {wrong[:3]} missing, {unexpected[:3]} unknown"
            raise InputError(message)
    return Upscaled(net, mean, std, size)


def read_keras(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """Our state dict from the shards of a Keras model that was converted for TensorFlow.js."""
    manifest = json.loads(files["model.json"].read_text())["weightsManifest"][0]
    raw = b"".join(files[name].read_bytes() for name in manifest["paths"])
    sizes = [math.prod(entry["shape"]) for entry in manifest["weights"]]
    if len(raw) != 4 * sum(sizes):
        message = (
            f"the shards hold {len(raw)} bytes, model.json lists {4 * sum(sizes)}: one is truncated"
        )
        raise MissingDataError(message)
    numbers = torch.from_numpy(np.frombuffer(raw, dtype="<f4").copy())
    keras = {
        entry["name"]: part.reshape(entry["shape"])
        for entry, part in zip(manifest["weights"], numbers.split(sizes), strict=True)
    }
    found = {"fc.weight": keras["fc1000/kernel"].T, "fc.bias": keras["fc1000/bias"]}
    layers = [("", "conv1", "bn1")]
    for stage, count in enumerate(STAGES):
        for place in range(count):
            theirs = f"{stage + 2}{'abcdef'[place]}_branch"
            ours = f"blocks.{sum(STAGES[:stage]) + place}"
            for number, letter in enumerate("abc", start=1):
                name = f"{theirs}2{letter}"
                layers.append((name, f"{ours}.conv{number}", f"{ours}.bn{number}"))
            if place == 0:
                name = f"{theirs}1"
                layers.append((name, f"{ours}.shortcut.0", f"{ours}.shortcut.1"))
    for name, our_conv, our_norm in layers:
        conv, norm = (f"res{name}", f"bn{name}") if name else ("conv1", "bn_conv1")
        kernel = keras[f"{conv}/kernel"].permute(3, 2, 0, 1)  # [out, in, height, width]
        found[f"{our_conv}.weight"] = kernel.flip(1) if conv == "conv1" else kernel  # BGR to RGB
        found[f"{our_norm}.weight"] = keras[f"{norm}/gamma"]
        found[f"{our_norm}.bias"] = keras[f"{norm}/beta"]
        # A bias before a BatchNorm only moves its mean.
        found[f"{our_norm}.running_mean"] = keras[f"{norm}/moving_mean"] - keras[f"{conv}/bias"]
        found[f"{our_norm}.running_var"] = keras[f"{norm}/moving_variance"]
    return {name: t.contiguous() for name, t in found.items()}
