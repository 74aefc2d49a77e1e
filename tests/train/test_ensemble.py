"""One step of many members; the rest is held to ``fit`` in test_population."""

from __future__ import annotations

import pytest
import torch

import fsmap
from cases import case
from fsmap.train.batches import Batches
from fsmap.train.ensemble import Ensemble
from fsmap.train.feed import Feeder, as_splits
from fsmap.train.grid import Grid
from fsmap.train.optim import sgd
from fsmap.train.step import make_loss


def ensemble(chunk: int, clip: float | None = None) -> Ensemble:
    it = case("tanh_mlp")
    grid = Grid(std=[0.5, 1.0, 2.0, 4.0, 8.0])
    splits = as_splits((it.x, torch.zeros(12, 1)), None, it.params)

    def build(std: object) -> fsmap.Objective:
        return fsmap.ps_map(fsmap.Gaussian(0.1), fsmap.Normal(std), num_data=12)

    feeder = Feeder(
        it.f,
        grid,
        lambda k: build(1.0),
        lambda k: it.params,
        splits,
        lambda s: Batches(12, None, seed=s),
    )
    stacked = {
        n: p.detach().expand(5, *p.shape).clone().requires_grad_() for n, p in it.params.items()
    }
    moving = sgd(1.0).build(stacked.values())
    hypers = grid.hypers(it.params["0.bias"])
    return Ensemble(make_loss(it.f, build), stacked, hypers, feeder, moving, clip=clip, chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_make_no_difference(chunk: int):
    whole, cut = ensemble(5), ensemble(chunk)
    row, again = whole.step(whole.feeder.make(0)), cut.step(cut.feeder.make(0))
    assert row.shape == (5, 5)
    torch.testing.assert_close(again, row, rtol=1e-12, atol=0)
    for n, p in whole.params.items():
        torch.testing.assert_close(cut.params[n], p, rtol=1e-12, atol=1e-14)


def test_every_member_is_clipped_by_its_own_norm():
    made = ensemble(5, clip=0.2)
    before = {n: p.detach().clone() for n, p in made.params.items()}
    row = made.step(made.feeder.make(0))
    moved = torch.cat(
        [(p.detach() - before[n]).flatten(1) for n, p in made.params.items()], 1
    ).norm(dim=1)
    assert (row[-1] > 0.3).all()
    torch.testing.assert_close(moved, torch.full((5,), 0.2), rtol=1e-4, atol=0)


def test_a_dead_member_gets_no_gradient():
    made = ensemble(5)
    made.hypers["std"][2] = torch.nan
    before = {n: p.detach().clone() for n, p in made.params.items()}
    row = made.step(made.feeder.make(0))
    assert made.alive.tolist() == [True, True, False, True, True]
    assert not torch.isfinite(row[0, 2])
    made.hypers["std"][2] = 1.0  # it does not come back
    made.step(made.feeder.make(1))
    for n, p in made.params.items():
        assert torch.equal(p[2], before[n][2])
        assert not torch.equal(p[1], before[n][1])


def test_too_little_memory_halves_the_chunk(monkeypatch: pytest.MonkeyPatch):
    expected = ensemble(5).gradients(ensemble(5).feeder.make(0))
    made = ensemble(5)
    together, sizes = made._together, []

    def limited(chunk: object, members: slice) -> object:
        sizes.append(members.stop - members.start)
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError
        return together(chunk, members)

    monkeypatch.setattr(made, "_together", limited)
    found = made.gradients(made.feeder.make(0))
    assert sizes == [5, 3, 2, 2]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_nothing_left_to_halve(monkeypatch: pytest.MonkeyPatch):
    made = ensemble(1)

    def never(feed: object, member: int) -> object:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(made, "_alone", never)
    with pytest.raises(torch.OutOfMemoryError):
        made.gradients(made.feeder.make(0))
