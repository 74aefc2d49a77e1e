"""Priors against torch.distributions, quadrature and hand-made Jacobians, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions
from torch.func import grad, vmap
from torch.testing import assert_close

from fsmap.errors import InputError, MemoryLimitError
from fsmap.objective import prior as module
from fsmap.objective.prior import Flat, Laplace, Normal, Reparametrized


def parameters(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (3, 2), "bias": (3,), "gain": ()}
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}


PARAMS = parameters()
SCALES = {
    "weight": torch.tensor([0.5, 2.0], dtype=torch.float64),
    "bias": 3.0,
    "gain": torch.tensor(0.1, dtype=torch.float64),
}
MEANS = {**parameters(7), "running_mean": torch.ones(3, dtype=torch.float64)}


def slow(density, scale, mean, params=PARAMS):
    """Entry by entry, the definition."""
    pick = lambda table, n: table[n] if isinstance(table, dict) else table  # noqa: E731
    total = torch.zeros(())
    for name, theta in params.items():
        s = torch.as_tensor(pick(scale, name)).expand_as(theta)
        m = torch.as_tensor(pick(mean, name)).expand_as(theta)
        for values in zip(theta.reshape(-1), m.reshape(-1), s.reshape(-1), strict=True):
            total = total + density(values[1], values[2]).log_prob(values[0])
    return total


@pytest.mark.parametrize(
    ("prior", "density"), [(Normal, distributions.Normal), (Laplace, distributions.Laplace)]
)
@pytest.mark.parametrize("scale", [0.7, torch.tensor(2.0, dtype=torch.float64), SCALES])
@pytest.mark.parametrize("mean", [None, 0.3, MEANS])
def test_is_the_sum_of_log_densities(prior, density, scale, mean):
    term = prior(scale, mean)
    term.check(PARAMS)
    value = term.value(PARAMS)
    assert value.shape == ()
    expected = slow(density, scale, 0.0 if mean is None else mean)
    assert_close(value, expected, rtol=1e-12, atol=1e-12)


PRIORS = {
    "normal": Normal(0.7),
    "normal_transfer": Normal(SCALES, MEANS),
    "laplace": Laplace(0.7, 0.1),
    "flat": Flat(),
    "sinh": Reparametrized(Normal(0.7), torch.asinh),
    "mixed": Reparametrized(
        Normal(SCALES),
        {"weight": torch.asinh, "bias": lambda t: t**3 + t, "gain": lambda t: 2 * t},
    ),
    "rotation": Reparametrized(
        Normal(0.7),
        lambda p: {"all": torch.cat([t.reshape(-1) for t in p.values()]).cumsum(0)},
        False,
    ),
}


@pytest.fixture(params=PRIORS)
def prior(request):
    return PRIORS[request.param]


def test_gradients_in_the_parameters(prior):
    names = [*PARAMS]
    inputs = tuple(t.clone().requires_grad_() for t in PARAMS.values())
    value = lambda *ts: prior.value(dict(zip(names, ts, strict=True))) + 0 * ts[0].sum()  # noqa: E731
    assert torch.autograd.gradcheck(value, inputs)


def test_func_grad_equals_backward(prior):
    slopes = grad(prior.value)(PARAMS)
    leaves = {n: t.clone().requires_grad_() for n, t in PARAMS.items()}
    (prior.value(leaves) + 0 * leaves["gain"]).backward()
    for name, slope in slopes.items():
        theirs = leaves[name].grad
        assert_close(slope, torch.zeros_like(slope) if theirs is None else theirs)


def test_vmaps_over_members(prior):
    members = [parameters(seed) for seed in range(3)]
    stacked = {n: torch.stack([m[n] for m in members]) for n in PARAMS}
    assert_close(vmap(prior.value)(stacked), torch.stack([prior.value(m) for m in members]))


def test_check_accepts(prior):
    prior.check(PARAMS)


def test_half_precision_is_summed_in_float32(prior):
    params = {n: t.bfloat16() for n, t in PARAMS.items()}
    value = Normal(0.7).value(params)
    assert value.dtype == torch.float32
    assert_close(value, Normal(0.7).value({n: t.float() for n, t in params.items()}))


@pytest.mark.parametrize("make", [Normal, Laplace])
def test_scale_is_vmapped_and_learned(make):
    scales = torch.tensor([0.1, 1.0, 3.0])
    alone = torch.stack([make(float(s)).value(PARAMS) for s in scales])
    assert_close(vmap(lambda s: make(s).value(PARAMS))(scales), alone)
    step = 1e-6
    rise = make(1 + step).value(PARAMS) - make(1 - step).value(PARAMS)
    slope = grad(lambda s: make(s).value(PARAMS))(torch.ones(()))
    assert_close(slope, rise / (2 * step), rtol=1e-7, atol=1e-6)


@given(seed=st.integers(0, 1000), decay=st.floats(1e-3, 1e3))
def test_normal_is_weight_decay(seed, decay):
    params = parameters(seed)
    slope = grad(Normal(decay**-0.5).value)(params)
    for name, theta in params.items():
        assert_close(slope[name], -decay * theta)


def test_flat_is_zero_in_the_parameters_dtype():
    value = Flat().value({"w": torch.ones(3, dtype=torch.float32)})
    assert value.dtype == torch.float32
    assert value == 0


@pytest.mark.parametrize("term", [Normal(1.0), Laplace(1.0), Flat(), PRIORS["sinh"]])
def test_no_parameters_are_refused(term):
    for use in (term.value, term.check):
        with pytest.raises(InputError, match="trainable"):
            use({})


@pytest.mark.parametrize(
    ("term", "what"),
    [
        (Normal({"gain": 1.0}), "std"),
        (Normal(1.0, {"gain": torch.zeros(())}), "mean"),
        (Laplace({"gain": 1.0}), "scale"),
        (Reparametrized(Normal(1.0), {"gain": torch.asinh}), "inverse"),
    ],
)
def test_missing_names_are_listed(term, what):
    message = rf"{what} has no entry for \['weight', 'bias'\]; it has \['gain'\]"
    for use in (term.value, term.check):
        with pytest.raises(InputError, match=message):
            use(PARAMS)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (1, 3, 2), (5, 3, 2)])
def test_shapes_that_do_not_broadcast_are_refused(shape):
    scale = {"weight": torch.ones(shape), "bias": 1.0, "gain": 1.0}
    message = rf"std of 'weight' has shape \[{', '.join(map(str, shape))}\].*\[3, 2\]"
    for use in (Normal(scale).value, Normal(scale).check):
        with pytest.raises(InputError, match=message):
            use(PARAMS)
    with pytest.raises(InputError, match="shape"):
        Laplace(1.0, {**MEANS, "bias": torch.ones(2)}).check(PARAMS)


@pytest.mark.parametrize("bad", [0.0, -2.0, float("nan")])
def test_check_refuses_bad_scales(bad):
    with pytest.raises(InputError, match="weight"):
        Normal(bad).check(PARAMS)
    with pytest.raises(InputError, match="finite"):
        Laplace({**SCALES, "bias": bad}).check(PARAMS)


def test_check_refuses_a_mean_that_is_not_finite():
    with pytest.raises(InputError, match="holds"):
        Normal(1.0, {**MEANS, "bias": torch.tensor([1.0, math.nan, 0.0])}).check(PARAMS)


def test_repr_names_the_hyper_parameters():
    assert repr(Normal(0.5)) == "Normal(std=0.5, mean=None)"
    assert repr(Flat()) == "Flat()"


STDS = {
    "weight": torch.tensor([0.5, 2.0], dtype=torch.float64),
    "bias": 3.0,
    "gain": 0.1,
}


# theta' = R(theta): name -> R, R^-1, log |d theta / d theta'| by hand, at theta'
MAPS = {
    "sinh": (torch.sinh, torch.asinh, lambda t: -0.5 * torch.log1p(t**2)),
    "scaled": (lambda t: 5 * t, lambda t: t / 5, lambda t: torch.full_like(t, -math.log(5))),
    "inverted": (lambda t: 1 / t, lambda t: 1 / t, lambda t: -2 * t.abs().log()),
    "cubed": (
        lambda t: (t - 0.4) ** 3,
        lambda t: 0.4 + t.sign() * t.abs() ** (1 / 3),
        lambda t: -math.log(3) - 2 / 3 * t.abs().log(),
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_change_of_variables_by_hand(name):
    forward, inverse, log_slope = MAPS[name]
    there = {n: forward(t) for n, t in PARAMS.items()}
    expected = Normal(1.2).value(PARAMS) + sum(log_slope(t).sum() for t in there.values())
    assert_close(Reparametrized(Normal(1.2), inverse).value(there), expected)


def test_against_transformed_distribution():
    there = {n: t.exp() for n, t in PARAMS.items()}
    lognormal = distributions.LogNormal(0.2, 0.8)
    expected = sum(lognormal.log_prob(t).sum() for t in there.values())
    assert_close(Reparametrized(Normal(0.8, 0.2), torch.log).value(there), expected)


@pytest.mark.parametrize("name", ["sinh", "scaled", "inverted", "cubed"])
@pytest.mark.parametrize("prior", [Normal(0.9), Laplace(0.5)])
def test_integrates_to_one(name, prior):
    """Trapezoid in v = log |theta'| on both sides of zero, which resolves the poles there."""
    term = Reparametrized(prior, MAPS[name][1])
    v = torch.linspace(-60, 40, 50_001)
    sides = [vmap(lambda t: term.value({"t": t}))(sign * v.exp()) + v for sign in (1, -1)]
    total = sum(torch.trapezoid(log_p.exp(), v) for log_p in sides)
    assert_close(total, torch.ones(()), rtol=1e-6, atol=0)


