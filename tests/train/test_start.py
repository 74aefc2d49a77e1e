"""Starts that a seed decides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases import Shared, case
from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.train.population import initialize, start


def test_layers_initialize_themselves_by_seed(seeded: None):
    module = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 1))
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    state = torch.random.get_rng_state()
    a, b, c = (initialize(module, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not any(torch.equal(a[n], c[n]) for n in a)
    assert a["0.weight"].abs().max() <= 2**-0.5  # torch's own range for two inputs
    assert a["0.weight"].abs().max() > 0.9 * 2**-0.5
    assert all(torch.equal(before[n], p) for n, p in module.named_parameters())
    assert torch.equal(state, torch.random.get_rng_state())


def test_shared_and_frozen_parameters_are_counted_once(seeded: None):
    assert set(initialize(Shared(), 0)) == {"first.weight", "first.bias", "second.bias"}
    module = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    assert set(initialize(module, 0)) == {"1.weight", "1.bias"}


def test_attention_can_be_initialized(seeded: None):
    assert len(initialize(nn.TransformerEncoderLayer(4, 2, 5), 0)) == 12


def test_what_cannot_be_initialized_is_named(seeded: None):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

    with pytest.raises(
        UnsupportedModuleError, match=r"'1' \(Own\).*no reset_parameters.*Give init="
    ):
        initialize(nn.Sequential(nn.Linear(1, 1), Own()), 0)


def test_ways_to_start(seeded: None):
    it = case("linear")
    state = torch.random.get_rng_state()
    by_module = start(lambda seed: nn.Linear(3, 1), it.f, 4)
    again = start(lambda seed: nn.Linear(3, 1), it.f, 4)
    assert all(torch.equal(by_module[n], again[n]) for n in again)  # torch's generator is seeded
    assert torch.equal(state, torch.random.get_rng_state())
    by_params = start(lambda seed: {"w": torch.full((1,), float(seed))}, it.f, 4)
    assert by_params["w"].tolist() == [4.0]
    same = start(it.params, it.f, 0)
    assert all(torch.equal(same[n], p) and same[n] is not p for n, p in it.params.items())
    own = start(None, it.f, 4)
    expected = initialize(it.module, 4)
    assert all(torch.equal(own[n], expected[n]) for n in own)


def test_nothing_to_start_from_is_refused():
    f, params = (lambda p, x: x * p["w"]), {"w": torch.ones(1)}
    with pytest.raises(InputError, match=r"f is a plain function, so give init="):
        start(None, f, 0)
    with pytest.raises(
        InputError, match=r"init must give a dict of parameters or a module, got int"
    ):
        start(lambda seed: 3, f, 0)
    assert start(params, f, 0)["w"].tolist() == [1.0]
