"""From a module to a pure function and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import cases
import fsmap
from fsmap.errors import UnsupportedModuleError


@pytest.mark.parametrize("name", cases.MODELS)
def test_equals_the_module_and_changes_nothing(name):
    case = cases.case(name)
    before, twin = copy.deepcopy(case.module.state_dict()), copy.deepcopy(case.module)
    expected = twin(**case.x) if isinstance(case.x, dict) else twin(case.x)
    out = case.f(case.params, case.x)
    torch.testing.assert_close(out, expected)
    for key, value in case.module.state_dict().items():
        assert torch.equal(value, before[key]), key
    out.square().sum().backward()  # reaches the module
    expected.square().sum().backward()
    ours, theirs = ([p.grad for p in m.parameters()] for m in (case.module, twin))
    torch.testing.assert_close(ours, theirs)


def test_frozen_parameters_are_constants_and_shared_ones_appear_once():
    assert set(cases.case("frozen").params) == {"2.weight", "2.bias"}
    shared = cases.case("shared")
    assert set(shared.params) == {"first.weight", "first.bias", "second.bias"}
    moved = {n: p + 1 for n, p in shared.params.items()}  # the one tensor is moved in both places
    with torch.no_grad():
        for p in shared.module.parameters():
            p.add_(1)
        torch.testing.assert_close(shared.f(moved, shared.x), shared.module(shared.x))


def test_state_holds_the_running_statistics_of_the_pass():
    case = cases.case("batchnorm_train")
    _, state = case.f.with_state(case.params, case.x)
    twin = copy.deepcopy(case.module)
    twin(case.x)
    assert set(state.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for key, value in twin.named_buffers():
        assert torch.equal(state.buffers[key], value), key
    assert case.module[1].num_batches_tracked == 0


def test_the_mode_is_read_at_the_call():
    case = cases.case("batchnorm_train")
    trained = case.f(case.params, case.x)
    assert not case.f.pointwise
    case.module.eval()
    assert case.f.pointwise
    assert not torch.allclose(case.f(case.params, case.x), trained)


class Drop(nn.Module):
    """Stochastic depth as many model libraries write it: a rate, and no nn.Dropout."""

    drop_prob = 0.2

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("layer", "in_training", "in_eval"),
    [
        (nn.Linear(2, 2), True, True),
        (nn.Dropout(0.5), False, True),
        (nn.Dropout(0.0), True, True),
        (nn.BatchNorm1d(2), False, True),
        (nn.BatchNorm1d(2, track_running_stats=False), False, False),
        (nn.MultiheadAttention(4, 2, dropout=0.1), False, True),
        (nn.MultiheadAttention(4, 2), True, True),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.1), False, True),
        (nn.RReLU(), False, True),
        (Drop(), False, True),
    ],
)
def test_pointwise_says_whether_points_see_each_other(layer, in_training, in_eval, seeded):
    """Or the random stream."""
    f, _ = fsmap.functional(nn.Sequential(nn.Linear(2, 2), layer))
    assert f.pointwise is in_training
    f.module.eval()
    assert f.pointwise is in_eval


def test_tuples_custom_calls_and_objects_with_logits(seeded):
    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, a, b, wrap=False):
            out = self.layer(a) * b
            return Output(out) if wrap else out

    module, a, b = Two(), torch.randn(3, 2), torch.randn(3, 2)
    expected = module(a, b)
    f, params = fsmap.functional(module)
    torch.testing.assert_close(f(params, (a, b)), expected)
    f, params = fsmap.functional(module, forward=lambda m, x: m(x, b, wrap=True))
    torch.testing.assert_close(f(params, a), expected)
    f, params = fsmap.functional(module, forward=lambda m, x: (m(x, b), "aux"))
    with pytest.raises(UnsupportedModuleError, match="returned"):
        f(params, a)
