"""Compiled models inside LMAP, and a compiled LMAP: the same numbers, and compiled where it can."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsmap

PX = fsmap.px.Normal(shape=(2,))
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch):
    # The compiler switches this off for the whole process: put it back after the test.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def compiled(where: str, net: nn.Module, backend: object, **options: object) -> nn.Module:
    if where == "inside":
        return fsmap.LMAP(torch.compile(net, backend=backend), PX, num_points=5, **options)
    return torch.compile(fsmap.LMAP(net, PX, num_points=5, **options), backend=backend)


def steps(net: nn.Module, lm: nn.Module, count: int = 3) -> list[torch.Tensor]:
    """R, gradients and running statistics of several steps."""
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(count):
        net.zero_grad()
        out, R = lm(x)
        (out.square().mean() + 0.1 * R).backward()
        found += [R.detach(), *(p.grad.clone() for p in net.parameters())]
    return [*found, *net.buffers()]


@pytest.mark.parametrize("mode", ["joint", "frozen"])
@pytest.mark.parametrize("estimator", ["jvp", "fd"])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("every", [1, 2])
def test_compiling_changes_nothing(mode: str, estimator: str, where: str, every: int) -> None:
    options = {"batchnorm": mode, "estimator": estimator, "every": every}
    plain, net = network(), network()
    wanted = steps(plain, fsmap.LMAP(plain, PX, num_points=5, **options))
    got = steps(net, compiled(where, net, "aot_eager", **options))
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("where", "options", "calls"),
    [
        ("inside", {"batchnorm": "frozen"}, [1, 1, 1]),  # the loss's pass; R as written
        ("inside", {"batchnorm": "frozen", "estimator": "fd"}, [3, 3, 3]),  # all passes
        ("inside", {"estimator": "fd"}, [2, 2, 2]),
        ("inside", {"every": 2}, [0, 1, 0]),  # joint: one pass serves both
        ("outside", {"batchnorm": "frozen"}, [1, 1, 1]),
        ("outside", {"every": 2}, [0, 1, 0]),
    ],
)
def test_what_runs_compiled(where: str, options: dict, calls: list[int]) -> None:
    """A pass that fails in forward mode must not switch the compiler off for the others."""
    count = [0]

    def backend(graph: torch.fx.GraphModule, _: object):
        def run(*args: object) -> object:
            count[0] += 1
            return graph.forward(*args)

        return run

    lm = compiled(where, network(), backend, **options)
    found = []
    for _ in calls:
        before = count[0]
        lm(torch.ones(4, 2))
        found.append(count[0] - before)
    assert found == calls
