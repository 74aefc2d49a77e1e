"""Files from strangers: nothing in them is executed, and what is wrong gets a typed error."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from fsmap.cli import main
from fsmap.errors import CheckpointError
from fsmap.train import checkpoint
from fsmap.train.images import ImageRun, ImageSettings, load_model
from fsmap.train.images.state import FILE

TINY = {"generated": True, "limit": 32, "valid": 16, "width": 2, "epochs": 1, "batch_size": 16}


@pytest.fixture(autouse=True)
def single() -> object:
    """As a user has it."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def forged(folder: Path, model: str) -> Path:
    """A checkpoint with a valid checksum that names another model."""
    settings = asdict(ImageSettings(model=model, **TINY))
    for how in ("compile", "graph", "deterministic"):
        del settings[how]
    config = {"kind": "images", "settings": settings, "data": {}, "hooks": []}
    progress = {"step": 1, "reg_strength": 0.0, "seconds": 0.0, "history": [], "hooks": {}}
    content = checkpoint.Checkpoint({"params/weight": torch.zeros(1)}, config, progress)
    checkpoint.save(folder / FILE, content)
    return folder


def commands(folder: Path, mark: Path) -> list[str]:
    """Models that would leave a mark if they were built."""
    (folder / "hostile.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef make(): ...\n")
    return [
        f"subprocess:getoutput?cmd=touch {mark}",
        f"os:system?command='touch {mark}'",
        f"builtins:exec?source='open({str(mark)!r},\"w\")'",
        f"pathlib:Path.touch?self={str(mark)!r}",
        "hostile:make",
        f"resnet50-imagenet?files={{'model.json': {str(mark)!r}}}",
    ]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("way", ["load_model", "assess", "landscape"])
def test_a_checkpoint_runs_no_code(
    tmp_path: Path,
    number: int,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    mark = tmp_path / "mark"
    folder = forged(tmp_path / "run", commands(tmp_path, mark)[number])
    monkeypatch.chdir(tmp_path)
    if way == "load_model":
        with pytest.raises(CheckpointError, match="which code runs"):
            load_model(folder)
    else:
        out = ["--out", str(tmp_path / "out"), "--device", "cpu"]
        assert main([way, str(folder), *out]) == 2
        assert "--model" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.usefixtures("seeded")
def test_a_model_of_ones_own_is_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = ImageSettings(model="image_cases:TinyNet", num_points=8, **TINY)
    run = ImageRun(settings, folder=tmp_path)
    run.train(progress=False)
    assert main(["assess", str(tmp_path), "--device", "cpu"]) == 2
    assert "--model" in capsys.readouterr().err
    same = ["--model", settings.model]
    assert main(["assess", str(tmp_path), "--device", "cpu", "--points", "8", *same]) == 0
    blank = copy.deepcopy(run.module)
    torch.nn.init.zeros_(blank.fc.weight)
    for model in (settings.model, blank):
        module, _ = load_model(tmp_path, model=model)
        x = torch.zeros(2, 1, 28, 28, dtype=next(module.parameters()).dtype)
        assert torch.equal(module(x), run.module.eval()(x))
    for other in ("resnet18", "image_cases:Other", torch.nn.Linear(1, 1)):
        with pytest.raises(CheckpointError):
            load_model(tmp_path, model=other)


def test_settings_that_nobody_knows(tmp_path: Path):
    folder = forged(tmp_path, "resnet18")
    saved = checkpoint.load(folder / FILE)
    for settings in ({**saved.config["settings"], "exec": 1}, None, {"epochs": -1}):
        config = {**saved.config, "settings": settings}
        checkpoint.save(folder / FILE, saved._replace(config=config))
        with pytest.raises(CheckpointError, match="settings"):
            load_model(folder)
