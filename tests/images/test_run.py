"""Image runs: a resumed run equals an uninterrupted one, hooks steer, bad input is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from fsmap.errors import CheckpointError, DivergedError, InputError
from fsmap.images import ImageRun, load_model
from fsmap.train import checkpoint
from image_cases import TINY, KillAt, TinyNet, trained


class Halve:
    """A hook that steers: λ is halved after every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_epoch(self, run: ImageRun) -> None:
        run.history[-1]["mine"] = 1.0

    def on_step(self, run: ImageRun) -> None:
        self.seen.append(run.reg_strength)
        run.reg_strength /= 2


def test_rows_say_what_happened(tmp_path: Path):
    run = trained(folder=tmp_path, about={"commit": "abc"})
    assert [row["epoch"] for row in run.history] == [1, 2]
    assert all(row["laplacian"] > 0 for row in run.history)
    assert run.step == run.steps == 2 * 4
    head, *rows = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert rows == run.history
    assert head["commit"] == "abc"
    assert head["settings"]["px"] == "kmnist"


def test_a_checkpoint_gives_the_deployed_model_back(tmp_path: Path):
    run = trained(folder=tmp_path)
    module, progress = load_model(tmp_path, model=TINY.model)
    assert progress["settings"] == run.settings
    assert not module.training
    x = run.task.test.x[:3]
    assert torch.equal(module(run.task.normalize(x, torch.float64)), run.logits_of(x))
    assert run.module.training


def same(run: ImageRun, other: ImageRun) -> None:
    """To the last bit."""
    torch.testing.assert_close(run.stepper.tensors(), other.stepper.tensors(), rtol=0, atol=0)
    assert [r["loss"] for r in run.history] == [r["loss"] for r in other.history]


@pytest.mark.parametrize(
    ("stop", "change"),
    [
        (1, {}),
        (3, {"every": 2, "data": "cifar10", "px": "0.5*train+0.5*white-noise"}),
        (4, {"method": "ps-map"}),
        (5, {"batchnorm": "frozen"}),
        (7, {"reg_nats": 1.0}),
        (7, {"sam": 0.05}),
        (7, {"estimator": "vjp"}),
        (5, {"model": "image_cases:noisy", "method": "ps-map"}),
        (5, {"model": "image_cases:noisy", "sam": 0.05}),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, stop: int, change: dict):
    settings = dataclasses.replace(TINY, **change)
    whole = trained(settings, hooks=[Halve()])
    cut = ImageRun(settings, folder=tmp_path, hooks=[Halve(), KillAt(stop)])
    with pytest.raises(KeyboardInterrupt):
        cut.train(progress=False, checkpoint_every=2)
    again = ImageRun(settings, folder=tmp_path, resume=True, hooks=[Halve()])
    assert again.step == (stop - 1) // 2 * 2
    again.train(progress=False)
    same(whole, again)
    assert again.hooks[0].seen == whole.hooks[0].seen[(stop - 1) // 2 * 2 :]
    rows = (tmp_path / "log.jsonl").read_text().splitlines()[1:]
    assert [json.loads(row)["epoch"] for row in rows] == [1, 2]


def test_a_stopped_run_has_a_checkpoint_of_its_last_step(tmp_path: Path):
    run = ImageRun(TINY, folder=tmp_path, hooks=[KillAt(3, ImageRun.stop)])
    run.train(progress=False)
    assert (run.step, run.done) == (3, False)
    run.stop()  # before it goes on
    run.train(progress=False)
    assert run.step == 4
    again = ImageRun(TINY, folder=tmp_path, resume=True)
    assert again.step == 4
    again.train(progress=False)
    same(trained(), again)


def test_a_finished_or_foreign_checkpoint_is_not_overwritten(tmp_path: Path):
    other = tmp_path / "other.safetensors"
    checkpoint.save(other, checkpoint.Checkpoint({}, {"kind": "fit"}, {}))
    with pytest.raises(CheckpointError, match="image run"):
        load_model(other)
    trained(folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"exists already\. Resume it"):
        ImageRun(TINY, folder=tmp_path)
    other = dataclasses.replace(TINY, reg_strength=1e-2)
    with pytest.raises(CheckpointError, match=r"reg_strength: 0.001 there, 0.01 here"):
        ImageRun(other, folder=tmp_path, resume=True)


def test_another_spelling_of_the_data_is_the_same_run(tmp_path: Path, monkeypatch):
    trained(folder=tmp_path)
    for name in ("fashion-mnist", "FMNIST"):
        assert dataclasses.replace(TINY, data=name) == TINY
    file = tmp_path / "checkpoint.safetensors"
    saved = checkpoint.load(file)
    saved.config["settings"]["data"] = "fashion-mnist"  # as older versions wrote it
    checkpoint.save(file, saved)
    assert ImageRun(TINY, folder=tmp_path, resume=True).done
    (tmp_path / "photos").mkdir()
    (tmp_path / "fmnist").mkdir()  # "fmnist" without "./" is the set
    monkeypatch.chdir(tmp_path)
    named = {"photos/": "photos", "./photos//?size=8": "photos?size=8", "fmnist/": "./fmnist"}
    for name, same in {**named, f"{tmp_path}/photos/": f"{tmp_path}/photos"}.items():
        assert dataclasses.replace(TINY, data=name).data == same


@pytest.mark.filterwarnings("ignore::fsmap.errors.NonFiniteWarning")
@pytest.mark.parametrize(("nats", "strength"), [(None, "λ 0.001"), (0.05, "0.05 nats")])
def test_divergence_names_the_term(nats: float | None, strength: str):
    run = ImageRun(dataclasses.replace(TINY, reg_nats=nats))
    with torch.no_grad():
        run.module.fc.bias.fill_(torch.inf)
    with pytest.raises(DivergedError, match=f"the cross-entropy is not finite .*{strength}"):
        run.train(progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 65}, r"batch_size=65 is larger than the training set, 64 images"),
        ({"model": "image_cases:TinyNet?classes=9"}, r"returned shape \(2, 9\) .* needs \(2, 10\)"),
        ({"model": "torch.nn:Linear?in_features=5&out_features=10"}, r"cannot take images of fmn"),
        ({"model": "image_cases:Wrapped"}, r"and return logits: AttributeError: 'dict' object"),
        ({"model": "torch.nn:Flatten"}, r"torch\.nn:Flatten has no parameters to train"),
        ({"graph": True}, r"graph=True needs a CUDA device, got cpu"),
        ({"model": "image_cases:noisy", "compile": True}, r"random layers.*has Dropout"),
    ],
)
def test_runs_are_checked(change: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        ImageRun(dataclasses.replace(TINY, **change))


def test_frozen_layers_of_a_given_module_stay_frozen(seeded: None):
    module = TinyNet()
    module.bn.eval()
    before = module.bn.running_mean.clone()
    run = trained(dataclasses.replace(TINY, epochs=1), module=module)
    assert torch.equal(run.module.bn.running_mean, before)
    assert not run.module.bn.training
    module = TinyNet().eval()  # as it comes from a file: all of it is meant to be trained
    run = trained(dataclasses.replace(TINY, epochs=1), module=module)
    assert run.module.bn.training
    assert not torch.equal(run.module.bn.running_mean, before)


@pytest.mark.parametrize(("model", "mode"), [("TinyNet", "joint"), ("bare", "frozen")])
def test_the_default_mode_is_that_of_lmap(model: str, mode: str):
    run = ImageRun(dataclasses.replace(TINY, model=f"image_cases:{model}"))
    assert run.stepper.lm is not None
    assert run.config["settings"]["batchnorm"] == run.stepper.lm.batchnorm == mode
