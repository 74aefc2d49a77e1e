"""What training returns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsmap
from fsmap.errors import DivergedError
from fsmap.train.grid import Grid
from fsmap.train.state import PopulationBest, PopulationState, deployed, measure
from fsmap.types import Batch


def states() -> PopulationState:
    params = {"w": torch.tensor([[1.0], [2.0]])}
    best = PopulationBest(
        {"w": torch.tensor([[3.0], [4.0]])}, torch.tensor([7, 0]), torch.tensor([0.5, torch.inf])
    )
    return PopulationState(
        params, 9, Grid(a=[1.0, 2.0]), lambda p, x: x * p["w"], torch.tensor([-1, -1]), best
    )


def test_a_member_is_what_fit_returns():
    one, two = states().member(0), states().member(1)
    assert one.params["w"].tolist() == [1.0]
    assert one.step == 9
    assert (one.best.params["w"].item(), one.best.step, one.best.value) == (3.0, 7, 0.5)
    assert two.best is None


def test_a_diverged_member_is_refused_and_says_nothing():
    gone = states()._replace(diverged=torch.tensor([-1, 4]))
    with pytest.raises(DivergedError, match=r"member 1 \(\{'a': 2.0\}\) diverged at step 4"):
        gone.member(1)
    out = gone.outputs(torch.ones(3, 1))
    assert out.shape == (2, 3, 1)
    assert out[0].unique().tolist() == [1.0]
    assert out[1].isnan().all()
    assert repr(gone) == "PopulationState(Grid(2 members: 2 a) after 9 steps, 1 diverged)"


def test_metrics_are_those_of_the_deployed_function(seeded: None):
    module = nn.Sequential(nn.Linear(2, 40), nn.Dropout(0.5))
    f, params = fsmap.functional(module)
    x = torch.ones(3, 2)
    module.eval()
    expected = module(x).detach().mean()
    module.train()
    module[0].eval()
    stacked = {n: p.detach()[None] for n, p in params.items()}
    found = measure(f, stacked, [Batch(x, x)], lambda out, y: out.mean())
    assert found.tolist() == pytest.approx([expected.item()])
    assert (module.training, module[0].training, module[1].training) == (True, False, True)
    with deployed(f):
        assert f.pointwise
    assert not f.pointwise


def test_outputs_that_are_not_finite_are_not_measured():
    params = {"w": torch.tensor([[1.0], [torch.inf]])}

    def refuse_nan(out: torch.Tensor, y: torch.Tensor) -> float:
        assert torch.isfinite(out).all()
        return 1.0

    data = [Batch(torch.ones(2, 1), torch.ones(2, 1))] * 2
    found = measure(lambda p, x: x * p["w"], params, data, refuse_nan)
    assert found[0] == 1.0
    assert found[1].isnan()
