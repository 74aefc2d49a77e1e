"""Evaluation points: tensors, dicts, tuples."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.func import grad, vmap

from fsmap.errors import InputError
from fsmap.functional import concat_points, holds, number, take_points

memory = sys.modules["fsmap.functional"]  # fsmap.functional is the function

PAIR = {"a": torch.arange(6.0).reshape(3, 2), "b": torch.tensor([1, 2, 3])}


def test_concat_takes_the_first_ones_dtype():
    joined = concat_points(PAIR, take_points(PAIR, slice(0, 1)))
    assert torch.equal(joined["b"], torch.tensor([1, 2, 3, 1]))
    joined = concat_points(torch.zeros(1, 2), torch.ones(2, 2, dtype=torch.float32))
    assert (joined.dtype, joined.shape) == (torch.float64, (3, 2))
    for other in (torch.zeros(3, 4), PAIR):
        with pytest.raises(InputError, match="cannot"):
            concat_points(torch.zeros(3, 2), other)


CPU = torch.device("cpu")


@pytest.mark.gpu
def test_free_bytes_on_a_gpu():
    device = torch.device("cuda")
    before = memory.free_bytes(device)
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert before - memory.free_bytes(device) >= 2**27
    del held


def test_numbers_are_not_known_inside_vmap():
    found = []

    def record(x):
        found.append((number(x), holds(x > 0, otherwise=True), holds(x > 0, otherwise=False)))
        return x

    grad(record)(torch.tensor(-2.0))
    vmap(record)(torch.tensor([1.0, -1.0]))
    assert found == [(-2.0, False, False), (None, True, False)]


def test_memory(monkeypatch):
    assert 2**26 < memory.free_bytes(CPU) < 2**50
    files = {"/proc/meminfo": f"MemFree: 1 kB\nMemAvailable:  {2**30} kB\n"}
    limits = {"/sys/fs/cgroup/memory.max": "3000\n", "/sys/fs/cgroup/memory.current": "1000\n"}
    for found, expected in ((files, 2**40), (files | limits, 2000), ({}, 2**33)):
        monkeypatch.setattr(memory, "_read", lambda path, found=found: found.get(path, ""))
        assert memory.free_bytes(CPU) == expected
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    assert memory.fits(int(0.79e9), CPU)
    assert not memory.fits(int(0.81e9), CPU)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    assert memory.fits(memory.ALWAYS, CPU)
    assert not memory.fits(memory.ALWAYS + 1, CPU)
