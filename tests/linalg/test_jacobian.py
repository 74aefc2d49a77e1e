"""Jacobians against one backward pass per output, and their products with vectors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cases
import fsmap
import oracles
from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import ravel, unravel
from fsmap.linalg.jacobian import add, jacobian, jvp, outputs, vjp, with_state


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
    with pytest.raises(UnsupportedModuleError, match=r"returned shape \(2, 3\) for 3 points"):
        outputs(lambda p, x: (x * p["w"]).mT, params, torch.ones(3, 2))
    with pytest.raises(UnsupportedModuleError, match=r"returned shape \(\) for 3 points"):
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
    with pytest.raises(InputError, match=r"x of shape \(5, 3, 8, 8\)"):
        product(f, params, torch.zeros(5, 3, 8, 8))
    case = cases.case("dict_input")
    with pytest.raises(InputError, match=r"\{'values': \(5, 2, 3\)\}, .*'mask'"):
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
    with pytest.raises(UnsupportedModuleError, match="the module returned tuple, which is neither"):
        jvp(f, params, x, {n: p.detach() for n, p in params.items()})


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_checkpointing_is_refused(product, seeded):
    f, params = fsmap.functional(Checkpointed())
    with pytest.raises(UnsupportedModuleError, match="uses activation checkpointing"):
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
