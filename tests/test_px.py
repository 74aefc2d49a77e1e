"""Evaluation distributions: moments, shapes, reproducible draws, copies, errors."""

from __future__ import annotations

import copy
import math
from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fsmap import px
from fsmap.errors import InputError
from fsmap.px import Empirical, Lattice, choose

POINTS = torch.arange(24, dtype=torch.float64).reshape(12, 2)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(n, 2, generator=generator, dtype=torch.float64)


DISTRIBUTIONS = {
    "uniform": lambda: px.Uniform([-1, 0], [1, 5]),
    "normal": lambda: px.Normal([0.0, 1.0], 2.0),
    "empirical": lambda: px.Empirical(POINTS),
    "lattice": lambda: px.Lattice([-5, -5], [5, 5], 4),
    "mixture": lambda: px.Mixture([px.Uniform(0, 1, shape=2), POINTS, noise], [1, 2, 3]),
    "function": lambda: px.as_px(noise),
}


@pytest.fixture(params=DISTRIBUTIONS)
def distribution(request):
    return DISTRIBUTIONS[request.param]()


@pytest.mark.gpu
def test_points_do_not_depend_on_the_device(distribution):
    there = distribution.to("cuda")
    points = there.sample(6, source())
    assert points.device.type == "cuda"
    assert_close(points.cpu(), distribution.sample(6, source()))
    if not isinstance(distribution, px.FromFunction | px.Mixture):
        generator = torch.Generator("cuda").manual_seed(0)
        assert there.sample(6, generator).device.type == "cuda"
        assert distribution.sample(6, generator).device.type == "cpu"


def test_mixture_counts_are_multinomial():
    mixture = px.Mixture([torch.full((1,), float(k)) for k in range(4)], [1, 3, 6, 0])
    generator = source()
    draws = torch.stack([mixture.sample(20, generator) for _ in range(2000)])  # [2000, 20]
    counts = torch.stack([(draws == k).sum(1) for k in range(4)], 1).double()
    p = torch.tensor([0.1, 0.3, 0.6, 0.0])
    assert_close(counts.sum(1), torch.full((2000,), 20.0))
    deviation = (20 * p * (1 - p)).sqrt()
    assert ((counts.mean(0) - 20 * p).abs() <= 5 * deviation / math.sqrt(2000)).all()
    expected = 20 * (p.diag() - p[:, None] * p)  # covariance of Multinomial(20, p)
    assert_close(counts.mT.cov(), expected, rtol=0.15, atol=0.15)


def test_mixture_is_in_random_order():
    """Any one position sees every component with its weight."""
    mixture, generator = px.Mixture([torch.zeros(1), torch.ones(1)]), source()
    first = torch.stack([mixture.sample(4, generator)[0] for _ in range(1000)])
    assert abs(first.mean() - 0.5) < 5 * 0.5 / math.sqrt(1000)


def test_mixture_of_dicts():
    part = {"a": torch.zeros(6, 2), "b": torch.zeros(6, dtype=torch.long)}
    other = {"a": torch.ones(6, 2), "b": torch.ones(6, dtype=torch.long)}
    x = px.Mixture([part, other]).sample(10, source())
    assert x["a"].shape == (10, 2)
    assert torch.equal(x["a"][:, 0].long(), x["b"])
    assert 0 < x["b"].sum() < 10


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


@pytest.mark.parametrize(
    ("distribution", "mean", "std"),
    [(px.Uniform(-1, 3), 1.0, 4 / math.sqrt(12)), (px.Normal(2.0, 3.0), 2.0, 3.0)],
)
def test_moments(distribution, mean, std):
    x = distribution.to(dtype=torch.float64).sample(40_000, source())
    error = 5 * std / math.sqrt(len(x))
    assert abs(x.mean() - mean) < error
    assert abs(x.std() - std) < error


X = torch.arange(60, dtype=torch.float64).reshape(20, 3)
Y = torch.arange(20)


