"""Estimators of Tr 𝒥: exact with complete probes, unbiased, with the error that they report."""

from __future__ import annotations

import pytest
import torch

import cases
import fsmap
import oracles
from fsmap.linalg import estimators, probes
from fsmap.linalg.estimators import Site, by_name

ESTIMATORS = ("fd", "fd_central", "jvp", "vjp")


PARAMETER_PROBES = ("fd", "fd_central", "jvp")


def complete(case, method):
    """Probes whose mean is the trace itself."""
    if method in PARAMETER_PROBES:
        return probes.basis(case.params)
    rows = case.f(case.params, case.x).numel()
    return rows**0.5 * torch.eye(rows)


def slopes(value, case, num=2):
    """Derivatives of a value along directions, by autograd and by differences of the slow trace."""
    grads = [None] * len(case.params)
    if value.requires_grad:
        grads = torch.autograd.grad(value, case.params.values(), allow_unused=True)
    for seed in range(num):
        direction = cases.direction(case.params, seed)
        pairs = zip(grads, direction.values(), strict=True)
        found = sum(float((g * d).sum()) for g, d in pairs if g is not None)
        yield (
            found,
            oracles.directional_slow(
                lambda p: oracles.trace_slow(case.f, p, case.x), case.params, direction
            ),
        )


@pytest.mark.parametrize("name", cases.MODELS)
@pytest.mark.parametrize("method", ["exact", "jvp", "vjp"])
def test_value_and_gradient_with_complete_probes(name, method):
    case = cases.case(name)
    drawn = 1 if method == "exact" else complete(case, method)
    value = fsmap.trace(case.f, case.params, case.x, method=method, probes=drawn).value
    expected = oracles.trace_slow(case.f, case.params, case.x)
    torch.testing.assert_close(value.detach(), expected, rtol=1e-9, atol=0)
    for found, wanted in slopes(value, case):
        assert found == pytest.approx(wanted, rel=1e-7, abs=1e-8)


@pytest.mark.parametrize("name", cases.MODELS)
@pytest.mark.parametrize("method", ["fd", "fd_central"])
def test_differences_are_right_to_second_order_in_beta(name, method):
    case = cases.case(name)
    truth = float(oracles.trace_slow(case.f, case.params, case.x))
    errors = []
    for beta in (1e-3, 5e-4):
        estimate = fsmap.trace(
            case.f,
            case.params,
            case.x,
            method=method,
            probes=probes.basis(case.params),
            beta=beta,
            antithetic=method
            == "fd",  # the basis with both signs: odd orders cancel, as on average
        )
        errors.append((float(estimate.value.detach()) - truth) / truth)
    assert abs(errors[1]) < 1e-3
    if abs(errors[0]) > 1e-10:  # a model that is linear in what is trained has no error at all
        assert errors[0] / errors[1] == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("name", ["tanh_mlp", "wide", "layernorm", "cnn", "batchnorm_train"])
@pytest.mark.parametrize("method", ["fd", "fd_central"])
def test_gradient_of_differences(name, method):
    case = cases.case(name)
    found = {}
    for beta in (2e-3, 1e-3):
        value = fsmap.trace(
            case.f,
            case.params,
            case.x,
            method=method,
            probes=probes.basis(case.params),
            beta=beta,
            antithetic=method == "fd",
        ).value
        found[beta] = list(slopes(value, case, num=1))[0]
    (coarse, wanted), (fine, _) = found[2e-3], found[1e-3]
    extrapolated = (4 * fine - coarse) / 3  # the error is O(β²): what is left is O(β⁴)
    assert extrapolated == pytest.approx(wanted, rel=2e-6)
    assert fine == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize("name", ["wide", "sequence", "cnn", "batchnorm_train"])
@pytest.mark.parametrize("method", ESTIMATORS)
def test_unbiased_within_its_own_error(name, method, generator):
    case = cases.case(name)
    estimate = fsmap.trace(
        case.f, case.params, case.x, method=method, probes=400, generator=generator, beta=1e-4
    )
    truth = oracles.trace_slow(case.f, case.params, case.x)
    assert abs(estimate.value.detach() - truth) < 5 * estimate.stderr
    assert 0 < estimate.stderr < 0.3 * truth


