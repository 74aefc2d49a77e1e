"""Fresh statistics: those of the batches within, everything as it was afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from fsmap.errors import InputError
from fsmap.lmap.batchnorm import fresh_statistics

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
        assert_close([*module.buffers()], [*slow.buffers()])
        assert not any(m.training for m in module.modules())
    assert state(module) == before
    assert torch.equal(torch.get_rng_state(), random)  # no dropout was drawn


def test_batches_may_be_those_of_a_loader():
    module, x = network(), torch.randn(12, 1, 6, 6)
    with fresh_statistics(module, x.split(4)):
        expected = [b.clone() for b in module.buffers()]
    loader = DataLoader(TensorDataset(x, torch.arange(12)), 4)
    for given in (loader, [{"input": part} for part in x.split(4)]):
        with fresh_statistics(module, given):
            assert_close([*module.buffers()], expected)
    with pytest.raises(InputError, match=r"\[x\]"):
        fresh_statistics(module, x).__enter__()


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
    before = state(module)
    with pytest.raises(InputError, match="batch"):
        fresh_statistics(module, iter([])).__enter__()
    assert state(module) == before
