"""``frozen``: R of the deployed function, and a gradient that knows that statistics follow."""

from __future__ import annotations

import copy

import pytest
import torch
from fsmap.objective.following import following
from tests.oracles import follow_slow, gradient_slow, jacobian_slow
from torch import Tensor, nn

import fsmap
from fsmap.functional import unravel
from fsmap.linalg.probes import Stream

S = 5


def images() -> nn.Sequential:
    """Convolutions, one layer without weights of its own, one that nothing comes before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.BatchNorm2d(1, affine=False),
            nn.Conv2d(1, 3, 2),
            nn.BatchNorm2d(3),
            nn.Tanh(),
            nn.Conv2d(3, 2, 2),
            nn.BatchNorm2d(2, affine=False),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(2, 2),
        )
        for layer in net:
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.5, 2.0)
        return net


def points(n: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, 1, 3, 3, generator=generator)


def definition(net: nn.Module, estimator: str, step: int = 0) -> float:
    """R of the network in eval(): ‖Jψ‖²/S for what estimates with ψ, else the trace itself."""
    net = copy.deepcopy(net).eval()
    f, params = fsmap.functional(net)
    stream = Stream(0, step)
    jac = jacobian_slow(f, params, points(S, stream.points()))  # [S, K, P]
    if estimator == "exact":
        return float(jac.square().sum() / S)
    psi = torch.cat([p[0].reshape(-1) for p in stream.psi(params).values()])
    return float((jac @ psi).square().sum() / S)


@pytest.mark.parametrize("estimator", ["jvp", "fd", "fd_central", "exact"])
def test_value_and_gradient_are_the_definition_s(estimator: str) -> None:
    net = images()
    beta = {"fd": 1e-7, "fd_central": 1e-5}.get(estimator, 1e-3)
    penalty = fsmap.LaplacianPenalty(net, points, num_points=S, estimator=estimator, beta=beta)
    value = penalty()
    value.backward()
    exactly = estimator in ("jvp", "exact")
    assert value.item() == pytest.approx(definition(net, estimator), rel=1e-10 if exactly else 1e-5)

    x = points(S, Stream(0, 0).points())
    reference = follow_slow(net, x)

    def moved_value(moved: dict[str, Tensor]) -> float:
        other = copy.deepcopy(net)
        other.load_state_dict(moved, strict=False)
        follow_slow(other, x, reference)
        return definition(other, estimator)

    _, params = fsmap.functional(net)
    expected = unravel(gradient_slow(moved_value, params, 1e-4), params)
    tolerance = 1e-7 if exactly else 1e-5
    for name, p in net.named_parameters():
        got = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(got, expected[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("estimator", ["jvp", "fd", "fd_central", "exact"])
def test_in_lmap_they_follow_as_in_the_pass_of_the_training_points(estimator: str) -> None:
    net = images()
    x = points(7, torch.Generator().manual_seed(1))
    reference = follow_slow(net, x, training=True)
    before = copy.deepcopy(net)
    beta = {"fd": 1e-7, "fd_central": 1e-5}.get(estimator, 1e-3)
    lm = fsmap.LMAP(net, points, num_points=S, estimator=estimator, beta=beta, batchnorm="frozen")
    lm(x)[1].backward()
    _, params = fsmap.functional(before)
    before(x)  # R is that of the statistics as the training points' pass has left them

    def moved_value(moved: dict[str, Tensor]) -> float:
        other = copy.deepcopy(before)
        other.load_state_dict(moved, strict=False)
        follow_slow(other, x, reference, training=True)
        return definition(other, estimator)

    expected = unravel(gradient_slow(moved_value, params, 1e-4), params)
    tolerance = 1e-7 if estimator in ("jvp", "exact") else 1e-5
    for name, p in net.named_parameters():
        got = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(got, expected[name], rtol=tolerance, atol=tolerance, msg=name)


def test_vjp_has_the_exact_gradient_on_average() -> None:
    def gradient(estimator: str, probes: int) -> Tensor:
        net = images()
        penalty = fsmap.LaplacianPenalty(
            net, points, num_points=S, estimator=estimator, probes=probes
        )
        penalty().backward()
        return net[4].weight.grad.flatten()

    exact, estimate = gradient("exact", 1), gradient("vjp", 2_000)
    assert (estimate - exact).norm() < 0.1 * exact.norm()


def test_a_bias_that_is_normalized_away_is_left_alone() -> None:
    net = images()
    fsmap.LaplacianPenalty(net, points, num_points=S)().backward()
    assert net[1].bias.grad.abs().max() < 1e-12 < net[1].weight.grad.abs().max()


def test_layers_that_somebody_froze_stand_still() -> None:
    net = images()
    for layer in net:
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    with following(net) as layers:
        assert not layers
    fsmap.LaplacianPenalty(net, points, num_points=S)().backward()
    assert net[1].bias.grad.abs().max() > 1e-6


def test_statistics_layers_and_modes_are_put_back() -> None:
    net = images()
    before = {n: b.clone() for n, b in net.named_buffers()}

    def fail_inside() -> None:
        with following(net):
            assert not net[2].training
            message = "inside"
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    fsmap.LaplacianPenalty(net, points, num_points=S)().backward()
    assert net[2].training
    assert "forward" not in net[2].__dict__
    for name, b in net.named_buffers():
        assert torch.equal(b, before[name]), name


class Activated(nn.BatchNorm2d):
    """A layer that does more than BatchNorm."""

    def forward(self, x: Tensor, slope: float = 0.5) -> Tensor:
        return nn.functional.leaky_relu(super().forward(x), slope)


def test_layers_with_a_forward_of_their_own_do_what_they_do() -> None:
    net, x = images(), points(7, torch.Generator().manual_seed(1))
    net[2] = Activated(3)
    _, value = fsmap.LMAP(net, points, num_points=S, batchnorm="frozen")(x)
    value.backward()
    assert value.item() == pytest.approx(definition(net, "jvp"), rel=1e-10)


def test_a_forward_that_somebody_replaced_is_called_and_kept() -> None:
    net, x, called = images(), points(7, torch.Generator().manual_seed(1)), []
    own = net[2].forward

    def hooked(z: Tensor) -> Tensor:
        called.append(len(z))
        return own(z)

    net[2].forward = hooked
    fsmap.LMAP(net, points, num_points=S, batchnorm="frozen")(x)[1].backward()
    assert called == [7, S]
    assert net[2].forward is hooked


@pytest.mark.parametrize("stands_still", [False, True])
def test_autocast_on_a_cpu_keeps_forward_mode(stands_still: bool) -> None:
    gradients = []
    for autocast in (False, True):
        net, x = images().float(), points(7, torch.Generator().manual_seed(1)).float()
        if stands_still:
            net[2].eval()
        lm = fsmap.LMAP(net, x[:S], num_points=S, batchnorm="frozen", probes=4)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = lm(x)[1]
        value.backward()
        assert lm.regularizer.estimator == "jvp"  # and no warning, which would be an error
        gradients.append(
            torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        )
    assert (gradients[1] - gradients[0]).norm() < 0.1 * gradients[0].norm()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = images()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[3:](self.inner[2](input=self.inner[1](x)))


def test_layers_that_are_called_by_keyword() -> None:
    lm = fsmap.LMAP(Named(), points, num_points=S, batchnorm="frozen")
    assert lm(points(7, torch.Generator().manual_seed(1)))[1] > 0


@pytest.mark.parametrize("estimator", ["jvp", "vjp", "exact"])
def test_a_model_in_half_precision(estimator: str) -> None:
    values = []
    for dtype in (torch.bfloat16, torch.float64):
        net = images().bfloat16().to(dtype)
        x = points(7, torch.Generator().manual_seed(1)).bfloat16().to(dtype)
        px = x[:S]
        lm = fsmap.LMAP(net, px, num_points=S, batchnorm="frozen", estimator=estimator)
        value = lm(x)[1]
        value.backward()
        values.append(value.item())
        assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())
    if estimator == "exact":  # the others draw other numbers in another precision
        assert values[0] == pytest.approx(values[1], rel=0.1)


def test_outputs_are_those_of_eval_to_the_bit() -> None:
    net, x = images(), points(S, torch.Generator().manual_seed(1))
    with following(net):
        out = net(x)
    assert torch.equal(out, net.eval()(x))


def test_without_gradients_nothing_is_read_off() -> None:
    net, x = images(), points(S, torch.Generator().manual_seed(1))
    with torch.no_grad(), following(net) as layers:
        net(x)
        assert [layer.change for layer in layers] == [None] * 3
    with following(net) as layers:
        net(x)
        assert None not in [layer.change for layer in layers]
