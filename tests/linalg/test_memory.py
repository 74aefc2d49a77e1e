"""What fits is predicted, not tried."""

from __future__ import annotations

import pytest
import torch

from fsmap.errors import MemoryLimitError
from fsmap.linalg import memory

CPU = torch.device("cpu")


def test_free_bytes_is_plausible():
    assert 2**26 < memory.free_bytes(CPU) < 2**50


def test_a_control_group_can_lower_the_limit(monkeypatch):
    known = {"/sys/fs/cgroup/memory.max": 3 * 2**30, "/sys/fs/cgroup/memory.current": 2**30}
    monkeypatch.setattr(memory, "_read_int", known.get)
    monkeypatch.setattr(memory, "_meminfo_available", lambda: 2**40)
    assert memory.free_bytes(CPU) == 2 * 2**30
    monkeypatch.setattr(memory, "_read_int", lambda path: None)
    assert memory.free_bytes(CPU) == 2**40


def test_numbers_are_read_from_files(tmp_path):
    (tmp_path / "limit").write_text("123\n")
    (tmp_path / "none").write_text("max\n")
    assert memory._read_int(str(tmp_path / "limit")) == 123
    assert memory._read_int(str(tmp_path / "none")) is None
    assert memory._read_int(str(tmp_path / "missing")) is None


def test_small_things_are_not_looked_up(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    assert memory.fits(memory.ALWAYS, CPU)
    assert not memory.fits(memory.ALWAYS + 1, CPU)


def test_refusal_names_size_limit_and_way_out(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    memory.check_fits(int(0.79e9), CPU, what="this", instead="")
    with pytest.raises(
        MemoryLimitError, match=r"a cube needs 2\.50 GB, 0\.80 GB may be used on cpu\. Cut it\."
    ):
        memory.check_fits(int(2.5e9), CPU, what="a cube", instead="Cut it.")


@pytest.mark.gpu
def test_free_bytes_on_a_gpu():
    device = torch.device("cuda")
    before = memory.free_bytes(device)
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert before - memory.free_bytes(device) >= 2**27
    del held
