"""A weight counts like so many equal points."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import fsmap
from fsmap.errors import InputError
from fsmap.objective.weighted import Weighted, packed, unpacked
from fsmap.train.optim import adam


@pytest.fixture(params=["gaussian", "categorical"])
def case(request, generator):
    out = torch.randn(5, 3, generator=generator)
    if request.param == "gaussian":
        return fsmap.Gaussian(0.7), out, torch.randn(5, 3, generator=generator), False
    return fsmap.Categorical(), out, torch.tensor([0, 2, 1, 1, 0]), True


def test_a_weight_of_two_is_two_points_and_zero_is_none(case):
    likelihood, out, y, labels = case
    weight = torch.tensor([2.0, 0.0, 1.0, 3.0, 1.0])
    rows = torch.tensor([0, 0, 2, 3, 3, 3, 4])
    found = Weighted(likelihood, labels).value(out, packed(y, weight))
    assert_close(found, likelihood.value(out[rows], y[rows]))
    twice = Weighted(likelihood, labels).value(out, packed(y, weight), torch.full((5,), 2.0))
    assert_close(twice, 2 * found)


def test_targets_survive_packing(case):
    _, _, y, labels = case
    weight = torch.rand(5, generator=torch.Generator().manual_seed(1))
    target, own = unpacked(packed(y, weight), labels=labels)
    assert_close(target, y)
    assert_close(own, weight)


def test_the_check_looks_at_the_targets_alone():
    out, labels = torch.zeros(2, 3), torch.tensor([0, 7])
    likelihood = Weighted(fsmap.Categorical(), labels=True)
    likelihood.check(out, packed(torch.tensor([0, 2]), torch.tensor([5.0, 0.5])))
    with pytest.raises(InputError, match=r"labels must lie in 0..2"):
        likelihood.check(out, packed(labels, torch.ones(2)))


def test_an_objective_with_weights_trains(seeded):
    x = torch.linspace(-1, 1, 20)[:, None]
    y = torch.where(x > 0, 1.0, 5.0)
    weight = (x[:, 0] > 0).double()  # only these rows count
    f, params = fsmap.functional(torch.nn.Linear(1, 1))
    objective = fsmap.ps_map(Weighted(fsmap.Gaussian(1.0)), fsmap.Flat(), num_data=20)
    state, _ = fsmap.fit(
        objective,
        f,
        params,
        (x, packed(y, weight)),
        steps=200,
        optimizer=adam(0.1),
        progress=False,
    )
    assert_close(f(state.params, x[10:]), y[10:], atol=0.02, rtol=0)
