"""Residual networks: ResNet-18 for small images, as in the paper's image experiments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from fsmap.errors import InputError

STAGES = (2, 2, 2, 2)  # blocks of a ResNet-18


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut.

    Args:
        inputs: Channels in.
        outputs: Channels out.
        stride: Of the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[B, inputs, H, W]`` to ``[B, outputs, H/stride, W/stride]``."""
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network for 32×32 or 28×28 images: 3×3 stem, no max-pool, four stages.

    Args:
        classes: K.
        channels: Of the images: 3, or 1 for MNIST-like sets.
        width: Channels of the first stage; those of the others are twice that of the one before.
        stages: Blocks in each stage.
        generator: Source of the initial weights; None is torch's own.

    Raises:
        InputError: If a size is not positive.

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
        stages: Sequence[int] = STAGES,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if min(classes, channels, width, *stages) < 1 or not stages:
            message = (
                f"a residual network needs positive sizes, got {classes=}, {channels=}, {width=}, "
                f"stages={tuple(stages)}"
            )
            raise InputError(message)
        with _own_noise(generator):
            self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(width)
            blocks: list[nn.Module] = []
            inputs = width
            for stage, count in enumerate(stages):
                outputs = width * 2**stage
                for place in range(count):
                    stride = 2 if stage > 0 and place == 0 else 1
                    blocks.append(BasicBlock(inputs, outputs, stride))
                    inputs = outputs
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
        x = self.blocks(x)
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


def _own_noise(generator: torch.Generator | None) -> AbstractContextManager[None]:
    """Layers draw initial values from torch's generator when they are made: put it back."""
    return torch.random.fork_rng(devices=[], enabled=generator is not None)
