"""``frozen``: R of the deployed function, and a gradient that knows that statistics follow."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap
from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.functional import unravel
from fsmap.px import Stream
from oracles import follow_slow, gradient_slow, jacobian_slow

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


def batch(n: int = 7) -> Tensor:
    return points(n, torch.Generator().manual_seed(1))


def frozen(net: nn.Module, **options: object) -> fsmap.LMAP:
    return fsmap.LMAP(net, points, num_points=S, batchnorm="frozen", **options)


def definition(net: nn.Module, estimator: str = "jvp") -> float:
    """R of the network in eval(): ‖Jψ‖²/S for what estimates with ψ, else the trace itself."""
    f, params = fsmap.functional(copy.deepcopy(net).eval())
    stream = Stream(0, 0)
    jac = jacobian_slow(f, params, points(S, stream.points()))  # [S, K, P]
    if estimator == "exact":
        return float(jac.square().sum() / S)
    psi = torch.cat([p[0].reshape(-1) for p in stream.psi(params).values()])
    return float((jac @ psi).square().sum() / S)


def follow_gradient(net: nn.Module, estimator: str, follow: Callable[[nn.Module], object]) -> dict:
    """Finite differences of R at moved weights, after the statistics have followed."""

    def value(moved: dict[str, Tensor]) -> float:
        other = copy.deepcopy(net)
        other.load_state_dict(moved, strict=False)
        follow(other)
        return definition(other, estimator)

    _, params = fsmap.functional(net)
    return unravel(gradient_slow(value, params, 1e-4), params)


def check(net: nn.Module, estimator: str, *, training: bool) -> None:
    """R of LMAP or of a penalty, and its gradient, against the definition."""
    beta = {"fd": 1e-7, "fd_central": 1e-5}.get(estimator, 1e-3)
    x = batch() if training else points(S, Stream(0, 0).points())
    reference, before = follow_slow(net, x, training=training), copy.deepcopy(net)
    if training:
        value = frozen(net, estimator=estimator, beta=beta)(x)[1]
        before(x)  # R is that of the statistics as the training points' pass has left them
    else:
        options = {"num_points": S, "estimator": estimator, "beta": beta}
        value = fsmap.LaplacianPenalty(net, points, **options)()
        assert all(map(torch.equal, net.buffers(), before.buffers()))
    value.backward()
    exactly = estimator in ("jvp", "exact")
    expected = definition(before, estimator)
    assert value.item() == pytest.approx(expected, rel=1e-10 if exactly else 1e-5)
    wanted = follow_gradient(
        before, estimator, lambda other: follow_slow(other, x, reference, training=training)
    )
    tolerance = 1e-7 if exactly else 1e-5
    for name, p in net.named_parameters():
        got = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(got, wanted[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("estimator", ["jvp", "fd", "fd_central", "exact"])
@pytest.mark.parametrize("seen", ["evaluation points", "training points"])
def test_value_and_gradient_are_the_definition_s(estimator: str, seen: str) -> None:
    """A penalty follows the pass of its own points, LMAP that of the training points."""
    check(images(), estimator, training=seen == "training points")


def test_vjp_has_the_exact_gradient_on_average() -> None:
    def gradient(estimator: str, probes: int) -> Tensor:
        net = images()
        options = {"num_points": S, "estimator": estimator, "probes": probes}
        fsmap.LaplacianPenalty(net, points, **options)().backward()
        return net[4].weight.grad.flatten()

    exact, estimate = gradient("exact", 1), gradient("vjp", 2_000)
    assert (estimate - exact).norm() < 0.1 * exact.norm()


def test_layers_that_somebody_froze_stand_still() -> None:
    """A bias that is normalized away has no gradient, unless the layer after it stands still."""
    found = []
    for still in (False, True):
        net = images()
        for layer in net:
            layer.train(not (still and isinstance(layer, nn.BatchNorm2d)))
        fsmap.LaplacianPenalty(net, points, num_points=S)().backward()
        found.append(net[1].bias.grad.abs().max())
    assert found[0] < 1e-12
    assert found[1] > 1e-6


class Activated(nn.BatchNorm2d):
    """A layer that does more than BatchNorm."""

    def forward(self, input: Tensor, slope: float = 0.5) -> Tensor:
        return nn.functional.leaky_relu(super().forward(input), slope)


@pytest.mark.parametrize("kind", ["subclass", "keyword"])
def test_layers_with_a_forward_of_their_own_do_what_they_do(kind: str) -> None:
    net, options = images(), {}
    if kind == "subclass":
        net[2] = Activated(3)
    else:
        options = {"forward": lambda m, x: m[3:](m[2](input=m[:2](x)))}
    _, value = frozen(net, **options)(batch())
    value.backward()
    assert value.item() == pytest.approx(definition(net), rel=1e-10)


@pytest.mark.parametrize("stands_still", [False, True])
def test_autocast_on_a_cpu_keeps_forward_mode(stands_still: bool) -> None:
    gradients = []
    for autocast in (False, True):
        net, x = images().float(), batch().float()
        net[2].train(not stands_still)
        lm = fsmap.LMAP(net, x[:S], num_points=S, batchnorm="frozen", probes=4)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = lm(x)[1]
        value.backward()
        assert "jvp" in repr(lm)  # and no warning, which would be an error
        grads = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
        gradients.append(torch.cat(grads))
    assert (gradients[1] - gradients[0]).norm() < 0.1 * gradients[0].norm()


class Standardized(nn.Conv2d):
    """A weight that ``F.batch_norm`` standardizes, as in BiT."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.reshape(1, len(self.weight), -1)
        weight = F.batch_norm(weight, None, None, training=True)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("others", ["no BatchNorm", "BatchNorm"])
def test_standardized_weights_follow_the_parameters(others: str) -> None:
    """Their statistics are those of the weights at each θ, and not of a batch."""
    net = images()
    net[1] = Standardized(1, 3, 2)
    if others == "no BatchNorm":
        for i, layer in enumerate(net):
            if isinstance(layer, nn.BatchNorm2d):
                net[i] = nn.GroupNorm(1, layer.num_features)
    check(net, "jvp", training=True)


class Own(nn.Module):
    """BatchNorm that is no subclass of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=self.training)


def test_a_layer_of_another_class_is_one_of_torch_s() -> None:
    found = []
    for layer in (nn.BatchNorm2d(3, affine=False), Own()):
        net = images()
        net[2] = layer
        net[5] = net[0] = nn.Identity()
        value = frozen(net)(batch())[1]
        value.backward()
        found.append((value, net[1].weight.grad))
    torch.testing.assert_close(found[0], found[1])


def test_more_calls_at_evaluation_points_are_refused() -> None:
    net = images()
    forward = lambda m, x: m(x) + (0 if len(x) > S else m[0](x).sum())  # noqa: E731
    with pytest.raises(UnsupportedModuleError, match="BatchNorm 3 times"):
        frozen(net, forward=forward)(batch())


@pytest.mark.usefixtures("seeded")
def test_an_error_inside_leaves_modes_and_statistics() -> None:
    net = images()
    before = [b.clone() for b in net.buffers()]
    net[8] = nn.Linear(3, 2)  # does not fit
    with pytest.raises(InputError):
        fsmap.LaplacianPenalty(net, points, num_points=S)()
    assert net[2].training
    assert "forward" not in vars(net[2])
    assert all(map(torch.equal, net.buffers(), before))
