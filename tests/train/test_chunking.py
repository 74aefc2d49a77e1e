"""How many members at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsmap
from fsmap.errors import InputError, MemoryLimitError
from fsmap.linalg.probes import Stream
from fsmap.train import ensemble
from fsmap.types import Batch


def chosen(
    chunk: object, *, width: int = 8, batch: int = 10, members: int = 16, geometry: str = "l-map"
):
    module = nn.Sequential(
        nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )
    f, params = fsmap.functional(module)
    terms = fsmap.Gaussian(1.0), fsmap.Normal(1.0), fsmap.px.Uniform(-torch.ones(2), 1.0)
    make = fsmap.l_map if geometry == "l-map" else fsmap.fs_map
    objective = make(*terms, num_points=20, jitter=1.0, num_data=batch)
    data = Batch(torch.zeros(batch, 2), torch.zeros(batch, 1))
    draws = objective.draw(f, params, Stream(0, 0))
    needed = ensemble.member_bytes(f, params, data, objective, draws)
    return ensemble.choose_chunk(chunk, members, f, params, data, objective, draws), needed


def test_small_members_go_together_and_large_ones_one_by_one(seeded: None):
    assert chosen("auto", width=64, batch=64)[0] == 16
    assert chosen("auto", width=256, batch=512)[0] == 1


def test_a_number_is_obeyed(seeded: None):
    assert chosen(5)[0] == 5
    assert chosen(99)[0] == 16
    for bad in (0, -1, "all", 2.5):
        with pytest.raises(
            InputError, match=r"chunk must be a number of members >= 1, or 'auto', got"
        ):
            chosen(bad)


def test_memory_limits_the_chunk(seeded: None, monkeypatch: pytest.MonkeyPatch):
    _, needed = chosen("auto")
    monkeypatch.setattr(ensemble, "free_bytes", lambda device: int(6.5 * needed / ensemble.SHARE))
    assert chosen("auto")[0] == 6  # 16 members in three chunks
    monkeypatch.setattr(ensemble, "free_bytes", lambda device: needed // 2)
    with pytest.raises(
        MemoryLimitError, match=r"one member needs about .* GB, .* smaller batch_size"
    ):
        chosen("auto")


def test_the_estimate_counts_activations_and_jacobians(seeded: None):
    _, small = chosen("auto", batch=10)
    _, large = chosen("auto", batch=1_010)
    made = 8 * 1_000 * (8 + 8 + 8 + 8 + 1)  # float64: two layers, two activations, the output
    assert large - small == made
    _, exact = chosen("auto", geometry="fs-map")
    assert exact - small == 3 * 20 * 8 * (2 * 8 + 8 + 8 * 8 + 8 + 8 + 1)


def test_random_layers_go_one_by_one(seeded: None):
    f, params = fsmap.functional(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)))
    objective = fsmap.ps_map(fsmap.Gaussian(1.0), fsmap.Flat(), num_data=2)
    data = Batch(torch.zeros(2, 1), torch.zeros(2, 1))
    assert (
        ensemble.choose_chunk(
            "auto", 9, f, params, data, objective, objective.draw(f, params, Stream(0, 0))
        )
        == 1
    )


def test_chunks_are_even():
    assert [ensemble.even(16, most) for most in (16, 15, 6, 5, 1)] == [16, 8, 6, 4, 1]
