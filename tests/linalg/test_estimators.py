"""Estimators as objects: your own in every place, and what happens where one cannot be used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap
from fsmap.errors import FallbackWarning, ForwardModeError, InputError
from fsmap.linalg import second_order
from fsmap.linalg.estimators import Jvp, Pass, Site, by_name
from fsmap.linalg.probes import Stream
from oracles import laplacian_slow, trace_slow

pytestmark = pytest.mark.usefixtures("seeded")
S = 4


class Signs:
    """‖Js‖² with random signs s in parameter space: an estimator that is not the library's."""

    name = "signs"
    parameter_probes = full_precision = forward_mode = reverse_mode = adaptive = False

    def check(self, params: Any) -> None: ...

    def check_probes(self, *_: object) -> None: ...

    def draw(self, source: Any, site: Site, num: int) -> Any:
        return {name: p.sign() for name, p in source.psi(site.params, num).items()}

    def at(self, site: Site, probe: Any) -> Pass:
        out, tangent = torch.func.jvp(lambda p: site.f(p, site.x), (site.params,), (probe,))
        return Pass(tangent.square().sum() / len(site.x), None, None)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("mode", ["joint", "batch", "frozen"])
def test_your_own_in_lmap(mode: str) -> None:
    net, x = network(), torch.randn(6, 3)
    lm = fsmap.LMAP(net, x[:S], num_points=S, estimator=Signs(), batchnorm=mode)
    points = lm.draw(x).points
    out, R = lm(x)
    assert torch.equal(out, net(x))
    assert "signs" in repr(lm)
    f, params = fsmap.functional(net)
    signs = {n: p[0].sign() for n, p in Stream(0, 0).psi(params).items()}
    slow = laplacian_slow(f, params, torch.cat([x, points]) if mode == "joint" else points, signs)
    torch.testing.assert_close(R, slow, rtol=1e-10, atol=0.0)
    own, theirs = (
        torch.autograd.grad(r, list(net.parameters()), allow_unused=True) for r in (R, slow)
    )
    for a, b in zip(own[:-1], theirs[:-1], strict=True):  # the last bias has no part in it
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_your_own_in_trace(generator: torch.Generator) -> None:
    f, params = fsmap.functional(network())
    x = torch.randn(S, 3)
    found = fsmap.trace(f, params, x, method=Signs(), probes=500, generator=generator)
    assert abs(found.value - trace_slow(f, params, x)) < 5 * found.stderr


def test_your_own_in_fit() -> None:
    """An object is used as its name is."""
    x = torch.randn(8, 3)
    f, params = fsmap.functional(network())
    found = []
    for estimator in ("jvp", Jvp(), Signs()):
        objective = fsmap.l_map(
            fsmap.Gaussian(0.1), fsmap.Normal(1.0), fsmap.px.Normal(shape=(3,)), num_points=S,
            num_data=8, jitter=1.0, estimator=estimator,
        )  # fmt: skip
        state, _ = fsmap.fit(objective, f, params, (x, x[:, :2]), steps=5, progress=False)
        found.append(torch.cat([p.flatten() for p in state.params.values()]))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


def test_unknown_names() -> None:
    with pytest.raises(InputError, match="magic"):
        by_name("magic")
    with pytest.raises(InputError, match="magic"):
        fsmap.LMAP(network(), torch.randn(S, 3), num_points=S, estimator="magic")


class Attention(nn.Module):
    """Sequences through torch's attention, by function or by layer."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True) if layer else None
        self.value = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        v = self.value(x)
        if self.layer is not None:
            return self.layer(v, v, v, need_weights=False)[0]
        return F.scaled_dot_product_attention(v, v, v)


@pytest.mark.parametrize("layer", [False, True])
def test_attention_that_does_not_fit(layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Attention(layer), torch.randn(5, 3, 4)
    f, params = fsmap.functional(net)
    wanted = fsmap.LMAP(net, x[:S], num_points=S)(x)[1].item()
    needed = []

    def refuse(size: int, _: torch.device) -> bool:
        needed.append(size)
        return False

    def never(*_: object, **__: object) -> None:
        pytest.fail("allocated all the same")

    monkeypatch.setattr(second_order, "fits", refuse)
    for name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        monkeypatch.setattr(second_order, name, never)
    with pytest.raises(ForwardModeError, match="attention"):
        fsmap.trace(f, params, x, method="jvp")
    heads = 2 if layer else 1
    assert needed[0] >= 2 * 4 * 5 * heads * 3 * 3  # scores and their tangents
    lm = fsmap.LMAP(net, x[:S], num_points=S)
    with pytest.warns(FallbackWarning, match="fd_central"):
        value = lm(x)[1].item()
    assert value == pytest.approx(wanted, rel=1e-4)
    lm(x)  # a second warning would be an error
