import math

import pytest
import torch

from fsmap.functional import functional, ravel
from fsmap.linalg.jacobian import jacobian
from fsmap.paper.networks.moons_pathology import PROBLEMS, between, climb, merged, path


def start(problem):
    f, params = functional(problem.network(0))
    return f, {n: p.detach() for n, p in params.items()}


@pytest.mark.parametrize("name", PROBLEMS)
def test_merged_units_are_a_fixed_point_and_singular(name):
    problem = PROBLEMS[name]()
    f, params = start(problem)
    end = merged(params)
    first = end["layers.0.weight"]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(params["layers.0.weight"][0], params["layers.0.weight"][1])
    rows = jacobian(f, end, problem.px.all()).flatten(0, 1)
    assert torch.linalg.matrix_rank(rows) < len(ravel(end))
    before = jacobian(f, params, problem.px.all()).flatten(0, 1)
    assert torch.linalg.matrix_rank(before) == len(ravel(params))


def test_the_path_ends_where_it_says():
    problem = PROBLEMS["1-2-1"]()
    _, params = start(problem)
    end = merged(params)
    assert torch.equal(ravel(between(params, end, 0.0)), ravel(end))
    torch.testing.assert_close(ravel(between(params, end, 1.0)), ravel(params))


def test_the_four_parameter_network_gains_four_log_ten_per_decade():
    # the smallest singular values fall like t and t³ where units merge at distance t
    problem = PROBLEMS["1-2-1"]()
    values = path(problem, 0.0, [1e-2, 1e-3])
    assert abs(float(values[1] - values[0]) - 4 * math.log(10)) < 0.05
    bounded = path(problem, 1e-4, [1e-2, 1e-3])
    assert abs(float(bounded[1] - bounded[0])) < 0.05


@pytest.mark.parametrize("jitter", [0.0, 1e-4])
def test_the_path_is_the_objective(jitter):
    problem = PROBLEMS["2-4-1"]()
    f, params = start(problem)
    (value,) = path(problem, jitter, [1.0])
    out = f(params, problem.data.x)
    likelihood = problem.likelihood.value(out, problem.data.y)
    prior = problem.objective(jitter).prior.value(params)
    rows = jacobian(f, params, problem.px.all()).flatten(0, 1) / math.sqrt(len(problem.px))
    gram = rows.mT @ rows + jitter * torch.eye(rows.shape[1])
    torch.testing.assert_close(
        value, likelihood + prior - 0.5 * torch.logdet(gram), rtol=1e-6, atol=1e-6
    )


def test_climbing_gains_and_records():
    shares = []
    problem = PROBLEMS["1-2-1"]()
    climbed = climb(
        problem, 1e-2, seeds=2, steps=20, stages=2, lr=0.03, every=10, advance=shares.append
    )
    assert climbed.step.tolist() == [10, 20, 30, 40]
    assert climbed.objective.shape == climbed.ratio.shape == (4, 2)
    assert (climbed.objective[-1] > climbed.objective[0]).all()
    assert shares[-1] == 1.0
    again = climb(
        problem, 1e-2, seeds=2, steps=20, stages=2, lr=0.03, every=10, advance=lambda _: None
    )
    assert torch.equal(climbed.objective, again.objective)
