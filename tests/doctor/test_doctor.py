"""Verdicts, the page, JSON, ε, cost, and that the module is left unchanged."""

from __future__ import annotations

import copy
import itertools
import json
import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import fsmap
from cases import MODELS, case
from fsmap.doctor import doctor as examination
from fsmap.doctor import spectrum


def net(activation=nn.Tanh, inputs=2, hidden=4, outputs=1):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, hidden), activation(), nn.Linear(hidden, outputs))


def points(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def with_twins():
    twins = net()
    with torch.no_grad():
        for t in (twins[0].weight, twins[0].bias, twins[2].weight.mT):
            t[3] = t[1]
    return twins


@contextmanager
def unchanged(module):
    before, state = copy.deepcopy(module.state_dict()), torch.random.get_rng_state()
    yield
    assert all(torch.equal(before[key], t) for key, t in module.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("name", MODELS)
def test_every_module_gets_a_page_and_json_and_does_not_change(name):
    c = case(name)
    with unchanged(c.module):
        d = fsmap.doctor(c.module, c.x, jitter=0.1, num_data=100)
    assert set(json.loads(d.to_json())) == {"version", *d._fields}  # no NaN, no infinity
    assert max(map(len, str(d).splitlines())) <= 100
    assert d.parameters == sum(p.numel() for p in c.params.values())


def test_twin_units_are_pathological_and_named():
    d = fsmap.doctor(with_twins(), points(60, 2))
    assert d.verdict == "pathological"
    assert (d.rank.deficit, d.rank.known, d.rank.unexplained) == (4, 4, 0)
    (finding,) = d.symmetries
    assert (finding.kind, finding.units, finding.where) == ("twin_units", (1, 3), "0 → 2")
    assert finding.pathological
    assert finding.residual < 1e-14
    texts = {v.text for v in d.null_vectors}
    assert "2.weight[0, 1] and 2.weight[0, 3], with opposite signs" in texts
    assert "1, 3" in str(d)


def test_verdicts_of_a_regular_a_homogeneous_and_a_deep_network():
    d = fsmap.doctor(net(), points(60, 2))
    assert (d.verdict, d.rank.rank, d.rank.deficit, d.rank.known) == ("regular", 17, 0, 0)
    assert d.symmetries == d.null_vectors == ()
    assert d.eigenvalues.smallest == d.eigenvalues.smallest_nonzero > 0
    d = fsmap.doctor(net(nn.ReLU, outputs=2), points(60, 2))
    assert (d.verdict, d.rank.deficit, d.rank.known) == ("harmless", 4, 4)
    assert not d.symmetries[0].pathological
    deep = nn.Sequential(*net(inputs=1, hidden=12)[:2], *net(inputs=12, hidden=12))
    d = fsmap.doctor(deep, points(300, 1))
    assert (d.verdict, d.rank.sure, d.null_vectors) == ("ill-conditioned", False, ())


def test_too_few_points_are_not_a_deficit():
    d = fsmap.doctor(net(hidden=8), points(10, 2))
    assert (d.verdict, d.rank.unexplained) == ("undecided", None)
    assert (d.rank.rank, d.rank.missing_rows, d.rank.points_needed) == (10, 23, 33)
    relu = fsmap.doctor(net(nn.ReLU, hidden=8), points(10, 2))
    assert relu.rank.known >= 8  # symmetries do not need many points
    assert relu.rank.points_needed == 33 - relu.rank.known


class Sum(nn.Module):
    """Two parameters of which only the sum matters."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x @ (self.a + self.b)[:, None]


class Product(Sum):
    """Singular where both factors are zero, and only there: no symmetry of a layer."""

    def forward(self, x):
        return x @ (self.a * self.b.square())[:, None] + (x**2) @ (self.a**3 + self.b)[:, None]


def test_null_directions_without_a_name():
    d = fsmap.doctor(Sum(), points(20, 3))
    assert d.verdict == "unexplained"
    assert (d.rank.unexplained, d.rank.nearby, d.rank.grows) == (3, 3, False)
    assert "a[0] and b[0], with opposite signs" in {v.text for v in d.null_vectors}
    with torch.no_grad():
        module = Product()
        assert fsmap.doctor(module, points(20, 3)).verdict == "regular"
        module.a[1] = module.b[1] = 0.0
    d = fsmap.doctor(module, points(20, 3))
    assert (d.verdict, d.rank.deficit, d.rank.nearby) == ("pathological", 1, 0)
    assert d.null_vectors[0].text == "a[1]"


def test_equal_heads_of_attention_are_pathological(seeded):
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = points(60, 3, 4)

    def examined():
        return fsmap.doctor(attention, x, forward=lambda m, x: m(x, x, x)[0])

    assert examined().verdict == "unexplained"  # queries and keys: singular for all parameters
    with torch.no_grad():
        for t in (attention.in_proj_weight.view(3, 4, 4), attention.in_proj_bias.view(3, 4)):
            t[:, 2:] = t[:, :2]
        attention.out_proj.weight[:, 2:] = attention.out_proj.weight[:, :2]
    d = examined()
    assert d.verdict == "pathological"
    assert d.rank.nearby < d.rank.deficit


def test_parameters_without_effect(seeded):
    module = net()
    module.register_parameter("spare", nn.Parameter(torch.ones(5)))
    d = fsmap.doctor(module, points(60, 2))
    assert (d.verdict, d.rank.deficit, d.rank.unexplained) == ("unused", 5, 0)
    assert (d.symmetries[0].kind, d.symmetries[0].where) == ("no_effect", "spare")
    zero = fsmap.doctor(nn.Linear(2, 1, bias=False), torch.zeros(5, 2), jitter=1.0)
    assert (zero.verdict, zero.rank.rank) == ("unused", 0)
    assert [row.name for row in zero.jitters] == ["given"]


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_constant_units_on_a_few_points_may_be_chance(activation):
    assert fsmap.doctor(net(activation), points(1, 2)).verdict == "undecided"
    assert fsmap.doctor(with_twins(), points(1, 2)).verdict == "pathological"


@pytest.mark.parametrize("name", ["tanh_mlp", "wide", "cnn"])
@pytest.mark.parametrize("jitter", [1e-3, 1.0, 1e3])
def test_a_jitter_row_agrees_with_log_det(name, jitter):
    c = case(name)
    row = fsmap.doctor(c.module, c.x, jitter=jitter, num_data=50).jitters[0]
    P = sum(p.numel() for p in c.params.values())
    exact = fsmap.log_det(c.f, c.params, c.x, jitter=jitter).item() - P * math.log(jitter)
    first = fsmap.log_det(c.f, c.params, c.x, jitter=jitter, method="first_order").item()
    assert row.log_det == pytest.approx(exact, rel=1e-9)
    assert row.first_order == pytest.approx(first - P * math.log(jitter), rel=1e-9)
    assert row.error == pytest.approx((row.first_order - exact) / exact, rel=1e-6)
    assert -1e-12 <= row.error <= row.error_bound * (1 + 1e-9) + 1e-7
    assert row.lam == pytest.approx(1 / (2 * jitter * 50))


def made(eigenvalues):
    return spectrum.from_rows(torch.diag(eigenvalues.sqrt()), len(eigenvalues), 1e-12)


def test_recommended_jitters():
    eigenvalues = torch.logspace(1, -4, 40)
    found = made(eigenvalues)
    advice = examination.recommended(found, torch.float64)
    changed = (eigenvalues + advice["fs-map"]).log() - eigenvalues.log()
    assert float((changed <= 0.1).double().mean()) >= 0.9
    assert advice["l-map"] == 100.0
    assert examination.jitter_row(found, "l-map", 100.0, None).error < 0.05
    steep = made(torch.logspace(0, -20, 40))
    dtypes = torch.float32, torch.float64
    single, double = (examination.recommended(steep, dtype)["fs-map"] for dtype in dtypes)
    assert single >= double >= 9 * 40 * 2.2e-16
    assert examination.recommended(made(torch.zeros(2)), torch.float64) == {}


def test_a_model_too_large_for_the_jacobian(monkeypatch):
    exact = fsmap.doctor(with_twins(), points(60, 2))
    for part in (spectrum, examination.symmetry):
        monkeypatch.setattr(part, "LARGEST_SVD", 0)
    monkeypatch.setattr(spectrum, "LARGEST_ROWS", 0)
    ticks = itertools.count()
    monkeypatch.setattr(spectrum, "clock", lambda device: 1e-9 * next(ticks))  # all points
    d = fsmap.doctor(with_twins(), points(60, 2), jitter=10.0)
    assert (d.rank.method, d.rank.rank) == ("power", None)
    assert (d.verdict, d.symmetries[0].units) == ("pathological", (1, 3))
    assert d.eigenvalues.largest <= exact.eigenvalues.largest_upper * (1 + 1e-9)
    assert d.eigenvalues.largest_upper >= exact.eigenvalues.largest * (1 - 1e-9)
    assert d.jitters[0].error is None
    assert d.jitters[0].error_bound > 0
    assert json.loads(d.to_json())["rank"]["rank"] is None
    assert "not computed" in str(d)
    assert fsmap.doctor(net(), points(60, 2)).verdict == "undecided"


def test_the_module_is_left_unchanged(seeded):
    module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    module[0].weight.requires_grad_(False)
    module.float()
    x = torch.randn(40, 2, requires_grad=True)
    with unchanged(module):
        d = fsmap.doctor(module, x)
    assert (d.mode, d.precision, d.frozen) == ("train", "float64", 8)
    assert any("dropout" in note for note in d.notes)
    assert module[2].p == 0.5
    assert all(p.dtype == torch.float32 and p.grad is None for p in module.parameters())
    assert [p.requires_grad for p in module.parameters()][:2] == [False, True]
    assert x.grad is None


def test_a_module_that_does_not_run_in_float64():
    def forward(m, x):
        if m[0].weight.dtype != torch.float32:
            raise RuntimeError("expected scalar type Float but found Double")
        return m(x.float())

    d = fsmap.doctor(net(nn.ReLU).float(), points(60, 2).float(), forward=forward)
    assert d.precision == "float32"
    assert any("float64" in note for note in d.notes)
    assert "scale" in {f.kind for f in d.symmetries}


def test_a_recurrent_network_by_a_forward_of_ones_own(seeded):
    lstm = nn.LSTM(2, 3, batch_first=True)
    d = fsmap.doctor(lstm, points(20, 4, 2), forward=lambda m, x: m(x)[0])
    assert d.outputs == 4 * 3
    assert d.rank.deficit == 12  # the two biases of an LSTM are added
    assert "bias_ih_l0" in d.null_vectors[0].text
