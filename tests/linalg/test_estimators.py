"""Estimators of Tr 𝒥: exact with complete probes, unbiased, with the error that they report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import cases
import fsmap
import oracles
from fsmap import metric as m
from fsmap.errors import FallbackWarning, ForwardModeError, InputError
from fsmap.linalg import estimators, jacobian, probes, second_order
from fsmap.linalg.estimators import Estimator, Jvp, Pass, by_name
from fsmap.linalg.jacobian import Site
from fsmap.px import Stream

DIFFERENCES = ("fd", "fd_central")
RANDOM = (*DIFFERENCES, "jvp", "vjp")


def trace(case, method, probes=1, **options):
    return fsmap.trace(case.f, case.params, case.x, method=method, probes=probes, **options)


def complete(case, method):
    """Probes whose mean is the trace itself."""
    if method == "exact":
        return 1
    if method == "vjp":
        rows = case.f(case.params, case.x).numel()
        return rows**0.5 * torch.eye(rows)
    return oracles.complete_probes(case.params)


def both_signs(params):
    """The complete set with both signs: odd orders in β cancel, as on average."""
    return {n: torch.cat([p, -p]) for n, p in oracles.complete_probes(params).items()}


@pytest.mark.parametrize("name", cases.MODELS)
@pytest.mark.parametrize("method", ["exact", "jvp", "vjp"])
def test_value_and_gradient_with_complete_probes(name, method):
    case = cases.case(name)
    value = trace(case, method, complete(case, method)).value
    expected = oracles.trace_slow(case.f, case.params, case.x)
    torch.testing.assert_close(value.detach(), expected, rtol=1e-9, atol=0)
    slow = lambda p: oracles.trace_slow(case.f, p, case.x)  # noqa: E731
    for found, expected in cases.slopes(value, slow, case.params):
        assert found == pytest.approx(expected, rel=1e-7, abs=1e-8)


@pytest.mark.parametrize("name", cases.MODELS)
@pytest.mark.parametrize("method", DIFFERENCES)
def test_differences_are_right_to_second_order_in_beta(name, method):
    case = cases.case(name)
    truth = float(oracles.trace_slow(case.f, case.params, case.x))
    psi = both_signs(case.params)
    errors = [
        float(trace(case, method, psi, beta=beta).value.detach()) / truth - 1
        for beta in (1e-3, 5e-4)
    ]
    assert abs(errors[1]) < 1e-3
    if abs(errors[0]) > 1e-10:  # a model that is linear in what is trained has no error at all
        assert errors[0] / errors[1] == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("name", ["tanh_mlp", "wide", "layernorm", "cnn", "batchnorm_train"])
@pytest.mark.parametrize("method", DIFFERENCES)
def test_gradient_of_differences(name, method):
    case = cases.case(name)
    slow = lambda p: oracles.trace_slow(case.f, p, case.x)  # noqa: E731
    found = []
    for beta in (2e-3, 1e-3):
        value = trace(case, method, both_signs(case.params), beta=beta).value
        found.append(next(cases.slopes(value, slow, case.params, num=1)))
    (coarse, expected), (fine, _) = found
    extrapolated = (4 * fine - coarse) / 3  # the error is O(β²): what is left is O(β⁴)
    assert extrapolated == pytest.approx(expected, rel=2e-6)
    assert fine == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("name", ["wide", "sequence", "cnn", "batchnorm_train"])
@pytest.mark.parametrize("method", RANDOM)
def test_unbiased_within_its_own_error(name, method, generator):
    case = cases.case(name)
    estimate = trace(case, method, 400, generator=generator, beta=1e-4)
    truth = oracles.trace_slow(case.f, case.params, case.x)
    assert abs(estimate.value.detach() - truth) < 5 * estimate.stderr
    assert 0 < estimate.stderr < 0.3 * truth


@pytest.mark.parametrize("method", ["jvp", "vjp"])
def test_the_reported_error_is_the_theoretical_one(method, generator):
    """Var ψᵀ𝒥ψ = 2‖𝒥‖² for normal ψ; for signs the diagonal does not count."""
    case = cases.case("wide")
    estimate = trace(case, method, 4000, generator=generator)
    matrix = oracles.gram_slow(case.f, case.params, case.x)
    if method == "vjp":
        rows = oracles.jacobian_slow(case.f, case.params, case.x).flatten(0, 1) / 5**0.5
        matrix = rows @ rows.mT
        matrix = matrix - torch.diag(matrix.diagonal())
    variance = 2 * matrix.square().sum() / 4000
    assert float(estimate.stderr) == pytest.approx(float(variance.sqrt()), rel=0.15)


@pytest.mark.parametrize("name", ["wide", "dict_input"])
@pytest.mark.parametrize("method", RANDOM)
def test_same_generator_same_value_however_many_at_a_time(name, method, monkeypatch):
    case = cases.case(name)
    values = []
    for num in (7, 7, 2):
        size = 8 * sum(p.numel() for p in case.params.values())
        monkeypatch.setattr(estimators, "PROBE_BYTES", num * size)
        values.append(trace(case, method, 7, generator=torch.Generator().manual_seed(3)).value)
    assert torch.equal(values[0], values[1])
    torch.testing.assert_close(values[2], values[0], rtol=1e-12, atol=0)


def test_exact_in_parts_and_errors_of_one_probe(generator, monkeypatch):
    case = cases.case("wide")
    whole = trace(case, "exact")
    assert whole.stderr == 0
    monkeypatch.setattr(jacobian, "CHUNK_BYTES", 1)  # one point at a time
    torch.testing.assert_close(trace(case, "exact").value, whole.value)
    assert torch.isnan(trace(case, "jvp", generator=generator).stderr)


@pytest.mark.parametrize("method", RANDOM)
def test_probes_of_a_random_function_run_in_turn(method, seeded):
    """Which vmap refuses, and nothing about the module tells."""
    forward = lambda m, x: F.rrelu(m(x), training=True)  # noqa: E731
    f, params = fsmap.functional(nn.Linear(3, 2), forward=forward)
    assert fsmap.trace(f, params, torch.randn(5, 3), method=method, probes=2).stderr > 0


def test_without_a_generator_torchs_own_is_used(seeded):
    case = cases.case("wide")
    assert trace(case, "jvp").value != trace(case, "jvp").value


@pytest.mark.parametrize("method", ["fd", "fd_central", "jvp", "exact"])
def test_vmaps_over_members(method):
    case = cases.case("wide")
    members = {n: torch.stack([p.detach(), 2 * p.detach()]) for n, p in case.params.items()}
    psi = probes.normal(case.params, 2, torch.Generator().manual_seed(0))

    def value(p):
        drawn = None if method == "exact" else psi
        site = Site(case.f, p, case.x)
        return estimators.evaluate(by_name(method), site, drawn, with_output=False).value.mean()

    together = torch.func.vmap(value)(members)
    for k in range(2):
        torch.testing.assert_close(together[k], value({n: p[k] for n, p in members.items()}))


@pytest.mark.parametrize("method", [*RANDOM, "exact"])
def test_single_precision(method):
    case = cases.case("wide")
    drawn = complete(case, method)
    double = trace(case, method, drawn, beta=1e-2).value
    case.module.float()
    params = dict(case.module.named_parameters())
    drawn = tree_map_only(Tensor, Tensor.float, drawn)
    case = case._replace(params=params, x=case.x.float())
    single = trace(case, method, drawn, beta=1e-2).value
    assert single.dtype == torch.float32
    tolerance = 1e-3 if method in DIFFERENCES else 1e-5
    assert float(single.detach()) == pytest.approx(float(double.detach()), rel=tolerance)


@pytest.mark.parametrize("metric", cases.METRICS)
@pytest.mark.parametrize("method", estimators.ESTIMATORS)
@pytest.mark.parametrize("name", ["wide", "batchnorm_train"])
def test_metrics_against_the_double_sum(metric, method, name):
    case = cases.case(name)
    S, K = case.f(case.params, case.x).shape
    g, full = cases.metric(metric, S, K)
    expected = oracles.trace_slow(case.f, case.params, case.x, full)
    value = trace(case, method, complete(case, method), metric=g, beta=1e-5).value
    tolerance = {"fd": 1e-3, "fd_central": 1e-6}.get(method, 1e-9)
    torch.testing.assert_close(value.detach(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("method", ["exact", "jvp", "vjp"])
def test_softmax_fisher_and_its_gradient(method, detach):
    case = cases.case("wide")
    value = trace(case, method, complete(case, method), metric=m.SoftmaxFisher(detach)).value
    slow = lambda p, g: oracles.trace_slow(case.f, p, case.x, g)  # noqa: E731
    cases.check_softmax_fisher(value, case, slow, detach)


class Thinned(nn.Module):
    """Dropout whose rate has a name of its own."""

    keep = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 1 - self.keep, self.training)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), Thinned()], ids=["torch's", "own"])
def test_dropout_has_the_same_mask_in_all_passes(layer, seeded):
    net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), layer, nn.Linear(50, 2))
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
        torch.manual_seed(1)
        fsmap.LMAP(net, x, num_points=4, estimator=method, batchnorm="batch")(x)
        assert torch.equal(torch.get_rng_state(), after)
    assert values["fd"] == pytest.approx(values["jvp"], rel=1e-3)
    assert values["fd_central"] == pytest.approx(values["jvp"], rel=1e-6)


@pytest.fixture
def gelu(seeded):
    """A GELU network in single precision."""
    net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))
    net.extend([nn.GELU(), nn.Linear(64, 4)])
    f, params = fsmap.functional(net.float())
    return cases.Case(f, params, torch.randn(32, 8, dtype=torch.float32), net)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_jvp_in_bf16_is_within_two_percent(gelu, device):
    params = dict(gelu.module.to(device).named_parameters())
    gelu = gelu._replace(params=params, x=gelu.x.to(device))
    psi = probes.normal(params, 4, torch.Generator(device).manual_seed(0))
    with torch.autocast(device, dtype=torch.bfloat16):
        half = trace(gelu, "jvp", psi).value
    assert half.dtype == torch.float32
    params = dict(gelu.module.double().named_parameters())
    wide = {n: p.double() for n, p in psi.items()}
    exact = trace(gelu._replace(params=params, x=gelu.x.double()), "jvp", wide).value
    assert float(half.detach()) == pytest.approx(float(exact.detach()), rel=0.02)


@pytest.mark.parametrize("method", DIFFERENCES)
def test_differences_leave_autocast_and_refuse_half_precision(gelu, method):
    psi = probes.normal(gelu.params, 1, torch.Generator().manual_seed(0))
    outside = trace(gelu, method, psi).value
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = trace(gelu, method, psi).value
    assert torch.equal(inside, outside)
    params = dict(gelu.module.bfloat16().named_parameters())
    with pytest.raises(InputError, match="bfloat16"):
        trace(gelu._replace(params=params, x=gelu.x.bfloat16()), method)


S = 4


class Signs(Estimator):
    """‖Js‖² with random signs s in parameter space: an estimator that is not the library's."""

    name = "signs"

    def draw(self, source: Any, site: Site, num: int) -> Any:
        return {name: p.sign() for name, p in source.psi(site.params, num).items()}

    def at(self, site: Site, probe: Any) -> Pass:
        out, tangent = torch.func.jvp(lambda p: site.f(p, site.x), (site.params,), (probe,))
        return Pass(tangent.square().sum() / len(site.x), None, None)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("mode", ["joint", "batch", "frozen"])
