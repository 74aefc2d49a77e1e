"""Uniform and Normal evaluation points: shapes, moments, dtypes, errors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsmap import px
from fsmap.errors import InputError


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("make", [px.Uniform, px.Normal])
@pytest.mark.parametrize(
    ("a", "b", "shape", "expected"),
    [
        (0.0, 1.0, None, (1,)),
        (0.0, 1.0, (), ()),
        (0.0, 1.0, 3, (3,)),
        (0.0, 1.0, (3, 4, 4), (3, 4, 4)),
        ([0.0, 0.0], 1.0, None, (2,)),
        (torch.zeros(2, 3), torch.ones(3), None, (2, 3)),
        (torch.zeros(3, 1, 1), torch.ones(3, 1, 1), (3, 4, 4), (3, 4, 4)),
    ],
)
def test_shape_of_a_point(make, a, b, shape, expected):
    assert make(a, b, shape).sample(5, source()).shape == (5, *expected)


@given(seed=st.integers(0, 10_000), low=st.floats(-100, 100), width=st.floats(1e-3, 100))
def test_uniform_stays_in_the_box(seed, low, width):
    x = px.Uniform(low, low + width).sample(50, source(seed))
    assert (x >= low).all()
    assert (x <= low + width).all()


@pytest.mark.parametrize(
    ("distribution", "mean", "std"),
    [
        (px.Uniform(-1, 3), 1.0, 4 / math.sqrt(12)),
        (px.Normal(2.0, 3.0), 2.0, 3.0),
    ],
)
def test_moments(distribution, mean, std):
    x = distribution.to(dtype=torch.float64).sample(40_000, source())
    error = 5 * std / math.sqrt(len(x))
    assert abs(x.mean() - mean) < error
    assert abs(x.std() - std) < error


@pytest.mark.parametrize("make", [px.Uniform, px.Normal])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_follows_the_bounds(make, dtype):
    x = make(torch.zeros(2, dtype=dtype), 1.0).sample(100, source())
    assert x.dtype == dtype
    assert torch.isfinite(x).all()


def test_dtype_of_numbers_is_the_default():
    assert px.Uniform(-1, 1).sample(2, source()).dtype == torch.float64


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(1, 1, "low=1, high=1"), (2, 1, "low=2, high=1"), ([0, 3], [1, 2], r"low=\[0, 3\]")],
)
def test_box_must_have_a_volume(low, high, text):
    with pytest.raises(InputError, match=rf"low must be below high in every dimension, got {text}"):
        px.Uniform(low, high)
    with pytest.raises(InputError, match=r"low must be below high"):
        px.Lattice(low, high, 3)


def test_bounds_must_be_finite_and_fit():
    with pytest.raises(InputError, match=r"high must be finite, got inf"):
        px.Uniform(0, math.inf)
    with pytest.raises(InputError, match=r"mean must be finite, got nan"):
        px.Normal(math.nan)
    with pytest.raises(InputError, match=r"std must be finite and > 0, got 0"):
        px.Normal(0.0, [1.0, 0.0])
    with pytest.raises(
        InputError, match=r"shapes \(2,\), \(3,\), which do not fit points of shape"
    ):
        px.Uniform([0, 0], [1, 1, 1])
    with pytest.raises(InputError, match=r"do not fit points of shape \(3,\)"):
        px.Normal([0.0, 0.0], 1.0, shape=(3,))
