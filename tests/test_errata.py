"""Every slip that docs/errata.md lists, as a number. The names here are the ones it refers to."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import fsmap
from fsmap.objective.closed_form import TANH, FourierBasis, Invertible, log_sech_squared

ERRATA = Path(__file__).parents[1] / "docs" / "errata.md"
X = torch.linspace(-1, 1, 9, dtype=torch.float64)
THETA = torch.tensor([0.3, -0.8, 0.5, 1.1], dtype=torch.float64)


def f(theta: Tensor) -> Tensor:
    """A small tanh network at the points X."""
    return torch.tanh(X[:, None] * theta[:2]) @ theta[2:]


def gram(theta: Tensor) -> Tensor:
    jacobian = torch.func.jacrev(f)(theta)
    return jacobian.mT @ jacobian / len(X)


def d(psi: Tensor) -> Tensor:
    """The paper's d(θ, θ + ψ) at THETA."""
    return (f(THETA + psi) - f(THETA)).square().mean()


def excess(jitter: float) -> float:
    """log det(𝒥 + εI) − P log ε."""
    identity = torch.eye(4, dtype=torch.float64)
    return float(torch.logdet(gram(THETA) + jitter * identity)) - 4 * math.log(jitter)


HALF_LAPLACIAN = 0.5 * torch.func.hessian(d)(torch.zeros(4, dtype=torch.float64)).trace().item()
assert pytest.approx(gram(THETA).trace().item()) == HALF_LAPLACIAN


def test_first_order_identity_lacks_one_over_epsilon():
    jitter = 1e3
    assert excess(jitter) == pytest.approx(HALF_LAPLACIAN / jitter, rel=1e-3)
    assert abs(excess(jitter) - HALF_LAPLACIAN) > 0.9 * HALF_LAPLACIAN


def test_the_expansion_needs_a_large_epsilon():
    errors = [abs(excess(e) * e / HALF_LAPLACIAN - 1) for e in (1e-3, 1.0, 1e3)]
    assert errors[0] > 0.9
    assert errors[1] > 0.1
    assert errors[2] < 1e-3


def test_caption_of_figure_a3_is_a_factor_two_off():
    """E d/(2εβ²) → Tr 𝒥/(2ε): half of what the horizontal axis shows."""
    jitter, beta = 1e3, 1e-3
    psi = beta * torch.eye(4, dtype=torch.float64)
    expected = sum(0.5 * (d(p) + d(-p)) for p in psi)  # E over ±βe_i, times 4: the same trace
    caption = float(expected) / (2 * jitter * beta**2)
    assert excess(jitter) / caption == pytest.approx(2, rel=1e-3)


def test_derivative_of_tanh_is_the_square_of_sech():
    t = torch.tensor(1.0, requires_grad=True)
    (slope,) = torch.autograd.grad(t.tanh(), t)
    sech = 1 / math.cosh(1)
    assert slope.item() == pytest.approx(sech**2)
    assert abs(slope.item() - sech) > 0.2
    assert log_sech_squared(t).exp().item() == pytest.approx(slope.item())


def test_a_single_draw_has_a_third_order_term_that_vanishes_on_average():
    psi = torch.tensor([0.7, -0.2, 0.4, 0.9], dtype=torch.float64)
    quadratic = psi @ gram(THETA) @ psi

    def rest(t: float) -> tuple[float, float]:
        one, other = d(t * psi) - t**2 * quadratic, d(-t * psi) - t**2 * quadratic
        return float(one), float(one + other) / 2

    (odd, even), (odd_half, even_half) = rest(2e-2), rest(1e-2)
    assert math.log2(abs(odd / odd_half)) == pytest.approx(3, abs=0.1)
    assert math.log2(abs(even / even_half)) == pytest.approx(4, abs=0.1)


def test_sign_of_the_new_term_in_appendix_a():
    """log p'(θ') = log p(θ) + log |det dθ/dθ'|: the term is added, not subtracted."""
    base = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))
    cube = torch.distributions.transforms.PowerTransform(torch.tensor(3.0))
    moved = torch.distributions.TransformedDistribution(base, cube, validate_args=False)
    theta = torch.tensor(1.7)
    term = -torch.log(3 * theta**2)  # log |dθ/dθ'| for θ' = θ³
    assert_close(moved.log_prob(theta**3), base.log_prob(theta) + term)
    slope = torch.func.grad(lambda theta: theta**3)(torch.zeros(()))
    assert -torch.log(slope) == math.inf  # at θ₀, where the paper has −∞


def test_the_determinant_costs_the_square_of_the_smaller_side():
    rows = torch.linspace(0, 9, 5 * 40).sin().reshape(5, 40)  # [SK, P]
    with FlopCounterMode(display=False) as counter:
        small = rows @ rows.mT
    assert counter.get_total_flops() == 2 * 5**2 * 40  # O(S²K²P)
    assert_close(torch.logdet(small + torch.eye(5)), torch.logdet(rows.mT @ rows + torch.eye(40)))


def test_the_bound_of_appendix_b7_is_the_divergence():
    """KL(q‖p) ≥ 0 and log evidence − KL ≤ log evidence: what is printed is to be minimized."""
    q = torch.distributions.Normal(torch.tensor(0.3), torch.tensor(0.5))
    p = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))
    grid = torch.linspace(-8, 8, 20_001)
    printed = torch.trapezoid(q.log_prob(grid).exp() * (q.log_prob(grid) - p.log_prob(grid)), grid)
    assert_close(printed, torch.distributions.kl_divergence(q, p), rtol=1e-6, atol=1e-8)
    assert printed > 0