def test_your_own_in_lmap(mode, seeded):
    net, x = network(), torch.randn(6, 3)
    lm = fsmap.LMAP(net, x[:S], num_points=S, estimator=Signs(), batchnorm=mode)
    points = lm.draw(x).points
    out, R = lm(x)
    assert torch.equal(out, net(x))
    assert "signs" in repr(lm)
    f, params = fsmap.functional(net)
    signs = {n: p[0].sign() for n, p in Stream(0, 0).psi(params).items()}
    x = torch.cat([x, points]) if mode == "joint" else points
    slow = oracles.laplacian_slow(f, params, x, signs)
    torch.testing.assert_close(R, slow, rtol=1e-10, atol=0.0)
    own, theirs = (
        torch.autograd.grad(r, list(net.parameters()), allow_unused=True) for r in (R, slow)
    )
    for a, b in zip(own[:-1], theirs[:-1], strict=True):  # the last bias has no part in it
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_your_own_in_trace_and_fit(seeded, generator):
    f, params = fsmap.functional(network())
    x = torch.randn(8, 3)
    found = fsmap.trace(f, params, x, method=Signs(), probes=500, generator=generator)
    assert abs(found.value - oracles.trace_slow(f, params, x)) < 5 * found.stderr
    terms = fsmap.Gaussian(0.1), fsmap.Normal(1.0), fsmap.px.Normal(shape=(3,))
    fitted = []
    for estimator in ("jvp", Jvp(), Signs()):
        objective = fsmap.l_map(*terms, num_points=S, num_data=8, jitter=1.0, estimator=estimator)
        state, _ = fsmap.fit(objective, f, params, (x, x[:, :2]), steps=5, progress=False)
        fitted.append(torch.cat([p.flatten() for p in state.params.values()]))
    assert torch.equal(fitted[0], fitted[1])
    assert not torch.allclose(fitted[0], fitted[2])


