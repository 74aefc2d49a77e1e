"""Grids, states of a trained population, and selection by a held-out metric."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fsmap import Grid, select
from fsmap.errors import DivergedError, EdgeOfGridWarning, InputError
from fsmap.train.loop import Best
from fsmap.train.population import PopulationState

X = torch.ones(4, 1)
ZEROS = (X, torch.zeros(4, 1))


def predicts(grid: Grid, values: list[float], diverged: tuple[int, ...] = ()) -> PopulationState:
    """Members that say a constant."""
    gone = torch.full((len(grid),), -1)
    gone[list(diverged)] = 5
    params = {"w": torch.tensor(values)[:, None]}
    return PopulationState(params, 10, grid, lambda p, x: x * p["w"], gone)


def error(out: torch.Tensor, y: torch.Tensor) -> float:
    return float((out - y).abs().mean())


def test_each_seed_chooses_for_itself():
    grid = Grid(lam=[1, 2, 3], seed=range(2))  # members: (1,0) (1,1) (2,0) (2,1) (3,0) (3,1)
    states = predicts(grid, [5.0, 5.0, 1.0, 4.0, 3.0, 2.0])
    with pytest.warns(EdgeOfGridWarning, match=r"lam=3 \(grid from 1 to 3\).*widen the grid"):
        found = select(states, on=ZEROS, by=error)
    assert [c.where for c in found.choices] == [{"seed": 0}, {"seed": 1}]
    assert [c.config for c in found.choices] == [{"lam": 2}, {"lam": 3}]
    assert [c.value for c in found.choices] == [1.0, 2.0]
    assert found.values.tolist() == [5.0, 5.0, 1.0, 4.0, 3.0, 2.0]
    assert (found[1].params["w"].tolist(), len(found)) == ([2.0], 2)


@pytest.mark.parametrize(
    ("axes", "values", "options", "members", "value"),
    [
        ({"seed": range(2)}, [5.0, 5.0, 1.0, 4.0, 3.0, 2.5], {"per": ()}, (2, 3), 2.5),
        ({}, [0.1, 0.9, 0.5], {"largest": True}, (1,), 0.9),
    ],
)
def test_one_choice_for_all_goes_by_the_mean(axes, values, options, members, value):
    states = predicts(Grid(lam=[1, 2, 3], **axes), values)
    (choice,) = select(states, on=ZEROS, by=error, **options).choices
    assert choice == ({}, {"lam": 2}, members, pytest.approx(value))


def test_every_split_has_its_own_data():
    grid = Grid(lam=[1, 2, 3], split=["a", "b"])
    on = {"a": (X, torch.zeros(4, 1)), "b": (X, 2 * torch.ones(4, 1))}
    found = select(predicts(grid, [9.0, 9.0, 0.0, 2.0, 9.0, 9.0]), on=on, by=error)
    assert found.values.tolist() == [9.0, 7.0, 0.0, 0.0, 9.0, 7.0]
    with pytest.raises(InputError, match=r"splits \['b'\].*only \['a'\]"):
        select(predicts(grid, [0.0] * 6), on={"a": on["a"]}, by=error)


def test_diverged_members_cannot_win():
    grid = Grid(lam=[1, 2, 3, 4])
    found = select(predicts(grid, [5.0, 0.0, 1.0, math.nan], diverged=(1,)), on=ZEROS, by=error)
    assert found.choices[0].config == {"lam": 3}
    assert found.values.tolist() == [5.0, math.inf, 1.0, math.inf]
    with pytest.raises(DivergedError, match=r"no configuration to choose: all diverged"):
        select(predicts(grid, [0.0] * 4, diverged=(0, 1, 2, 3)), on=ZEROS, by=error)
    one = Grid(lam=[1, 2], seed=[0, 1])
    with pytest.raises(DivergedError, match=r"no configuration to choose for \{'seed': 1\}"):
        select(predicts(one, [0.0] * 4, diverged=(1, 3)), on=ZEROS, by=error)


@pytest.mark.parametrize(
    ("lam", "warns"), [([1, 2, 3], True), ([0, 2, 3], False), ([1, 3], False), ([2, 1, 3], False)]
)
def test_an_edge_is_an_end_of_three_or_more_values_and_not_zero(lam: list[float], warns: bool):
    states = predicts(Grid(lam=lam), [0.0] + [1.0] * (len(lam) - 1))  # the first one wins
    if warns:
        with pytest.warns(EdgeOfGridWarning, match=r"lam=1"):
            select(states, on=ZEROS, by=error)
    else:
        select(states, on=ZEROS, by=error)


def test_only_seeds_and_splits_can_choose():
    with pytest.raises(InputError, match=r"per may hold \['seed', 'split'\], got \['lam'\]"):
        select(predicts(Grid(lam=[1, 2]), [1.0, 2.0]), on=(X, X), by=error, per=("lam",))


def test_a_member_is_what_fit_returns():
    states = predicts(Grid(lam=[1, 2]), [1.0, 2.0])
    best = {"w": torch.tensor([[3.0], [4.0]])}
    states = states._replace(best=Best(best, torch.tensor([7, 0]), torch.zeros(2)))
    one = states.member(0)
    assert (one.params["w"].item(), one.step) == (1.0, 10)
    assert (one.best.params["w"].item(), one.best.step, one.best.value) == (3.0, 7, 0.0)
    assert states.member(1).best is None
    states = predicts(Grid(lam=[1, 2]), [1.0, 2.0], diverged=(1,))
    with pytest.raises(DivergedError, match=r"member 1 \(\{'lam': 2\}\) diverged at step 5"):
        states.member(1)
    assert repr(states) == "PopulationState(Grid(2 members: 2 lam) after 10 steps, 1 diverged)"


def test_axes_multiply_and_the_last_runs_fastest():
    grid = Grid(prior_std=[0.1, 1, 10], jitter=torch.tensor([1e-2, 1.0]), seed=np.arange(2))
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
