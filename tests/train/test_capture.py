"""CUDA graphs: the replay equals the eager step; what surrounds a capture needs no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsmap
from fsmap import Grid, adam, cosine, fit_population, sgd
from fsmap.errors import DivergedWarning, FallbackWarning
from fsmap.train.capture import CapturedStep, Graphed
from fsmap.train.loop import Schedule
from fsmap.train.population import Feed
from fsmap.types import Batch, Draws


def test_without_a_capture_training_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch):
    calls = []
    graphed = Graphed(lambda feed: calls.append(feed) or torch.ones(1), list)

    def fail(step: CapturedStep) -> None:
        raise RuntimeError("called a synchronizing CUDA operation\nmore")

    monkeypatch.setattr(CapturedStep, "capture", fail)
    with pytest.warns(
        FallbackWarning, match=r"no CUDA graph: called a synchronizing CUDA operation. Training"
    ):
        graphed(Feed(None, Draws()))
    graphed(Feed(None, Draws()))  # said once
    assert len(calls) == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch says it once, in a thread
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("spec", [adam(0.02), sgd(1e-3, momentum=0.9)], ids=lambda s: s.name)
@pytest.mark.parametrize(
    ("schedule", "tolerance"),
    [(Schedule(), 1e-10), (cosine(), 1e-5)],  # a learning rate that moves is read in float32
    ids=["constant", "cosine"],
)
def test_replay_equals_the_eager_step(
    seeded: None, spec: object, every: int, schedule: object, tolerance: float
):
    f, _ = fsmap.functional(nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).cuda())
    x = torch.linspace(-1, 1, 24, device="cuda")[:, None]
    train = Batch(x, torch.sin(3 * x))
    px = fsmap.px.Uniform(-1.0, 1.0)

    def build(prior_std: object, jitter: object) -> fsmap.Objective:
        terms = fsmap.Gaussian(0.2), fsmap.Normal(prior_std), px
        return fsmap.l_map(*terms, num_points=6, jitter=jitter, num_data=24, every=every)

    grid = Grid(prior_std=[0.5, 2.0], jitter=[1e-306, 0.1], seed=range(3))
    knobs = {"steps": 30, "batch_size": 8, "clip": 2.0, "progress": False}
    knobs |= {"optimizer": spec, "schedule": schedule}
    with pytest.warns(DivergedWarning, match=r"6 of 12 members"):
        eager, expected = fit_population(build, grid, f, train, graph=False, **knobs)
    with pytest.warns(DivergedWarning, match=r"6 of 12 members"):
        replayed, found = fit_population(build, grid, f, train, graph=True, **knobs)
    assert torch.equal(found.diverged, expected.diverged)
    alive = expected.diverged < 0
    near = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(found.loss[:, alive], expected.loss[:, alive], **near)
    for n, p in eager.params.items():
        torch.testing.assert_close(replayed.params[n][alive], p[alive], **near)


@pytest.mark.gpu
def test_a_step_that_waits_is_found_out_before_the_capture(seeded: None):
    """And torch's own generator still works afterwards."""
    waits = lambda m, x: m(x) * torch.tensor([1.0]).to(x.device)  # noqa: E731  from the host
    f, _ = fsmap.functional(nn.Linear(1, 1).cuda(), forward=waits)
    x = torch.linspace(-1, 1, 8, device="cuda")[:, None]

    def build(prior_std: object) -> fsmap.Objective:
        return fsmap.ps_map(fsmap.Gaussian(1.0), fsmap.Normal(prior_std), num_data=8)

    knobs = {"steps": 5, "progress": False}
    with pytest.warns(FallbackWarning, match=r"no CUDA graph"):
        states, _ = fit_population(build, Grid(prior_std=[1.0, 2.0]), f, (x, x), **knobs)
    eager, _ = fit_population(build, Grid(prior_std=[1.0, 2.0]), f, (x, x), graph=False, **knobs)
    torch.testing.assert_close(states.params, eager.params)
    with torch.random.fork_rng():
        assert torch.isfinite(torch.randn(3, device="cuda")).all()
