"""J at points: products, the factored form, and how parameters enter a model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

import cases
import fsmap
import oracles
from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import outputs, ravel, with_state
from fsmap.linalg import jacobian as module
from fsmap.linalg.jacobian import inner, jacobian, jvp, linearize, recorded_calls, vjp


@pytest.mark.parametrize("name", cases.MODELS)
def test_products(name):
    """And the state of their passes; the module stays as it is."""
    case = cases.case(name)
    before = copy.deepcopy(case.module.state_dict())
    jac = oracles.jacobian_slow(case.f, case.params, case.x)  # [S, K, P]
    psi = cases.direction(case.params)
    expected, state = with_state(case.f, case.params, case.x)
    assert ("1.running_mean" in state.buffers) == (name == "batchnorm_train")
    out, forward, forward_state = jvp(case.f, case.params, case.x, psi)
    torch.testing.assert_close((out, forward_state.buffers), (expected, state.buffers))
    torch.testing.assert_close(forward, jac @ ravel(psi))
    out, transpose, reverse_state = vjp(case.f, case.params, case.x)
    torch.testing.assert_close((out, reverse_state.buffers), (expected, state.buffers))
    u = forward.sin()
    torch.testing.assert_close(ravel(transpose(u)), torch.einsum("sk,skp->p", u, jac))
    torch.testing.assert_close(dict(case.module.state_dict()), dict(before), rtol=0, atol=0)


def test_a_plain_function_is_a_model_too():
    params = {"w": torch.tensor([1.0, 2.0])}

    def f(p, x):
        return (x * p["w"]).sin().sum(1)  # [S]

    x = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    torch.testing.assert_close(jacobian(f, params, x)[:, 0], x * (x * params["w"]).cos())
    assert outputs(f, params, x).shape == (3, 1)
    assert with_state(f, params, x)[1].buffers == {}
    for wrong in (lambda p, x: (x * p["w"]).mT, lambda p, x: (x * p["w"]).sum()):
        with pytest.raises(UnsupportedModuleError, match="returned"):
            outputs(wrong, params, torch.ones(3, 2))


PRODUCTS = {
    "jacobian": lambda f, p, x: jacobian(f, p, x),
    "jvp": lambda f, p, x: jvp(f, p, x, p),
    "vjp": lambda f, p, x: vjp(f, p, x),
    "outputs": lambda f, p, x: outputs(f, p, x),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_points_that_do_not_fit_are_named(product, seeded):
    f, params = fsmap.functional(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
    with pytest.raises(InputError, match=r"'0' \(Linear\)"):
        product(f, params, torch.zeros(5, 3))
    f, params = fsmap.functional(nn.Conv2d(1, 2, 3))
    with pytest.raises(InputError, match="shape"):
        product(f, params, torch.zeros(5, 3, 8, 8))
    case = cases.case("dict_input")
    with pytest.raises(InputError, match="values"):
        product(case.f, case.params, {"values": case.x["values"]})


def test_a_module_without_forward_mode_is_named(seeded):
    """The LSTM kernel of float32 has no forward-mode derivative."""
    x = torch.randn(4, 5, 2, dtype=torch.float32)
    net = nn.Sequential(nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 1)).float()
    f, params = fsmap.functional(net, forward=lambda m, x: m[1](m[0](x)[0][:, -1]))
    with pytest.raises(UnsupportedModuleError, match=r"'0' \(LSTM\).*fd_central"):
        jvp(f, params, x, {n: p.detach() for n, p in params.items()})
    jac = oracles.jacobian_slow(f, params, x)
    _, transpose, _ = vjp(f, params, x)  # reverse mode is there
    torch.testing.assert_close(ravel(transpose(torch.ones(4, 1))), jac.sum((0, 1)))
    torch.testing.assert_close(jacobian(f, params, x), jac)
    f, params = fsmap.functional(net[0])
    with pytest.raises(UnsupportedModuleError, match="returned"):  # a tuple: this comes first
        jvp(f, params, x, {n: p.detach() for n, p in params.items()})


def test_functions_without_a_rule_for_vmap(seeded):
    """Such as the product with a sparse matrix: one reverse pass per output instead."""
    mixing = torch.eye(3).roll(1, 0).to_sparse()
    forward = lambda m, x: torch.sparse.mm(mixing, m[0](x).tanh().T).T  # noqa: E731
    f, params = fsmap.functional(nn.Sequential(nn.Linear(2, 3)), forward=forward)
    x = torch.randn(4, 2)
    check(f, params, x)
    plain = fsmap.functional(f.module, forward=lambda m, x: m[0](x).tanh().roll(1, 1))[0]
    found = []
    for g in (f, plain):
        value = fsmap.trace(g, params, x, method="exact").value
        found.append((value, *torch.autograd.grad(value, list(params.values()))))
    torch.testing.assert_close(*found)


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
    with pytest.raises(UnsupportedModuleError, match=r"reverse-mode .*'1' \(Old\)"):
        linearize(f, params, torch.ones(3, 2))


class SequenceFirst(nn.Module):
    """Its layers see [T, S, d], not [S, T, d]."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens
        self.layer, self.head = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.layer(x[None].expand(self.tokens, -1, -1)).tanh()).sum(0)


