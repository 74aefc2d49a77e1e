"""The whole examination: verdicts, the page, JSON, and that the patient is left alone."""

from __future__ import annotations

import copy
import json
import threading

import pytest
import torch
from torch import nn

import fsmap
from cases import MODELS, case
from fsmap.assess import doctor as examination
from fsmap.assess import matrix_free, spectrum
from fsmap.assess.diagnosis import VERDICTS, Diagnosis
from fsmap.errors import InputError, UnsupportedModuleError

KEYS = {
    *("version", "module", "mode", "precision", "parameters", "frozen", "points", "points_used"),
    *("outputs", "verdict", "summary", "rank", "eigenvalues", "symmetries", "null_vectors"),
    *("closest", "jitters", "costs", "auto", "unfollowed", "notes", "seconds"),
}


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


@pytest.mark.parametrize("name", MODELS)
def test_every_module_gets_a_page_and_json(name):
    c = case(name)
    before = copy.deepcopy(c.module.state_dict())
    state = torch.random.get_rng_state()
    d = fsmap.doctor(c.module, c.x, jitter=0.1, num_data=100)
    assert set(d.to_dict()) == KEYS
    assert d.verdict in VERDICTS
    assert Diagnosis.from_json(d.to_json()) == d
    lines = str(d).splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("[") for line in lines) == 5  # a verdict for each section
    assert d.parameters == sum(p.numel() for p in c.params.values())
    after = c.module.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_regular_network():
    d = fsmap.doctor(net(), points(60, 2))
    assert d.verdict == "regular"
    assert (d.rank.rank, d.rank.deficit, d.rank.known) == (17, 0, 0)
    assert d.symmetries == ()
    assert d.null_vectors == ()
    assert d.eigenvalues.smallest == d.eigenvalues.smallest_nonzero > 0
    assert "[ok] Rank (Theorem 1): full, 17 of 17" in str(d)
    assert "[ok] Symmetries (Theorem 2): none found" in str(d)


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
    assert "units 1, 3 of 0 → 2: 4 null directions" in str(d)


def test_scale_is_harmless():
    d = fsmap.doctor(net(nn.ReLU, outputs=2), points(60, 2))
    assert d.verdict == "harmless"
    assert d.rank.deficit == d.rank.known == 4
    assert not d.symmetries[0].pathological
    assert "a pseudo-determinant" in str(d)


def test_too_few_points_are_told_from_a_true_deficit():
    d = fsmap.doctor(net(hidden=8), points(10, 2))
    assert d.verdict == "undecided"
    assert (d.rank.rank, d.rank.missing_rows, d.rank.points_needed) == (10, 23, 33)
    assert d.rank.unexplained is None
    assert "too few to tell" in str(d)
    assert "At least 33 points are needed" in " ".join(str(d).split())
    relu = fsmap.doctor(net(nn.ReLU, hidden=8), points(10, 2))
    assert relu.rank.known >= 8  # symmetries are known with any number of points
    assert relu.rank.points_needed == 33 - relu.rank.known


def test_a_smooth_spectrum_is_called_ill_conditioned():
    deep = nn.Sequential(*net(inputs=1, hidden=12)[:2], *net(inputs=12, hidden=12))
    d = fsmap.doctor(deep, points(300, 1))
    assert d.verdict == "ill-conditioned"
    assert d.rank.sure is False
    assert d.null_vectors == ()
    assert "without a gap" in str(d)


def test_null_vectors_without_a_known_symmetry_are_named():
    class Sum(nn.Module):  # two parameters of which only the sum counts
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x @ (self.a + self.b)[:, None]

    d = fsmap.doctor(Sum(), points(20, 3))
    assert d.verdict == "unexplained"
    assert (d.rank.unexplained, d.rank.grows) == (3, False)
    assert "a[0] and b[0], with opposite signs" in {v.text for v in d.null_vectors}
    assert any(text.startswith("add: applied to") for text in d.unfollowed)
    assert "not analyzed: add" in str(d)


def test_units_that_are_rarely_active_are_pointed_at():
    relu = net(nn.ReLU)
    x = points(60, 2)
    with torch.no_grad():
        relu[0].weight[1] = torch.tensor([1.0, 0.0])
        relu[0].bias[1] = -x[:, 0].sort().values[-2:].mean()  # active on one point
    d = fsmap.doctor(relu, x)
    assert d.rank.unexplained > 0
    assert any("unit 1 of 0 → 2 is active on 1 of 60 points only" in note for note in d.notes)


