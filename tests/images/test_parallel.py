"""Several processes: the same weights as one process on the whole batch, own points, one ψ."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fsmap.errors import InputError
from fsmap.images import ImageRun, ImageSettings
from fsmap.images.step import Group, LostPeerError, processes, torchrun_device
from image_cases import TINY, trained

PLAIN = dataclasses.replace(TINY, model="image_cases:bare", method="ps-map", epochs=1)
STEERED = dataclasses.replace(TINY, data="cifar10", px="cifar100", epochs=1)


def worker(rank: int, folder: str, settings: list[ImageSettings]) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with processes(torch.device("cpu")) as group:
        found = []
        for one in settings:
            run = ImageRun(one, group=group)
            run.train(progress=False)
            state = {name: t.clone() for name, t in run.stepper.tensors().items()}
            found.append({"state": state, "history": run.history, "table": run.feeder.table})
            found[-1]["psi"] = getattr(run.stepper, "psi", None)
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, object]]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(worker, (str(folder), [PLAIN, STEERED]), nprocs=2, start_method="fork")
    return [torch.load(Path(folder) / f"rank{r}.pt", weights_only=True) for r in range(2)]


def test_two_processes_are_one_on_the_whole_batch(ranks: list[list[dict[str, object]]]):
    alone = trained(PLAIN)
    both, first = ranks[0][0]["state"], ranks[0][0]["history"][0]
    torch.testing.assert_close(both, alone.stepper.tensors(), rtol=1e-10, atol=1e-12)
    assert first["accuracy"] == pytest.approx(alone.history[0]["accuracy"])
    assert first["loss"] == pytest.approx(alone.history[0]["loss"])


def test_all_processes_hold_the_same_weights(ranks: list[list[dict[str, object]]]):
    states = [[run["state"] for run in runs] for runs in ranks]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert ranks[0][1]["history"][0]["laplacian"] > 0


def test_one_psi_and_points_of_their_own(ranks: list[list[dict[str, object]]]):
    one, two = ranks[0][1], ranks[1][1]
    assert torch.equal(one["psi"], two["psi"])
    assert one["psi"].abs().min() > 0
    rows = [set(r["table"][0, :8].tolist()) for r in (one, two)]
    assert not rows[0] & rows[1]  # shares of one batch
    assert not torch.equal(one["table"][:, -4:], two["table"][:, -4:])


def test_what_does_not_divide():
    with pytest.raises(InputError, match="batch_size=15 does not divide over 2 processes"):
        ImageRun(dataclasses.replace(PLAIN, batch_size=15), group=Group(0, 2))


@pytest.mark.parametrize("change", [{"reg_nats": 0.05}, {"method": "ps-map"}])
def test_a_lost_process_is_named(change: dict, monkeypatch: pytest.MonkeyPatch):
    def lost(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    run = ImageRun(dataclasses.replace(TINY, **change), group=Group(0, 2))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", lost)
    with pytest.raises(LostPeerError, match=r"process 0 of 2 lost the others \(Connection closed"):
        run.train(progress=False)


def test_alone_and_local_devices(monkeypatch: pytest.MonkeyPatch):
    with processes(torch.device("cpu")) as group:
        assert group == Group(0, 1)
    group.average([torch.ones(2)])
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert torchrun_device(torch.device("cuda")) == torch.device("cuda", 1)
    assert torchrun_device(torch.device("cuda", 0)) == torch.device("cuda", 0)
    assert torchrun_device(torch.device("cpu")) == torch.device("cpu")
