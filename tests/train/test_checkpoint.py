"""Checkpoint files: whole, verified, replaced at once."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fsmap.errors import CheckpointError
from fsmap.train import checkpoint as files
from fsmap.train.checkpoint import Checkpoint

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
    assert found.tensors.keys() == SAVED.tensors.keys()
    for name, tensor in SAVED.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)
    assert set(found.group("params")) == {"a.w", "s"}


def test_other_readers_can_open_it(path: Path):
    assert torch.equal(safetensors.torch.load_file(path)["params/a.w"], SAVED.tensors["params/a.w"])


def test_a_truncated_file_is_refused(path: Path):
    whole = path.read_bytes()
    for length in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"run.ckpt is truncated or no checkpoint at all"):
            files.load(path)


def test_a_full_disk_leaves_the_old_one_and_no_part(path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.save(path, SAVED._replace(progress={"step": 8}))
    assert files.load(path).progress == {"step": 7}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("where", [-1, -20])
def test_an_altered_tensor_is_refused(path: Path, where: int):
    whole = bytearray(path.read_bytes())
    whole[where] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"altered or damaged: its checksum does not fit"):
        files.load(path)


def test_an_altered_setting_is_refused(path: Path):
    whole = path.read_bytes()
    changed = whole.replace(b'\\"seed\\": 0', b'\\"seed\\": 1')
    assert changed != whole
    path.write_bytes(changed)
    with pytest.raises(CheckpointError, match=r"altered or damaged"):
        files.load(path)


def test_missing_and_foreign_files_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*nothing"):
        files.load(tmp_path / "nothing")
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"x": torch.ones(1)}, other)
    with pytest.raises(CheckpointError, match=r"is not an fsmap checkpoint: its format is None"):
        files.load(other)


def test_the_old_file_stays_until_the_new_one_is_whole(path: Path, monkeypatch: pytest.MonkeyPatch):
    before = path.read_bytes()

    def power_cut(handle: int) -> None:
        assert path.read_bytes() == before
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", power_cut)
    with pytest.raises(KeyboardInterrupt):
        files.save(path, SAVED._replace(progress={"step": 8}))
    assert files.load(path).progress == {"step": 7}
    monkeypatch.undo()
    files.save(
        path, SAVED._replace(progress={"step": 8})
    )  # what was left lying about is no obstacle
    assert files.load(path).progress == {"step": 8}
    assert [p.name for p in path.parent.iterdir()] == ["run.ckpt"]


def test_another_run_is_refused_with_what_differs():
    here = {"seed": 1, "prior": {"std": 1.0, "mean": 0.0}}
    with pytest.raises(CheckpointError) as caught:
        files.check_same_run(Path("run.ckpt"), SAVED.config, here)
    text = str(caught.value)
    assert "seed: 0 there, 1 here" in text
    assert "prior.mean: absent there, 0.0 here" in text
    assert "prior.std" not in text


def test_of_long_descriptions_only_what_differs_is_said():
    many = ", ".join(f"x{i}={i}" for i in range(30))
    there, here = {"hooks": [f"Steer({many}, gain=6)"]}, {"hooks": [f"Steer({many}, gain=5)"]}
    with pytest.raises(CheckpointError) as caught:
        files.check_same_run(Path("run.ckpt"), there, here)
    assert "gain=6)" in str(caught.value)
    assert "x7" not in str(caught.value)
    five, more = {"widths": [64, 64, 64, 64, 128]}, {"widths": [64, 64, 64, 64, 256]}
    with pytest.raises(CheckpointError, match=r"widths: 128\] there, 256\] here"):
        files.check_same_run(Path("run.ckpt"), five, more)
    longer = {"widths": [64, 64, 64, 64, 64, 128]}
    with pytest.raises(CheckpointError, match=r"64, 128\] there, \[64, 64, 64, 64, 64, 128\] here"):
        files.check_same_run(Path("run.ckpt"), five, longer)  # the same parts, more often
    with pytest.raises(CheckpointError, match=r"hooks: \[\] there, \['Steer\(x0=0.*, … here"):
        files.check_same_run(Path("run.ckpt"), {"hooks": []}, here)


def test_the_same_run_passes_after_a_trip_through_json():
    here = {"betas": (0.9, 0.999), "inf": float("inf"), "list": [{"a": 1}, [1, (2, 3)]]}
    files.check_same_run(Path("run.ckpt"), json.loads(json.dumps(here)), here)


def test_many_differences_are_counted():
    with pytest.raises(CheckpointError, match=r"a7: 7 there, absent here; and 12 more"):
        files.check_same_run(Path("x"), {f"a{i}": i for i in range(20)}, {})