class Spare(nn.Module):
    """One of its parameters is never used."""

    def __init__(self):
        super().__init__()
        self.body, self.spare = net(), nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.body(x)


def test_parameters_without_effect():
    d = fsmap.doctor(Spare(), points(60, 2))
    assert d.verdict == "unused"
    assert (d.rank.deficit, d.rank.unexplained) == (5, 0)
    assert (d.symmetries[0].kind, d.symmetries[0].where) == ("no_effect", "spare")
    assert "5 parameters have no effect on any of the points" in str(d)


def test_a_zero_matrix(seeded):
    flat = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        flat.weight.fill_(1.0)
    d = fsmap.doctor(flat, torch.zeros(5, 2), jitter=1.0)
    assert (d.verdict, d.rank.rank) == ("unused", 0)
    assert "no ε can be recommended" in str(d)
    assert Diagnosis.from_json(d.to_json()) == d


def test_units_near_a_fixed_point():
    near = with_twins()
    with torch.no_grad():
        near[0].weight[3] *= 1 + 1e-5
    d = fsmap.doctor(near, points(60, 2))
    (finding,) = d.symmetries
    assert finding.nearly
    assert 0 < finding.distance < 1e-4
    assert d.closest[0].units == (1, 3)
    assert d.verdict == "near-pathological"
    assert "relative distance" in str(d)


def test_given_and_recommended_jitter():
    d = fsmap.doctor(net(), points(60, 2), jitter=1e-3, num_data=50)
    rows = {row.name: row for row in d.jitters}
    assert set(rows) == {"given", "fs-map", "l-map"}
    assert rows["given"].lam == pytest.approx(1 / (2 * 1e-3 * 50))
    assert rows["l-map"].jitter >= 10 * d.eigenvalues.largest
    assert rows["l-map"].error < 0.05 < rows["given"].error
    assert "first-order form of L-MAP does not hold" in str(d)
    assert "λ=1/(2εN)" in str(d)
    fine = fsmap.doctor(net(), points(60, 2), jitter=1e3)
    assert "first-order form of L-MAP holds" in str(fine)
    assert "λ=1/(2εN)" not in str(fine)


@pytest.mark.parametrize("limit", ["LARGEST_ROWS", "LARGEST_FACTOR"])
def test_without_a_jacobian_symmetries_are_checked_all_the_same(monkeypatch, limit):
    monkeypatch.setattr(spectrum, "LARGEST_SVD", 0)
    monkeypatch.setattr(spectrum, limit, 0)
    d = fsmap.doctor(with_twins(), points(60, 2))
    assert d.rank.method in ("gram", "lanczos")
    assert d.verdict == "pathological"
    assert d.symmetries[0].units == (1, 3)
    assert len(d.symmetries) == 1


def test_lanczos_says_what_it_does_not_know(monkeypatch):
    exact = fsmap.doctor(net(nn.ReLU), points(60, 2))
    monkeypatch.setattr(spectrum, "LARGEST_SVD", 0)
    monkeypatch.setattr(spectrum, "LARGEST_ROWS", 0)
    monkeypatch.setattr(matrix_free, "_points_of_gram", lambda *args, **kwargs: 0)
    monkeypatch.setattr(
        matrix_free,
        "_affordable",
        lambda f, params, x, *args, **kwargs: (matrix_free.Products(f, params, x, None), len(x)),
    )
    d = fsmap.doctor(net(nn.ReLU), points(60, 2), jitter=10.0)
    assert (d.rank.method, d.rank.rank, d.verdict) == ("lanczos", None, "undecided")
    assert d.eigenvalues.largest <= exact.eigenvalues.largest * (1 + 1e-9)
    assert d.eigenvalues.largest_upper >= exact.eigenvalues.largest * (1 - 1e-9)
    assert d.jitters[0].error is None
    assert d.jitters[0].error_bound > 0
    assert {f.kind for f in d.symmetries} >= {"scale"}
    assert Diagnosis.from_json(d.to_json()) == d
    assert "not computed" in str(d)


