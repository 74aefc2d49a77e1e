"""Units are followed through modules: who makes them, who reads them, what pins them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import fsmap
from fsmap.assess.wiring.tracer import Units, function_name, reshaped, trace
from fsmap.assess.wiring.units import Member


def wire(module, x):
    return trace(fsmap.functional(module)[0], x)


def free(wiring):
    """Spaces whose units can be permuted, as (units, names of members)."""
    found = [s for s in wiring.spaces if not s.pinned]
    return [(s.units, {(m.name, m.dim, m.role) for m in s.members()}) for s in found]


class Fn(nn.Module):
    """Layers a, b, c and whatever a function does with them."""

    def __init__(self, function, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


MLP = {("0.weight", 0, "out"), ("0.bias", 0, "out"), ("2.weight", 1, "in")}


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU])
def test_the_hidden_units_of_an_mlp(seeded, activation):
    wiring = wire(nn.Sequential(nn.Linear(2, 5), activation(), nn.Linear(5, 3)), torch.randn(4, 2))
    assert free(wiring) == [(5, MLP)]
    assert wiring.unfollowed == []
    scalable = [s for s in wiring.segments if s.scalable]
    assert bool(scalable) == (activation is nn.ReLU)


def test_functions_and_operators_do_what_layers_do(seeded):
    a, b = nn.Linear(2, 5), nn.Linear(5, 3)
    plain = wire(nn.Sequential(a, nn.ReLU(), b), torch.randn(4, 2))
    written = Fn(lambda m, x: torch.relu(x @ m.a.weight.T + m.a.bias) @ m.b.weight.t(), a=a, b=b)
    other = wire(written, torch.randn(4, 2))
    rename = {"0.weight": "a.weight", "0.bias": "a.bias", "2.weight": "b.weight"}
    renamed = {(rename[n], d, r) for n, d, r in free(plain)[0][1]}
    assert free(other) == [(5, renamed)]
    assert [s.scalable for s in other.segments if s.role("in") and s.role("out")] == [True]


def test_a_flattened_feature_map_keeps_its_channels(seeded):
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2)
    )
    (space,) = [s for s in wire(net, torch.randn(2, 1, 8, 8)).spaces if not s.pinned]
    reader = next(m for m in space.members() if m.role == "in")
    assert (space.units, reader.block) == (3, 9)
    assert space.label() == "0 → 4"


def test_a_residual_sum_ties_units(seeded):
    def forward(m, x):
        x = m.a(x)
        return m.c(x + m.b(x.relu()))

    net = Fn(forward, a=nn.Linear(2, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 1))
    ((units, members),) = free(wire(net, torch.randn(3, 2)))
    assert units == 4
    assert {n for n, _, _ in members} == {"a.weight", "a.bias", "b.weight", "b.bias", "c.weight"}


def test_a_residual_sum_with_data_pins_them(seeded):
    net = Fn(lambda m, x: m.b(x + m.a(x)), a=nn.Linear(3, 3), b=nn.Linear(3, 1))
    assert free(wire(net, torch.randn(3, 3))) == []


@pytest.mark.parametrize("shape", [lambda p: p.view(1, -1, 1, 1), lambda p: p[None, :, None, None]])
def test_vectors_that_are_broadcast_belong_to_units(seeded, shape):
    def forward(m, x):
        return m.b((m.a(x) + shape(m.shift)).relu())

    net = Fn(
        forward, a=nn.Conv2d(1, 4, 3), b=nn.Conv2d(4, 1, 1), shift=nn.Parameter(torch.zeros(4))
    )
    wiring = wire(net, torch.randn(2, 1, 5, 5))
    ((units, members),) = free(wiring)
    assert units == 4
    assert ("shift", 0, "out") in members
    assert wiring.unfollowed == []


def test_a_weight_used_twice_has_one_order(seeded):
    def tied(m, x):
        return F.linear(torch.relu(m.a(x)), m.a.weight.t())  # decoder = encoder transposed

    wiring = wire(Fn(tied, a=nn.Linear(3, 4)), torch.randn(5, 3))
    assert [units for units, _ in free(wiring)] == [4]
    assert not any(s.scalable for s in wiring.segments)  # W would have to grow and shrink at once


def test_packed_projections_are_taken_apart(seeded):
    def forward(m, x):
        q, k, v = m.qkv(x).chunk(3, -1)
        shape = (*x.shape[:2], 2, 2)
        q, k, v = (t.view(shape).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return m.out(y)

    net = Fn(forward, qkv=nn.Linear(4, 12), out=nn.Linear(4, 2))
    wiring = wire(net, torch.randn(3, 5, 4))
    (attention,) = wiring.attentions
    assert attention.heads == 2
    starts = [[m.start for m in part if m.name == "qkv.weight"] for part in attention[:3]]
    assert starts == [[0], [4], [8]]
    assert wiring.unfollowed == []


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda m, x: m.b(m.a(x).roll(1, -1)), "roll"),
        (lambda m, x: m.b(m.a(x).sort(-1).values), "sort"),
        (lambda m, x: m.b(m.a(x)[:, [1, 0, 2, 3]]), "indexing"),
        (
            lambda m, x: m.b(torch.einsum("si,ij->sj", x, m.a.weight.T)),
            "einsum: applied to a.weight",
        ),
        (lambda m, x: m.b(F.linear(x, m.a.weight * 2)), "mul: applied to a.weight"),
    ],
)
def test_what_is_not_known_pins_units_and_is_named(seeded, function, said):
    wiring = wire(Fn(function, a=nn.Linear(2, 4), b=nn.Linear(4, 1)), torch.randn(3, 2))
    assert free(wiring) == []
    assert any(said in text for text in wiring.unfollowed), wiring.unfollowed


def test_a_call_in_an_unknown_form_is_not_fatal(seeded):
    net = Fn(
        lambda m, x: m.b(torch.add(input=m.a(x), other=1.0)), a=nn.Linear(2, 3), b=nn.Linear(3, 1)
    )
    wiring = wire(net, torch.randn(3, 2))
    assert free(wiring) == []
    assert "add: called in a form that is not known" in wiring.unfollowed


def test_levels_are_those_of_the_units(seeded):
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.randn(50, 2)
    hidden = net[1](net[0](x)).detach()
    (segment,) = [s for s in wire(net, x).segments if s.role("in") and s.role("out")]
    assert_close(segment.level.low, hidden.amin(0))
    assert_close(segment.level.high, hidden.amax(0))
    assert segment.level.active.tolist() == (hidden > 0).sum(0).tolist()


def test_tracing_leaves_the_module_alone(seeded):
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = {name: t.clone() for name, t in net.state_dict().items()}
    wire(net, torch.randn(5, 2))
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())


SHAPES = st.lists(st.integers(1, 4), min_size=2, max_size=4)


@given(SHAPES, st.data())
def test_units_after_a_reshape_are_where_they_should_be(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    total = int(torch.tensor(shape).prod())
    first = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    rest = total // first
    second = data.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    new = (first, second, rest // second)
    label = torch.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    moved = label.expand(shape).reshape(new)  # which unit each entry belongs to
    after = reshaped(Units(0, (dim,)), shape[dim], shape, new)
    if after is not None:
        counts = torch.arange(shape[dim]).repeat_interleave(after.block)
        inner = [new[d] for d in after.dims]
        view = counts.reshape([new[d] if d in after.dims else 1 for d in range(3)])
        assert len(counts) == int(torch.tensor(inner).prod())
        assert torch.equal(view.expand(new), moved)


def test_common_reshapes_are_followed():
    assert reshaped(Units(0, (1,)), 4, (2, 4, 3, 3), (2, 36)) == Units(0, (1,), 9)
    assert reshaped(Units(0, (2,)), 8, (2, 5, 8), (10, 8)) == Units(0, (1,))
    assert reshaped(Units(0, (2,)), 8, (2, 5, 8), (2, 5, 4, 2)) == Units(0, (2, 3))
    assert reshaped(Units(0, (2, 3)), 8, (2, 5, 4, 2), (2, 5, 8)) == Units(0, (2,))
    assert reshaped(Units(0, (1, 3)), 8, (2, 4, 5, 2), (2, 40)) is None  # not side by side


@pytest.mark.parametrize(
    "member", [Member("w", 1, "in", 2, start=1, block=2), Member("w", 0, "out", 3)]
)
def test_blocks_and_their_place(generator, member):
    p = torch.randn(3, 6, 2, generator=generator)
    blocks = member.blocks(p)
    assert len(blocks) == member.units
    placed = member.place(blocks, p)
    inside = torch.zeros_like(p, dtype=torch.bool)
    for unit in range(member.units):
        inside.narrow(member.dim, member.rows(unit).start, member.block)[:] = True
    assert_close(placed, torch.where(inside, p, 0.0))


def test_names_of_functions():
    assert function_name(torch.Tensor.__iadd__) == "add"
    assert function_name(torch.Tensor.relu_) == "relu"
    assert function_name(F.linear) == "linear"
