"""Drawn data: shapes, moments, reproducibility, and the paper's own points."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.testing import assert_close

from fsmap.data import synthetic
from fsmap.errors import MissingExtraError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_regression_is_the_function_plus_noise():
    data = synthetic.regression(torch.sin, 20_000, generator=generator(), noise_std=0.1, high=3.0)
    assert data.x.shape == data.y.shape == (20_000,)
    assert -1 <= data.x.min() < data.x.max() <= 3
    assert data.x.mean().item() == pytest.approx(1, abs=0.05)
    residual = data.y - data.x.sin()
    assert residual.std().item() == pytest.approx(0.1, rel=0.02)
    assert abs(residual.mean()) < 0.003
    exact = synthetic.regression(torch.cos, 50, generator=generator())
    assert_close(exact.y, exact.x.cos(), rtol=0, atol=0)


def test_two_bumps():
    data = synthetic.two_bumps(generator=generator(), num_left=5_000)
    assert (data.x[-1], data.y[-1]) == (0.7, 0.1)
    left, height = data.x[:-1], data.y[:-1]
    assert left.mean().item() == pytest.approx(-0.5, abs=0.01)
    assert left.std().item() == pytest.approx(0.2, rel=0.05)
    noise = height - torch.exp(-(left + 0.5).square() / 0.03)
    assert noise.std().item() == pytest.approx(0.1, rel=0.05)
    one, same, other = (synthetic.two_bumps(generator=generator(seed)) for seed in (1, 1, 2))
    assert len(one.x) == 11
    assert_close(one, same, rtol=0, atol=0)
    assert (one.y[:5] != other.y[:5]).all()


def test_fourier_sum_is_the_sum():
    f = synthetic.fourier_sum(3, generator=generator(4))
    a, b = torch.randn(2, 3, generator=generator(4))
    x = torch.linspace(0, 1, 5)
    by_hand = sum(a[i] * ((i + 1) * x).sin() + b[i] * ((i + 1) * x).cos() for i in range(3))
    assert_close(f(x), by_hand)


def test_moons_are_the_papers(monkeypatch):
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.make_moons(n_samples=200, shuffle=True, noise=0.2, random_state=0)
    ours = synthetic.moons()
    assert_close(ours.x, torch.tensor(x))
    assert ours.y.tolist() == y.tolist()
    assert synthetic.moons(dtype=torch.float32).x.dtype == torch.float32
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"fsmap\[data\]"):
        synthetic.moons()
