"""Jacobians against one backward pass per output, and their products with vectors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

import cases
import fsmap
import oracles
from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import outputs, ravel, take_points, unravel, with_state
from fsmap.linalg import jacobian as module
from fsmap.linalg.jacobian import (
    ChangedError,
    Dense,
    Outer,
    Watch,
    add,
    inner,
    jacobian,
    jvp,
    linearize,
    look,
    survey,
    vjp,
)


@pytest.mark.parametrize("name", cases.MODELS)
def test_dense(name):
    case = cases.case(name)
    expected = oracles.jacobian_slow(case.f, case.params, case.x)
    found = jacobian(case.f, case.params, case.x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["wide", "sequence", "cnn", "batchnorm_train", "dict_input"])
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_chunks_change_nothing(name, chunk):
    case = cases.case(name)
    whole = jacobian(case.f, case.params, case.x)
    torch.testing.assert_close(jacobian(case.f, case.params, case.x, chunk=chunk), whole)


@pytest.mark.parametrize("name", cases.MODELS)
def test_gradient(name):
    """The derivative of ⟨C, J⟩ for a fixed C, against differences of the slow Jacobian."""
    case = cases.case(name)
    weight = oracles.jacobian_slow(case.f, case.params, case.x).sin()
    value = (weight * jacobian(case.f, case.params, case.x)).sum()
    if name in ("linear", "frozen"):  # linear in what is trained: J is a constant
        assert not value.requires_grad
        return
    grads = torch.autograd.grad(value, case.params.values(), allow_unused=True)
    for seed in range(2):
        direction = cases.direction(case.params, seed)
        wanted = oracles.directional_slow(
            lambda p: (weight * oracles.jacobian_slow(case.f, p, case.x)).sum(),
            case.params,
            direction,
        )
        pairs = zip(grads, direction.values(), strict=True)
        found = sum(float((g * d).sum()) for g, d in pairs if g is not None)
        assert found == pytest.approx(wanted, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("name", cases.MODELS)
def test_products(name):
    case = cases.case(name)
    jac = oracles.jacobian_slow(case.f, case.params, case.x)  # [S, K, P]
    psi = cases.direction(case.params)
    out, forward, _ = jvp(case.f, case.params, case.x, psi)
    torch.testing.assert_close(out, case.f(case.params, case.x))
    torch.testing.assert_close(forward, jac @ ravel(psi))
    out, transpose, _ = vjp(case.f, case.params, case.x)
    u = forward.sin()
    torch.testing.assert_close(out, case.f(case.params, case.x))
    expected = torch.einsum("sk,skp->p", u, jac)
    torch.testing.assert_close(ravel(transpose(u)), expected)


def test_products_keep_the_state_and_leave_the_module_alone():
    case = cases.case("batchnorm_train")
    before = copy.deepcopy(case.module.state_dict())
    _, _, forward_state = jvp(case.f, case.params, case.x, cases.direction(case.params))
    _, _, reverse_state = vjp(case.f, case.params, case.x)
    jacobian(case.f, case.params, case.x)
    _, plain_state = with_state(case.f, case.params, case.x)
    assert plain_state.buffers["1.num_batches_tracked"] == 1
    for key, value in plain_state.buffers.items():
        torch.testing.assert_close(forward_state.buffers[key], value)
        torch.testing.assert_close(reverse_state.buffers[key], value)
    for key, value in case.module.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_a_plain_function_is_a_model_too():
    params = {"w": torch.tensor([1.0, 2.0])}

    def f(p, x):
        return (x * p["w"]).sin().sum(1)  # [S]

    x = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    expected = x * (x * params["w"]).cos()
    torch.testing.assert_close(jacobian(f, params, x)[:, 0], expected)
    assert outputs(f, params, x).shape == (3, 1)
    assert with_state(f, params, x)[1].buffers == {}


def test_add():
    params = {"w": torch.tensor([1.0, 2.0])}
    assert torch.equal(add(params, -2.0, {"w": torch.ones(2)})["w"], torch.tensor([-1.0, 0.0]))


def test_a_layout_without_points_first_is_refused():
    params = {"w": torch.ones(2)}
    with pytest.raises(UnsupportedModuleError, match="returned"):
        outputs(lambda p, x: (x * p["w"]).mT, params, torch.ones(3, 2))
    with pytest.raises(UnsupportedModuleError, match="returned"):
        outputs(lambda p, x: (x * p["w"]).sum(), params, torch.ones(3, 2))


PRODUCTS = {
    "jacobian": lambda f, p, x: jacobian(f, p, x),
    "jvp": lambda f, p, x: jvp(f, p, x, p),
    "vjp": lambda f, p, x: vjp(f, p, x),
    "outputs": lambda f, p, x: outputs(f, p, x),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_points_that_do_not_fit_are_named(product, seeded):
    f, params = fsmap.functional(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
    with pytest.raises(
        InputError,
        match=r"cannot be evaluated at x of shape \(5, 3\), in '0' \(Linear\): .*5x3|1x3",
    ):
        product(f, params, torch.zeros(5, 3))
    f, params = fsmap.functional(nn.Conv2d(1, 2, 3))
    with pytest.raises(InputError, match="shape"):
        product(f, params, torch.zeros(5, 3, 8, 8))
    case = cases.case("dict_input")
    with pytest.raises(InputError, match="values"):
        product(case.f, case.params, {"values": case.x["values"]})


class Recurrent(nn.Module):
    """The LSTM kernel of float32 has no forward-mode derivative."""

    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(2, 3, batch_first=True)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.memory(x)[0][:, -1])


class Checkpointed(nn.Module):
    """Its backward pass would run at other parameters."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        hidden = checkpoint(self.body, x, use_reentrant=False, preserve_rng_state=False)
        return self.head(hidden.tanh())