def test_the_papers_sign_does_not_integrate_to_one():
    t = torch.linspace(-200, 200, 400_001)
    log_p = Normal(0.9).value
    wrong = vmap(lambda t: log_p({"t": t.asinh()}) + 0.5 * torch.log1p(t**2))(t)
    assert abs(torch.trapezoid(wrong.exp(), t) - 1) > 0.1


def test_psmap_in_cubed_coordinates_ignores_the_prior():
    """At theta' = (theta - theta0)^3 the density is infinite at theta0, whatever the prior."""
    term = Reparametrized(Normal(1.0), MAPS["cubed"][1])
    near = torch.tensor([1e-3, 1e-6, 1e-9, 1e-12])
    values = vmap(lambda t: term.value({"t": t}))(near)
    assert (values.diff() > 4).all()


@given(seed=st.integers(0, 1000), scale=st.floats(0.2, 5.0))
def test_there_and_back_is_the_prior(seed, scale):
    """R after R^-1 is the identity, so the two new terms cancel."""
    params = parameters(seed)
    once = Reparametrized(Normal(1.3), lambda t: (t / scale).asinh())
    twice = Reparametrized(once, lambda t: scale * t.sinh())
    assert_close(twice.value(params), Normal(1.3).value(params), rtol=1e-9, atol=1e-9)


