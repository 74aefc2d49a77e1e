"""``fsmap assess`` and ``fsmap landscape`` on a checkpoint of a tiny run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from fsmap.cli import main
from fsmap.images import ImageRun, ImageSettings

TINY = {"width": 2, "epochs": 1, "batch_size": 16, "limit": 32, "generated": True}
SETTINGS = ImageSettings(data="cifar10", method="ps-map", channels_last=False, **TINY)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, in the precision that users have."""
    folder = tmp_path_factory.mktemp("run")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        ImageRun(SETTINGS, folder=folder).train(progress=False)
    finally:
        torch.set_default_dtype(before)
    return folder


pytestmark = pytest.mark.usefixtures("float32")


def test_an_unfinished_run_is_said_to_be_one(checkpoint, tmp_path, capsys):
    longer = dataclasses.replace(SETTINGS, epochs=3)
    ImageRun(longer, folder=tmp_path / "run").train(until_epoch=2, progress=False)
    some = ["--steps", "3", "--directions", "1", "--images", "8"]
    for command, few in (("assess", ["--points", "8"]), ("landscape", some)):
        for folder, says in ((tmp_path / "run", True), (checkpoint, False)):
            out = ["--out", str(tmp_path / "out"), "--device", "cpu"]
            assert main([command, str(folder), *few, *out]) == 0
            said = capsys.readouterr().err
            assert ("run is unfinished: 2 of 3 epochs" in said) == ("unfinished" in said) == says


def test_assess_writes_and_says(checkpoint, tmp_path, capsys):
    command = ["assess", str(checkpoint), "--out", str(tmp_path / "a"), "--points", "8"]
    options = ["--corruptions", "contrast", "pixelate", "--severities", "2", "--device", "cpu"]
    assert main([*command, *options]) == 0
    said = capsys.readouterr().out
    words = "contrast 2", "OOD AUROC against generated", "on held-out images", "R at generated"
    assert all(part in said for part in words)
    found = json.loads((tmp_path / "a" / "assessment.json").read_text())
    assert set(found["sets"]) == {"clean", "contrast 2", "pixelate 2"}
    assert found["sets"]["clean"]["nll_scaled"] > 0
    assert found["laplacian"]["train"][0] > 0
    assert found["settings"]["data"] == "cifar10"
    assert sum(found["reliability"]["as trained"]["count"]) == 32
    for ending in ("svg", "png"):
        assert (tmp_path / "a" / f"assessment.{ending}").stat().st_size > 1000


def test_a_temperature_at_its_bound_is_no_finding(checkpoint, tmp_path, capsys, monkeypatch):
    for T in (0.01, 100.0):
        monkeypatch.setattr("fsmap.metrics.temperature", lambda *_, T=T: T)
        command = ["assess", str(checkpoint), "--points", "8", "--device", "cpu"]
        assert main([*command, "--out", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert f"T = {T:.3f} on held-out images: a bound of the search" in said
        assert "-confident" not in said


def test_assess_as_json(checkpoint, tmp_path, capsys):
    file = checkpoint / "checkpoint.safetensors"
    assert main(["assess", str(file), "--json", "--out", str(tmp_path), "--limit", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["reliability"]["scaled"]["count"]) == 8
    assert found["step"] == 2
    assert {path.stem for path in tmp_path.iterdir()} == {"assessment-8"}  # not that of all images
    assert main(["assess", str(file), "--ood", "minst", "--out", str(tmp_path)]) == 2
    assert "Did you mean 'mnist'?" in capsys.readouterr().err


def test_landscape_looks_at_all_networks_first(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("fsmap.cli.landscape.landscape", lambda *_, **__: pytest.fail("walked"))
    assert main(["landscape", str(checkpoint), str(tmp_path / "nosuch")]) == 2


@pytest.mark.parametrize("command", ["assess", "landscape"])
def test_an_unwritable_folder_is_refused_first(command, checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fsmap.images.build.load_data", lambda *_: pytest.fail("too late"))
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "out")
    assert main([command, str(checkpoint), "--out", out, "--device", "cpu"]) == 2
    assert f"cannot write to {out}: Not a directory" in capsys.readouterr().err
    assert main([command, str(tmp_path / "none"), "--out", str(tmp_path / "new")]) == 2
    assert "there is no checkpoint at" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_runs_of_several_seeds_are_named(checkpoint, tmp_path, capsys):
    for seed in (0, 1):
        shutil.copytree(checkpoint, tmp_path / "run" / f"seed{seed}")
    assert main(["assess", str(tmp_path / "run"), "--device", "cpu"]) == 2
    folders = f"{tmp_path}/run/seed0, {tmp_path}/run/seed1"
    assert f"Folders that have one: {folders}" in capsys.readouterr().err


def test_landscape_of_coarse_steps_is_not_flat(checkpoint, tmp_path, capsys):
    """Its first step away from the network counts, however far it is."""
    command = ["landscape", str(checkpoint), "--out", str(tmp_path), "--directions", "2"]
    assert main([*command, "--steps", "5", "--images", "6", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "steps up to 2.5" in said
    found = json.loads((tmp_path / "landscape.json").read_text())[str(checkpoint)]["mean"]
    rise = (found[1] + found[3]) / 4 - found[2] / 2  # two trapezoids
    assert rise != 0
    assert (tmp_path / "landscape.png").stat().st_size > 1000
    assert f"{rise:.4g}" in said