def test_a_module_without_forward_mode_is_named(seeded):
    f, params = fsmap.functional(Recurrent().float())  # the kernel of float32 is the one without
    x = torch.randn(4, 5, 2, dtype=torch.float32)
    psi = {n: p.detach() for n, p in params.items()}
    with pytest.raises(
        UnsupportedModuleError,
        match=r"forward-mode .* failed, in 'memory' \(LSTM\) \(use the estimator 'fd_central'",
    ):
        jvp(f, params, x, psi)
    jac = oracles.jacobian_slow(f, params, x)
    _, transpose, _ = vjp(f, params, x)  # reverse mode is there
    torch.testing.assert_close(ravel(transpose(torch.ones(4, 1))), jac.sum((0, 1)))
    torch.testing.assert_close(jacobian(f, params, x), jac)


def test_an_output_that_is_no_tensor_is_named_before_the_missing_derivative(seeded):
    f, params = fsmap.functional(nn.LSTM(2, 3, batch_first=True).float())
    x = torch.zeros(4, 5, 2, dtype=torch.float32)
    with pytest.raises(UnsupportedModuleError, match="returned"):
        jvp(f, params, x, {n: p.detach() for n, p in params.items()})


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_checkpointing_is_refused(product, seeded):
    f, params = fsmap.functional(Checkpointed())
    with pytest.raises(UnsupportedModuleError, match="checkpointing"):
        product(f, params, torch.ones(2, 2))