def test_replacing_zero_singular_values_is_not_adding_a_jitter():
    module, params = fsmap.functional(FourierBasis(3))
    x = torch.linspace(-1, 1, 4, dtype=torch.float64)  # rank 3 of 6
    jitter = 1e-2
    clipped = fsmap.log_det(module, params, x, jitter=jitter, method="svd_clip")
    assert fsmap.log_det(module, params, x, jitter=jitter, method="dense") - clipped > 0.01


def test_two_hundred_lattice_points_are_two_too_few():
    ranks = {m: FourierBasis(100).lattice(m, 1e-6).rank for m in (200, 201, 202)}
    assert ranks == {200: 198, 201: 199, 202: 200}


def test_without_jitter_px_does_not_matter_for_the_fourier_model():
    model = FourierBasis(5)
    theta = torch.randn(2, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = torch.linspace(-0.7, 0.5, 200, dtype=torch.float64)
    forms = [Invertible.from_gram(gram) for gram in (model.uniform_gram(), model.gram(points))]
    first, second = (form.value(TANH.log_slope(5 * theta)) for form in forms)
    assert_close(first - second, (first - second)[:1].expand(2))


SAMPLES = [4, 8, 16, 32, 64, 128, 256, 512]
ECE = {"fmnist": [4.3, 4.2, 4.1, 4.4, 4.2, 4.1, 4.3, 4.2],
       "cifar10": [2.4, 2.2, 2.1, 1.8, 1.7, 1.4, 1.2, 1.2]}  # fmt: skip


def test_it_is_cifar10_whose_calibration_improves_with_samples():
    """Table 4, printed numbers."""
    assert spearmanr(SAMPLES, ECE["cifar10"]).statistic < -0.99
    assert abs(spearmanr(SAMPLES, ECE["fmnist"]).statistic) < 0.5
    assert max(ECE["fmnist"]) - min(ECE["fmnist"]) < 0.4


def test_tables_2_and_4_print_one_row_twice():
    """L-MAP, p_X = D', S = 128, mean and ±: the ± cannot be error here and deviation there."""
    table2 = "94.1 .1 99.2 .1 .26 .01 4.1 .1 95.5 .1 99.5 .0 .16 .01 1.4 .1".split()
    table4 = "94.1 .1 99.2 .1 .26 .01 4.1 .1 95.5 .1 99.5 .0 .16 .00 1.4 .1".split()
    assert [(a, b) for a, b in zip(table2, table4, strict=True) if a != b] == [(".01", ".00")]


def test_the_mixture_notebook_squares_a_square():
    """Its singular values are those of 𝒥, which holds J twice already."""
    matrix = gram(THETA)
    notebook = torch.linalg.svdvals(matrix).square().log().sum()
    assert_close(notebook, 2 * torch.logdet(matrix))


def test_standardization_overwrites_what_it_needs():
    """train ← (train − m)/s comes first; m and s of the new train are used for the test set."""
    generator = torch.Generator().manual_seed(0)
    train = 3 + 2 * torch.randn(50, 1, generator=generator, dtype=torch.float64)
    test = 3 + 2 * torch.randn(20, 1, generator=generator, dtype=torch.float64)
    mean, std = train.mean(0), train.std(0, correction=0)
    rescaled = (train - mean) / std
    late = (test - rescaled.mean(0)) / rescaled.std(0, correction=0)
    assert_close(late, test)  # not rescaled at all
    assert not torch.allclose(late, (test - mean) / std)


def test_clipping_after_the_learning_rate_is_ten_times_weaker():
    """lr = 0.1: the update of a gradient of norm 8 has norm 0.8 and passes; clipped first, 0.1."""
    gradient, lr = torch.tensor([8.0, 0.0]), 0.1

    def clip(v: Tensor) -> Tensor:
        return v / v.norm().clamp_min(1.0)

    assert clip(lr * gradient).norm().item() == pytest.approx(0.8)
    assert (lr * clip(gradient)).norm().item() == pytest.approx(0.1)


def test_the_regularizer_averages_training_and_context_points():
    generator = torch.Generator().manual_seed(0)
    # f_{θ+ψ} − f_θ on 4 training, 8 context points
    changes = torch.randn(12, 3, generator=generator)
    squares = changes.square().sum(-1)
    joint = squares.mean()
    assert_close(joint, (4 * squares[:4].mean() + 8 * squares[4:].mean()) / 12)
    assert abs(joint - squares[4:].mean()) > 0.01


def test_a_weight_of_zero_still_runs_the_perturbed_pass():
    """λ·R with λ = 0 as a tensor, as under jax.jit: R is computed and differentiated anyway."""
    passes = []
    weight = torch.tensor([0.5, -0.3], requires_grad=True)

    def model(w: Tensor) -> Tensor:
        passes.append(1)
        return torch.tanh(X[:, None] * w).sum(-1)

    out = model(weight)
    loss = out.square().mean() + torch.tensor(0.0) * (model(weight + 1e-3) - out).square().mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert len(passes) == 2
    (plain,) = torch.autograd.grad(model(weight).square().mean(), weight)
    assert_close(gradient, plain)


def test_every_entry_names_a_test_that_exists():
    named = set(re.findall(r"`(test_\w+)`", ERRATA.read_text()))
    here = {name for name in globals() if name.startswith("test_")}
    assert len(named) > 15
    assert named <= here
    assert here - named == {"test_every_entry_names_a_test_that_exists"}
