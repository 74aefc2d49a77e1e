"""A folder of the user's own images: splits, sizes, colours, refusals, and a run on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fsmap.cli import main
from fsmap.data.images.read import read_folder
from fsmap.data.images.task import load_task
from fsmap.errors import InputError, MissingDataError


def make(
    folder: Path, *, mode: str = "RGB", sizes: tuple[int, ...] = (12,), number: int = 9
) -> Path:
    rng = np.random.default_rng(0)
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for i in range(number):
            size = sizes[i % len(sizes)]
            shape = (size, size, 3) if mode == "RGB" else (size, size)
            pixels = rng.integers(100 * label, 100 * label + 60, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def test_one_image_in_six_is_test(tmp_path: Path):
    found = read_folder(str(make(tmp_path / "photos")))
    assert found.classes == ("cat", "dog")
    assert (len(found.train.x), len(found.test.x)) == (15, 3)
    assert found.train.x.shape[1:] == (3, 12, 12)
    assert all((x.float().mean() > 90) == bool(y) for x, y in zip(*found.train, strict=True))
    task = load_task(f"{tmp_path}/photos", px="train", valid=3)
    assert (len(task.train.x), len(task.valid.x), task.classes) == (12, 3, 2)
    x = task.normalize(found.train.x)
    assert x.mean().abs() < 0.1
    assert (x.std() - 1).abs() < 0.1


def test_own_test_images_grey_and_sizes(tmp_path: Path):
    make(tmp_path / "train", mode="L", sizes=(12, 16))
    make(tmp_path / "test", mode="L", number=2)
    with pytest.raises(InputError, match="size"):
        read_folder(str(tmp_path))
    found = read_folder(f"{tmp_path}?size=8")
    assert found.train.x.shape == (18, 1, 8, 8)
    assert len(found.test.x) == 4


def test_refusals(tmp_path: Path):
    with pytest.raises(MissingDataError, match="no folder"):
        read_folder(f"{tmp_path}/absent")
    (tmp_path / "only").mkdir()
    with pytest.raises(MissingDataError, match="classes"):
        read_folder(str(tmp_path))
    photos = make(tmp_path / "photos")
    with pytest.raises(InputError, match="size"):
        read_folder(f"{photos}?width=3")
    (photos / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(InputError, match="0.png"):
        read_folder(str(photos))


def test_a_run_on_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.set_default_dtype(torch.float32)
    try:
        photos, out = make(tmp_path / "photos"), str(tmp_path / "run")
        sizes = ["--width", "2", "--batch-size", "4", "--num-points", "4", "--epochs", "1"]
        words = ["train", "--data", str(photos), *sizes, "--device", "cpu", "--silent"]
        assert main([*words, "--reg-nats", "0.05", "--out", out]) == 0
        assert "0.05 nats" in capsys.readouterr().out
        assert main(["assess", out, "--device", "cpu", "--points", "4"]) == 0
    finally:
        torch.set_default_dtype(torch.float64)
