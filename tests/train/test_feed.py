"""Who gets which batch and draws."""

from __future__ import annotations

import torch

import fsmap
from cases import case
from fsmap.linalg.probes import Stream
from fsmap.train.batches import Batches
from fsmap.train.feed import Feeder, as_splits
from fsmap.train.grid import Grid


def feeder(
    grid: Grid, *, batch_size: int | None = 3, every: int = 1
) -> tuple[Feeder, fsmap.Objective]:
    it = case("tanh_mlp")
    x = torch.arange(8.0)[:, None]
    wanted = grid.axes.get("split")
    train = (x, x) if wanted is None else [(x, x), (100 + x, 100 + x)]
    splits = as_splits(train, wanted, it.params)
    terms = fsmap.Gaussian(1.0), fsmap.Normal(1.0), fsmap.px.Uniform(-1.0, 1.0)
    objective = fsmap.l_map(*terms, num_points=4, jitter=1.0, num_data=8, every=every)
    order = lambda seed: Batches(8, batch_size, seed=seed)  # noqa: E731
    return Feeder(it.f, grid, lambda k: objective, lambda k: it.params, splits, order), objective


def test_one_seed_shares_everything():
    made, objective = feeder(Grid(a=[1.0, 2.0, 3.0]))
    feed = made.make(5)
    chunk = made.chunk(feed, slice(0, 3))
    assert chunk.dims[0] is None
    assert chunk.dims[1].x is None
    rows = Batches(8, 3, seed=0).rows(5)
    assert torch.equal(chunk.batch.y[:, 0].long(), rows)
    expected = objective.draw(case("tanh_mlp").f, case("tanh_mlp").params, Stream(0, 5))
    assert torch.equal(chunk.draws.x, expected.x)
    assert torch.equal(made.single(feed, 2)[1].psi["0.bias"], expected.psi["0.bias"])


def test_several_seeds_and_splits_are_gathered():
    grid = Grid(a=[1.0, 2.0], split=[0, 1], seed=[4, 9])
    made, objective = feeder(grid)
    feed = made.make(2)
    chunk = made.chunk(feed, slice(0, 8))
    assert chunk.dims[0] == chunk.dims[1].x == 0
    it = case("tanh_mlp")
    for k, member in enumerate(grid):
        rows = Batches(8, 3, seed=member["seed"]).rows(2)
        expected = objective.draw(it.f, it.params, Stream(member["seed"], 2))
        batch, draws = made.single(feed, k)
        assert torch.equal(chunk.batch.y[k, :, 0].long(), rows + 100 * member["split"])
        assert torch.equal(batch.y, chunk.batch.y[k])
        assert torch.equal(chunk.draws.x[k], expected.x)
        assert torch.equal(draws.psi["0.weight"], expected.psi["0.weight"])


def test_full_batches():
    made, _ = feeder(Grid(a=[1.0, 2.0], seed=[4, 9]), batch_size=None)
    batch = made.single(made.make(0), 3)[0]
    assert batch.y[:, 0].tolist() == list(range(8))
    assert made.chunk(made.make(0), slice(0, 4)).dims[0] is None  # all seeds share all data
    made, _ = feeder(Grid(split=[1, 0]), batch_size=None)
    assert made.single(made.make(0), 0)[0].y[0].item() == 100.0
    made, _ = feeder(Grid(a=[1.0]), batch_size=None)
    assert made.make(0).rows is None


def test_a_single_set_of_rows_is_not_all_data():
    it = case("tanh_mlp")
    x = torch.arange(8.0)[:, None]
    splits = as_splits(((x, x), {"a": [5, 2]}), ("a",), it.params)
    objective = fsmap.ps_map(fsmap.Gaussian(1.0), fsmap.Normal(1.0), num_data=2)
    order = lambda seed: Batches(2, None, seed=seed)  # noqa: E731
    made = Feeder(it.f, Grid(split=["a"]), lambda k: objective, lambda k: it.params, splits, order)
    assert made.single(made.make(0), 0)[0].y[:, 0].tolist() == [5.0, 2.0]


def test_steps_that_are_left_out_have_no_draws():
    made, _ = feeder(Grid(a=[1.0], seed=[0, 1]), every=2)
    feed = made.make(1)
    assert feed.draws.x is None
    assert made.chunk(feed, slice(0, 2)).dims[1].x is None
    assert made.make(2).draws.x.shape == (2, 4, 1)
