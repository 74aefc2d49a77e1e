"""Every symmetry is found where it was put, and none elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsmap
from fsmap.doctor import spectrum, symmetry
from oracles import jacobian_slow

SMOOTH = {"tanh": nn.Tanh, "gelu": nn.GELU, "sigmoid": nn.Sigmoid}
HOMOGENEOUS = {"relu": nn.ReLU, "leaky": nn.LeakyReLU}
SIZES = {
    "inputs": st.integers(1, 3),
    "hidden": st.integers(2, 5),
    "outputs": st.integers(1, 3),
    "seed": st.integers(0, 10**6),
}
few = settings(max_examples=8)


def build(make, seed=0):
    """A network with parameters and statistics of order one."""
    with torch.random.fork_rng(devices=[]):
        net = nn.Sequential(*make())
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.8 * torch.randn(p.shape, generator=g))
        for b in net.buffers():
            if b.is_floating_point():
                b.copy_(0.5 + torch.rand(b.shape, generator=g))
    return net


def mlp(activation, inputs=2, hidden=4, outputs=2, seed=0):
    def make():
        return nn.Linear(inputs, hidden), activation(), nn.Linear(hidden, outputs)

    return build(make, seed)


def points(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def found(net, x):
    """Exact findings as {kind: (units, directions, adds)}, and the rank."""
    d = fsmap.doctor(net, x)
    kinds = {}
    for f in d.symmetries:
        if f.kind != "no_effect":
            units, directions, adds = kinds.get(f.kind, (f.units, 0, 0))
            kinds[f.kind] = f.units, directions + f.directions, adds + f.adds
    return kinds, d.rank


def copy_unit(net, i, j, incoming=1.0, outgoing=True):
    with torch.no_grad():
        net[0].weight[j], net[0].bias[j] = incoming * net[0].weight[i], incoming * net[0].bias[i]
        if outgoing:
            net[2].weight[:, j] = net[2].weight[:, i]


def saturate(net):
    net[0].bias[1] = 1e3  # incoming weights have no effect either


PLANTED = {  # activations, change, and what is found for so many inputs and outputs
    "nothing": (SMOOTH, lambda net: None, lambda i, o: {}),
    "equal incoming weights": (  # outgoing weights are collinear if there is one output
        SMOOTH,
        lambda net: copy_unit(net, 0, 1, outgoing=False),
        lambda i, o: {"twin_inputs": ((0, 1), o + (i + 1) * (o == 1))},
    ),
    "zero outgoing weights": (
        SMOOTH,
        lambda net: net[2].weight[:, 1].zero_(),
        lambda i, o: {"unread_units": ((1,), i + 1)},
    ),
    "zero incoming weights": (  # an outgoing weight trades with the next bias
        ["tanh"],
        lambda net: net[0].weight[1].zero_(),
        lambda i, o: {"constant_units": ((1,), o)},
    ),
    "saturation": (["tanh"], saturate, lambda i, o: {"constant_units": ((1,), o + i + 1)}),
}


@pytest.mark.parametrize("name", PLANTED)
@few
@given(data=st.data(), **SIZES)
def test_what_was_put_into_a_smooth_network_is_found(name, data, inputs, hidden, outputs, seed):
    activations, change, expected = PLANTED[name]
    activation = SMOOTH[data.draw(st.sampled_from(sorted(activations)))]
    net = mlp(activation, inputs, hidden, outputs, seed)
    with torch.no_grad():
        change(net)
    kinds, _ = found(net, points(80, inputs))
    sizes = expected(inputs, outputs)
    assert kinds == {kind: (units, size, size) for kind, (units, size) in sizes.items()}


@few
@given(activation=st.sampled_from(sorted(SMOOTH | HOMOGENEOUS)), data=st.data(), **SIZES)
def test_twin_units(activation, data, inputs, hidden, outputs, seed):
    net = mlp((SMOOTH | HOMOGENEOUS)[activation], inputs, hidden, outputs, seed)
    i, j = sorted(data.draw(st.permutations(range(hidden)))[:2])
    copy_unit(net, i, j)
    kinds, rank = found(net, points(80, inputs))
    size = inputs + 1 + outputs  # Theorem 2: the image of S − I
    assert kinds["twin_units"] == ((i, j), size, size)
    assert rank.deficit >= size


def test_three_equal_units_are_one_finding():
    net = mlp(nn.Tanh, 2, 5, 2)
    copy_unit(net, 1, 2)
    copy_unit(net, 1, 4)
    kinds, rank = found(net, points(80, 2))
    assert kinds == {"twin_units": ((1, 2, 4), 10, 10)}
    assert rank.deficit == 10


@pytest.mark.parametrize(("activation", "odd"), [(nn.Tanh, True), (nn.GELU, False)])
def test_opposite_incoming_weights_of_an_odd_activation(activation, odd):
    net = mlp(activation)
    copy_unit(net, 0, 2, incoming=-1.0, outgoing=False)
    assert set(found(net, points(80, 2))[0]) == ({"twin_inputs"} if odd else set())


@few
@given(**SIZES)
def test_a_relu_that_is_never_active(inputs, hidden, outputs, seed):
    net = mlp(nn.ReLU, inputs, hidden, outputs, seed)
    with torch.no_grad():
        net[0].bias[1] = -1e3
    x = points(80, inputs)
    silent = tuple((net[:2](x) == 0).all(0).nonzero().flatten().tolist())
    kinds, _ = found(net, x)
    size = len(silent) * (inputs + 1 + outputs)
    assert 1 in silent
    assert kinds["silent_units"] == (silent, size, size)


@few
@given(activation=st.sampled_from(sorted(HOMOGENEOUS)), **SIZES)
def test_scale_of_homogeneous_units(activation, inputs, hidden, outputs, seed):
    net = mlp(HOMOGENEOUS[activation], inputs, hidden, outputs, seed)
    kinds, rank = found(net, points(80, inputs))
    assert kinds["scale"][1] == hidden
    assert rank.deficit >= hidden
    net[2].requires_grad_(False)
    assert "scale" not in found(net, points(80, inputs))[0]


NETWORKS = {
    "pooling": lambda: (
        *(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(12, 2)),
    ),
    "transposed": lambda: (nn.ConvTranspose2d(1, 3, 2), nn.ReLU(), nn.ConvTranspose2d(3, 1, 2)),
    "norm1d": lambda: (
        *(nn.Flatten(), nn.Linear(36, 3), nn.BatchNorm1d(3)),
        *(nn.Tanh(), nn.Linear(3, 2)),
    ),
    "norm2d": lambda: (
        *(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(48, 2)),
    ),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pooling", {"scale": 3}),
        ("transposed", {"scale": 3}),
        ("norm1d", {"batchnorm_scale": 3, "batchnorm_bias": 3}),
        ("norm2d", {"scale": 3, "batchnorm_scale": 3, "batchnorm_bias": 3}),
    ],
)
def test_convolutions_and_batchnorm_are_explained(name, expected, training):
    kinds, rank = found(build(NETWORKS[name]).train(training), points(150, 1, 6, 6))
    assert {kind: adds for kind, (_, _, adds) in kinds.items()} == expected
    assert rank.unexplained == 0
    assert rank.deficit == sum(expected.values())


def test_twin_channels_need_equal_statistics():
    net = build(NETWORKS["norm2d"]).eval()
    with torch.no_grad():
        for t in (net[0].weight, net[0].bias, net[1].weight, net[1].bias):
            t[2] = t[0]
        net[4].weight[:, 32:] = net[4].weight[:, :16]
    x = points(150, 1, 6, 6)
    assert "twin_units" not in found(net, x)[0]
    for t in (net[1].running_mean, net[1].running_var):
        t[2] = t[0]
    assert found(net, x)[0]["twin_units"][:2] == ((0, 2), 9 + 1 + 1 + 1 + 2 * 16)


class Residual(nn.Module):
    """The hidden layer of a block is followed, the residual stream is not."""

    def __init__(self):
        super().__init__()
        self.first, self.up = nn.Linear(2, 3), nn.Linear(3, 4)
        self.down, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        h = self.first(x)
        return self.last((h + self.down(nn.functional.leaky_relu(self.up(h)))).tanh())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.offset = nn.Linear(3, 4), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return torch.relu(self.encode(x)) @ self.encode.weight + self.offset


def test_wrong_guesses_of_the_wiring_make_no_finding(seeded):
    kinds, rank = found(Residual(), points(120, 2))
    assert kinds == {"scale": ((), 4, 4)}
    net = Tied()
    assert found(net, points(80, 3))[0] == {}
    with torch.no_grad():
        net.encode.weight[2], net.encode.bias[2] = net.encode.weight[0], net.encode.bias[0]
    assert found(net, points(80, 3))[0]["twin_units"][0] == (0, 2)


@pytest.mark.parametrize("limit", [spectrum.LARGEST_SVD, 0])
def test_directions_of_all_findings_are_null_by_definition(monkeypatch, limit):
    monkeypatch.setattr(symmetry, "LARGEST_SVD", limit)  # 0: random combinations are checked
    net = mlp(nn.ReLU)
    copy_unit(net, 0, 3)
    f, params = fsmap.functional(net)
    x = points(80, 2)
    s = spectrum.spectrum(f, params, x)
    params = {name: p.detach() for name, p in params.items()}
    candidates = list(symmetry.families(symmetry.record(f, params, x), params, {}, s))
    findings, known = symmetry.check(iter(candidates), params, s)
    assert [(f.kind, f.directions) for f in findings] == [("twin_units", 5), ("scale", 4)]
    if limit:
        J = jacobian_slow(f, params, x).flatten(0, 1)
        assert (J @ known.mT).norm(dim=0).max() < 1e-11 * torch.linalg.matrix_norm(J, 2)
        assert torch.linalg.matrix_rank(known) == sum(f.adds for f in findings)
