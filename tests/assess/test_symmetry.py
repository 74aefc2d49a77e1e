"""Every symmetry is found where it was planted, and none where it was not.

A finding's directions are held against the definition: J v = 0 with J by one backward pass per row.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsmap
from fsmap.assess import fixed_points, idle, symmetry
from fsmap.assess.families import KINDS
from fsmap.assess.spectrum import spectrum
from fsmap.assess.verify import check, independent
from fsmap.assess.wiring.tracer import trace
from fsmap.linalg.jacobian import jacobian
from oracles import jacobian_slow

SMOOTH = {"tanh": nn.Tanh, "gelu": nn.GELU, "sigmoid": nn.Sigmoid, "silu": nn.SiLU}
HOMOGENEOUS = {"relu": nn.ReLU, "leaky": nn.LeakyReLU}
SIZES = {
    "inputs": st.integers(1, 3),
    "hidden": st.integers(2, 5),
    "outputs": st.integers(1, 3),
    "seed": st.integers(0, 10**6),
}


few = settings(max_examples=8)


def randomized(module, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.8 * torch.randn(p.shape, generator=g))
        for m in module.modules():
            if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
                m.running_mean.copy_(0.3 * torch.randn(m.num_features, generator=g))
                m.running_var.copy_(0.5 + torch.rand(m.num_features, generator=g))
    return module


def build(*layers, seed=0):
    with torch.random.fork_rng(devices=[]):
        return randomized(nn.Sequential(*[layer() for layer in layers]), seed)


def mlp(activation, inputs=2, hidden=4, outputs=2, seed=0):
    ends = (lambda: nn.Linear(inputs, hidden)), (lambda: nn.Linear(hidden, outputs))
    return build(ends[0], activation, ends[1], seed=seed)


def points(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Found:
    """What holds for a module at points, by kind, and how much of the null space it spans."""

    def __init__(self, module, x):
        f, params = fsmap.functional(module)
        params = {name: p.detach() for name, p in params.items()}
        frozen = {n: p.detach() for n, p in module.named_parameters() if n not in params}
        s = spectrum(f, params, x)
        wiring = trace(f, x)
        families = [
            *fixed_points.special(wiring, params, frozen),
            *symmetry.continuous(wiring, params, frozen),
            *idle.without_effect(s.probes, params, whole=False),
        ]
        self.checked = check(families, params, s)
        self.deficit = s.parameters - s.rank
        exact = sorted(
            (c for c in self.checked if c.kept), key=lambda c: list(KINDS).index(c.family.kind)
        )
        self.added = dict.fromkeys(KINDS, 0)
        for c, number in zip(exact, independent(exact, s.null), strict=True):
            self.added[c.family.kind] += number
        self.explained = sum(self.added.values())
        self._hold_against_the_definition(f, params, x)

    def _hold_against_the_definition(self, f, params, x):
        if len(x) > 200 or x.ndim > 2:  # one backward pass per row would take long
            jac = jacobian(f, params, x).flatten(0, 1)
        else:
            jac = jacobian_slow(f, params, x).flatten(0, 1)
        size = torch.linalg.matrix_norm(jac, 2)
        for c in self.checked:
            if c.directions is not None:
                assert float((jac @ c.directions.mT).norm(dim=0).max()) < 1e-11 * size, (
                    c.family.kind
                )

    def units(self, kind):
        return {c.family.units for c in self.checked if c.family.kind == kind and c.kept}

    def kinds(self):
        return {c.family.kind for c in self.checked if c.kept} - {"no_effect"}


def make_twins(net, i, j, incoming=1.0, outgoing=True):
    with torch.no_grad():
        net[0].weight[j] = incoming * net[0].weight[i]
        net[0].bias[j] = incoming * net[0].bias[i]
        if outgoing:
            net[2].weight[:, j] = net[2].weight[:, i]


@pytest.mark.parametrize("activation", SMOOTH)
@few
@given(**SIZES)
def test_a_generic_smooth_network_has_no_symmetry(activation, inputs, hidden, outputs, seed):
    found = Found(mlp(SMOOTH[activation], inputs, hidden, outputs, seed), points(80, inputs))
    assert found.kinds() == set()


@few
@given(activation=st.sampled_from(sorted(SMOOTH | HOMOGENEOUS)), data=st.data(), **SIZES)
def test_twin_units_are_found(activation, data, inputs, hidden, outputs, seed):
    net = mlp((SMOOTH | HOMOGENEOUS)[activation], inputs, hidden, outputs, seed)
    i, j = sorted(data.draw(st.permutations(range(hidden)))[:2])
    make_twins(net, i, j)
    found = Found(net, points(80, inputs))
    assert found.units("twin_units") == {(i, j)}
    (twins,) = [c for c in found.checked if c.family.kind == "twin_units" and c.kept]
    assert twins.kept == inputs + 1 + outputs  # Theorem 2: the image of S − I
    assert found.deficit >= twins.kept


@few
@given(data=st.data(), seed=SIZES["seed"])
def test_three_equal_units_are_one_group(data, seed):
    net = mlp(nn.Tanh, 2, 5, 2, seed)
    group = sorted(data.draw(st.permutations(range(5)))[:3])
    for j in group[1:]:
        make_twins(net, group[0], j)
    found = Found(net, points(80, 2))
    assert found.units("twin_units") == {tuple(group)}
    assert found.added["twin_units"] == 2 * (2 + 1 + 2)


@few
@given(**SIZES)
def test_units_near_a_fixed_point_are_nearly_null(inputs, hidden, outputs, seed):
    net = mlp(nn.Tanh, inputs, hidden, outputs, seed)
    make_twins(net, 0, 1)
    with torch.no_grad():
        net[0].weight[1] *= 1 + 1e-4
    found = Found(net, points(80, inputs))
    near = [c for c in found.checked if c.family.kind == "twin_units"]
    assert [c.family.units for c in near] == [(0, 1)]
    assert near[0].nearly
    assert 1e-6 < near[0].family.distance < 1e-3


@few
@given(activation=st.sampled_from(sorted(SMOOTH)), **SIZES)
def test_equal_incoming_weights_alone_are_a_finding_too(activation, inputs, hidden, outputs, seed):
    net = mlp(SMOOTH[activation], inputs, hidden, outputs, seed)
    make_twins(net, 0, 1, outgoing=False)
    found = Found(net, points(80, inputs))
    assert found.units("twin_inputs") == {(0, 1)}
    assert found.units("twin_units") == set()
    trades = outputs + (inputs + 1 if outputs == 1 else 0)  # scalar readers are collinear
    assert found.added["twin_inputs"] == trades


@pytest.mark.parametrize(("activation", "odd"), [(nn.Tanh, True), (nn.GELU, False)])
def test_opposite_incoming_weights_matter_for_odd_activations(activation, odd):
    net = mlp(activation, 2, 4, 2)
    make_twins(net, 0, 2, incoming=-1.0, outgoing=False)
    found = Found(net, points(80, 2))
    assert found.units("twin_inputs") == ({(0, 2)} if odd else set())


@few
@given(**SIZES)
def test_a_relu_that_never_fires(inputs, hidden, outputs, seed):
    net = mlp(nn.ReLU, inputs, hidden, outputs, seed)
    with torch.no_grad():
        net[0].bias[1] = -1e3
    x = points(80, inputs)
    silent = tuple((net[:2](x) == 0).all(0).nonzero().flatten().tolist())
    found = Found(net, x)
    assert 1 in silent
    assert found.units("silent_units") == {silent}
    assert found.added["silent_units"] == len(silent) * (inputs + 1 + outputs)


@few
@given(**SIZES)
def test_a_saturated_unit_is_constant(inputs, hidden, outputs, seed):
    net = mlp(nn.Tanh, inputs, hidden, outputs, seed)
    with torch.no_grad():
        net[0].bias[1] = 1e3
    found = Found(net, points(80, inputs))
    assert found.units("constant_units") == {(1,)}
    assert found.added["constant_units"] == inputs + 1 + outputs  # what leaves trades with a bias


@few
@given(**SIZES)
def test_a_unit_without_incoming_weights_is_constant(inputs, hidden, outputs, seed):
    net = mlp(nn.GELU, inputs, hidden, outputs, seed)
    with torch.no_grad():
        net[0].weight[1] = 0.0
    found = Found(net, points(80, inputs))
    assert found.units("constant_units") == {(1,)}
    assert found.added["constant_units"] == outputs


@few
@given(activation=st.sampled_from(sorted(SMOOTH)), **SIZES)
def test_a_unit_that_nobody_reads(activation, inputs, hidden, outputs, seed):
    net = mlp(SMOOTH[activation], inputs, hidden, outputs, seed)
    with torch.no_grad():
        net[2].weight[:, 1] = 0.0
    found = Found(net, points(80, inputs))
    assert found.units("unread_units") == {(1,)}
    assert found.added["unread_units"] == inputs + 1


@few
@given(activation=st.sampled_from(sorted(HOMOGENEOUS)), **SIZES)
def test_scale_of_homogeneous_units(activation, inputs, hidden, outputs, seed):
    net = mlp(HOMOGENEOUS[activation], inputs, hidden, outputs, seed)
    found = Found(net, points(80, inputs))
    (scale,) = [c for c in found.checked if c.family.kind == "scale"]
    assert scale.kept == hidden
    assert scale.family.where == "0 → 2"


def test_scale_needs_both_sides():
    net = mlp(nn.ReLU)
    net[2].requires_grad_(False)
    assert "scale" not in Found(net, points(80, 2)).kinds()


def test_scale_through_pooling_and_flattening():
    net = build(
        lambda: nn.Conv2d(1, 3, 3),
        nn.ReLU,
        lambda: nn.MaxPool2d(2),
        nn.Flatten,
        lambda: nn.Linear(12, 2),
    )
    found = Found(net, points(120, 1, 6, 6))
    assert found.added["scale"] == 3
    assert found.explained == found.deficit == 3


@pytest.mark.parametrize("dim", [1, 2])
def test_batchnorm_with_running_statistics(dim):
    norm = nn.BatchNorm1d if dim == 1 else nn.BatchNorm2d
    if dim == 1:
        layers = (lambda: nn.Linear(2, 4), lambda: norm(4), nn.Tanh, lambda: nn.Linear(4, 2))
        x = points(80, 2)
    else:
        layers = (
            *(lambda: nn.Conv2d(1, 4, 3), lambda: norm(4), nn.Tanh),
            *(nn.Flatten, lambda: nn.Linear(64, 2)),
        )
        x = points(200, 1, 6, 6)
    found = Found(build(*layers).eval(), x)
    assert found.added["batchnorm_scale"] == 4
    assert found.added["batchnorm_bias"] == 4
    assert found.explained == found.deficit == 8


def test_batchnorm_with_statistics_of_the_points():
    net = build(
        lambda: nn.Linear(2, 4), lambda: nn.BatchNorm1d(4), nn.Tanh, lambda: nn.Linear(4, 2)
    )
    found = Found(net.train(), points(80, 2))
    assert found.added["batchnorm_scale"] == 4  # its weight makes up for eps
    assert found.added["batchnorm_bias"] == 4
    assert found.explained == found.deficit


def test_batchnorm_without_parameters_of_its_own_is_scale_free_up_to_eps():
    norm = nn.BatchNorm1d(4, affine=False)
    net = build(lambda: nn.Linear(2, 4), lambda: norm, nn.Tanh, lambda: nn.Linear(4, 2)).train()
    found = Found(net, points(80, 2))
    (scale,) = [c for c in found.checked if c.family.kind == "batchnorm_scale"]
    assert scale.nearly
    assert found.added["batchnorm_bias"] == 4


def test_twin_channels_with_batchnorm():
    net = build(
        *(lambda: nn.Conv2d(1, 4, 3), lambda: nn.BatchNorm2d(4), nn.ReLU),
        *(lambda: nn.AdaptiveAvgPool2d(2), nn.Flatten, lambda: nn.Linear(16, 2)),
    ).eval()
    with torch.no_grad():
        for t in (net[0].weight, net[0].bias, net[1].weight, net[1].bias):
            t[3] = t[1]
        net[5].weight[:, 12:16] = net[5].weight[:, 4:8]
    x = points(150, 1, 6, 6)
    assert Found(net, x).units("twin_units") == set()  # running statistics still differ
    net[1].running_mean[3] = net[1].running_mean[1]
    net[1].running_var[3] = net[1].running_var[1]
    found = Found(net, x)
    assert found.units("twin_units") == {(1, 3)}
    (twins,) = [c for c in found.checked if c.family.kind == "twin_units" and c.kept]
    assert twins.kept == 9 + 1 + 1 + 1 + 2 * 4


def test_two_linear_maps_in_a_row():
    net = build(lambda: nn.Linear(3, 4), lambda: nn.Linear(4, 3))
    found = Found(net, points(80, 3))
    assert found.deficit == found.explained == 31 - 12  # W₂W₁ and W₂b₁ + b₂ have 12 freedoms
    (maps,) = [c for c in found.checked if c.family.kind == "linear_maps"]
    assert maps.kept == 16


def test_layernorm_before_and_behind():
    net = build(lambda: nn.Linear(2, 4), lambda: nn.LayerNorm(4), lambda: nn.Linear(4, 3))
    found = Found(net, points(80, 2))
    assert found.added["layernorm_shift"] == 3  # one for each column and the bias
    assert found.added["layernorm_readers"] == 3
    assert found.added["layernorm_rotation"] == 3  # O(3) of the centered units
    assert found.explained == found.deficit - 1  # the last one trades eps against biases


def test_narrow_readers_do_not_see_all_units(seeded):
    class Wide(nn.Module):  # a residual sum with data: no linear map is free, but the kernel is
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(x + self.body(x.tanh()))

    found = Found(randomized(Wide(), 0), points(80, 4))
    assert found.added["narrow_readers"] == 3 * (4 + 1)
    assert found.explained == found.deficit == 3 * (4 + 1) + 1  # and the biases trade


def test_groupnorm_takes_off_a_shift_of_each_group():
    net = build(
        *(lambda: nn.Conv2d(1, 4, 2), lambda: nn.GroupNorm(2, 4), nn.ReLU),
        *(nn.Flatten, lambda: nn.Linear(36, 2)),
    )
    found = Found(net, points(100, 1, 4, 4))
    assert found.added["layernorm_shift"] == 2
    assert found.added["scale"] == 4
    assert found.explained == found.deficit


def test_a_gate_passes_the_scale_of_what_it_gates(seeded):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    net = randomized(Gated(), 0)
    found = Found(net, points(90, 3))
    assert found.added["scale"] == found.explained == found.deficit == 5
    with torch.no_grad():
        for t in (net.gate.weight, net.gate.bias, net.up.weight, net.up.bias, net.down.weight.mT):
            t[4] = t[2]
    assert Found(net, points(90, 3)).units("twin_units") == {(2, 4)}


def test_transposed_and_depthwise_convolutions():
    up = build(lambda: nn.ConvTranspose2d(2, 3, 2), nn.ReLU, lambda: nn.ConvTranspose2d(3, 1, 2))
    found = Found(up, points(30, 2, 3, 3))
    assert found.added["scale"] == found.deficit == 3
    thin = build(
        *(lambda: nn.Conv2d(1, 4, 1), nn.ReLU, lambda: nn.Conv2d(4, 4, 3, groups=4), nn.ReLU),
        *(nn.Flatten, lambda: nn.Linear(16, 2)),
    )
    found = Found(thin, points(90, 1, 4, 4))
    scales = [(c.family.where, c.kept) for c in found.checked if c.family.kind == "scale"]
    assert sorted(scales) == [("0", 4), ("2 → 5", 4)]  # a depthwise kernel is a gain of its units


class Encoder(nn.Module):
    def __init__(self, activation="gelu", **options):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            8, 2, 6, dropout=0.0, batch_first=True, activation=activation, **options
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.layer(x))


@pytest.mark.parametrize("norm_first", [False, True])
def test_all_null_directions_of_a_transformer_layer_are_explained(seeded, norm_first):
    found = Found(randomized(Encoder(norm_first=norm_first), 3).eval(), points(90, 4, 8))
    assert found.added["attention_key_bias"] == 8
    assert found.added["attention_query_key"] == 2 * 4 * 4
    assert found.added["linear_maps"] == 2 * 4 * 4
    assert found.deficit == found.explained


def test_twin_heads(seeded):
    net = randomized(Encoder(), 3).eval()
    attention = net.layer.self_attn
    with torch.no_grad():
        for start in (0, 8, 16):  # queries, keys, values
            attention.in_proj_weight[start + 4 : start + 8] = attention.in_proj_weight[
                start : start + 4
            ]
            attention.in_proj_bias[start + 4 : start + 8] = attention.in_proj_bias[
                start : start + 4
            ]
        attention.out_proj.weight[:, 4:] = attention.out_proj.weight[:, :4]
    assert Found(net, points(90, 4, 8)).units("twin_heads") == {(0, 1)}
    assert Found(randomized(net, 4), points(90, 4, 8)).units("twin_heads") == set()


def test_a_unit_that_is_always_active_is_linear():
    net = mlp(nn.ReLU, 2, 3, 2)
    with torch.no_grad():
        net[0].bias[0] = 1e2
    found = Found(net, points(80, 2))
    assert found.units("linear_units") == {(0,)}
    assert found.explained == found.deficit


def test_tied_weights_make_no_false_claim(seeded):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(3, 4)
            self.offset = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return torch.relu(self.encode(x)) @ self.encode.weight + self.offset

    net = randomized(Tied(), 0)
    assert Found(net, points(80, 3)).kinds() == set()
    with torch.no_grad():
        net.encode.weight[2], net.encode.bias[2] = net.encode.weight[0], net.encode.bias[0]
    assert Found(net, points(80, 3)).units("twin_units") == {(0, 2)}


def test_a_parameter_that_is_never_used(seeded):
    net = mlp(nn.Tanh)
    net.spare = nn.Linear(2, 2)
    net.forward = lambda x: net[2](net[1](net[0](x)))
    found = Found(net, points(80, 2))
    assert found.added["no_effect"] == 6
    assert found.explained == found.deficit


def test_families_that_are_too_large_are_tested_by_random_combinations(monkeypatch):
    from fsmap.assess import verify

    monkeypatch.setattr(verify, "LARGEST_BUILD", 0)
    right = Found(mlp(nn.ReLU), points(80, 2))
    (scale,) = [c for c in right.checked if c.family.kind == "scale"]
    assert scale.kept == 4
    assert scale.directions is None
    assert Found(mlp(nn.Tanh), points(80, 2)).kinds() == set()
