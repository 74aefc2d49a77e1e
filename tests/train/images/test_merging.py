"""Convolutions by the same weights as one: the same numbers from fewer calls."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
import torch
from fsmap.train.images.captured import TracedStep
from fsmap.train.images.merging import MergeConvolutions
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._inductor import inductor_prims

from fsmap.errors import InputError
from fsmap.train.images import ImageRun, ImageSettings, traced
from image_cases import TINY

aten: Any = torch.ops.aten
BOTH = (aten.convolution.default, aten.convolution_backward.default)


class TwoLayers(nn.Module):
    """A block with a shortcut, so that two convolutions read the same images."""

    def __init__(self, classes: int = 10, bias: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 5, 4, bias=bias)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.second = nn.Conv2d(4, 4, 3, 2, 1, bias=bias)
        self.shortcut = nn.Conv2d(4, 4, 1, 2, bias=bias)
        self.fc = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norms[0](self.first(x)))
        h = torch.relu(self.norms[1](self.second(h)) + self.norms[2](self.shortcut(h)))
        return self.fc(h.mean((2, 3)))


class Twice(nn.Module):
    """One convolution called twice, the second time on what the first gave."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.first, self.again = nn.Conv2d(1, 4, 5, 4), nn.Conv2d(4, 4, 3, 1, 1)
        self.fc = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.again(torch.tanh(self.again(h))))
        return self.fc(h.mean((2, 3)))


class Mirrored(nn.Module):
    """One convolution of two pictures, added up: both have the same derivative by the result."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 5, 4, bias=False), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x) + self.conv(x.flip(3).sin())))
        return self.fc(h.mean((2, 3)))


class Crossed(nn.Module):
    """Sums of two layers, which are called on their pictures in opposite orders."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(1, 4, 5, 4, bias=False) for _ in range(2))
        self.fc = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        one = self.a(x)
        other, this = self.b(x.cos()), self.b(x.sin())
        h = torch.tanh(one + this) * torch.sigmoid(other + self.a(x.flip(3)))
        return self.fc(h.mean((2, 3)))


class PreActivated(nn.Module):
    """A sum of two convolutions: both have the same derivative by the result."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 5, 4, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (4, 6, 6))
        self.second, self.third = nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.Conv2d(6, 6, 3, 1, 1)
        self.shortcut, self.fc = nn.Conv2d(4, 6, 1, 2, bias=False), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norms[0](self.first(x)))
        h = self.third(torch.relu(self.norms[1](self.second(h)))) + self.shortcut(h)
        return self.fc(torch.relu(self.norms[2](h)).mean((2, 3)))


class Strided(nn.Module):
    """Reads the images of a convolution by where they lie in memory."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 5, 4), nn.Conv2d(4, 4, 3, 1, 1)
        self.fc = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)).contiguous()
        part = h.as_strided((len(h), 4, 3, 6), (144, 36, 12, 1), 0)
        return self.fc(self.second(h).mean((2, 3)) + part.sum((2, 3)))


class Views(nn.Module):
    """Images and a derivative that are not laid out one number after the other."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 5, 4, bias=False), nn.Conv2d(4, 4, 3, 1, 1)
        self.fc = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.expand(-1, 3, -1, -1)))
        return self.fc(self.second(h[:, :, ::2, 1:]).sum((2, 3)))


class Spread(Views):
    """Pixels that are copies of their mean."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.expand(-1, 3, -1, -1))).mean((2, 3), keepdim=True)
        return self.fc(torch.tanh(self.second(h.expand(-1, -1, 4, 4))).mean((2, 3)))


def shuffled(graph: torch.fx.Graph, seed: int) -> None:
    """Bring a graph's operations into another order that is as good."""
    draw, last = random.Random(seed), next(reversed(graph.nodes))
    waiting = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    placed = {n for n in graph.nodes if n.op == "placeholder"}
    while waiting:
        ready = [n for n in waiting if placed.issuperset(n.all_input_nodes)]
        node = draw.choice(ready)
        last.prepend(node)
        waiting.remove(node)
        placed.add(node)
    graph.lint()


