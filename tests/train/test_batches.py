"""Which points a step sees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fsmap.errors import InputError
from fsmap.train.batches import Batches, as_batch, sample_batch, take
from fsmap.types import Batch

PARAMS = {"w": torch.zeros(1, dtype=torch.float32)}


def test_an_epoch_sees_each_point_once_and_the_next_another_order():
    batches = Batches(10, 3, seed=5)
    rows = [batches.rows(step) for step in range(6)]
    first, second = torch.cat(rows[:3]), torch.cat(rows[3:])
    assert len(first.unique()) == len(second.unique()) == 9
    assert not torch.equal(first, second)


@pytest.mark.parametrize("replace", [False, True])
def test_rows_depend_on_seed_and_step_alone(replace: bool):
    one, two = (Batches(20, 6, seed=1, replace=replace) for _ in range(2))
    forward = [one.rows(step) for step in range(8)]
    backward = [two.rows(step) for step in reversed(range(8))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    assert not torch.equal(forward[0], Batches(20, 6, seed=2, replace=replace).rows(0))


def test_with_replacement_a_batch_may_be_larger_than_the_data():
    rows = Batches(4, 512, seed=0, replace=True).rows(3)
    assert rows.shape == (512,)
    assert set(rows.tolist()) == {0, 1, 2, 3}
    counts = rows.bincount()
    assert (counts - 128).abs().max() < 5 * (512 * 0.25 * 0.75) ** 0.5


def test_no_size_means_all_points_in_order():
    data = Batch(torch.arange(4.0)[:, None], torch.arange(4))
    assert take(data, Batches(4, None, seed=0).rows(9)) is data


def test_points_and_targets_stay_together():
    data = Batch({"a": torch.arange(8.0), "b": -torch.arange(8.0)[:, None]}, torch.arange(8))
    batch = take(data, Batches(8, 5, seed=0).rows(0))
    assert torch.equal(batch.x["a"].long(), batch.y)
    assert torch.equal(-batch.x["b"][:, 0].long(), batch.y)


def test_sizes_out_of_range_are_refused():
    with pytest.raises(
        InputError, match=r"batch_size=512 is larger than the data, N=409.*replace=True"
    ):
        Batches(409, 512, seed=0)
    with pytest.raises(
        InputError, match=r"batch_size must be at least 1, or None for all data, got 0"
    ):
        Batches(409, 0, seed=0)


def test_data_may_come_in_three_forms_and_is_moved_to_the_parameters_dtype():
    x, y = torch.zeros(3, 1), torch.ones(3, dtype=torch.long)
    for data in (Batch(x, y), (x, y), SimpleNamespace(x=x, y=y)):
        batch = as_batch(data, PARAMS)
        assert batch.x.dtype == torch.float32
        assert batch.y.dtype == torch.long


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (torch.zeros(3), r"data must be Batch\(x, y\), a pair, or have .x and .y, got Tensor"),
        ((torch.zeros(3, 1), torch.zeros(2)), r"x has 3 points and y has 2"),
        ((torch.zeros(3, 1), [1, 2, 3]), r"y must be a tensor with one entry per point, got list"),
        ((torch.zeros(2, 1), torch.tensor([0.0, torch.nan])), r"y has NaN or inf in 1 of 2 points"),
        (
            (torch.tensor([[0.0], [torch.inf]]), torch.zeros(2)),
            r"x has NaN or inf in 1 of 2 points",
        ),
    ],
)
def test_bad_data_is_refused(data: object, text: str):
    with pytest.raises(InputError, match=text):
        as_batch(data, PARAMS)


def test_the_sample_to_check_on_holds_the_extreme_targets():
    data = Batch(torch.arange(9.0)[:, None], torch.tensor([0, 1, 0, 1, -100, 1, 0, 7, 1]))
    sample = sample_batch(data, 2)
    assert sample.y.tolist() == [0, 1, -100, 7]
    assert sample_batch(data, None) is data
