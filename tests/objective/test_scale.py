r"""The size of a normalized layer: R falls as it grows, in every BatchNorm mode.

Before BatchNorm the size of a layer's weights $w$ is of no consequence: $f(\alpha w) = f(w)$, as
the statistics follow. Then $J_w$ goes with $1/\alpha$, and $\langle w, \nabla_w R\rangle = -2 R_w$.
With statistics that stood still R would rise.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fsmap

pytestmark = pytest.mark.usefixtures("seeded")


def network() -> tuple[nn.Sequential, Tensor]:
    module = nn.Sequential(
        nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4, eps=1e-12), nn.Tanh(), nn.Linear(4, 2)
    )
    x = torch.randn(12, 3)
    module[1].momentum = 1.0
    module(x)  # running statistics that fit the points
    return module, x


def along(mode: str) -> tuple[float, float]:
    """The derivative of R in the log of the first layer's size, and that layer's part of R."""
    module, x = network()
    found = []
    for layers in (None, ["0"]):
        lm = fsmap.LMAP(
            module,
            lambda n, _: x[:n],
            num_points=len(x),
            estimator="exact",
            batchnorm=mode,
            layers=layers,
        )
        found.append(lm(x)[1])
    weight = module[0].weight
    (gradient,) = torch.autograd.grad(found[0], weight)
    return float((gradient * weight.detach()).sum()), float(found[1].detach())


@pytest.mark.parametrize("mode", ["batch", "joint", "frozen"])
def test_r_falls_as_the_layer_grows(mode: str):
    slope, part = along(mode)
    assert_close(slope, -2 * part, rtol=1e-6, atol=0)