def test_the_patient_is_left_alone(seeded):
    patient = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    patient[0].weight.requires_grad_(False)
    x = torch.randn(40, 2, requires_grad=True)
    before = copy.deepcopy(patient.state_dict())
    ids = {name: id(p) for name, p in patient.named_parameters()}
    state = torch.random.get_rng_state()
    d = fsmap.doctor(patient, x)
    assert d.mode == "train"
    assert d.frozen == 8
    assert any("dropout" in note for note in d.notes)
    assert patient[2].p == 0.5
    assert all(torch.equal(before[key], t) for key, t in patient.state_dict().items())
    assert all(p.dtype == torch.float64 for p in patient.parameters())
    assert all(p.grad is None for p in patient.parameters())
    assert x.grad is None
    assert ids == {name: id(p) for name, p in patient.named_parameters()}
    assert [p.requires_grad for p in patient.parameters()][:2] == [False, True]
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_float32_module_is_examined_in_float64():
    single = with_twins().float()
    d = fsmap.doctor(single, points(60, 2).float())
    assert d.precision == "float64"
    assert d.symmetries[0].residual < 1e-14
    assert all(p.dtype == torch.float32 for p in single.parameters())


def test_a_module_that_insists_on_its_precision():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net(nn.ReLU).float()
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x):
            x = x.float() * self.scale.float()
            if self.body[0].weight.dtype != torch.float32:
                message = "expected scalar type Float but found Double"
                raise RuntimeError(message)
            return self.body(x)

    d = fsmap.doctor(Single(), points(60, 2).float())
    assert d.precision == "float32"
    assert any("does not run in float64" in note for note in d.notes)
    assert "scale" in {f.kind for f in d.symmetries}


def test_unusual_calls(seeded):
    lstm = nn.LSTM(2, 3, batch_first=True)
    d = fsmap.doctor(lstm, points(20, 4, 2), forward=lambda m, x: m(x)[0])
    assert d.outputs == 4 * 3
    assert d.rank.deficit == 12  # the two biases of an LSTM are one
    assert "bias_ih_l0" in d.null_vectors[0].text
    assert any(text.startswith("lstm") for text in d.unfollowed)


def test_a_metric_is_used():
    x = points(60, 2)
    weights = torch.full((60,), 4.0)
    plain, weighted = fsmap.doctor(net(), x), fsmap.doctor(net(), x, metric=weights)
    assert weighted.eigenvalues.trace == pytest.approx(4 * plain.eigenvalues.trace)


def test_time_for_tracing_limits_points(monkeypatch):
    monkeypatch.setattr(examination, "TRACE_SECONDS", 0.0)
    d = fsmap.doctor(with_twins(), points(60, 2))
    assert d.symmetries[0].kind == "twin_units"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"module": net}, UnsupportedModuleError, "got function. Call the factory first"),
        ({"module": nn.Tanh()}, UnsupportedModuleError, "has no trainable parameter"),
        ({"x": torch.empty(0, 2)}, InputError, "x is empty"),
        ({"x": torch.tensor([[float("nan"), 0.0]])}, InputError, "NaN or inf in 1 of 1 points"),
        ({"x": torch.zeros(5, 3)}, InputError, r"cannot be evaluated at x of shape \(4, 3\)"),
        ({"jitter": 0.0}, InputError, "jitter must be > 0 and finite, got 0"),
        ({"jitter": float("inf")}, InputError, "jitter must be > 0 and finite, got inf"),
        ({"num_data": 0}, InputError, "num_data must be at least 1, got 0"),
        ({"tolerance": 1.0}, InputError, "0 < tolerance < 1, got 1"),
        ({"metric": torch.ones(7)}, InputError, "metric"),
    ],
)
def test_bad_input_is_refused_in_words(change, error, message):
    arguments = {"module": net(), "x": points(60, 2)} | change
    patient, x = arguments.pop("module"), arguments.pop("x")
    with pytest.raises(error, match=message):
        fsmap.doctor(patient, x, **arguments)


def test_a_module_that_returns_nan_is_refused():
    broken = net()
    with torch.no_grad():
        broken[2].bias.fill_(float("nan"))
    with pytest.raises(InputError, match="returns NaN or inf"):
        fsmap.doctor(broken, points(10, 2))


def test_a_module_that_cannot_be_copied_is_refused():
    fixed = net()
    fixed.lock = threading.Lock()
    with pytest.raises(UnsupportedModuleError, match="cannot be copied .*load its state_dict"):
        fsmap.doctor(fixed, points(10, 2))


def test_json_is_plain():
    text = fsmap.doctor(with_twins(), points(60, 2)).to_json()
    given = json.loads(text)
    assert given["version"] == 1
    assert given["symmetries"][0]["units"] == [1, 3]
    assert "NaN" not in text
    assert "Infinity" not in text


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_what_a_few_points_show_may_be_chance(activation):
    few = fsmap.doctor(net(activation), points(1, 2))
    assert few.verdict == "undecided"
    assert "on so few points (S = 1) that may be chance: give at least 20" in few.summary
    assert fsmap.doctor(with_twins(), points(1, 2)).verdict == "pathological"