class Flattened(nn.Linear):
    """Its layer sees [S·T, d]."""

    def forward(self, x):
        return super().forward(x.reshape(-1, 2)).tanh().reshape(len(x), -1)


class Branch(nn.Linear):
    """Control flow on values: it cannot be vmapped, and is differentiated as a batch."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


class Twice(nn.Linear):
    """One weight in two calls."""

    def forward(self, x):
        return super().forward(super().forward(x).tanh())


class Tied(nn.Module):
    """A weight that is a linear layer's and something else's, and one that is not used."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.layer(x) @ self.layer.weight


class Coupled(nn.Linear):
    """Its points depend on each other, which no module tells; the first point may not notice."""

    def __init__(self, couple):
        super().__init__(2, 3)
        self.couple = couple

    def forward(self, x):
        return self.couple(super().forward(x).tanh())


class Odd(nn.Module):
    """A weight as input of a linear map, and arguments by name."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return F.linear(input=x, weight=F.linear(self.a, self.b))


class Asking(nn.Linear):
    """Questions about the shape of a weight, and arguments by name."""

    def forward(self, x):
        assert self.weight.shape[1] == x.shape[-1]
        assert self.weight.numel() > 0
        return F.linear(input=x, weight=self.weight, bias=self.bias)


# A module, points, and the parameters that are not those of a linear layer.
MODULES = {
    "sequence_first": (lambda: SequenceFirst(4), (5, 2), ()),
    "one_token": (lambda: SequenceFirst(1), (5, 2), ()),
    "as_many_tokens_as_points": (lambda: SequenceFirst(5), (5, 2), ()),
    "flattened": (lambda: Flattened(2, 3), (5, 3, 2), ()),
    "branch": (lambda: Branch(2, 1), (3, 2), ()),
    "tied": (Tied, (3, 2), ("idle", "layer.weight")),
    "twice": (lambda: Twice(2, 2, bias=False), (3, 2), ("weight",)),
    "odd": (Odd, (3, 2), ("a", "b")),
    "coupled_to_the_first": (lambda: Coupled(lambda h: h - h[:1].sin()), (4, 2), ()),
    "coupled_to_those_before": (lambda: Coupled(lambda h: h.cumsum(0)), (4, 2), ()),
    "coupled_to_the_mean": (lambda: Coupled(lambda h: h - h.mean(0)), (4, 2), ()),
    "asking": (lambda: Asking(2, 3), (4, 2), ()),
    "conv": (
        lambda: nn.Conv2d(2, 3, (2, 3), stride=2, padding=(1, 0), dilation=(1, 2)),
        *((3, 2, 6, 8), ()),
    ),
    "conv_circular": (
        lambda: nn.Conv2d(2, 3, 2, padding_mode="circular", padding=1), (3, 2, 3, 3), (),
    ),
    "conv_no_bias": (lambda: nn.Conv2d(2, 2, 2, bias=False), (3, 2, 3, 3), ()),
    "conv_1d": (lambda: nn.Conv1d(2, 3, 2, stride=2), (3, 2, 7), ("weight", "bias")),
    "conv_valid": (lambda: nn.Conv2d(2, 3, 1, padding="valid"), (3, 2, 3, 3), ("weight", "bias")),
    "conv_groups": (lambda: nn.Conv2d(2, 4, 2, groups=2), (3, 2, 3, 3), ("weight", "bias")),
    "conv_3d": (lambda: nn.Conv3d(1, 2, 2), (3, 1, 3, 3, 3), ("weight", "bias")),
    "conv_transposed": (lambda: nn.ConvTranspose2d(1, 2, 2), (3, 1, 3, 3), ("weight", "bias")),
    "embedding": (lambda: nn.Embedding(5, 2), (4, 3), ("weight",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules(name, seeded):
    make, shape, others = MODULES[name]
    f, params = fsmap.functional(make())
    x = torch.randint(0, 5, shape) if name == "embedding" else torch.rand(shape)
    check(f, params, x)
    assert recorded_calls(f, params, x).others == others


@pytest.mark.parametrize("name", cases.MODELS)
def test_cases(name):
    check(*cases.case(name)[:3])


def check(f, params, x):
    """Everything that factors can do, against the slow Jacobian."""
    jac = oracles.jacobian_slow(f, params, x)
    torch.testing.assert_close(jacobian(f, params, x), jac)
    flat = jac.flatten(0, 1)
    factors = linearize(f, params, x)
    torch.testing.assert_close(factors.rows(), jac, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(factors.gram(), flat @ flat.mT, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(factors.squares(), jac.square().sum(-1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(factors.out, f(params, x).reshape(len(jac), -1))
    found = fsmap.trace(f, params, x, method="exact").value
    torch.testing.assert_close(found, jac.square().sum() / len(jac), rtol=1e-10, atol=1e-12)
    mixed = factors.mixed(lambda u: torch.stack([u.sum(1), 2 * u[:, 0]], dim=1))
    expected = torch.stack([jac.sum(1), 2 * jac[:, 0]], dim=1)
    torch.testing.assert_close(mixed.rows(), expected, rtol=1e-10, atol=1e-12)


def test_gram_is_double_whatever_the_model_is(seeded):
    f, params = fsmap.functional(nn.Linear(3, 2).float())
    x = torch.randn(4, 3, dtype=torch.float32)
    gram = linearize(f, params, x).gram()
    exact = torch.kron(x.double() @ x.double().mT + 1, torch.eye(2))
    torch.testing.assert_close(gram, exact, rtol=1e-14, atol=1e-14)  # and float64


def test_calls_are_recorded_again_if_they_change(seeded):
    class Switch(nn.Linear):
        """Does something else on request, which no mode tells."""

        twice = False

        def forward(self, x):
            out = super().forward(x).tanh()
            return super().forward(out) if self.twice else out

    net, x = Switch(2, 2), torch.randn(3, 2)
    f, params = fsmap.functional(net)
    check(f, params, x)
    net.twice = True
    check(f, params, x)  # differentiated as a batch
    check(f, params, x)
    net.twice = False
    check(f, params, torch.randn(3, 4, 2))  # other shapes of a point


def test_calls_of_another_weight_or_of_other_shapes(seeded):
    used = ["a", "b"]
    f = lambda p, x: F.linear(F.linear(x, p[used[0]]).tanh(), p[used[1]])  # noqa: E731
    params, x = {n: torch.randn(3, 3) for n in "ab"}, torch.randn(5, 3)
    for used[1] in "ba":
        check(f, params, x)
    product = lambda p, x: x @ p["w"]  # noqa: E731
    for width in (1, 5):
        log_det = fsmap.log_det(product, {"w": torch.randn(3, width)}, x[:3], jitter=0.0)
        torch.testing.assert_close(log_det, width * (x[:3].mT @ x[:3] / 3).logdet())


def test_a_callable_without_weak_references():
    class Model:
        __slots__ = ()

        def __call__(self, p, x):
            return F.linear(x, p["w"])

    check(Model(), {"w": torch.ones(2, 3)}, torch.randn(4, 3, generator=torch.Generator()))


def test_random_functions_inside_a_model_are_differentiated_as_a_batch(seeded):
    """F.dropout has no attribute that tells; the passes of the batch all have one mask."""
    f, params = fsmap.functional(nn.Linear(2, 2), forward=lambda m, x: F.dropout(m(x), 0.5))
    rows = linearize(f, params, torch.randn(6, 2)).rows()
    kept = rows[:, :, -2:].sum(-1)  # the bias: 2 where kept, 0 where dropped
    assert set(kept.flatten().tolist()) == {0.0, 2.0}


def test_many_points_are_differentiated_in_turn(monkeypatch):
    case = cases.case("cnn")
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    assert len(module.chunks(case.f, case.params, case.x)) == len(case.x)
    jac = oracles.jacobian_slow(case.f, case.params, case.x)
    torch.testing.assert_close(jacobian(case.f, case.params, case.x).detach(), jac)
    torch.testing.assert_close(module.written_out(*case[:3])[1], case.f(case.params, case.x))


def test_inner_products_and_derivatives(monkeypatch, seeded):
    monkeypatch.setattr(module, "LEAST", 1)
    stacked = torch.randn(2, 5, 3).requires_grad_()
    torch.testing.assert_close(vmap(inner)(stacked), stacked @ stacked.mT)
    rows = stacked[0].detach().requires_grad_()
    assert torch.autograd.gradcheck(inner, rows, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(inner, rows, check_fwd_over_rev=True)