ATTENTION = {
    "function": lambda m, x: F.scaled_dot_product_attention(*[m[0](x)] * 3),
    "layer": lambda m, x: m[1](*[m[0](x)] * 3, need_weights=False)[0],
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_that_does_not_fit(kind, seeded, monkeypatch):
    net, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(5, 3, 4)
    if kind == "layer":
        net.append(nn.MultiheadAttention(4, 2, batch_first=True))
    options = {"forward": ATTENTION[kind]}
    f, params = fsmap.functional(net, **options)
    expected = fsmap.LMAP(net, x[:S], num_points=S, **options)(x)[1].item()
    needed = []

    def refuse(size: int, _: torch.device) -> bool:
        needed.append(size)
        return False

    def never(*_: object, **__: object) -> None:
        pytest.fail("allocated all the same")

    monkeypatch.setattr(second_order, "fits", refuse)
    for name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        monkeypatch.setattr(second_order, name, never)
    with pytest.raises(ForwardModeError, match="attention"):
        fsmap.trace(f, params, x, method="jvp")
    heads = 2 if kind == "layer" else 1
    assert needed[0] >= 2 * 4 * 5 * heads * 3 * 3  # scores and their tangents
    lm = fsmap.LMAP(net, x[:S], num_points=S, **options)
    with pytest.warns(FallbackWarning, match="fd_central"):
        value = lm(x)[1].item()
    assert value == pytest.approx(expected, rel=1e-4)
    lm(x)  # a second warning would be an error


@pytest.mark.parametrize("method", DIFFERENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e8, 1e12, 1e16, 1e30])
def test_scales_at_which_differences_are_wrong(seeded, method, dtype, scale):
    """Refused, or within 20 % of the exact trace."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    x = torch.randn(6, 3).to(dtype)
    f, params = fsmap.functional(net)
    for what in (
        {n: scale * p for n, p in params.items()},
        params | {"2.bias": params["2.bias"] + scale},
    ):
        exact = fsmap.trace(f, what, x, method="exact").value
        given = {"beta": 1e-3, "probes": 4000, "generator": torch.Generator().manual_seed(0)}
        try:
            found = fsmap.trace(f, what, x, method=method, **given).value
        except InputError:
            continue
        assert abs((found / exact).item() - 1) < 0.2
