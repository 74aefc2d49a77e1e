"""R, gradients and buffers against the float64 definition: eager and compiled, in every way in."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

import fsmap
from fsmap.errors import FallbackWarning
from fsmap.functional import concat_points, unravel
from oracles import laplacian_slow

B, S = 6, 4
pytestmark = [  # torch warns while it compiles
    pytest.mark.filterwarnings("ignore", "error::fsmap.errors.FallbackWarning"),
    pytest.mark.usefixtures("seeded", "fresh_compiler"),
]


class Attention(nn.Module):
    """Pre-norm attention by torch's function, causal or masked."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(-2, -3)
        h = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return x + h.transpose(-2, -3).flatten(-2)


class Decoder(nn.Module):
    """Tokens in, tokens out, one table for both."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(5, 8), Attention()
        self.head = nn.Linear(8, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.attention(self.table(tokens)))


class Masked(nn.Module):
    """Takes a dict of sequences and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = Attention(), nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.attention(x, mask[:, None, None]).mean(1))


def mlp(frozen: bool = False) -> nn.Sequential:
    first = nn.Linear(3, 5).requires_grad_(not frozen)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(5, 2))


def cnn() -> nn.Sequential:
    layers = (nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 2, 2))
    return nn.Sequential(*layers, nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))


def encoder() -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(32, 2))


def masked_points(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 4, 8), "mask": torch.arange(4) < torch.randint(1, 5, (n, 1))}


Case = tuple[Callable[[], nn.Module], Callable[[int], Any]]
CASES: dict[str, Case] = {
    "mlp": (mlp, lambda n: torch.randn(n, 3)),
    "frozen part": (lambda: mlp(frozen=True), lambda n: torch.randn(n, 3)),
    "cnn": (cnn, lambda n: torch.randn(n, 1, 4, 4)),
    "encoder": (encoder, lambda n: torch.randn(n, 4, 8)),
    "decoder, tied": (Decoder, lambda n: torch.randint(0, 5, (n, 4))),
    "masked, dict": (Masked, masked_points),
}
EVERY = [*((name, "joint") for name in CASES), ("cnn", "batch"), ("cnn", "frozen")]
EVERY += [("encoder", "batch"), ("mlp", "frozen")]
Found = tuple[Tensor, Tensor, dict[str, Tensor]]


def floats(x: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, x)


TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bf16": 0.02}


def made(name: str, mode: str, how: str = "float64") -> tuple[fsmap.LMAP, Any]:
    """A model with an LMAP around it, and training points."""
    dtype = torch.float64 if how == "float64" else torch.float32
    build, draw = CASES[name]
    module, x, evaluation = build().to(dtype), floats(draw(B), dtype), floats(draw(S), dtype)
    return fsmap.LMAP(module, lambda n, _: evaluation, num_points=S, batchnorm=mode), x


def measured(lm: nn.Module, net: nn.Module, x: Any) -> Found:
    """R, the gradient of a loss with it, and buffers."""
    net.zero_grad()
    out, R = lm(x)
    (out.float() if out.dtype == torch.bfloat16 else out).square().mean().add(R).backward()
    grads = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
    return R.detach(), torch.cat(grads), {n: b.clone() for n, b in net.named_buffers()}


def definition(lm: fsmap.LMAP, x: Any) -> Found:
    """The same by one backward pass per output, in float64."""
    drawn = lm.draw(x)
    net = copy.deepcopy(lm.module).double()
    x, evaluation = floats(x, torch.float64), floats(drawn.points, torch.float64)
    f, params = fsmap.functional(net)
    psi = unravel(drawn.probes[0].double(), params)
    with sdpa_kernel(SDPBackend.MATH):
        if lm.batchnorm == "joint":
            both = concat_points(x, evaluation)
            out, R = f(params, both)[:B], laplacian_slow(f, params, both, psi)
            net(**both) if isinstance(both, dict) else net(both)
        else:
            out = f(params, x)
            net(x)  # moves the running statistics
            if lm.batchnorm == "frozen":
                f, _ = fsmap.functional(net.eval())
            R = laplacian_slow(f, params, evaluation, psi)
        grads = torch.autograd.grad(out.square().mean() + R, list(params.values()))
    return R.detach(), torch.cat([g.flatten() for g in grads]), dict(net.named_buffers())


