"""Checkpoints: torch.distributed.checkpoint on other ranks, and files of an earlier release.

python tests/lmap/test_checkpoints.py      writes the file of this release anew
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn

import fsmap

RELEASES = ["0.1.0"]  # release-VERSION.pt beside this file
X = torch.linspace(-1, 1, 8).reshape(4, 2)


def made() -> tuple[fsmap.LMAP, fsmap.LogTrace, fsmap.LaplacianPenalty]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    px = fsmap.px.Normal(torch.zeros(2, dtype=torch.float64))
    lm = fsmap.LMAP(net, px, num_points=3, seed=5)
    return lm, fsmap.LogTrace(0.1), fsmap.LaplacianPenalty(net, px, num_points=3, seed=6)


def train(lm: fsmap.LMAP, trace: fsmap.LogTrace, penalty: fsmap.LaplacianPenalty) -> list[Tensor]:
    """Three steps; the values of each."""
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.1)
    values = []
    for _ in range(3):
        out, R = lm(X.double())
        value, other = trace(R), penalty()
        optimizer.zero_grad()
        (out.square().mean() + value + 1e-3 * other).backward()
        optimizer.step()
        values += [R.detach(), value.detach(), other.detach()]
    return values


def states(lm: fsmap.LMAP, trace: fsmap.LogTrace, penalty: Any = None) -> dict[str, Any]:
    found = {"lm": lm.state_dict(), "trace": trace.state_dict()}
    return found if penalty is None else {**found, "penalty": penalty.state_dict()}


def worker(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    lm, trace, _ = made()
    state = states(lm, trace)
    dcp.load(state, checkpoint_id=f"{folder}/saved")
    lm.load_state_dict(state["lm"])
    trace.load_state_dict(state["trace"])
    found = {"step": lm.step, "psi": lm.draw(X.double()).probes, "trace": trace.state_dict()}
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # torch's, of a save without a process group
def test_distributed_checkpoints_load_on_another_number_of_ranks(tmp_path: Path) -> None:
    lm, trace, penalty = made()
    train(lm, trace, penalty)
    dcp.save(states(lm, trace), checkpoint_id=str(tmp_path / "saved"))
    mp.start_processes(worker, (str(tmp_path),), nprocs=2, start_method="fork")
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert found["step"] == lm.step == 3
        assert torch.equal(found["psi"], lm.draw(X.double()).probes)
        assert all(torch.equal(t, found["trace"][n]) for n, t in trace.state_dict().items())


@pytest.mark.parametrize("version", RELEASES)
def test_a_checkpoint_of_a_release_continues_as_it_would_have(version: str) -> None:
    saved = torch.load(Path(__file__).with_name(f"release-{version}.pt"))
    lm, trace, penalty = made()
    lm.load_state_dict(saved["lm"])
    trace.load_state_dict(saved["trace"])
    penalty.load_state_dict(saved["penalty"])
    values = train(lm, trace, penalty)
    torch.testing.assert_close(torch.stack(values), saved["next"], rtol=1e-6, atol=0.0)
    assert lm.step == penalty.step == 6


if __name__ == "__main__":
    terms = made()
    train(*terms)
    saved = copy.deepcopy(states(*terms))
    saved["next"] = torch.stack(train(*terms))
    torch.save(saved, Path(__file__).with_name(f"release-{fsmap.__version__}.pt"))
