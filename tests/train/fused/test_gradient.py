"""The written-out gradient is the one that ``vmap`` of the pure loss gives."""

from __future__ import annotations

import pytest
import torch

from fsmap.train.fused import triton_gradient
from fsmap.train.fused.layout import ALIGNED, TILE, Layout
from fsmap.train.fused.torch_gradient import TorchGradient
from fused_cases import make

SHAPES = [(5, 64, 32, 64, 1), (3, 16, 1), (13, 32, 16, 1)]


@pytest.mark.parametrize("points", [50, 0], ids=["l-map", "ps-map"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_equals_vmap_of_the_loss(sizes, points):
    case = make(sizes, points=points)
    gradient = TorchGradient(*case.arguments)
    gradient(case.x, case.y, case.psi)
    found = case.layout.view(gradient.grad)
    for name, expected in case.grads.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12)
    geometry = -333 * case.scales[1] * gradient.sums[1]
    torch.testing.assert_close(geometry, case.terms["geometry"], rtol=1e-9, atol=1e-12)


def test_a_second_call_does_not_remember_the_first():
    case = make(SHAPES[0])
    gradient = TorchGradient(*case.arguments)
    gradient(case.x, case.y, case.psi)
    once = gradient.grad.clone()
    gradient(case.x, case.y, case.psi)
    assert torch.equal(gradient.grad, once)


def test_a_member_that_is_not_finite_disturbs_no_other():
    case = make(SHAPES[0])
    clean, broken = TorchGradient(*case.arguments), TorchGradient(*case.arguments)
    broken.theta[2] = torch.nan
    for gradient in (clean, broken):
        gradient(case.x, case.y, case.psi)
    others = [0, 1, 3]
    assert torch.equal(clean.grad[others], broken.grad[others])
    assert broken.grad[2].isnan().any()


def test_layout_packs_and_views():
    layout = Layout((3, 8, 1), 2, batch=5, points=4)
    params = {
        n: torch.randn(2, *p.shape, generator=torch.Generator()) for n, p in layout.pieces.items()
    }
    flat = layout.pack(params)
    assert flat.shape == (2, layout.stride)
    for name, view in layout.view(flat).items():
        assert torch.equal(view, params[name])
    assert all(piece.offset % ALIGNED == 0 for piece in layout.pieces.values())
    used = sum(piece.size for piece in layout.pieces.values())
    assert int((flat != 0).sum()) == 2 * used


def test_layout_rounds_rows_up_to_tiles():
    layout = Layout((3, 8, 1), 2, batch=TILE, points=1)
    assert (layout.rows_plain, layout.rows) == (2 * TILE, 3 * TILE)
    assert Layout((3, 8, 1), 2, batch=TILE, points=0).rows == TILE


@pytest.mark.gpu
@pytest.mark.parametrize("members", [3, 24])
@pytest.mark.parametrize("points", [512, 0], ids=["l-map", "ps-map"])
def test_kernels_compute_the_same(points, members):
    """Up to what rounding of 16 bits does to the float64 gradient, kinks of ReLU included.

    A unit that rounding moves across its kink changes the gradient by much more than the rounding
    itself, most of all that of R; how much is measured by rounding the inputs of the definition.
    """
    if not triton_gradient.available():
        pytest.skip("triton is not installed")
    case = make((13, 256, 256, 256, 1), members=members, points=points, batch=512)
    there = case.to("cuda", torch.float32)
    gradient = triton_gradient.TritonGradient(*there.arguments)
    gradient(there.x, there.y, there.psi)
    errors = _errors(case, gradient.grad)
    rounded = torch.cat([_errors(case, _rounded(case, seed)) for seed in range(4)])
    print(
        f"kernel {errors.median():.1e} to {errors.max():.1e}, "
        f"rounding {rounded.median():.1e} to {rounded.max():.1e}"
    )
    assert errors.median() < 1e-3
    assert errors.median() < 10 * rounded.median()
    assert errors.max() < 3 * rounded.max()


def _errors(case, flat):
    """‖g − g*‖/‖g*‖ of every tensor of every member."""
    found = case.layout.view(flat.double().cpu())
    pairs = [(found[name][m], g[m]) for name, g in case.grads.items() for m in range(len(g))]
    return torch.stack([(a - b).norm() / b.norm() for a, b in pairs])


def _rounded(case, seed):
    """The definition at parameters and inputs with errors of half a unit in 16 bits."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(t):
        return t * (1 + 2.0**-17 * (2 * torch.rand(t.shape, generator=generator).to(t) - 1))

    moved = case._replace(theta=noisy(case.theta), x=noisy(case.x)).to("cuda", torch.float64)
    gradient = TorchGradient(*moved.arguments)
    gradient(moved.x, moved.y, moved.psi)
    return gradient.grad