def near(found: Found, wanted: Found, tolerance: float, *, gradient: bool = True) -> None:
    def off(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))

    assert off(found[0], wanted[0]) < tolerance
    assert not gradient or off(found[1], wanted[1]) < tolerance
    for name, b in wanted[2].items():
        assert off(found[2][name], b) < tolerance, name


@pytest.mark.parametrize(("name", "mode"), EVERY)
@pytest.mark.parametrize("how", ["float64", "float32", "bf16"])
def test_eager(name: str, mode: str, how: str) -> None:
    lm, x = made(name, mode, how)
    wanted = definition(lm, x)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "bf16"):
        found = measured(lm, lm.module, x)
    # How running statistics follow the weights is held to finite differences in test_frozen.
    near(found, wanted, TOLERANCE[how], gradient=(name, mode) != ("cnn", "frozen"))


HALF = [("mlp", "joint"), ("cnn", "joint"), ("cnn", "frozen"), ("decoder, tied", "joint")]
COMPILED = [(*case, "float64") for case in EVERY] + [(*case, "float32") for case in HALF[1:]]
COMPILED += [(*case, "bf16") for case in HALF]


@pytest.mark.parametrize(("name", "mode", "how"), COMPILED)
def test_compiled(name: str, mode: str, how: str) -> None:
    lm, x = made(name, mode, how)
    wanted = definition(lm, x)
    before = copy.deepcopy(lm.module.state_dict())
    eager = measured(lm, lm.module, x)
    lm.module.load_state_dict(before)
    lm.step = 0
    lm.compile(backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "bf16"):
        found = measured(lm, lm.module, x)
    near(found, wanted, TOLERANCE[how], gradient=(name, mode) != ("cnn", "frozen"))
    near(found, eager, TOLERANCE[how])


def stepping(lm: fsmap.LMAP) -> Callable[[Any], tuple[Tensor, Tensor]]:
    @torch.compile
    def step(x: Any) -> tuple[Tensor, Tensor]:
        out, R = lm(2 * x / 2)
        return out + 0, R * 1

    return step


def inside(lm: fsmap.LMAP) -> fsmap.LMAP:
    lm.module.compile(backend="aot_eager")
    return lm


def around(lm: fsmap.LMAP) -> fsmap.LMAP:
    o = lm.regularizer.options
    module = torch.compile(lm.module, backend="aot_eager")
    return fsmap.LMAP(module, o.px, num_points=S, batchnorm=o.batchnorm)


@pytest.mark.slow
@pytest.mark.parametrize("way", [torch.compile, stepping, inside, around])
@pytest.mark.parametrize("mode", ["joint", "batch"])
def test_every_way_to_compile(way: Callable[[fsmap.LMAP], Any], mode: str) -> None:
    lm, x = made("cnn", mode)
    entry = way(lm)
    for step in range(2):
        lm.step = step
        wanted = definition(lm, x)
        near(measured(entry, lm.module, x), wanted, 1e-9)
    assert (entry if way is around else lm).step == 1 + (way is around)


OPTIONS: dict[str, dict[str, Any]] = {
    "outputs": {"outputs": 2},
    "weights": {"metric": fsmap.metric.Weights(lambda x: x.square().mean(1))},
    "weights and outputs": {"metric": fsmap.metric.Weights(lambda x: x[:, 0] ** 2), "outputs": 2},
    "fisher": {"metric": fsmap.metric.SoftmaxFisher()},
    "matrix": {"metric": fsmap.metric.Output(torch.diag(torch.arange(1.0, 5.0)))},
}


