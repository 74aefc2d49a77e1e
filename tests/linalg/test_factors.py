"""Factored Jacobians: rows, Gram matrices and lengths against the written-out Jacobian."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cases
import fsmap
import oracles
from fsmap.errors import UnsupportedModuleError
from fsmap.linalg import jacobian as module
from fsmap.linalg.jacobian import Dense, Outer, linearize


class SequenceFirst(nn.Module):
    """Its layers see [T, S, d], not [S, T, d]."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens
        self.layer, self.head = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.layer(x[None].expand(self.tokens, -1, -1)).tanh()).sum(0)


class Flattened(nn.Module):
    """Its layer sees [S·T, d]."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x):
        return self.layer(x.reshape(-1, 2)).tanh().reshape(len(x), -1)


MODULES = {
    "sequence_first": (lambda: SequenceFirst(4), (5, 2)),
    "sequence_first_with_one_token": (lambda: SequenceFirst(1), (5, 2)),
    "as_many_tokens_as_points": (lambda: SequenceFirst(5), (5, 2)),
    "flattened": (Flattened, (5, 3, 2)),
    "conv_everything": (
        lambda: nn.Conv2d(2, 3, (2, 3), stride=2, padding=(1, 0), dilation=(1, 2)),
        (3, 2, 6, 8),
    ),
    "conv_1d": (lambda: nn.Conv1d(2, 3, 2, stride=2, padding=1), (3, 2, 7)),
    "conv_grouped": (lambda: nn.Conv2d(2, 4, 2, groups=2), (3, 2, 3, 3)),
    "conv_no_bias": (lambda: nn.Conv2d(2, 2, 2, bias=False), (3, 2, 3, 3)),
    "embedding": (lambda: nn.Embedding(5, 2), (4, 3)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name, seeded):
    make, shape = MODULES[name]
    net = make()
    x = torch.randint(0, 5, shape) if name == "embedding" else torch.randn(shape)
    f, params = fsmap.functional(net)
    check(f, params, x)


@pytest.mark.parametrize("name", cases.MODELS)
def test_cases(name):
    check(*cases.case(name)[:3])


def check(f, params, x):
    jac = oracles.jacobian_slow(f, params, x)
    factors = linearize(f, params, x)
    flat = jac.flatten(0, 1)
    torch.testing.assert_close(factors.rows(), jac, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(factors.gram(), flat @ flat.mT, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(factors.squares(), jac.square().sum(-1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(factors.out, f(params, x).reshape(len(jac), -1))
    torch.testing.assert_close(factors.compact().rows(), jac, rtol=1e-10, atol=1e-12)
    v = flat[:, :3].mT.sin().reshape(-1, *jac.shape[:2])
    expected = (v.flatten(1) @ flat @ flat.mT).reshape(v.shape)
    torch.testing.assert_close(factors.gram_product(v), expected, rtol=1e-9, atol=1e-10)
    mixed = factors.mixed(lambda u: torch.stack([u.sum(1), 2 * u[:, 0]], dim=1))
    expected = torch.stack([jac.sum(1), 2 * jac[:, 0]], dim=1)
    torch.testing.assert_close(mixed.rows(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("fan_in", [1, 50])
def test_blocks_agree(places, fan_in):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, places, fan_in, generator=generator)
    grads = torch.randn(4, 2, places, 3, generator=generator)
    weight = torch.einsum("sti,skto->skoi", inputs, grads).flatten(2)
    for names, parts in [(("w",), [weight]), (("w", "b"), [weight, grads.sum(2)])]:
        outer, dense = Outer(names, inputs, grads), Dense(("both",), torch.cat(parts, dim=-1))
        for found, expected in zip(outer.columns(), parts, strict=True):
            torch.testing.assert_close(found, expected)
        torch.testing.assert_close(outer.gram(), dense.gram())
        torch.testing.assert_close(outer.squares(), dense.squares())
        v = torch.randn(2, 4, 2, generator=generator)
        torch.testing.assert_close(outer.gram_product(v), dense.gram_product(v))
        assert outer.to(torch.float32).columns()[0].dtype == torch.float32


def test_compact_blocks_take_less_room():
    ones = torch.ones
    wide = Outer(
        ("w", "b"), ones(2, 1, 50), ones(2, 3, 1, 40)
    )  # 50 + 120 numbers a point, not 6120
    assert wide.compact() == [wide]
    many = Outer(("w", "b"), ones(2, 100, 2), ones(2, 3, 100, 4))  # 1400 numbers a point, not 36
    assert [block.names for block in many.compact()] == [("w",), ("b",)]


def test_gram_is_double_whatever_the_model_is(seeded):
    f, params = fsmap.functional(nn.Linear(3, 2).float())
    x = torch.randn(4, 3, dtype=torch.float32)
    gram = linearize(f, params, x).gram()
    exact = torch.kron(x.double() @ x.double().mT + 1, torch.eye(2))
    assert gram.dtype == torch.float64
    torch.testing.assert_close(gram, exact, rtol=1e-14, atol=1e-14)


def test_the_survey_is_remembered_and_renewed(seeded, monkeypatch):
    class Switch(nn.Module):
        """Does something else on request, which no mode tells."""

        wide = False

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            out = self.layer(x).tanh()
            return self.layer(out) if self.wide else out

    net, x = Switch(), torch.randn(3, 2)
    f, params = fsmap.functional(net)
    looks = []
    original = module.survey
    monkeypatch.setattr(module, "survey", lambda *args: looks.append(1) or original(*args))
    for _ in range(3):
        check(f, params, x)
    assert len(looks) == 1
    net.wide = True
    check(f, params, x)
    assert len(looks) == 2
    net.eval()
    check(f, params, x)
    check(f, params, torch.randn(3, 2))
    assert len(looks) == 3
    check(f, params, torch.randn(3, 4, 2))  # other shapes of a point
    assert len(looks) == 4


def test_a_callable_without_weak_references():
    class Model:
        __slots__ = ()

        def __call__(self, p, x):
            return F.linear(x, p["w"])

    check(Model(), {"w": torch.ones(2, 3)}, torch.randn(4, 3, generator=torch.Generator()))


def test_random_functions_inside_a_model_are_differentiated_as_a_batch(seeded):
    """F.dropout cannot be seen from outside; the passes of the batch all have one mask."""

    class Noisy(nn.Linear):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.5)

    f, params = fsmap.functional(Noisy(2, 2))
    x = torch.randn(6, 2)
    rows = linearize(f, params, x).rows()
    kept = rows[:, :, -2:].sum(-1)  # the bias: 2 where kept, 0 where dropped
    assert set(kept.flatten().tolist()) == {0.0, 2.0}


def test_many_points_are_differentiated_in_turn_where_no_gradient_is_kept(monkeypatch):
    case = cases.case("cnn")
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    calls = []
    original = module._alone
    monkeypatch.setattr(module, "_alone", lambda *args: calls.append(1) or original(*args))
    jac = oracles.jacobian_slow(case.f, case.params, case.x)
    with torch.no_grad():
        torch.testing.assert_close(linearize(case.f, case.params, case.x).rows(), jac)
    assert len(calls) == len(jac)
    torch.testing.assert_close(linearize(case.f, case.params, case.x).rows().detach(), jac)
    assert len(calls) == len(jac) + 1


class OldFunction(torch.autograd.Function):
    """Written before torch.func: it cannot be used inside its transforms."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_a_function_that_cannot_be_transformed_is_named(seeded):
    class Old(nn.Linear):
        def forward(self, x):
            return OldFunction.apply(super().forward(x))

    f, params = fsmap.functional(nn.Sequential(nn.Linear(2, 2), Old(2, 1)))
    with pytest.raises(
        UnsupportedModuleError, match=r"reverse-mode differentiation failed, in '1' \(Old\): In ord"
    ):
        linearize(f, params, torch.ones(3, 2))
