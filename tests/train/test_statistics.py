"""Fresh statistics: those of the batches within, everything as it was afterwards."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.testing import assert_close

from fsmap.errors import InputError
from fsmap.train.images import ImageRun
from fsmap.train.statistics import fresh_statistics
from image_cases import TINY, trained

pytestmark = pytest.mark.usefixtures("seeded")


def network() -> nn.Sequential:
    found = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(3, 2, 3),
        nn.BatchNorm2d(2, momentum=0.3),
    )  # fmt: skip
    found(torch.randn(8, 1, 6, 6))  # statistics that lag behind
    return found


def batches() -> list[torch.Tensor]:
    return [torch.randn(4, 1, 6, 6) + i for i in range(3)]


def state(module: nn.Module) -> list[object]:
    found = [(m.training, getattr(m, "momentum", None)) for m in module.modules()]
    return [*found, *(b.tolist() for b in module.buffers())]


def test_they_are_the_mean_over_the_batches_and_go_away():
    module, inputs = network(), batches()
    slow = copy.deepcopy(module)
    slow[3].p = 0.0
    update_bn(inputs, slow)  # torch's own, which changes the module
    before, random = state(module), torch.get_rng_state()
    with fresh_statistics(module, iter(inputs)):
        for found, wanted in zip(module.buffers(), slow.buffers(), strict=True):
            assert_close(found, wanted)
        assert not any(m.training for m in module.modules())
    assert state(module) == before
    assert torch.equal(torch.get_rng_state(), random)  # no dropout was drawn


def test_they_go_away_after_an_error():
    module = network()
    before = state(module)
    with pytest.raises(ZeroDivisionError), fresh_statistics(module, batches()):
        1 / 0  # noqa: B018
    assert state(module) == before
    with pytest.raises(RuntimeError), fresh_statistics(module, [torch.randn(4, 5, 6, 6)]):
        pass
    assert state(module) == before


def test_layers_in_eval_mode_keep_theirs():
    module = network()
    module[1].eval()
    kept, other = module[1].running_mean.clone(), module[5].running_mean.clone()
    with fresh_statistics(module, batches()):
        assert torch.equal(module[1].running_mean, kept)
        assert not torch.equal(module[5].running_mean, other)
    assert not module[1].training
    with fresh_statistics(nn.Linear(2, 2), []):  # nothing to measure
        pass


def test_a_model_in_eval_mode_is_measured_all_the_same():
    module, inputs = network(), batches()
    with fresh_statistics(module, inputs):
        wanted = [b.clone() for b in module.buffers()]
    module.eval()
    with fresh_statistics(module, inputs):
        assert all(torch.equal(a, b) for a, b in zip(module.buffers(), wanted, strict=True))


def test_no_batches():
    module = network()
    before = state(module)
    with pytest.raises(InputError, match="at least one batch; was the iterator used up"):
        fresh_statistics(module, iter([])).__enter__()
    assert state(module) == before


def test_processes_share_what_they_measured():
    module = network()
    with fresh_statistics(module, batches(), lambda tensors: [t.fill_(2.0) for t in tensors]):
        assert module[1].running_var.tolist() == [2.0] * 3
        assert module[1].num_batches_tracked == 3


@pytest.mark.parametrize("mode", ["joint", "frozen"])
def test_a_look_at_held_out_images(mode: str):
    run = trained(dataclasses.replace(TINY, batchnorm=mode))
    inputs = list(run.feeder.batches(run.step, 8, "joined" if mode == "joint" else "plain"))
    points = run.settings.num_points if mode == "joint" else 0
    assert len(inputs[0]) == run.settings.batch_size + points
    slow = copy.deepcopy(run.module)
    update_bn(inputs, slow)
    slow.eval()
    wanted = slow(run.task.normalize(run.task.valid.x, inputs[0].dtype))
    logits, y = run.look()
    assert_close(logits, wanted)
    assert torch.equal(y, run.task.valid.y)
    assert not torch.allclose(logits, run.glance()[0])  # the running ones lag behind


@pytest.mark.parametrize("mode", ["joint", "frozen"])
def test_looking_changes_nothing(mode: str):
    settings = dataclasses.replace(TINY, batchnorm=mode)

    class Look:
        def on_epoch(self, run: ImageRun) -> None:
            run.look()

        def on_step(self, run: ImageRun) -> None:
            run.look()

    plain, looked = trained(settings), trained(settings, hooks=[Look()])
    for a, b in zip(
        plain.module.state_dict().values(), looked.module.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)


def test_batches_are_those_of_the_epoch():
    run = trained()
    last = run.steps_per_epoch - 1
    found = list(run.feeder.batches(last, 2, "plain"))
    for place, x in zip((last, 0), found, strict=True):
        run.feeder.prepare(place, "plain")
        assert torch.equal(run.feeder.feed("plain").x, x)


def test_a_look_shares_its_statistics_between_processes():
    run = trained()
    alone = run.look()[0]

    class Two:
        rank, size = 0, 2

        def average(self, tensors: list[torch.Tensor]) -> None:
            for t in tensors:
                t.mul_(2.0)  # as if the other process had measured three times as much

    run.group = Two()
    shared = run.look()[0]
    assert not torch.allclose(shared, alone)
