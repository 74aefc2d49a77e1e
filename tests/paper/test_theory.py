"""The statements without a figure: their ingredients against definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from fsmap.paper.closed_form import reparam, theory_metric, theory_symmetry
from fsmap.paper.closed_form.fourier import FourierConfig
from fsmap.paper.closed_form.mixture import draw_data, log_det_form, moments
from fsmap.paper.closed_form.theory_any_parameter import TARGETS, Task, TheoryAnyParameter
from fsmap.paper.closed_form.theory_flat import compare
from fsmap.types import Batch


@pytest.mark.parametrize("chart", reparam.CHARTS, ids=lambda chart: chart.name)
def test_charts_know_their_derivatives(chart):
    t = torch.linspace(-2, 2, 9)
    slope = torch.vmap(torch.func.grad(chart.squash.value))(t)
    assert_close(chart.squash.log_slope(t), slope.log())
    stretch = torch.vmap(torch.func.grad(chart.to_theta))(t)
    assert_close(chart.log_slope(t), stretch.log())


def test_priors_of_the_charts_are_the_same_distribution():
    """Both densities integrate to the same, each over its own coordinate."""
    t = torch.linspace(-60, 60, 600_001)
    chart = reparam.CHARTS[1]
    theta = chart.to_theta(t)
    density = (-theta.square() / (2 * 0.65**2) + chart.log_slope(t)).exp()
    assert_close(
        torch.trapezoid(density, t).item(), math.sqrt(2 * math.pi) * 0.65, rtol=1e-6, atol=0
    )


def test_in_the_coordinates_of_appendix_a_the_prior_is_infinite_at_the_target():
    config = TheoryAnyParameter.quick
    data = draw_data(config)
    task = Task(moments(data), log_det_form(config), config)
    sign = torch.ones(len(TARGETS), 1, len(data), 2)

    def rise(method: str) -> torch.Tensor:
        near, nearer = (torch.full_like(sign, value) for value in (-20.0, -30.0))
        return task.log_posterior(method, nearer, sign) - task.log_posterior(method, near, sign)

    assert_close(rise("ps-map"), torch.full_like(rise("ps-map"), 40.0), rtol=0, atol=1e-4)
    assert rise("fs-map").abs().max() < 1e-4


def test_the_fixed_point_is_singular_and_its_neighbors_are_not():
    x = torch.linspace(-2, 2, 50)
    fixed = torch.tensor(theory_symmetry.FIXED)
    apart = fixed + 0.1 * torch.tensor(theory_symmetry.AWAY)
    values = torch.linalg.svdvals(theory_symmetry.scaled_jacobian(torch.stack([fixed, apart]), x))
    assert (values[0, 2:] < 1e-15).all()
    assert (values[1] > 1e-6).all()
    assert theory_symmetry.log_dets(apart[None], x).item() == pytest.approx(
        2 * values[1].log().sum().item(), rel=1e-9
    )


def test_swapping_the_units_leaves_the_function():
    x = torch.linspace(-2, 2, 9)
    swapped = torch.tensor([0.5, 1.5, -1.0, 2.0])[[1, 0, 3, 2]]
    f = theory_symmetry.network
    assert_close(f(swapped, x), f(torch.tensor([0.5, 1.5, -1.0, 2.0]), x))


def test_the_metrics_sums_are_the_definition():
    generator = torch.Generator().manual_seed(0)
    jacobian = torch.randn(3, 2, 4, generator=generator)
    metric = torch.randn(3, 2, 3, 2, generator=generator)
    exact = torch.einsum("ika,ikjl,jlb->ab", jacobian, metric, jacobian)
    assert_close(theory_metric._sum_over_metric(jacobian, metric), exact)
    assert_close(theory_metric._mean_over_metric(jacobian, metric), exact)


def test_hessian_and_gram_are_one_where_the_residual_is_zero():
    config = FourierConfig(num_frequencies=3)
    theta = torch.linspace(-1, 1, 6)
    x = torch.linspace(-0.9, 0.8, 20)
    y = config.model().design(x) @ theta.tanh()
    gap, residual = compare(config, theta, Batch(x, y))
    assert residual < 1e-15
    assert gap < 1e-14
    gap, residual = compare(config, theta, Batch(x, y + 0.3 * torch.sin(7 * x)))
    assert residual > 0.1
    assert gap > 1e-3