def test_control_flow_on_values_is_no_obstacle(seeded):
    """A module that looks at its input cannot be vmapped; it is differentiated as a batch."""

    class Branch(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else -super().forward(x)

    f, params = fsmap.functional(Branch(2, 1))
    x = torch.ones(3, 2)
    torch.testing.assert_close(jacobian(f, params, x), oracles.jacobian_slow(f, params, x))


def test_vmaps_over_members():
    case = cases.case("wide")
    center = ravel(case.params).detach()
    members = unravel(torch.stack([center, 2 * center]), case.params)
    found = torch.func.vmap(lambda p: jacobian(case.f, p, case.x))(members)
    for m in range(2):
        alone = jacobian(case.f, {n: p[m] for n, p in members.items()}, case.x)
        torch.testing.assert_close(found[m], alone)


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


def seen(module, *shape):
    f, params = fsmap.functional(module.double())
    return look(f, params, torch.ones(2, *shape))


def test_layers_of_an_mlp():
    found = look(*cases.case("wide")[:3])
    assert [(u.weight, u.bias, u.shape, u.places, u.width) for u in found.uses] == [
        ("0.weight", "0.bias", (1, 8), 1, 8),
        ("2.weight", "2.bias", (1, 3), 1, 3),
    ]
    assert found.others == ()
    assert found.outputs == 3
    assert found.leads


def test_shared_weights_are_used_twice_and_frozen_ones_not_at_all():
    assert [u.weight for u in look(*cases.case("shared")[:3]).uses] == ["first.weight"] * 2
    frozen = look(*cases.case("frozen")[:3])
    assert [(u.weight, u.bias) for u in frozen.uses] == [("2.weight", "2.bias")]


def test_normalization_and_attention_are_other_uses():
    found = look(*cases.case("sequence")[:3])
    assert "encoder.norm1.weight" in found.others
    assert "encoder.self_attn.in_proj_weight" in found.others
    assert [u.weight for u in found.uses] == [
        *("encoder.linear1.weight", "encoder.linear2.weight", "head.weight")
    ]
    assert found.uses[0].places == 2  # tokens
    assert not found.leads


class Tied(nn.Module):
    """A weight that is a linear layer's and something else's."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.layer(x) @ self.layer.weight


def test_one_other_use_makes_a_parameter_other(seeded):
    found = seen(Tied(), 2)
    assert set(found.others) == {"layer.weight", "idle"}
    assert [(u.weight, u.bias) for u in found.uses] == [(None, "layer.bias")]


def test_questions_about_shape_are_no_uses(seeded):
    class Asking(nn.Linear):
        def forward(self, x):
            assert self.weight.shape[1] == x.shape[-1]
            assert self.weight.dtype == x.dtype
            assert self.weight.numel() > 0
            return super().forward(x)

    assert seen(Asking(2, 3), 2).others == ()


def test_weights_as_inputs_and_keyword_arguments(seeded):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))

        def forward(self, x):
            return F.linear(input=x, weight=F.linear(self.a, self.b))

    assert seen(Odd(), 2).others == ("a", "b")

    class Named(nn.Linear):
        def forward(self, x):
            return F.linear(input=x, weight=self.weight, bias=self.bias)

    assert [(u.weight, u.bias) for u in seen(Named(2, 2), 2).uses] == [("weight", "bias")]


@pytest.mark.parametrize(
    ("module", "shape", "places"),
    [
        (nn.Conv2d(2, 3, 2), (2, 4, 5), 12),
        (nn.Conv2d(2, 3, (2, 3), stride=2, padding=(1, 0), dilation=(1, 2)), (2, 6, 8), 8),
        (nn.Conv2d(2, 3, 2, padding_mode="circular", padding=1), (2, 3, 3), 16),
        (nn.Conv2d(2, 3, 1, padding="valid"), (2, 3, 3), None),
        (nn.Conv2d(2, 4, 2, groups=2), (2, 4, 4), None),
        (nn.Conv1d(2, 3, 2, stride=2), (2, 7), 3),
        (nn.Conv3d(1, 2, 2), (1, 3, 3, 3), None),
        (nn.ConvTranspose2d(1, 2, 2), (1, 3, 3), None),
    ],
)
def test_convolutions(module, shape, places):
    found = seen(module, *shape)
    if places is None:  # differentiated as any other parameter
        assert found.others == ("weight", "bias")
    else:
        assert found.others == ()
        assert [u.places for u in found.uses] == [places]


def test_plain_functions_are_seen_too():
    params = {"w": torch.ones(2, 3), "c": torch.ones(2)}
    found = look(lambda p, x: F.linear(x, p["w"]) * p["c"], params, torch.ones(4, 3))
    assert [u.weight for u in found.uses] == ["w"]
    assert found.others == ("c",)


def test_numbers_per_point():
    case = cases.case("wide")  # K = 3 outputs; layers 2 → 8 → 3
    found = look(case.f, case.params, case.x)
    assert found.numbers_per_point(case.params) == (2 + 3 * 8) + (8 + 3 * 3)
    sequence = cases.case("sequence")
    found = look(sequence.f, sequence.params, sequence.x)
    others = sum(sequence.params[name].numel() for name in found.others)
    written = [
        u.places * (u.kernel[0] + 4 * u.width) + 4 * u.width * u.kernel[0] for u in found.uses
    ]
    assert found.numbers_per_point(sequence.params) == 4 * others + sum(written)
    compact = [
        min(u.places * (u.kernel[0] + 4 * u.width), 4 * u.width * u.kernel[0]) for u in found.uses
    ]
    assert found.compact_numbers(sequence.params) == 4 * others + sum(compact)


def test_taps_are_added_and_inputs_kept():
    case = cases.case("wide")
    taps = [torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(5, 3)]
    with Watch(case.params, taps) as watch:
        out = case.f(case.params, case.x)
    hidden = case.module[0](case.x) + taps[0]
    torch.testing.assert_close(out, case.module[1:](hidden))
    torch.testing.assert_close(watch.finish()[1], case.module[1](hidden))


def test_other_calls_than_surveyed_are_noticed():
    case = cases.case("wide")
    for taps in ([torch.zeros(5, 8)], [torch.zeros(4, 8), torch.zeros(5, 3)]):
        with pytest.raises(ChangedError), Watch(case.params, taps):
            case.f(case.params, case.x)
    watch = Watch(case.params, [torch.zeros(5, 8), torch.zeros(5, 3), torch.zeros(1)])
    with watch:
        case.f(case.params, case.x)
    with pytest.raises(ChangedError):
        watch.finish()


def test_survey_of_one_point_is_enough():
    case = cases.case("dict_input")
    first = take_points(case.x, slice(0, 1))
    found = survey(lambda: case.f(case.params, first), case.params)
    assert found.uses[0].shape == (1, 2, 2)


def matrix(n, p, seed=0):
    return torch.randn(n, p, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)
    monkeypatch.setattr(module, "LEAST", 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("n", [1, 7, 8, 9, 12, 15])
@pytest.mark.parametrize("p", [1, 4, 9])
def test_value_and_derivatives(n, p):
    rows = matrix(n, p).requires_grad_()
    torch.testing.assert_close(inner(rows), rows @ rows.mT)
    weight = matrix(n, n, 1)  # not symmetric
    (found,) = torch.autograd.grad((weight * inner(rows).sin()).sum(), rows, create_graph=True)
    (wanted,) = torch.autograd.grad(
        (weight * (rows @ rows.mT).sin()).sum(), rows, create_graph=True
    )
    torch.testing.assert_close(found, wanted)
    again = [torch.autograd.grad(g.cos().sum(), rows)[0] for g in (found, wanted)]
    torch.testing.assert_close(again[0], again[1])


@pytest.mark.usefixtures("small_blocks")
def test_forward_mode_and_vmap():
    rows, tangent = matrix(9, 5), matrix(9, 5, 1)
    found = torch.func.jvp(inner, (rows,), (tangent,))[1]
    torch.testing.assert_close(found, tangent @ rows.mT + rows @ tangent.mT)
    stacked = torch.stack([rows, tangent]).requires_grad_()
    torch.testing.assert_close(vmap(inner)(stacked), stacked @ stacked.mT)
    leaf = rows.clone().requires_grad_()
    along = torch.func.jvp(inner, (leaf,), (tangent,))[1].square().sum()
    (found,) = torch.autograd.grad(along, leaf)
    (wanted,) = torch.autograd.grad((tangent @ leaf.mT + leaf @ tangent.mT).square().sum(), leaf)
    torch.testing.assert_close(found, wanted)