def test_whole_map_equals_elementwise():
    whole = Reparametrized(Normal(STDS), lambda p: {n: t.asinh() for n, t in p.items()}, False)
    entries = Reparametrized(Normal(STDS), torch.asinh)
    assert_close(whole.value(PARAMS), entries.value(PARAMS))


def test_linear_whole_map_has_its_determinant(generator):
    matrix = torch.randn(3, 3, generator=generator)
    term = Reparametrized(Flat(), lambda p: {"b": matrix @ p["b"]}, elementwise=False)
    assert_close(term.value({"b": torch.ones(3)}), torch.linalg.det(matrix).abs().log())
    there = {"b": torch.randn(3, generator=generator)}
    term = Reparametrized(Normal(1.0), lambda p: {"b": matrix @ p["b"]}, elementwise=False)
    covariance = torch.linalg.inv(matrix.mT @ matrix)
    mvn = distributions.MultivariateNormal(torch.zeros(3), covariance)
    assert_close(term.value(there), mvn.log_prob(there["b"]))


def test_polar_coordinates():
    """A map that mixes two parameters of the dict: dx dy = r dr dphi."""
    to_xy = lambda p: {"x": p["r"] * p["phi"].cos(), "y": p["r"] * p["phi"].sin()}  # noqa: E731
    value = Reparametrized(Normal(1.0), to_xy, elementwise=False).value(
        {"r": torch.tensor(1.7), "phi": torch.tensor(0.3)}
    )
    assert_close(value, torch.tensor(-0.5 * 1.7**2 - math.log(2 * math.pi) + math.log(1.7)))


def test_check_sees_a_map_outside_its_domain():
    with pytest.raises(InputError, match="parameters"):
        Reparametrized(Normal(1.0), torch.log).check(PARAMS)
    steep = Reparametrized(Normal(1.0), lambda t: 0 * t.abs().sqrt())
    with pytest.raises(InputError, match="Jacobian"):
        steep.check({"w": torch.zeros(2)})


def test_check_sees_through_a_map_that_is_not_elementwise():
    with pytest.raises(InputError, match="elementwise"):
        Reparametrized(Normal(1.0), lambda t: t * t.square().sum()).check(PARAMS)


def test_maps_that_change_shapes_are_refused():
    with pytest.raises(InputError, match="parameter"):
        Reparametrized(Normal(1.0), lambda t: t.mT if t.dim() == 2 else t).value(PARAMS)
    with pytest.raises(InputError, match="numbers"):
        Reparametrized(Normal(1.0), lambda p: {"b": p["bias"]}, elementwise=False).value(PARAMS)


def test_a_jacobian_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_JACOBIAN_BYTES", 10 * 10 * 8 - 1)
    with pytest.raises(MemoryLimitError, match="parameters"):
        Reparametrized(Normal(1.0), lambda p: p, elementwise=False).value(PARAMS)