@pytest.mark.parametrize("mode", ["joint", "frozen"])
@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_and_metrics_compile(name: str, mode: str) -> None:
    """A FallbackWarning is an error."""
    net, options = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 4)), OPTIONS[name]
    lm = fsmap.LMAP(net, torch.randn(S, 3), num_points=S, batchnorm=mode, **options)
    x = torch.randn(B, 3)
    wanted = measured(lm, net, x)
    lm.step = 0
    lm.compile(backend="aot_eager")
    near(measured(lm, net, x), wanted, 1e-10)


def test_dropout_draws_as_the_eager_pass() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2))
    x, found = torch.randn(B, 3), []
    for compiled in (False, True):
        lm = fsmap.LMAP(net, x[:S], num_points=S, seed=1, batchnorm="joint")
        if compiled:
            lm.compile(backend="aot_eager")
            measured(lm, net, x)  # compiles
            lm.step = 0
        torch.manual_seed(3)
        found.append(measured(lm, net, x))
    near(found[1], found[0], 1e-10)


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_dropout_compiles_at_another_batch_size(p: float) -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(p), nn.Linear(5, 2))
    lm = fsmap.LMAP(net, torch.randn(S, 3), num_points=S, seed=1)
    lm.compile(backend="aot_eager")
    for size in (B, B, 3):  # a FallbackWarning is an error
        R, gradient, _ = measured(lm, net, torch.randn(size, 3))
        assert torch.isfinite(R)
        assert torch.isfinite(gradient).all()


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if float(x.sum()) > 100 else -self.net(x)


def test_a_model_that_cannot_be_traced_runs_eagerly_and_says_so_once() -> None:
    net, x = Branch(), torch.randn(B, 3)
    lm = fsmap.LMAP(net, x[:S], num_points=S)
    wanted = definition(lm, x)
    lm.compile(backend="aot_eager")
    with pytest.warns(FallbackWarning, match="Branch") as said:
        found = measured(lm, net, x)
    assert len([w for w in said if w.category is FallbackWarning]) == 1
    near(found, wanted, 1e-10)
    measured(lm, net, x)  # a second warning would be an error


def test_a_wrong_compiled_function_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
        return lambda *args: (found := function(*args))._replace(R=1.1 * found.R)

    monkeypatch.setattr(torch, "compile", wrong)
    lm, x = made("mlp", "joint")
    wanted = definition(lm, x)
    lm.compile()
    with pytest.warns(FallbackWarning, match="differs"):
        found = measured(lm, lm.module, x)
    near(found, wanted, 1e-10)


def test_no_memory_for_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    lm = fsmap.LMAP(net, torch.randn(8, 2), num_points=4)
    lm.compile(backend="eager")

    def eager(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(lm.regularizer, "_eager", eager)
    with pytest.warns(FallbackWarning, match="memory"):
        _, R = lm(torch.randn(3, 2))
    assert R.grad_fn is not None
    assert lm(torch.randn(3, 2))[1] > 0  # compiled, no second warning


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda lm: pickle.loads(pickle.dumps(lm))])
def test_copies_compile_for_themselves(duplicate: Callable[[fsmap.LMAP], fsmap.LMAP]) -> None:
    net, x = mlp(), torch.randn(B, 3)
    lm = fsmap.LMAP(net, fsmap.px.Normal(shape=(3,)), num_points=S)
    lm.compile(backend="aot_eager")
    measured(lm, net, x)
    other = duplicate(lm)
    with torch.no_grad():
        other.module[0].weight.mul_(2)
    wanted = definition(other, x)
    near(measured(other, other.module, x), wanted, 1e-10)
    assert other.regularizer.compiled.options == {"backend": "aot_eager"}


def test_batches_of_another_size() -> None:
    lm, x = made("mlp", "batch")
    lm.compile(backend="aot_eager")
    for size in (B, 5, 4):
        lm.step = 0
        eager = copy.deepcopy(lm)
        eager.regularizer.compiled.options = None
        near(measured(lm, lm.module, x[:size]), measured(eager, eager.module, x[:size]), 1e-10)
