"""Newton's method: to the last digit, out of saddles, and an error where it does not settle."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from fsmap.errors import DivergedError
from fsmap.paper.newton import maximize


def test_a_smooth_maximum_to_the_last_digit():
    center = torch.tensor([1.3, -0.4, 5.0])
    found = maximize(lambda t: -torch.cosh(t - center).sum(), torch.zeros(3))
    assert_close(found, center, rtol=0, atol=1e-14)


def test_it_leaves_regions_of_the_wrong_curvature():
    """Two bumps: between them the Hessian has the wrong sign, and a plain step would go down."""

    def bumps(t: torch.Tensor) -> torch.Tensor:
        return torch.exp(-(t - 2).square()).sum() + 0.5 * torch.exp(-(t + 2).square()).sum()

    found = maximize(bumps, torch.tensor([0.4]))
    assert found.item() == pytest.approx(2, abs=1e-6)
    slope = torch.func.grad(bumps)(found)
    assert abs(slope.item()) < 1e-12


def test_what_does_not_settle_is_an_error():
    with pytest.raises(DivergedError, match=r"not settled after 5 steps: the last one was .* long"):
        maximize(lambda t: t.sum(), torch.zeros(2), steps=5)
