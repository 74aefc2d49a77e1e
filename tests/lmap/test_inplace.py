"""InPlacePenalty equals the functional `fd`: value, gradient, and the state it leaves behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsmap
from fsmap.errors import InputError, UnsupportedModuleError

S = 5
PX = fsmap.px.Normal(shape=(2,))


def network(dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)
        )
        net(torch.randn(20, 2))  # running statistics that are not the defaults
    return net


def gradients(module: nn.Module) -> dict[str, Tensor]:
    zero = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    return {n: zero[n] if p.grad is None else p.grad for n, p in module.named_parameters()}


OPTIONS = {
    "frozen": {"batchnorm": "frozen"},
    "batch": {"batchnorm": "batch"},
    "weights": {"metric": fsmap.metric.Weights(lambda x: x[:, 0].square())},
    "softmax-Fisher": {"metric": fsmap.metric.SoftmaxFisher()},
    "two probes": {"probes": 2},
    "every": {"every": 3},
}


# With dropout and several probes the functional pass draws another mask for each of them.
CASES = [(n, d) for n in OPTIONS for d in (0.0, 0.5) if d == 0 or n != "two probes"]


@pytest.mark.parametrize(("name", "dropout"), CASES)
def test_equals_the_functional_difference(name: str, dropout: float) -> None:
    module, options = network(dropout), OPTIONS[name]
    twin = copy.deepcopy(module)
    if name != "batch":
        twin[1].eval()  # in which statistics stand still, as they do in place
    wanted = fsmap.LaplacianPenalty(twin, PX, num_points=S, estimator="fd", **options)()
    (0.3 * wanted).backward()
    before = copy.deepcopy(module.state_dict())
    noise = torch.get_rng_state()
    got = fsmap.InPlacePenalty(module, PX, num_points=S, **options).backward(0.3)
    assert torch.equal(noise, torch.get_rng_state())
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())  # to the last bit
    assert got.item() == pytest.approx(wanted.item(), rel=1e-12)
    torch.testing.assert_close(gradients(module), gradients(twin), rtol=1e-10, atol=1e-10)


class Reversible(torch.autograd.Function):
    """A layer that runs again in its backward pass, as those of Reformer do."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layer(x).backward(grad)
        return x.grad, None


RECOMPUTING = {
    "activation checkpointing": lambda m, x: m[2:](checkpoint(m[:2], x, use_reentrant=False)),
    "reversible layers": lambda m, x: m[4](Reversible.apply(m[0](x), m[1:4])),
}


@pytest.mark.parametrize("name", RECOMPUTING)
def test_layers_that_run_again_in_the_backward_pass(name: str) -> None:
    """Which a functional pass has to refuse."""
    module, twin = network().eval(), network().eval()
    options = {"num_points": S, "forward": RECOMPUTING[name]}
    with pytest.raises(UnsupportedModuleError, match=f"{name}.*InPlacePenalty"):
        fsmap.LaplacianPenalty(module, PX, **options)()
    fsmap.LaplacianPenalty(twin, PX, num_points=S, estimator="fd")().backward()
    fsmap.InPlacePenalty(module, PX, **options).backward()
    torch.testing.assert_close(gradients(module), gradients(twin), rtol=1e-10, atol=1e-10)


def test_steps_are_counted_like_those_of_the_others() -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    penalty = fsmap.InPlacePenalty(module, PX, num_points=S, every=2).attach(optimizer)
    values = []
    for _ in range(2):
        values += [penalty.backward().item(), penalty.backward().item()]
        optimizer.step()
    assert values[0] > 0
    assert values[0] != values[1]  # points of their own
    assert values[2:] == [0.0, 0.0]
    with pytest.raises(InputError, match=r"penalty\.backward"):
        penalty(torch.zeros(4, 3))
    other = fsmap.InPlacePenalty(network(), PX, num_points=S)
    other.load_state_dict(penalty.state_dict())
    assert other.step == 2


def test_parameters_come_back_after_an_error() -> None:
    module = network()
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    module[4].register_forward_hook(fail)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(KeyboardInterrupt):
        fsmap.InPlacePenalty(module, PX, num_points=S).backward()
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())