@pytest.mark.parametrize(("method", "moment"), [("jvp", 2.0), ("vjp", 2.0)])
def test_the_reported_error_is_the_theoretical_one(method, moment, generator):
    """Var ψᵀ𝒥ψ = 2‖𝒥‖² for normal ψ; for signs the diagonal does not count."""
    case = cases.case("wide")
    estimate = fsmap.trace(
        case.f, case.params, case.x, method=method, probes=4000, generator=generator
    )
    if method == "jvp":
        variance = moment * oracles.gram_slow(case.f, case.params, case.x).square().sum()
    else:
        rows = oracles.jacobian_slow(case.f, case.params, case.x).flatten(0, 1) / 5**0.5
        dual = rows @ rows.mT
        variance = moment * (dual - torch.diag(dual.diagonal())).square().sum()
    assert float(estimate.stderr) == pytest.approx(float((variance / 4000).sqrt()), rel=0.15)


@pytest.mark.parametrize("name", ["wide", "dict_input"])
@pytest.mark.parametrize("method", ESTIMATORS)
def test_same_generator_same_value_whatever_the_chunks(name, method):
    case = cases.case(name)
    values = [
        fsmap.trace(
            case.f,
            case.params,
            case.x,
            method=method,
            probes=7,
            generator=torch.Generator().manual_seed(3),
            chunk=chunk,
        ).value
        for chunk in (None, None, 2, 7)
    ]
    assert torch.equal(values[0], values[1])
    for value in values[2:]:
        torch.testing.assert_close(value, values[0], rtol=1e-12, atol=0)


def test_exact_in_chunks():
    case = cases.case("wide")
    whole = fsmap.trace(case.f, case.params, case.x, method="exact").value
    for chunk in (1, 2, 100):
        part = fsmap.trace(case.f, case.params, case.x, method="exact", chunk=chunk).value
        torch.testing.assert_close(part, whole)


def test_standard_error_of_one_probe_is_unknown_and_of_exact_is_zero(generator):
    case = cases.case("wide")
    one = fsmap.trace(case.f, case.params, case.x, method="jvp", generator=generator)
    assert torch.isnan(one.stderr)
    exact = fsmap.trace(case.f, case.params, case.x, method="exact")
    assert exact.stderr == 0


def test_without_a_generator_torchs_own_is_used(seeded):
    case = cases.case("wide")
    values = [fsmap.trace(case.f, case.params, case.x, method="jvp").value for _ in range(2)]
    assert values[0] != values[1]


def test_antithetic_pairs_count_as_one_probe():
    case = cases.case("wide")
    psi = probes.normal(case.params, 3, torch.Generator().manual_seed(0))
    options = {"method": "fd", "beta": 0.1}
    pair = fsmap.trace(case.f, case.params, case.x, probes=psi, antithetic=True, **options)
    minus = {n: -p for n, p in psi.items()}
    means = []
    for r in range(3):
        both = [{n: p[r : r + 1] for n, p in signed.items()} for signed in (psi, minus)]
        halves = [fsmap.trace(case.f, case.params, case.x, probes=p, **options) for p in both]
        means.append((halves[0].value + halves[1].value).detach() / 2)
    torch.testing.assert_close(pair.value.detach(), torch.stack(means).mean())
    torch.testing.assert_close(pair.stderr, torch.stack(means).std() / 3**0.5)


def test_vmaps_over_members():
    case = cases.case("wide")
    members = {n: torch.stack([p.detach(), 2 * p.detach()]) for n, p in case.params.items()}
    psi = probes.normal(case.params, 2, torch.Generator().manual_seed(0))
    for method in ("fd", "fd_central", "jvp", "exact"):

        def value(p, method=method):
            drawn = None if method == "exact" else psi
            return estimators.estimate(by_name(method), Site(case.f, p, case.x), drawn).value

        together = torch.func.vmap(value)(members)
        for m in range(2):
            alone = value({n: p[m] for n, p in members.items()})
            torch.testing.assert_close(together[m], alone)


@pytest.mark.parametrize("method", [*ESTIMATORS, "exact"])
def test_single_precision(method):
    case = cases.case("wide")
    drawn = 1 if method == "exact" else complete(case, method)
    options = {"method": method, "beta": 1e-2}
    double = fsmap.trace(case.f, case.params, case.x, probes=drawn, **options).value
    case.module.float()
    params = dict(case.module.named_parameters())
    if method in PARAMETER_PROBES:
        drawn = {n: p.float() for n, p in drawn.items()}
    elif method == "vjp":
        drawn = drawn.float()
    single = fsmap.trace(case.f, params, case.x.float(), probes=drawn, **options).value
    assert single.dtype == torch.float32
    assert float(single.detach()) == pytest.approx(
        float(double.detach()), rel=1e-3 if "fd" in method else 1e-5
    )
