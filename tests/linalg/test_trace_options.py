"""Options of the trace: metrics, last layer, random layers, half precision, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cases
import fsmap
import oracles
from cases import symmetric
from fsmap import metric as m
from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.linalg import estimators, probes

METRICS = {
    "weights": lambda S, K: torch.linspace(0.5, 2, S),
    "signed_weights": lambda S, K: torch.linspace(-1, 2, S),
    "output": lambda S, K: symmetric(K, K, definite=True),
    "signed_output": lambda S, K: symmetric(S, K, K),
    "general": lambda S, K: symmetric(S * K, S * K, definite=True),
    "signed_general": lambda S, K: symmetric(S * K, S * K).reshape(S, K, S, K),
}


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("method", estimators.METHODS)
@pytest.mark.parametrize("name", ["wide", "batchnorm_train"])
def test_metrics_against_the_double_sum(metric, method, name):
    case = cases.case(name)
    S, K = case.f(case.params, case.x).shape
    g = METRICS[metric](S, K)
    full = g.reshape(S, K, S, K) if "general" in metric else oracles.full_metric(g, S, K)
    expected = oracles.trace_slow(case.f, case.params, case.x, full)
    drawn = probes.basis(case.params)
    if method == "vjp":
        drawn = (S * K) ** 0.5 * torch.eye(S * K)
    value = fsmap.trace(
        case.f,
        case.params,
        case.x,
        method=method,
        probes=1 if method == "exact" else drawn,
        metric=g,
        beta=1e-5,
    ).value
    tolerance = {"fd": 1e-3, "fd_central": 1e-6}.get(method, 1e-9)
    torch.testing.assert_close(value.detach(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("method", ["exact", "jvp", "vjp"])
def test_softmax_fisher_and_its_gradient(method, detach):
    case = cases.case("wide")
    drawn = {"jvp": probes.basis(case.params), "vjp": 15**0.5 * torch.eye(15), "exact": 1}[method]
    value = fsmap.trace(
        case.f, case.params, case.x, method=method, probes=drawn, metric=m.SoftmaxFisher(detach)
    ).value
    held = oracles.softmax_fisher_slow(case.f(case.params, case.x)).detach()

    def slow(p):
        g = held if detach else oracles.softmax_fisher_slow(case.f(p, case.x))
        return oracles.trace_slow(case.f, p, case.x, oracles.full_metric(g.detach(), 5, 3))

    torch.testing.assert_close(value.detach(), slow(case.params), rtol=1e-9, atol=0)
    grads = torch.autograd.grad(value, case.params.values(), materialize_grads=True)
    found = torch.cat([g.reshape(-1) for g in grads])
    wanted = oracles.gradient_slow(slow, case.params)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-8)


@pytest.fixture
def headed(seeded):
    """A network that knows its last layer, and points."""
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    f, params = fsmap.functional(net, last_layer="2")
    return f, params, torch.randn(6, 2)


@pytest.mark.parametrize("method", ["fd", "fd_central", "jvp"])
def test_last_layer_in_closed_form(headed, method):
    f, params, x = headed
    truth = oracles.trace_slow(f, params, x)
    options = {"method": method, "beta": 1e-4}
    found = fsmap.trace(f, params, x, probes=probes.basis(params), **options).value.detach()
    torch.testing.assert_close(found, truth, rtol=1e-9 if method == "jvp" else 1e-3, atol=0)


def test_last_layer_in_closed_form_lowers_the_error(headed, generator):
    f, params, x = headed
    psi = probes.normal(params, 200, generator)
    plain = fsmap.trace(fsmap.functional(f.module)[0], params, x, method="jvp", probes=psi)
    better = fsmap.trace(f, params, x, method="jvp", probes=psi)
    assert better.stderr < 0.8 * plain.stderr
    truth = oracles.trace_slow(f, params, x)
    assert abs(better.value.detach() - truth) < 5 * better.stderr


def test_last_layer_counts_places_and_leaves_out_what_is_frozen(seeded):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    net[2].bias.requires_grad_(False)
    f, params = fsmap.functional(net, last_layer="2")
    x = torch.randn(5, 7, 3)  # the layer is applied at 7 places of each point
    out, state = f.with_state(params, x)
    block = estimators.last_layer_trace(f, out, state.features[0])
    jac = oracles.jacobian_slow(f, params, x)
    expected = jac[..., -8:].square().sum() / 5  # the last 8 parameters are its weight
    torch.testing.assert_close(block.detach(), expected)


def test_dropout_has_the_same_mask_in_all_passes(seeded):
    net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Dropout(0.5), nn.Linear(50, 2))
    f, params = fsmap.functional(net)
    x, psi = torch.randn(4, 2), probes.normal(params, 1, torch.Generator().manual_seed(0))
    values = {}
    for method in ("jvp", "fd", "fd_central"):
        torch.manual_seed(1)
        found = fsmap.trace(f, params, x, method=method, probes=psi, beta=1e-5)
        values[method] = float(found.value.detach())
        after = torch.get_rng_state()
        torch.manual_seed(1)
        f(params, x)
        assert torch.equal(torch.get_rng_state(), after)  # as after one plain pass
    assert values["fd"] == pytest.approx(values["jvp"], rel=1e-3)
    assert values["fd_central"] == pytest.approx(values["jvp"], rel=1e-6)


@pytest.fixture
def gelu(seeded):
    """A GELU network in single precision."""
    net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    f, params = fsmap.functional(net.float())
    return net, f, params, torch.randn(32, 8, dtype=torch.float32)


def test_jvp_in_bf16_is_within_two_percent(gelu):
    net, f, params, x = gelu
    psi = probes.normal(params, 4, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = fsmap.trace(f, params, x, method="jvp", probes=psi).value
    assert half.dtype == torch.float32
    net.double()
    wide = {n: p.double() for n, p in psi.items()}
    params = dict(net.named_parameters())
    exact = fsmap.trace(f, params, x.double(), method="jvp", probes=wide).value
    assert float(half.detach()) == pytest.approx(float(exact.detach()), rel=0.02)


@pytest.mark.parametrize("method", ["fd", "fd_central"])
def test_differences_leave_autocast(gelu, method):
    _, f, params, x = gelu
    psi = probes.normal(params, 1, torch.Generator().manual_seed(0))
    outside = fsmap.trace(f, params, x, method=method, probes=psi).value
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fsmap.trace(f, params, x, method=method, probes=psi).value
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("method", ["fd", "fd_central"])
def test_differences_of_half_precision_parameters_are_refused(gelu, method):
    net, f, _, x = gelu
    net.bfloat16()
    params = dict(net.named_parameters())
    with pytest.raises(InputError, match="bfloat16"):
        fsmap.trace(f, params, x.bfloat16(), method=method)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"method": "hutch"},
            "unknown trace estimator 'hutch'; known: fd, fd_central, jvp, vjp, ex",
        ),
        ({"method": "fd", "beta": 0.0}, "beta"),
        ({"method": "fd_central", "beta": torch.nan}, "beta"),
        ({"method": "jvp", "antithetic": True}, "antithetic probes change nothing for 'jvp'"),
        ({"method": "jvp", "probes": 2.5}, "probes must be an integer of at least 1, got 2.5"),
        ({"method": "exact", "chunk": -1}, "chunk must be None or an integer of at least 1, got"),
        ({"method": "jvp", "probes": 0}, "probes must be an integer of at least 1.*got 0"),
        ({"method": "jvp", "probes": torch.ones(2, 51)}, "must be a dict of stacked draws"),
        ({"method": "vjp", "probes": torch.ones(2, 7)}, r"'vjp' must be \[R, 15\], got \(2, 7\)"),
        ({"method": "vjp", "probes": {}}, r"'vjp' must be \[R, 15\], got dict"),
    ],
)
def test_bad_options_are_named(options, words):
    case = cases.case("wide")
    with pytest.raises(InputError, match=words):
        fsmap.trace(case.f, case.params, case.x, **options)


@pytest.mark.parametrize("method", estimators.METHODS)
def test_bad_points_are_named(method, generator):
    case = cases.case("wide")
    for bad, words in [
        (torch.full((2, 2), torch.nan), "NaN or inf in 2 of 2 points"),
        (torch.zeros(0, 2), "x is empty"),
        (torch.zeros(5, 3), r"x of shape \(5, 3\), in '0' \(Linear\)"),
    ]:
        with pytest.raises(InputError, match=words):
            fsmap.trace(case.f, case.params, bad, method=method, generator=generator)


def test_a_module_without_forward_mode_has_another_estimator(seeded):
    class Recurrent(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0][:, -1]

    f, params = fsmap.functional(Recurrent(2, 3, batch_first=True).float())
    x = torch.randn(4, 5, 2, dtype=torch.float32)
    with pytest.raises(
        UnsupportedModuleError, match=r"in Recurrent \(use the estimator 'fd_centra"
    ):
        fsmap.trace(f, params, x, method="jvp")
    truth = float(oracles.trace_slow(f, params, x))
    for method in ("fd_central", "vjp"):
        found = fsmap.trace(f, params, x, method=method, probes=200, beta=1e-2)
        assert abs(float(found.value.detach()) - truth) < 5 * found.stderr