class Items(Dataset):
    """A map-style data set of given items."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Stream(IterableDataset):
    def __init__(self, count=20):
        self.count = count

    def __iter__(self):
        yield from zip(X[: self.count], Y[: self.count], strict=True)


def test_draws_rows_without_repeats():
    x = Empirical(X).sample(20, source())
    assert sorted(x[:, 0].tolist()) == X[:, 0].tolist()
    assert (x[:, 1] == x[:, 0] + 1).all()
    assert len(Empirical(X).sample(200, source()).unique(dim=0)) == 20  # with repeats


@pytest.mark.parametrize(
    "data",
    [
        {"ids": Y, "x": X},
        UserDict({"ids": Y, "x": X}),
        Items([{"ids": i, "x": x} for i, x in zip(Y, X, strict=True)]),
    ],
    ids=["dict", "mapping", "dataset"],
)
def test_dicts_stay_together(data):
    x = Empirical(data).to(dtype=torch.float32).sample(6, source())
    assert type(x) is dict
    assert (x["ids"].dtype, x["x"].dtype) == (torch.int64, torch.float32)
    assert torch.equal(x["ids"] * 3, x["x"][:, 0].long())


@pytest.mark.parametrize(
    "data",
    [
        X.numpy(),
        Items(list(X)),
        Items(list(X.numpy())),
        TensorDataset(X),
        TensorDataset(X, Y),
        Subset(TensorDataset(X, Y, Y), range(20)),
        DataLoader(TensorDataset(X, Y), batch_size=7),
        DataLoader(Stream(), batch_size=7),
        DataLoader(list(X), batch_size=7),
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_is_read_once_and_in_order(data):
    for found in (Empirical(data), px.as_px(data)):
        assert len(found) == 20
        assert torch.equal(found.all(), X)


def test_a_shuffling_loader_is_reproducible_and_leaves_the_global_stream_alone():
    """The guard of tests/conftest.py sees the global state; this sees that it does not matter."""
    loader = DataLoader(TensorDataset(X), batch_size=6, shuffle=True)
    first = Empirical(loader)
    with torch.random.fork_rng():
        torch.manual_seed(17)
        second = Empirical(loader)
    assert torch.equal(first.all(), second.all())
    assert not torch.equal(first.all(), X)
    assert sorted(first.all()[:, 0].tolist()) == X[:, 0].tolist()


def test_a_tensor_is_shared_not_copied():
    px = Empirical(X)
    assert px.all().data_ptr() == X.data_ptr()
    assert Empirical(X.numpy()).all().data_ptr() == X.data_ptr()
    assert copy.deepcopy(px).all().data_ptr() == X.data_ptr()
    assert px.to("cpu", torch.float64).all().data_ptr() == X.data_ptr()


def test_what_does_not_fit_into_memory_is_refused(monkeypatch):
    monkeypatch.setattr(px, "MAX_BYTES", 20 * 3 * 8)
    for data in (Items(list(X)), DataLoader(Stream(), batch_size=5)):
        assert len(Empirical(data)) == 20
    with pytest.raises(InputError, match="Subset"):
        Empirical(Items([*X, X[0]]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a": X, "b": Y[:5]}, "dimension"),
        (Items([]), "empty"),
        (DataLoader(Stream(0)), "empty"),
        (Items([X[0], X[0, :2]]), "tensors"),
        (Items([object()]), "default_collate"),
        (Items(["a", "b"]), "tensors"),
        (("a", "b"), "tensors"),
        (list(X), "Allowed"),
        (Stream(), "Allowed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bad_data_are_refused(data, message):
    with pytest.raises(InputError, match=message):
        Empirical(data)


def test_lattice_is_the_grid():
    grid = Lattice([-5, -5], [5, 5], 40)
    axis = torch.linspace(-5, 5, 40)
    assert torch.equal(grid.all(), torch.cartesian_prod(axis, axis))
    assert torch.equal(Lattice(-1, 1, 201).all(), torch.linspace(-1, 1, 201)[:, None])
    box = Lattice([0, 10], [1, 20], [2, 3]).all()
    assert box.tolist() == [[0, 10], [0, 15], [0, 20], [1, 10], [1, 15], [1, 20]]


@given(total=st.integers(1, 200), share=st.floats(0, 1), seed=st.integers(0, 1000))
def test_without_replacement_there_are_no_repeats(total, share, seed):
    n = max(1, round(share * total))
    rows = choose(total, n, source(seed))
    assert rows.shape == (n,)
    assert len(rows.unique()) == n
    assert 0 <= rows.min() <= rows.max() < total


@pytest.mark.parametrize(("total", "n"), [(5, 3), (12, 3), (40, 10)])
def test_every_point_is_equally_likely_at_every_place(total, n):
    """Both ways of choosing (n <= total/4, and not): each place holds each point with 1/total."""
    generator, draws = source(), 4000
    rows = torch.stack([choose(total, n, generator) for _ in range(draws)])  # [draws, n]
    p = 1 / total
    error = 5 * math.sqrt(p * (1 - p) / draws)
    for place in range(n):
        assert ((rows[:, place].bincount(minlength=total) / draws - p).abs() < error).all()


def test_draws(distribution):
    first, again = (distribution.sample(7, source(3)) for _ in range(2))
    assert first.shape == (7, 2)
    assert torch.equal(first, again)
    assert torch.equal(first, copy.deepcopy(distribution).sample(7, source(3)))
    assert not torch.equal(first, distribution.sample(7, source(4)))
    generator = source()
    assert not torch.equal(distribution.sample(7, generator), distribution.sample(7, generator))
    assert distribution.sample(np.int64(1), source()).shape == (1, 2)
    assert px.as_px(distribution) is distribution
    moved = distribution.to(dtype=torch.float32)
    assert type(moved) is type(distribution)
    assert moved.sample(5, source()).dtype == torch.float32
    assert distribution.to("cpu").sample(5, source()).dtype == first.dtype  # itself unchanged
    assert type(distribution).__name__ in repr(distribution)
    for n in (0, -1, 2.0, True, None):
        with pytest.raises(InputError, match="integer"):
            distribution.sample(n, source())
    with pytest.raises(InputError, match="Generator"):
        distribution.sample(3, None)


@pytest.mark.parametrize("make", [px.Uniform, px.Normal])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_follows_the_bounds(make, dtype):
    x = make(torch.zeros(2, dtype=dtype), 1.0).sample(100, source())
    assert x.dtype == dtype
    assert torch.isfinite(x).all()
    assert make(-1, 1).sample(2, source()).dtype == torch.get_default_dtype()


def test_several_inputs_and_plain_numbers():
    a, b = Empirical((X, Y)).sample(6, source())
    assert torch.equal(a[:, 0], 3.0 * b)
    a, b = Empirical(Items([((x, i), i) for x, i in zip(X, Y, strict=True)])).all()
    assert torch.equal(a, X)
    assert torch.equal(b, Y)
    assert torch.equal(Empirical(Items([1.0, 2.0])).all(), torch.tensor([1.0, 2.0]))
    assert not Empirical(X.clone().requires_grad_()).sample(3, source()).requires_grad
