"""Grids."""

from __future__ import annotations

import pytest
import torch

from fsmap.errors import InputError
from fsmap.train.grid import Grid


def test_axes_multiply_and_the_last_runs_fastest():
    grid = Grid(prior_std=[0.1, 1, 10], jitter=torch.tensor([1e-2, 1.0]), seed=range(2))
    assert len(grid) == 12
    assert grid[0] == {"prior_std": 0.1, "jitter": 0.01, "seed": 0}
    assert [m["seed"] for m in grid][:4] == [0, 1, 0, 1]
    assert grid.hyper_names == ("prior_std", "jitter")
    assert grid.axes["prior_std"] == (0.1, 1, 10)
    assert repr(grid) == "Grid(12 members: 3 prior_std, 2 jitter, 2 seed)"


def test_an_explicit_list_need_not_be_a_product():
    grid = Grid([{"a": 1.0, "split": "x"}, {"split": "y", "a": 2.0}, {"a": 1.0, "split": "y"}])
    assert len(grid) == 3
    assert grid.axes == {"a": (1.0, 2.0), "split": ("x", "y")}
    assert grid.groups("split") == {("x",): [0], ("y",): [1, 2]}
    assert grid.groups("seed") == {(0,): [0, 1, 2]}
    assert grid.groups() == {(): [0, 1, 2]}


def test_members_are_copies():
    grid = Grid(a=[1.0])
    grid[0]["a"] = 2.0
    next(iter(grid))["a"] = 3.0
    assert grid[0] == {"a": 1.0}


def test_hypers_become_tensors_of_the_parameters_kind():
    hypers = Grid(a=[1, 2.5], seed=[3]).hypers(torch.zeros(1, dtype=torch.float32))
    assert hypers["a"].dtype == torch.float32
    assert hypers["a"].tolist() == [1.0, 2.5]
    assert set(hypers) == {"a"}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Grid(), r"made of axes, .*or of a list of members"),
        (lambda: Grid([{"a": 1.0}], b=[1.0]), r"made of axes"),
        (lambda: Grid(a=[]), r"axis 'a' is empty"),
        (lambda: Grid(a=1.0), r"axis 'a' needs a list of values, got 1.0. Write a=\[1.0\]"),
        (lambda: Grid(a="relu"), r"axis 'a' needs a list of values, got 'relu'"),
        (lambda: Grid(a=[1.0, 1.0]), r"axis 'a' holds a value twice"),
        (lambda: Grid(a=["relu", "tanh"]), r"axis 'a' holds 'relu'.*finite numbers only"),
        (lambda: Grid(a=[True]), r"axis 'a' holds True"),
        (lambda: Grid(a=[float("inf")]), r"axis 'a' holds inf"),
        (lambda: Grid(seed=[0.5]), r"seed must be an integer, got 0.5 in member 0"),
        (lambda: Grid([]), r"the list of members is empty"),
        (lambda: Grid([{"a": 1}, {"b": 1}]), r"same names: \['a'\], but member 1 has \['b'\]"),
    ],
)
def test_bad_grids_are_refused(make: object, text: str):
    with pytest.raises(InputError, match=text):
        make()
