import dataclasses
import math

import pytest
import scipy.stats
import torch

from fsmap import log_det, trace
from fsmap.paper.experiment import Context
from fsmap.paper.networks.logdet_mc import LogDetConfig, LogDetMC
from fsmap.paper.networks.scaled_networks import (
    CloudConfig,
    draw_network,
    jitter_text,
    jitter_title,
    spearman,
    square,
)
from oracles import logdet_slow


def test_networks_depend_on_their_index_only():
    config = CloudConfig(draws=5, block=2)
    blocks = [list(config.networks(unit)) for unit in config.units()]
    assert [network.draw for block in blocks for network in block] == [0, 1, 2, 3, 4]
    again = draw_network(3)
    assert all(torch.equal(blocks[1][1].params[n], p) for n, p in again.params.items())
    assert blocks[1][1].scale == again.scale != blocks[0][0].scale


def test_networks_are_those_of_the_paper():
    network = draw_network(0)
    assert sum(p.numel() for p in network.params.values()) == 898
    assert all(p.dtype == torch.float64 for p in network.params.values())
    points = CloudConfig().points()
    assert points.shape == (1600, 2)
    assert points.dtype == torch.float64
    assert points.abs().max() == 5
    assert len(square(40)) == 1600


def test_scales_are_log_uniform():
    scales = torch.tensor([draw_network(k, width=1).scale for k in range(120)])
    share = scales.log10().add(1).div(2)  # uniform on [0, 1]
    assert scipy.stats.kstest(share.numpy(), "uniform").pvalue > 0.01


def test_eigenvalues_are_those_of_the_jacobian():
    network = draw_network(1, width=2)
    x = square(5).all()
    eigenvalues = network.eigenvalues(x)
    exact = trace(network.f, network.params, x, method="exact").value
    torch.testing.assert_close(eigenvalues.sum(), exact)
    slow = logdet_slow(network.f, network.params, x, 1e-3)
    torch.testing.assert_close((eigenvalues + 1e-3).log().sum(), slow)


def test_exact_values_and_estimates_are_log_determinants(tmp_path):
    config = dataclasses.replace(LogDetConfig(), draws=1, width=2, grid=5, samples=(12, 6))
    context = Context(torch.device("cpu"), tmp_path)
    rows = list(LogDetMC().run(config, {"first": 0}, context))
    network, x = draw_network(0, width=2), square(5).all()
    for m in (m for m in rows if m.metric == "log_det" and m.config["exact"]):
        expected = log_det(network.f, network.params, x, jitter=m.config["jitter"])
        torch.testing.assert_close(m.value, expected, rtol=1e-8, atol=1e-8)
    assert {m.config["points"] for m in rows if m.metric == "log_det"} == {25, 12, 6}
    dimension = next(m.value for m in rows if m.metric == "dimension")
    assert 0 < dimension < sum(p.numel() for p in network.params.values())


@pytest.mark.parametrize("shape", ["curve", "noise"])
def test_spearman_is_scipys(shape, generator):
    x = torch.rand(50, generator=generator)
    y = x.exp() if shape == "curve" else torch.rand(50, generator=generator)
    expected = scipy.stats.spearmanr(x, y).statistic
    assert math.isclose(spearman(x.tolist(), y.tolist()), expected, abs_tol=1e-12)
    assert math.isnan(spearman([1.0], [1.0]))


def test_titles_of_jitters():
    assert [jitter_text(j) for j in (1e-6, 0.0562, 1.0, 1e3)] == [
        "ε = 1e−6", "ε = 0.0562", "ε = 1", "ε = 1000",
    ]  # fmt: skip
    assert jitter_title(10.0) == r"$\epsilon = 10$"
    assert jitter_title(1e-3) == r"$\epsilon = 10^{-3}$"
