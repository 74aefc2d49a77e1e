"""Selection by a held-out metric."""

from __future__ import annotations

import math

import pytest
import torch

import fsmap
from fsmap.errors import DivergedError, EdgeOfGridWarning, InputError
from fsmap.train.grid import Grid
from fsmap.train.select import select
from fsmap.train.state import PopulationBest, PopulationState

X = torch.ones(4, 1)


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
        found = select(states, on=(X, torch.zeros(4, 1)), by=error)
    assert [c.where for c in found.choices] == [{"seed": 0}, {"seed": 1}]
    assert [c.config for c in found.choices] == [{"lam": 2}, {"lam": 3}]
    assert [c.value for c in found.choices] == [1.0, 2.0]
    assert found.values.tolist() == [5.0, 5.0, 1.0, 4.0, 3.0, 2.0]
    assert found.mean == 1.5
    assert found.stderr == pytest.approx(0.5)
    assert found[1].params["w"].tolist() == [2.0]
    assert len(found) == 2


def test_one_choice_for_all_goes_by_the_mean():
    grid = Grid(lam=[1, 2, 3], seed=range(2))
    found = select(
        predicts(grid, [5.0, 5.0, 1.0, 4.0, 3.0, 2.5]), on=(X, torch.zeros(4, 1)), by=error, per=()
    )
    (choice,) = found.choices
    assert choice.config == {"lam": 2}
    assert choice.members == (2, 3)
    assert choice.value == 2.5
    assert math.isnan(found.stderr)


def test_the_largest_may_win():
    grid = Grid(lam=[1, 2, 3])
    found = select(
        predicts(grid, [0.1, 0.9, 0.5]), on=(X, torch.zeros(4, 1)), by=error, largest=True
    )
    assert found.choices[0].config == {"lam": 2}
    assert found.choices[0].value == pytest.approx(0.9)


def test_every_split_has_its_own_data():
    grid = Grid(lam=[1, 2, 3], split=["a", "b"])
    on = {"a": (X, torch.zeros(4, 1)), "b": (X, 2 * torch.ones(4, 1))}
    found = select(predicts(grid, [9.0, 9.0, 0.0, 2.0, 9.0, 9.0]), on=on, by=error)
    assert found.values.tolist() == [9.0, 7.0, 0.0, 0.0, 9.0, 7.0]
    with pytest.raises(
        InputError, match=r"held-out data for the splits \['b'\] is missing; there is \['a'\]"
    ):
        select(predicts(grid, [0.0] * 6), on={"a": on["a"]}, by=error)


def test_diverged_members_cannot_win():
    grid = Grid(lam=[1, 2, 3, 4])
    states = predicts(grid, [5.0, 0.0, 1.0, math.nan], diverged=(1,))
    found = select(states, on=(X, torch.zeros(4, 1)), by=error)
    assert found.choices[0].config == {"lam": 3}
    assert found.values.tolist() == [5.0, math.inf, 1.0, math.inf]
    with pytest.raises(DivergedError, match=r"no configuration to choose: all diverged"):
        select(
            predicts(grid, [0.0] * 4, diverged=(0, 1, 2, 3)), on=(X, torch.zeros(4, 1)), by=error
        )
    one = Grid(lam=[1, 2], seed=[0, 1])
    with pytest.raises(DivergedError, match=r"no configuration to choose for \{'seed': 1\}"):
        select(predicts(one, [0.0] * 4, diverged=(1, 3)), on=(X, torch.zeros(4, 1)), by=error)


@pytest.mark.parametrize(
    ("lam", "warns"), [([1, 2, 3], True), ([0, 2, 3], False), ([1, 3], False), ([2, 1, 3], False)]
)
def test_an_edge_is_an_end_of_three_or_more_values_and_not_zero(lam: list[float], warns: bool):
    states = predicts(Grid(lam=lam), [0.0] + [1.0] * (len(lam) - 1))  # the first one wins
    if warns:
        with pytest.warns(EdgeOfGridWarning, match=r"lam=1"):
            select(states, on=(X, torch.zeros(4, 1)), by=error)
    else:
        select(states, on=(X, torch.zeros(4, 1)), by=error)


def test_the_best_parameters_may_be_measured_instead():
    grid = Grid(lam=[1, 2, 3])
    states = predicts(grid, [5.0, 3.0, 4.0])
    with pytest.raises(
        InputError, match=r"use_best=True needs a population trained with on= and by="
    ):
        select(states, on=(X, torch.zeros(4, 1)), by=error, use_best=True)
    kept = {"w": torch.tensor([[9.0], [1.0], [2.0]])}
    states = states._replace(best=PopulationBest(kept, torch.tensor([1, 1, 1]), torch.zeros(3)))
    found = select(states, on=(X, torch.zeros(4, 1)), by=error, use_best=True)
    assert found.choices[0].value == 1.0


def test_a_metric_of_the_library():
    grid = Grid(lam=[1, 2, 3])
    found = select(
        predicts(grid, [2.0, 1.0, 3.0]), on=(X, torch.zeros(4, 1)), by=fsmap.metrics.rmse
    )
    assert found.choices[0].value == pytest.approx(1.0)


def test_only_seeds_and_splits_can_choose():
    with pytest.raises(InputError, match=r"per may hold \['seed', 'split'\], got \['lam'\]"):
        select(predicts(Grid(lam=[1, 2]), [1.0, 2.0]), on=(X, X), by=error, per=("lam",))
