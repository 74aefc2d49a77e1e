"""Files from strangers: nothing in them is executed, and what is wrong gets a typed error."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import safetensors.torch
import torch

import fsmap
from fsmap.cli import main
from fsmap.errors import CheckpointError, DivergedError, InputError
from fsmap.images import ImageRun, ImageSettings, load_model
from fsmap.images.build import FILE
from fsmap.tables.model import load_model as load_table_model
from fsmap.train import checkpoint
from small_tables import save_model

TINY = {"generated": True, "limit": 32, "valid": 16, "width": 2, "epochs": 1, "batch_size": 16}


pytestmark = pytest.mark.usefixtures("float32")


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
    images = {"shape": [1, 28, 28], "mean": [0.5], "std": [1.0], "names": [], "classes": 2}
    odd = [{"classes": n} for n in (0, 10**9, "2")] + [{"names": [1, 2]}, {"mean": ["x"]}]
    wrong = [
        {"settings": s} for s in ({**saved.config["settings"], "exec": 1}, None, {"epochs": -1})
    ]
    for change in (*wrong, *({"images": images | one} for one in odd), {"images": {}}, {"data": 3}):
        checkpoint.save(folder / FILE, saved._replace(config=saved.config | change))
        with pytest.raises(CheckpointError, match="settings|does not hold what"):
            load_model(folder)


def train(path: Path | None = None, params: dict | None = None, **options: object) -> object:
    x = torch.linspace(-1, 1, 8)[:, None]
    objective = fsmap.ps_map(fsmap.Gaussian(1.0), fsmap.Normal(1.0), num_data=8)
    options = {"steps": 4, "checkpoint": path, "progress": False, **options}
    start = {"a": torch.ones(2)} if params is None else params
    return fsmap.fit(objective, lambda p, x: x * p["a"].sum(), start, (x, x), **options)


NESTED: list = []
for _ in range(400):
    NESTED = [NESTED]

STEPS = ("2", 2.5, -2, None, [2], 10**30)
TENSORS = (  # none, other shapes, half of a best
    *({}, {"params/a": torch.zeros(3)}, {"params/a": torch.zeros(1)}),
    {"params/a": torch.zeros(2), "best/step": torch.zeros(())},
)
ODD = [
    *({"config": config} for config in ([], 7, None, "x", {"kind": NESTED})),
    *({"progress": progress} for progress in ([], None, {}, *({"step": s} for s in STEPS))),
    *({"tensors": tensors} for tensors in TENSORS),
]


def rewritten(path: Path, change: dict) -> None:
    """Write a checkpoint with other content and a checksum that fits."""
    saved = checkpoint.load(path)
    tensors = change.get("tensors", saved.tensors)
    about = {
        "format": checkpoint.FORMAT,
        "config": json.dumps(change.get("config", saved.config)),
        "progress": json.dumps(change.get("progress", saved.progress)),
        "torch": torch.__version__,
    }
    about["sha256"] = checkpoint._digest(tensors, about)
    path.write_bytes(safetensors.torch.save(tensors, about))


@pytest.mark.parametrize("change", ODD)
def test_a_checkpoint_with_odd_content_and_a_valid_checksum(tmp_path: Path, change: dict):
    path = tmp_path / "a.safetensors"
    train(path, steps=2)
    rewritten(path, change)
    with pytest.raises(CheckpointError):
        train(path, resume=True)


@pytest.mark.parametrize(
    "about",
    [{"config": "{}"}, {"progress": "{}"}, {"config": "{", "progress": "[" * 100_000}],
    ids=["no progress", "no config", "no JSON"],
)
def test_a_checkpoint_without_an_entry(tmp_path: Path, about: dict):
    path, about = tmp_path / "a.safetensors", {"format": checkpoint.FORMAT, **about}
    about["sha256"] = checkpoint._digest({}, about)
    path.write_bytes(safetensors.torch.save({}, about))
    with pytest.raises(CheckpointError):
        checkpoint.load(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), method="l-map")


def changed(tree: dict, place: str, value: object) -> dict:
    """A copy with another entry at ``a.b.c``."""
    tree = copy.deepcopy(tree)
    *way, last = place.split(".")
    at = tree
    for key in way:
        at = at[int(key)] if isinstance(at, list) else at[key]
    at[int(last) if isinstance(at, list) else last] = value
    return tree


WRONG = (  # values, and places in the description of a model
    (7, "columns columns.0.name columns.0.levels target.classes target.name"),
    ("x", "columns.0.fill columns.0.exec target.task target.mean members sizes.0"),
    ("images", "kind"),
    (10**9, "members edges"),
    ([10**9, 10**9], "sizes"),
    (float("nan"), "target.std"),
    (None, "target chosen"),
    ({}, "columns.0 sizes"),
)


@pytest.mark.parametrize(
    ("place", "value"), [(place, value) for value, places in WRONG for place in places.split()]
)
def test_a_model_with_odd_content_and_a_valid_checksum(
    tmp_path: Path, model: Path, place: str, value: object
):
    path = tmp_path / "model.pt"
    path.write_bytes(model.read_bytes())
    rewritten(path, {"config": changed(checkpoint.load(path).config, place, value)})
    with pytest.raises(CheckpointError):
        load_table_model(path)


@pytest.mark.parametrize("group", ["network/", "spread/", "encoder/"])
def test_a_model_with_odd_numbers(tmp_path: Path, model: Path, group: str):
    path = tmp_path / "model.pt"
    path.write_bytes(model.read_bytes())
    saved = checkpoint.load(path)
    name = next(name for name in saved.tensors if name.startswith(group))
    broken = saved.tensors | {name: torch.full_like(saved.tensors[name], torch.nan)}
    rewritten(path, {"tensors": broken})
    with pytest.raises(CheckpointError):
        load_table_model(path)


@pytest.mark.parametrize("command", ["run squares", "fit t.csv --target y", "report runs"])
def test_an_output_that_is_not_utf_8(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--out", os.fsdecode(b"a\xff")])
    assert ended.value.code == 2
    assert "UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["threads", "processes"])
def test_resuming_with_another_number_is_said(tmp_path: Path, monkeypatch, what: str):
    path = tmp_path / "a.safetensors"
    with monkeypatch.context() as patch:
        if what == "threads":
            patch.setattr(torch, "get_num_threads", lambda: 99)
        else:
            patch.setattr(torch.distributed, "is_initialized", lambda: True)
            patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        train(path, steps=2)
    with pytest.warns(UserWarning, match=what):
        train(path, resume=True)


class LaterNaN(fsmap.px.Normal):
    """Points that are not finite from the third draw on."""

    draws = 0

    def sample(self, n: int, generator: torch.Generator) -> torch.Tensor:
        type(self).draws += 1
        found = super().sample(n, generator)
        return found * torch.nan if self.draws > 3 else found


@pytest.mark.parametrize("make", [fsmap.l_map, fsmap.fs_map])
@pytest.mark.usefixtures("seeded")
def test_points_that_become_nan_while_training_are_noticed(make, monkeypatch):
    monkeypatch.setattr(LaterNaN, "draws", 0)
    x = torch.randn(8, 2)
    px = LaterNaN(shape=(2,))
    how = {"reg_strength": 0.1} if make is fsmap.l_map else {"jitter": 0.1}
    objective = make(fsmap.Gaussian(1.0), fsmap.Normal(1.0), px, num_points=4, num_data=8, **how)
    f, params = fsmap.functional(torch.nn.Linear(2, 1))
    with pytest.raises((DivergedError, InputError)):
        fsmap.fit(objective, f, params, (x, x[:, :1]), steps=20, progress=False)
