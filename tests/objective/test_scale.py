r"""The size of a normalized layer: `batch` and `joint` lower R by growing it, `frozen` shrinks it.

Before BatchNorm the size of a layer's weights $w$ is of no consequence: $f(\alpha w) = f(w)$ if the
statistics follow. Then $J_w$ goes with $1/\alpha$, and $\langle w, \nabla_w R\rangle = -2 R_w$: R
falls as the layer grows. Statistics that are held fixed do not know that.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close

from fsmap.types import Params
from oracles import jacobian_slow

pytestmark = pytest.mark.usefixtures("seeded")


def laplacian(module: nn.Module, x: Tensor, params: Params, name: str | None = None) -> Tensor:
    """R of all parameters, or of one of them, by the definition."""
    mine = {n: p for n, p in params.items() if name in (None, n)}
    rest = {n: p for n, p in params.items() if n not in mine}

    def f(some: Params, x: Tensor) -> Tensor:
        buffers = {n: b.clone() for n, b in module.named_buffers()}
        found: Tensor = functional_call(module, {**rest, **some, **buffers}, (x,))
        return found

    return jacobian_slow(f, mine, x).square().sum() / len(x)


def along(module: nn.Module, x: Tensor) -> tuple[float, float]:
    """The derivative of R in the log of the first layer's size, and that layer's part of R."""
    params = {n: p.detach() for n, p in module.named_parameters()}
    step = 1e-5

    def scaled(factor: float) -> float:
        return float(laplacian(module, x, {**params, "0.weight": factor * params["0.weight"]}))

    slope = (scaled(1 + step) - scaled(1 - step)) / (2 * step)
    return slope, float(laplacian(module, x, params, "0.weight"))


def network() -> tuple[nn.Sequential, Tensor]:
    module = nn.Sequential(
        nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4, eps=1e-12), nn.Tanh(), nn.Linear(4, 2)
    )
    x = torch.randn(12, 3)
    module[1].momentum = 1.0
    module(x)  # running statistics that fit the points
    return module, x


def test_with_statistics_that_follow_r_falls_as_the_layer_grows():
    module, x = network()
    slope, part = along(module.train(), x)
    assert_close(slope, -2 * part, rtol=1e-5, atol=0)


def test_with_frozen_statistics_it_rises():
    module, x = network()
    slope, _ = along(module.eval(), x)
    assert slope > 0
