"""Points of a data set and of a lattice."""

from __future__ import annotations

import copy
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fsmap.errors import InputError
from fsmap.px import Empirical, Lattice

X = torch.arange(60, dtype=torch.float64).reshape(20, 3)
Y = torch.arange(20)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
    few = Empirical(X).sample(4, source())
    assert len(few[:, 0].unique()) == 4
    assert (few[:, 1] == few[:, 0] + 1).all()


def test_draws_with_repeats_where_it_must_or_may():
    assert Empirical(X).sample(50, source()).shape == (50, 3)
    x = Empirical(X, replace=True).sample(20, source())
    assert len(x[:, 0].unique()) < 20
    with pytest.raises(InputError, match=r"cannot draw 21 of 20 points without replacement"):
        Empirical(X, replace=False).sample(21, source())


def test_transform_gets_the_points_and_the_generator():
    def shift(x, generator):
        return x + torch.rand((), generator=generator, dtype=x.dtype)

    px = Empirical(X, shift)
    x = px.sample(5, source())
    assert torch.equal(x, px.sample(5, source()))
    assert len(torch.unique(x % 1)) <= 3  # one shift for all, up to rounding
    assert not torch.equal(x, Empirical(X).sample(5, source()))
    assert torch.equal(px.all(), X)
    assert repr(px).endswith("transform=shift)")


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
    assert x["ids"].dtype == torch.int64
    assert x["x"].dtype == torch.float32
    assert torch.equal(x["ids"] * 3, x["x"][:, 0].long())


def test_tuples_are_several_inputs():
    a, b = Empirical((X, Y)).sample(6, source())
    assert torch.equal(a[:, 0], 3.0 * b)


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
    px = Empirical(data)
    assert len(px) == 20
    assert torch.equal(px.all(), X)


def test_items_with_several_inputs():
    items = [((x, i), i) for x, i in zip(X, Y, strict=True)]
    a, b = Empirical(Items(items)).all()
    assert torch.equal(a, X)
    assert torch.equal(b, Y)


def test_numbers_are_points_too():
    assert torch.equal(Empirical(Items([1.0, 2.0])).all(), torch.tensor([1.0, 2.0]))


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

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.px = px

    assert copy.deepcopy(Model()).px.all().data_ptr() == X.data_ptr()


def test_gradients_stay_outside():
    data = X.clone().requires_grad_()
    assert not Empirical(data).sample(3, source()).requires_grad


def test_what_does_not_fit_into_memory_is_refused_before_it_is_read():
    read = []

    class Counting(Items):
        def __getitem__(self, i):
            read.append(i)
            return self.items[i], 0

    size = 300 * 3 * 8
    data = Counting(list(X.repeat(15, 1)))  # 300 points, two batches of 256
    message = r"these points need .* GiB in memory, the limit is .*Subset.*uint8.*\(n, generator\)"
    with pytest.raises(InputError, match=message):
        Empirical(data, max_bytes=size - 1)
    assert len(read) == 256
    assert len(Empirical(data, max_bytes=2 * 256 * 3 * 8)) == 300


def test_a_stream_is_stopped_where_it_gets_too_long():
    with pytest.raises(InputError, match=r"these points need"):
        Empirical(DataLoader(Stream(), batch_size=5), max_bytes=3 * 5 * 3 * 8)
    assert len(Empirical(DataLoader(Stream(), batch_size=5), max_bytes=4 * 5 * 3 * 8)) == 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(0, 3), r"x is empty: shapes \[\(0, 3\)\]"),
        (torch.tensor([[1.0], [torch.nan]]), r"x has NaN or inf in 1 of 2 points \(first: 1\)"),
        (np.array([np.inf]), r"x has NaN or inf in 1 of 1 points"),
        ({"a": X, "b": Y[:5]}, r"must share their first dimension, got \[5, 20\]"),
        (torch.tensor(1.0), r"needs a first dimension"),
        ({}, r"x must be a tensor, or a dict or tuple"),
        (Items([]), r"the data set is empty"),
        (DataLoader(Stream(0)), r"the DataLoader yields nothing"),
        (Items([X[0], X[0, :2]]), r"cannot be read as tensors: stack expects each tensor"),
        (Items([object()]), r"cannot be read as tensors: default_collate"),
        (Items(["a", "b"]), r"points must be tensors or arrays of numbers, got str"),
        (("a", "b"), r"points must be tensors or arrays of numbers, got str"),
        (list(X), r"cannot use a list\. Allowed are .*torch.stack"),
        (Stream(), r"cannot use a Stream\. Allowed are"),
        ("train", r"cannot use a str"),
        (None, r"cannot use a NoneType"),
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


def test_lattice_draws_its_points_without_repeats():
    grid = Lattice([0, 0], [9, 9], 10)
    x = grid.sample(100, source())
    assert sorted(map(tuple, x.tolist())) == sorted(map(tuple, grid.all().tolist()))
    assert len(grid.sample(20, source()).unique(dim=0)) == 20
    assert grid.sample(150, source()).shape == (150, 2)


def test_lattice_moves_as_a_lattice():
    moved = Lattice(-1, 1, 3).to(dtype=torch.float32)
    assert repr(moved) == "Lattice(low=-1, high=1, num=3)"
    assert moved.all().dtype == torch.float32


@pytest.mark.parametrize("num", [1, 0, [3], [3, 3, 3], [3, 1]])
def test_lattice_sizes_are_checked(num):
    with pytest.raises(InputError, match=r"one for each of the 2 dimensions of the box, got"):
        Lattice([0, 0], [1, 1], num)


def test_a_lattice_that_is_too_large_is_refused():
    with pytest.raises(InputError, match=r"these points need .* the limit is 4.00 GiB"):
        Lattice([0] * 8, [1] * 8, 40)
