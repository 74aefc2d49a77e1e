"""Invariances of log det(𝒥 + εI), fixed points of Theorem 2, FS-MAP's change of variables."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import fsmap
import oracles
import strategies
from strategies import JITTERS, SEEDS


@given(strategies.networks(), JITTERS, st.floats(1.01, 100))
def test_log_det_grows_with_jitter(case, jitter, factor):
    low, high = (
        float(fsmap.log_det(case.f, case.params, case.x, jitter=eps).detach())
        for eps in (jitter, factor * jitter)
    )
    assert low < high
    # and at most as fast as all P eigenvalues being zero
    P = sum(p.numel() for p in case.params.values())
    assert high - low <= P * math.log(factor) * (1 + 1e-9)


@given(strategies.networks(points=(2, 8)), JITTERS, SEEDS)
def test_the_order_of_points_does_not_matter(case, jitter, seed):
    order = torch.randperm(len(case.x), generator=torch.Generator().manual_seed(seed))
    for method in ("dense", "dual"):
        options = {"jitter": jitter, "method": method}
        one = fsmap.log_det(case.f, case.params, case.x, **options)
        other = fsmap.log_det(case.f, case.params, case.x[order], **options)
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-6)


@given(strategies.networks(points=(1, 6)), JITTERS, st.integers(2, 4))
def test_points_that_are_repeated_count_once(case, jitter, times):
    for method in ("dense", "dual", "first_order"):
        options = {"jitter": jitter, "method": method}
        one = fsmap.log_det(case.f, case.params, case.x, **options)
        many = fsmap.log_det(case.f, case.params, case.x.repeat(times, 1), **options)
        torch.testing.assert_close(one, many, rtol=1e-8, atol=1e-6)


@given(strategies.networks(points=(1, 6)), st.floats(0.1, 10))
def test_weights_scale_the_eigenvalues(case, scale):
    """A constant metric c moves log det(cJ + cεI) by P log c."""
    P, S = sum(p.numel() for p in case.params.values()), len(case.x)
    plain = fsmap.log_det(case.f, case.params, case.x, jitter=0.1)
    scaled = fsmap.log_det(
        case.f, case.params, case.x, jitter=scale * 0.1, metric=torch.full((S,), scale)
    )
    torch.testing.assert_close(scaled, plain + P * math.log(scale), rtol=1e-9, atol=1e-9)


@given(SEEDS, st.integers(2, 4), st.sampled_from([nn.Tanh, nn.GELU]))
def test_twin_units_are_a_singularity(seed, width, activation):
    """At a fixed point of a permutation of hidden units 𝒥 is singular (Theorem 2)."""
    case = strategies.network(seed, [1, width, 1], activation, 40)
    P = 3 * width + 1
    eigenvalues = oracles.eigenvalues_slow(case.f, case.params, case.x)
    assume(eigenvalues[0] > 1e-10 * eigenvalues[-1])  # a generic point
    with torch.no_grad():
        for name in ("0.weight", "0.bias"):
            case.params[name][1] = case.params[name][0]
        case.params["2.weight"][0, 1] = case.params["2.weight"][0, 0]
    eigenvalues = oracles.eigenvalues_slow(case.f, case.params, case.x)
    assert int((eigenvalues > 1e-12 * eigenvalues[-1]).sum()) <= P - 3
    params = {n: p.detach() for n, p in case.params.items()}
    small = [float(fsmap.log_det(case.f, params, case.x, jitter=eps)) for eps in (1e-8, 1e-9)]
    assert small[0] - small[1] >= 2.99 * math.log(10)  # three directions hang on ε alone
    pseudo = [
        float(fsmap.log_det(case.f, params, case.x, jitter=1e-11, method=method))
        for method in ("pseudo", "svd_clip")
    ]
    assert pseudo[1] <= pseudo[0] - 3 * 10 * math.log(10)  # clipped: log ε for each of the three


def log_normal(theta):
    """Standard normal log-density, up to a constant."""
    return -0.5 * theta.square().sum()


@given(SEEDS, st.floats(0.2, 5.0))
def test_the_function_prior_is_invariant_to_reparametrization_and_the_parameter_prior_is_not(
    seed, scale
):
    """With θ' = c·sinh θ, log p(θ) − ½ log det 𝒥 is the same number in both at ε = 0."""
    generator = torch.Generator().manual_seed(seed)
    theta, x = torch.randn(4, generator=generator), torch.randn(12, 3, generator=generator)

    def f(p, x):
        return (x @ p["t"][:3]).sin() + p["t"][3] * x[:, 0].cos()

    def there(p, x):
        return f({"t": torch.asinh(p["t"] / scale)}, x)

    other = scale * theta.sinh()
    jacobian = (scale * theta.cosh()).log().sum()  # dθ'/dθ
    prior, moved_prior = log_normal(theta), log_normal(theta) - jacobian
    here = prior - 0.5 * fsmap.log_det(f, {"t": theta}, x, jitter=0.0)
    moved = moved_prior - 0.5 * fsmap.log_det(there, {"t": other}, x, jitter=0.0)
    torch.testing.assert_close(here, moved, rtol=1e-8, atol=1e-8)
    assume(abs(float(jacobian)) > 1e-3)
    assert abs(float(prior - moved_prior)) > 1e-4  # PS-MAP maximizes another number there
    jittered = [fsmap.log_det(g, {"t": t}, x, jitter=10.0) for g, t in ((f, theta), (there, other))]
    assume((scale * theta.cosh()).log().abs().max() > 0.3)
    assert float(jittered[0]) != pytest.approx(float(jittered[1] + 2 * jacobian), abs=1e-6)