def run_merged(
    settings: ImageSettings,
    module: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    seed: int | None = None,
) -> tuple[ImageRun, list[Counter[Any]]]:
    """Train with the traced step through the pass, without a compiler; and calls, as counted."""
    counted = []

    def merged(graph: torch.fx.GraphModule, flat: list[Tensor]) -> Any:
        with torch.no_grad():
            return aot_module_simplified(graph, flat, through_the_pass)

    def through_the_pass(pure: torch.fx.GraphModule, _: Any) -> Any:
        if seed is not None:
            shuffled(pure.graph, seed)
        for change in (lambda graph: None, MergeConvolutions()):
            change(pure.graph)
            pure.graph.eliminate_dead_code()
            counted.append(Counter(n.target for n in pure.graph.nodes if n.target in BOTH))
        pure.recompile()
        return make_boxed_func(pure)

    monkeypatch.setattr(traced, "_kernels", merged)
    run = ImageRun(dataclasses.replace(settings, compile=True), module=module)
    assert isinstance(run._step, TracedStep)
    run.train(progress=False)
    return run, counted


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batchnorm", ["joint", "frozen", "batch"])
@pytest.mark.parametrize("estimator", ["jvp", "fd", "fd_central", "vjp", "exact"])
def test_the_merged_step_is_the_eager_one(
    estimator: str, batchnorm: str, bias: bool, monkeypatch: pytest.MonkeyPatch
):
    settings = dataclasses.replace(TINY, epochs=1, estimator=estimator, batchnorm=batchnorm)
    run, _ = run_merged(settings, made(TwoLayers, bias=bias), monkeypatch)
    assert_as_eager(run, made(TwoLayers, bias=bias))


def test_jvp_convolves_all_images_by_the_same_weights_at_once(monkeypatch: pytest.MonkeyPatch):
    """Three layers: one call for W and one for ψ; derivatives by W, and by images by W and ψ."""
    settings = dataclasses.replace(TINY, epochs=1, batchnorm="frozen")
    _, (before, after) = run_merged(settings, made(TwoLayers), monkeypatch)
    # Training and evaluation points, tangents (zero at first), and by ψ.
    assert before[BOTH[0]] == 3 * 4
    assert after[BOTH[0]] == 3 * 2
    assert before[BOTH[1]] == 3 * 4 - 1
    assert after[BOTH[1]] == 3 + 2


def test_images_side_by_side_keep_their_layout(monkeypatch: pytest.MonkeyPatch):
    """Inductor lays them out by the last; left to choose, it may choose another, and copy."""
    cats = []
    merge = MergeConvolutions.__call__

    def look(self: MergeConvolutions, graph: torch.fx.Graph) -> None:
        merge(self, graph)
        cats.extend(graph.find_nodes(op="call_function", target=aten.cat.default))

    monkeypatch.setattr(MergeConvolutions, "__call__", look)
    settings = dataclasses.replace(TINY, epochs=1, batchnorm="frozen")
    run_merged(settings, made(TwoLayers), monkeypatch)
    lasts = [cat.args[0][-1] for cat in cats]
    assert lasts
    for last in lasts:
        assert last.target is inductor_prims.force_stride_order
        assert last.args[1] == list(last.args[0].meta["val"].stride())


@pytest.mark.parametrize("estimator", ["jvp", "vjp"])
@pytest.mark.parametrize("kind", [Twice, Mirrored])
def test_layers_that_are_called_twice(
    kind: type[nn.Module], estimator: str, monkeypatch: pytest.MonkeyPatch
):
    settings = dataclasses.replace(TINY, epochs=1, batchnorm="frozen", estimator=estimator)
    run, (before, after) = run_merged(settings, made(kind), monkeypatch)
    assert after[BOTH[0]] < before[BOTH[0]]
    assert_as_eager(run, made(kind))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("estimator", ["jvp", "fd"])
@pytest.mark.parametrize("kind", [Views, Spread])
def test_views_are_merged_too(
    kind: type[nn.Module], estimator: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch
):
    settings = dataclasses.replace(TINY, epochs=1, limit=32, batchnorm="frozen")
    settings = dataclasses.replace(settings, estimator=estimator, channels_last=channels_last)
    run, (before, after) = run_merged(settings, made(kind), monkeypatch)
    assert after[BOTH[0]] < before[BOTH[0]]
    assert_as_eager(run, made(kind))


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("estimator", ["jvp", "fd"])
@pytest.mark.parametrize("kind", [Crossed, PreActivated, Strided])
def test_order_and_place_in_memory_do_not_matter(
    kind: type[nn.Module], estimator: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
):
    settings = dataclasses.replace(
        TINY, epochs=1, limit=32, batchnorm="frozen", estimator=estimator, channels_last=False
    )
    run, _ = run_merged(settings, made(kind), monkeypatch, seed)
    assert_as_eager(run, made(kind))


def test_parameters_that_are_not_trained_are_refused():
    module = made(TwoLayers)
    module.first.requires_grad_(False)
    with pytest.raises(InputError, match="'first.weight' has requires_grad=False"):
        ImageRun(dataclasses.replace(TINY, compile=True), module=module)


def assert_as_eager(run: ImageRun, module: nn.Module) -> None:
    eager = ImageRun(dataclasses.replace(run.settings, compile=False), module=module)
    eager.train(progress=False)
    found = run.snapshot()
    for name, t in eager.snapshot().items():
        torch.testing.assert_close(found[name], t, rtol=1e-9, atol=1e-12, msg=name)


def made(kind: type[nn.Module], **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(**options)
