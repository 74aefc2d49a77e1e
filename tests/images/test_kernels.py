"""Memory layout: channels last, but for convolutions that oneDNN gets wrong on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from fsmap.images.build import layout_of
from fsmap.models.resnet import resnet18

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


def test_the_papers_network_has_channels_last(seeded):
    assert layout_of(resnet18(classes=10, width=64), True, CPU) == torch.channels_last
