"""Experiments on small networks: their numbers against definitions."""

from __future__ import annotations

import dataclasses
import math

import pytest
import scipy.stats
import torch

from fsmap import log_det
from fsmap.functional import functional, ravel
from fsmap.linalg.jacobian import jacobian
from fsmap.paper.engine import Context
from fsmap.paper.networks import moons as two_moons
from fsmap.paper.networks.clouds import LogDetMC, draw_network, spearman, square
from fsmap.paper.networks.moons import MoonsConfig, SolutionsConfig, train


def nothing(share):
    assert 0 <= share <= 1


def test_a_chain_goes_down_and_each_link_starts_where_the_last_one_ended():
    config = SolutionsConfig(steps=5, grid=6, lap_points=9, between=0)
    links = list(two_moons.chain(config, 0, nothing))
    assert [link.where["jitter"] for link in links] == [10.0, 1.0, 0.1, 0.01]
    step = MoonsConfig(steps=1, grid=6, lap_points=9)
    (again,) = train(step, "l-map", [0.1], 0, nothing, links[1].params)
    assert all(torch.equal(p, again.params[n]) for n, p in links[2].params.items())


def test_networks_are_those_of_the_paper_and_depend_on_their_index_only():
    first, again, other = draw_network(3), draw_network(3), draw_network(4)
    assert sum(p.numel() for p in first.params.values()) == 898
    assert all(torch.equal(first.params[n], p) for n, p in again.params.items())
    assert first.scale == again.scale != other.scale
    points = square(40).all()
    assert (points.shape, points.dtype) == ((1600, 2), torch.float64)
    assert points.abs().max() == 5


def test_exact_values_and_estimates_are_log_determinants(tmp_path):
    config = dataclasses.replace(LogDetMC.config, draws=2, width=2, grid=5, samples=(12, 6))
    rows = list(LogDetMC().run(config, {"first": 0}, Context(torch.device("cpu"), tmp_path)))
    x = square(5).all()
    for m in (m for m in rows if m.metric == "log_det" and m.config["exact"]):
        for index, value in enumerate(m.value):
            network = draw_network(index, width=2)
            assert network.scale == m.config["scale"][index]
            expected = log_det(network.f, network.params, x, jitter=m.config["jitter"])
            assert value == pytest.approx(expected.item(), rel=1e-8)
    assert {m.config["points"] for m in rows if m.metric == "log_det"} == {25, 12, 6}
    dimension = next(m.value for m in rows if m.metric == "dimension")
    assert 0 < dimension[0] < sum(p.numel() for p in network.params.values())


def test_spearman_is_scipys(generator):
    x, noise = torch.rand(2, 50, generator=generator)
    for y in (x.exp(), noise):
        expected = scipy.stats.spearmanr(x, y).statistic
        assert math.isclose(spearman(x.tolist(), y.tolist()), expected, abs_tol=1e-12)
    assert math.isnan(spearman([1.0], [1.0]))


def start(problem):
    f, params = functional(problem.network(0))
    return f, {n: p.detach() for n, p in params.items()}


@pytest.mark.parametrize("name", two_moons.NETWORKS)
def test_merged_units_are_a_fixed_point_and_singular(name):
    problem = two_moons.problem_of(name)
    f, params = start(problem)
    end = two_moons.merged(params)
    first = end["layers.0.weight"]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(params["layers.0.weight"][0], params["layers.0.weight"][1])
    rows = jacobian(f, end, problem.px.all()).flatten(0, 1)
    assert torch.linalg.matrix_rank(rows) < len(ravel(end))
    before = jacobian(f, params, problem.px.all()).flatten(0, 1)
    assert torch.linalg.matrix_rank(before) == len(ravel(params))


def test_the_four_parameter_network_gains_four_log_ten_per_decade():
    # the smallest singular values fall like t and t³ where units merge at distance t
    problem = two_moons.problem_of("1-2-1")
    values = two_moons.path(problem, 0.0, [1e-2, 1e-3])
    assert abs(float(values[1] - values[0]) - 4 * math.log(10)) < 0.05
    bounded = two_moons.path(problem, 1e-4, [1e-2, 1e-3])
    assert abs(float(bounded[1] - bounded[0])) < 0.05


@pytest.mark.parametrize("jitter", [0.0, 1e-4])
def test_the_path_is_the_objective(jitter):
    problem = two_moons.problem_of("2-4-1")
    f, params = start(problem)
    (value,) = two_moons.path(problem, jitter, [1.0])
    likelihood = problem.likelihood.value(f(params, problem.data.x), problem.data.y)
    prior = problem.objective(jitter).prior.value(params)
    rows = jacobian(f, params, problem.px.all()).flatten(0, 1) / math.sqrt(len(problem.px))
    gram = rows.mT @ rows + jitter * torch.eye(rows.shape[1])
    expected = likelihood + prior - 0.5 * torch.logdet(gram)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
