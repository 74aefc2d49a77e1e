"""Checkpoint files: whole, verified, replaced at once; descriptions of runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from fsmap.errors import CheckpointError
from fsmap.train import checkpoint as files
from fsmap.train.checkpoint import Checkpoint, describe

SAVED = Checkpoint(
    {
        "params/a.w": torch.randn(3, 2, generator=torch.Generator().manual_seed(0)),
        "params/s": torch.tensor(1.5),
        "best/step": torch.tensor([3, -1]),
        "half/x": torch.ones(2, dtype=torch.bfloat16),
        "none/x": torch.empty(0),
    },
    {"seed": 0, "prior": {"std": 1.0}},
    {"step": 7},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "new folder" / "run.ckpt"
    files.save(file, SAVED)
    return file


def test_round_trip(path: Path):
    found = files.load(path)
    assert {k: v for k, v in found.config.items() if k != files.MADE} == SAVED.config
    assert found.progress == SAVED.progress
    torch.testing.assert_close(found.tensors, SAVED.tensors, rtol=0, atol=0)
    assert set(found.group("params")) == {"a.w", "s"}


def flipped(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        *((lambda w, n=n: w[:n], r"run.ckpt is truncated or no checkpoint") for n in (0, 5, -1)),
        (lambda w: w[: len(w) // 2], r"run.ckpt is truncated or no checkpoint at all"),
        *((lambda w, n=n: flipped(w, len(w) - n), r"its checksum does not fit") for n in (1, 20)),
        *(
            (lambda w, old=old: flipped(w, w.index(old) + len(old) - 1), "run.ckpt")
            for old in (b'\\"seed\\": 0', b'\\"step\\": 7', b"best/step", b"F32")
        ),
    ],
)
def test_a_damaged_file_is_refused(path: Path, damage: Callable[[bytes], bytes], text: str):
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=text):
        files.load(path)


def test_missing_and_foreign_files_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*nothing"):
        files.load(tmp_path / "nothing")
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"x": torch.ones(1)}, other)
    with pytest.raises(CheckpointError, match=r"is not an fsmap checkpoint: its format is None"):
        files.load(other)


def test_another_run_is_refused_with_what_differs():
    here = {"seed": 1, "prior": {"std": 1.0, "mean": 0.0}}
    with pytest.raises(CheckpointError) as caught:
        files.check_same_run(Path("run.ckpt"), SAVED.config, here)
    text = str(caught.value)
    assert "seed: 0 there, 1 here" in text
    assert "prior.mean: absent there, 0.0 here" in text
    assert "prior.std" not in text
    there = {"images": {str(i): i for i in range(20)}, **SAVED.config}
    with pytest.raises(CheckpointError, match=r"run\. seed: 0 there.*and \d+ more"):
        files.check_same_run(Path("run.ckpt"), there, here)  # in the order of ``here``


def test_of_long_descriptions_the_difference_is_shown():
    many = ", ".join(f"x{i}={i}" for i in range(90))
    there, here = {"model": f"Net({many}, gain=6)"}, {"model": f"Net({many}, gain=5)"}
    with pytest.raises(CheckpointError) as caught:
        files.check_same_run(Path("run.ckpt"), there, here)
    assert "gain=6)" in str(caught.value)
    assert "x7=" not in str(caught.value)


def test_the_same_run_passes_after_a_trip_through_json():
    here = {"betas": (0.9, 0.999), "inf": float("inf"), "list": [{"a": 1}, [1, (2, 3)]]}
    files.check_same_run(Path("run.ckpt"), json.loads(json.dumps(here)), here)


def test_a_description_has_no_address():
    class Plain:
        def __init__(self) -> None:
            self.inner = object()
            self.size = 3

    found = describe([Plain(), lambda x: x, torch.float32])
    assert "0x" not in json.dumps(found)
    assert found[0]["size"] == 3


def test_values_are_told_apart_by_content(generator: torch.Generator):
    a = torch.randn(100, generator=generator)
    b = a.clone()
    assert describe(a) == describe(b)
    b[50] += 1e-12
    assert describe(a) != describe(b)
    assert describe(a) != describe(a.float())
    assert describe(torch.tensor(2.5)) == describe(np.float32(2.5)) == 2.5
    assert describe(partial(torch.add, alpha=2)) != describe(partial(torch.add, alpha=3))
