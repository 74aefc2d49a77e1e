"""The menagerie: models that every property is tested on. Adding one here gives it every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fsmap
import oracles
from fsmap.functional import Functional
from fsmap.types import Params


class Case(NamedTuple):
    """A model and points to evaluate it at."""

    f: Functional
    params: Params
    x: object
    module: nn.Module


class Sequence(nn.Module):
    """Attention over T tokens, one output per token and class: [S, T, K]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class DictInput(nn.Module):
    """Takes keyword arguments, one of them a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)

    def forward(self, *, values: Tensor, mask: Tensor) -> Tensor:
        return (self.body(values).tanh() * mask[..., None]).sum(1)


class Shared(nn.Module):
    """One weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def _frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    return module


def _cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU(), nn.Flatten(), nn.Linear(8, 2))


def _batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def _masked(generator: torch.Generator) -> dict[str, Tensor]:
    mask = torch.tensor([[1.0, 0.0]] * 2 + [[1.0, 1.0]] * 3)
    return {"values": torch.randn(5, 2, 3, generator=generator), "mask": mask}


# A module, and the shape of its points, or what draws them.
MODELS: dict[str, tuple[Callable[[], nn.Module], object]] = {
    "linear": (lambda: nn.Linear(3, 1), (6, 3)),
    "tanh_mlp": (lambda: nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)), (12, 1)),
    "wide": (lambda: nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 3)), (5, 2)),
    "layernorm": (
        lambda: nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)),
        (6, 2),
    ),
    "relu": (lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), (6, 2)),
    "cnn": (_cnn, (4, 1, 4, 4)),
    "batchnorm_train": (_batchnorm, (6, 2)),
    "batchnorm_eval": (lambda: _batchnorm().eval(), (6, 2)),
    "sequence": (Sequence, (3, 2, 4)),
    "sequence_eval": (lambda: Sequence().eval(), (3, 2, 4)),
    "shared": (Shared, (4, 3)),
    "frozen": (_frozen, (5, 2)),
    "dict_input": (DictInput, _masked),
}


def case(name: str, seed: int = 0) -> Case:
    """Build one of ``MODELS`` with random parameters of order one."""
    make, points = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.7 * torch.randn(p.shape, generator=generator))
    f, params = fsmap.functional(module)
    drawn = points(generator) if callable(points) else torch.randn(points, generator=generator)
    return Case(f, params, drawn, module)


def direction(params: Params, seed: int = 0) -> Params:
    """A random direction in parameter space, of length about one."""
    generator = torch.Generator().manual_seed(seed)
    scale = sum(p.numel() for p in params.values()) ** -0.5
    return {n: scale * torch.randn(p.shape, generator=generator) for n, p in params.items()}


def interrupt(at: int) -> Callable[[int, object], None]:
    """A callback of training: a kill after so many steps."""

    def call(step: int, params: object) -> None:
        if step == at:
            raise KeyboardInterrupt

    return call


def symmetric(*shape: int, seed: int = 0, definite: bool = False) -> Tensor:
    """A random symmetric matrix, positive definite or (usually) indefinite."""
    a = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return a @ a.mT if definite else a + a.mT


METRICS = {
    "weights": lambda S, K: torch.linspace(0.5, 2, S),
    "weights_with_zeros": lambda S, K: torch.linspace(0, 2, S).relu(),
    "output": lambda S, K: symmetric(K, K, definite=True),
    "output_per_point": lambda S, K: symmetric(S, K, K, definite=True),
    "general": lambda S, K: symmetric(S * K, S * K, definite=True),
}


def metric(name: str, S: int, K: int) -> tuple[Tensor, Tensor]:
    """One of ``METRICS``, and written out as [S, K, S, K]."""
    g = METRICS[name](S, K)
    return g, g.reshape(S, K, S, K) if name == "general" else oracles.full_metric(g, S, K)


def check_softmax_fisher(value: Tensor, case: Case, slow: Callable, detach: bool) -> None:
    """Value and gradient with g = diag(p) − ppᵀ of the outputs, held fixed in what is detached."""
    S, K = case.f(case.params, case.x).shape

    def fisher(params: Params) -> Tensor:
        g = oracles.softmax_fisher_slow(case.f(params, case.x)).detach()
        return oracles.full_metric(g, S, K)

    held = fisher(case.params)
    at = lambda p: slow(p, held if detach else fisher(p))  # noqa: E731
    torch.testing.assert_close(value.detach(), at(case.params), rtol=1e-9, atol=0)
    grads = torch.autograd.grad(value, case.params.values(), materialize_grads=True)
    found = torch.cat([g.reshape(-1) for g in grads])
    expected = oracles.gradient_slow(at, case.params)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)


def slopes(
    value: Tensor, slow: Callable[[Params], Tensor], params: Params, num: int = 2
) -> Iterator[tuple[float, float]]:
    """Derivatives along random directions: of a value by autograd, of ``slow`` by differences."""
    grads = [torch.zeros_like(p) for p in params.values()]
    if value.requires_grad:
        leaves = list(params.values())
        grads = torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True)
    for seed in range(num):
        along = direction(params, seed)
        found = sum(float((g * d).sum()) for g, d in zip(grads, along.values(), strict=True))
        yield found, oracles.directional_slow(slow, params, along)
