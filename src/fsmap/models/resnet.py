"""Residual networks: ResNet-18 for small images, and ResNet-50 with ImageNet weights.

The weights are those of Keras 2.2 ("v1"): the stride stands in the first 1×1 convolution of a
block, not in the 3×3 one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsmap.errors import MissingDataError

MEAN = (123.68 / 255, 116.779 / 255, 103.939 / 255)
"""Normalization of images (RGB in 0..1) that ResNet-50 expects, with :data:`STD`."""
STD = (1 / 255,) * 3
SIZE = 224
STAGES_50 = (3, 4, 6, 3)
EPS = 1e-3  # of ResNet-50's BatchNorm


class Block(nn.Module):
    """Convolutions ``conv1``, …, the first with the stride, their BatchNorms, and a shortcut.

    Two of 3×3, or for ``large`` images 1×1, 3×3 and 1×1 to 4 · width channels.
    """

    def __init__(self, inputs: int, width: int, stride: int, *, large: bool) -> None:
        super().__init__()
        kernels, eps = ((1, 3, 1), EPS) if large else ((3, 3), 1e-5)
        outputs = 4 * width if large else width
        channels = [inputs, *[width] * (len(kernels) - 1), outputs]
        self.depth = len(kernels)
        for i, (before, after) in enumerate(pairwise(channels)):
            step, padding = stride if i == 0 else 1, kernels[i] // 2
            conv = nn.Conv2d(before, after, kernels[i], step, padding, bias=False)
            self.add_module(f"conv{i + 1}", conv)
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(after, eps))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs, eps))

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[B, inputs, H, W]`` to ``[B, outputs, H/stride, W/stride]``."""
        out = x
        for i in range(1, self.depth + 1):
            out = out if i == 1 else torch.relu(out)
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out))
        return torch.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network of four stages.

    Args:
        classes: K.
        channels: Of the images: 3, or 1 for MNIST-like sets.
        width: Channels of the first stage; those of the others are twice that of the one before.
        stages: Blocks in each stage.
        large: False: for 32×32 or 28×28 images, 3×3 stem, no max-pool, blocks of two convolutions.
            True: for 224×224 images, 7×7 stem, max-pool, bottleneck blocks.
        generator: Source of the initial weights; None is torch's own.

    Example:
        >>> import torch
        >>> net = ResNet(10, channels=1, width=4, generator=torch.Generator().manual_seed(0))
        >>> net(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        *,
        channels: int = 3,
        width: int = 64,
        stages: Sequence[int] = (2, 2, 2, 2),
        large: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.large = large
        # layers draw initial values from torch's generator when they are made: put it back
        with torch.random.fork_rng(devices=[], enabled=generator is not None):
            stem = (7, 2, 3) if large else (3, 1, 1)
            self.conv1 = nn.Conv2d(channels, width, *stem, bias=False)
            self.bn1 = nn.BatchNorm2d(width, EPS if large else 1e-5)
            blocks: list[nn.Module] = []
            inputs = width
            for stage, count in enumerate(stages):
                inner = width * 2**stage
                for place in range(count):
                    stride = 2 if stage > 0 and place == 0 else 1
                    blocks.append(Block(inputs, inner, stride, large=large))
                    inputs = 4 * inner if large else inner
            self.blocks = nn.Sequential(*blocks)
            self.fc = nn.Linear(inputs, classes)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weights anew: He's normal for convolutions (fan-out), uniform for the last."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.out_channels * math.prod(module.kernel_size)
                module.weight.normal_(0.0, math.sqrt(2 / fan_out), generator=generator)
        bound = 1 / math.sqrt(self.fc.in_features)
        for parameter in self.fc.parameters():
            parameter.uniform_(-bound, bound, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[B, channels, H, W]`` to logits ``[B, classes]``."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.blocks(F.max_pool2d(x, 3, 2, 1) if self.large else x)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def resnet18(
    classes: int = 10,
    *,
    channels: int = 3,
    width: int = 64,
    generator: torch.Generator | None = None,
) -> ResNet:
    """The paper's ResNet-18 (11 million parameters at width 64)."""
    return ResNet(classes, channels=channels, width=width, generator=generator)


class Upscaled(nn.Module):
    """A network for large images on small ones that were normalized with ``mean`` and ``std``."""

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
    net = ResNet(classes, width=width, stages=STAGES_50, large=True)
    if files is not None:
        state = read_keras(files)
        if classes != 1000:
            state = {n: t for n, t in state.items() if not n.startswith("fc.")}
        net.load_state_dict({**net.state_dict(), **state})
    return Upscaled(net, mean, std, size)


def read_keras(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """Our state dict from the shards of a Keras model that was converted for TensorFlow.js."""
    manifest = json.loads(files["model.json"].read_text("utf-8"))["weightsManifest"][0]
    raw = b"".join(files[name].read_bytes() for name in manifest["paths"])
    sizes = [math.prod(entry["shape"]) for entry in manifest["weights"]]
    if len(raw) != 4 * sum(sizes):
        what = f"the shards hold {len(raw)} bytes, model.json lists {4 * sum(sizes)}"
        raise MissingDataError(f"{what}: one is truncated")
    numbers = torch.from_numpy(np.frombuffer(raw, dtype="<f4").copy())
    pairs = zip(manifest["weights"], numbers.split(sizes), strict=True)
    keras = {entry["name"]: part.reshape(entry["shape"]) for entry, part in pairs}
    found = {"fc.weight": keras["fc1000/kernel"].T, "fc.bias": keras["fc1000/bias"]}
    layers = [("", "conv1", "bn1")]
    for stage, count in enumerate(STAGES_50):
        for place in range(count):
            theirs = f"{stage + 2}{'abcdef'[place]}_branch"
            ours = f"blocks.{sum(STAGES_50[:stage]) + place}"
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
