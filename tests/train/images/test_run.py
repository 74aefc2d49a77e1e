"""Image runs: a resumed run equals an uninterrupted one, hooks steer, bad input is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch

from fsmap.errors import CheckpointError, DivergedError, InputError
from fsmap.train import checkpoint
from fsmap.train.images import ImageRun, ImageSettings, load_model, log, state
from image_cases import TINY, TinyNet, trained


class KillAt:
    """A hook that ends a run as a kill would, between two steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_epoch(self, run: ImageRun) -> None: ...

    def on_step(self, run: ImageRun) -> None:
        if run.step == self.step:
            raise KeyboardInterrupt


class Halve:
    """A controller with a state: λ is halved after every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.total = torch.zeros(())

    def on_epoch(self, run: ImageRun) -> None:
        run.history[-1]["mine"] = 1.0

    def on_step(self, run: ImageRun) -> None:
        self.seen.append(run.reg_strength_now)
        self.total += run.reg_strength_now
        run.reg_strength /= 2

    def state_dict(self) -> dict[str, object]:
        return {"seen": self.seen, "total": self.total}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.seen, self.total = list(state["seen"]), state["total"]


def test_rows_say_what_happened(tmp_path: Path):
    run = trained(folder=tmp_path, about={"commit": "abc"})
    assert [row["epoch"] for row in run.history] == [1, 2]
    assert all(row["laplacian"] > 0 for row in run.history)
    assert run.done
    assert run.step == run.steps == 2 * 4
    head, *rows = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert rows == run.history
    assert head["commit"] == "abc"
    assert head["settings"]["px"] == "kmnist"


def test_a_checkpoint_gives_the_deployed_model_back(tmp_path: Path):
    run = trained(folder=tmp_path)
    module, progress = load_model(tmp_path, model=TINY.model)
    assert progress["settings"] == TINY
    assert not module.training
    x = run.task.test.x[:3]
    expected = run.logits_of(x)
    assert torch.equal(module(run.task.normalize(x, torch.float64)), expected)
    assert run.module.training


@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, stop: int):
    settings = dataclasses.replace(TINY, every=2, data="cifar10", px="0.5*train+0.5*white-noise")
    whole = trained(settings, hooks=[Halve()])
    cut = ImageRun(settings, folder=tmp_path, hooks=[Halve(), KillAt(stop)])
    with pytest.raises(KeyboardInterrupt):
        cut.train(progress=False, checkpoint_every=2)
    again = ImageRun(settings, folder=tmp_path, resume=True, hooks=[Halve()])
    assert again.step == (stop - 1) // 2 * 2
    again.train(progress=False)
    for name, t in whole.snapshot().items():
        assert torch.equal(t, again.snapshot()[name]), name
    assert [r["loss"] for r in again.history] == [r["loss"] for r in whole.history]
    assert again.hooks[0].seen == whole.hooks[0].seen
    assert torch.equal(again.hooks[0].total, whole.hooks[0].total)
    rows = (tmp_path / "log.jsonl").read_text().splitlines()[1:]
    assert [json.loads(row)["epoch"] for row in rows] == [1, 2]


def test_time_is_up_with_a_checkpoint(tmp_path: Path):
    run = ImageRun(TINY, folder=tmp_path)
    run.train(progress=False, max_seconds=0.0)
    assert run.step == 5  # the first look at the clock
    again = ImageRun(TINY, folder=tmp_path, resume=True)
    assert again.step == 5
    assert not again.done


class StopAt(KillAt):
    """A hook that asks a run to end, as Ctrl-C does."""

    def on_step(self, run: ImageRun) -> None:
        if run.step == self.step:
            run.stop()


def test_a_stopped_run_has_a_checkpoint_of_its_last_step(tmp_path: Path):
    run = ImageRun(TINY, folder=tmp_path, hooks=[StopAt(3)])
    run.train(progress=False)
    assert (run.step, run.done) == (3, False)
    run.stop()  # before it goes on
    run.train(progress=False)
    assert run.step == 4
    again = ImageRun(TINY, folder=tmp_path, resume=True)
    assert again.step == 4
    again.train(progress=False)
    for name, t in trained().snapshot().items():
        assert torch.equal(t, again.snapshot()[name]), name


@pytest.fixture
def single() -> object:
    """As torch has it: its fused optimizer takes no float64 flag."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def overflowing() -> ImageRun:
    """A run that skips what is not finite, as in fp16, of a network that is lost."""
    run = ImageRun(dataclasses.replace(TINY, epochs=8))
    run._step.scaled = True
    run._step.restart()
    with torch.no_grad():
        run.module.fc.bias.fill_(torch.nan)
    return run


def test_a_lost_network_is_noticed_in_fp16(single: object):
    """Skipped steps are not in the sums, and the scale would fall for ever."""
    run = overflowing()
    with pytest.raises(DivergedError, match="the gradient is not finite"):
        run.train(progress=False)
    assert run.feeder.scale == 1.0
    assert all(bool(b.isfinite().all()) for b in run.module.buffers())


def test_a_restored_network_has_a_scale_again(single: object):
    run = overflowing()
    good = trained(dataclasses.replace(TINY, epochs=1)).snapshot()
    for step in range(20):
        run._step(step % 4, lr=0.1, reg_strength=1e-3)
    assert run._step.lost
    run.restore(good)
    assert not run._step.lost
    assert run.feeder.scale == 2.0**12
    assert run._step.totals.eq(0).all()
    before = {name: b.clone() for name, b in run.module.named_buffers()}
    run._step(0, lr=0.1, reg_strength=1e-3)
    assert run._step.totals[-1] == 1  # a step that counts
    assert any(not torch.equal(b, before[name]) for name, b in run.module.named_buffers())


def test_running_statistics_of_a_skipped_step_are_not_kept(single: object):
    run = overflowing()
    before = {name: b.clone() for name, b in run.module.named_buffers() if b.is_floating_point()}
    run._step(0, lr=0.1, reg_strength=1e-3)
    assert run._step.totals[-1] == 0
    for name, b in run.module.named_buffers():
        if b.is_floating_point():
            assert torch.equal(b, before[name]), name


def test_R_is_the_same_on_every_step_or_on_some():
    """On its steps it is counted k times, so that the mean gradient stays."""
    every = {
        k: trained(dataclasses.replace(TINY, every=k, lr=0.0, epochs=8)).history for k in (1, 4)
    }
    mean = {k: sum(row["laplacian"] for row in rows) / len(rows) for k, rows in every.items()}
    assert 0.6 < mean[4] / mean[1] < 1.6


def test_a_finished_or_foreign_checkpoint_is_not_overwritten(tmp_path: Path):
    trained(folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"exists already\. Resume it"):
        ImageRun(TINY, folder=tmp_path)
    other = dataclasses.replace(TINY, reg_strength=1e-2)
    with pytest.raises(CheckpointError, match=r"reg_strength: 0.001 there, 0.01 here"):
        ImageRun(other, folder=tmp_path, resume=True)


def test_other_data_is_another_run(tmp_path: Path):
    run = trained(folder=tmp_path)
    task = run.task._replace(train=run.task.train._replace(x=run.task.train.x + 1))
    with pytest.raises(CheckpointError, match=r"data\.train: \w+ there, \w+ here"):
        ImageRun(TINY, folder=tmp_path, resume=True, task=task)


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str):
    trained(folder=tmp_path)
    path = tmp_path / state.FILE
    raw = bytearray(path.read_bytes())
    if damage == "altered":
        raw[-9] ^= 1
    path.write_bytes(raw if damage == "altered" else raw[:-100])
    for load in (load_model, lambda p: ImageRun(TINY, folder=p, resume=True)):
        with pytest.raises(CheckpointError, match=damage):
            load(tmp_path)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = ImageRun(TINY, folder=tmp_path)
    run.train(progress=False, until_epoch=1)
    before = (tmp_path / state.FILE).read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run.train(progress=False)
    assert (tmp_path / state.FILE).read_bytes() == before
    monkeypatch.undo()
    assert ImageRun(TINY, folder=tmp_path, resume=True).epoch == 1


def test_a_checkpoint_of_something_else(tmp_path: Path):
    path = tmp_path / "other.safetensors"
    checkpoint.save(path, checkpoint.Checkpoint({}, {"kind": "fit"}, {}))
    with pytest.raises(CheckpointError, match="a checkpoint of 'fit', not of an image run"):
        load_model(path)


def test_a_state_that_cannot_be_kept(tmp_path: Path):
    class Odd(Halve):
        def state_dict(self) -> dict[str, object]:
            return {"what": object()}

    with pytest.raises(CheckpointError, match="holds 'what', a object"):
        trained(folder=tmp_path, hooks=[Odd()])


def test_hooks_steer_the_strength():
    run = trained(hooks=[Halve(), lambda run: run.history[-1].update(more=2.0)])
    assert run.hooks[0].seen[:3] == [1e-3, 5e-4, 2.5e-4]
    assert math.isclose(run.reg_strength, 1e-3 / 2**8)
    assert (run.history[0]["mine"], run.history[0]["more"]) == (1.0, 2.0)


def test_tensorboard_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None: ...

    board = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setattr(log.importlib.util, "find_spec", lambda name: object())
    run = trained(folder=tmp_path)
    assert ("loss", run.history[1]["loss"], 2) in written


def test_a_snapshot_brings_the_weights_back():
    run = ImageRun(TINY)
    before = run.snapshot()
    run.train(progress=False)
    assert not torch.equal(before["params/conv.weight"], run.snapshot()["params/conv.weight"])
    run.restore(before)
    assert all(torch.equal(t, before[name]) for name, t in run.snapshot().items())


def test_schedules():
    s = dataclasses.replace(TINY, reg_schedule="warmup", reg_warmup_epochs=2)
    assert [s.reg_factor(k, 4) for k in (0, 3, 7, 9)] == [0.125, 0.5, 1.0, 1.0]
    s = dataclasses.replace(TINY, reg_schedule="cosine")
    assert s.reg_factor(0, 4) == 1.0
    assert math.isclose(s.reg_factor(4, 4), 0.5)
    run = ImageRun(dataclasses.replace(TINY, warmup_epochs=1))
    assert math.isclose(run.lr, 0.1 / 4)


def test_divergence_names_the_term(monkeypatch: pytest.MonkeyPatch):
    run = ImageRun(TINY)
    with torch.no_grad():
        run.module.fc.bias.fill_(torch.inf)
    with pytest.raises(DivergedError, match=r"the cross-entropy is not finite .*λ 0\.001"):
        run.train(progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "fs-map"}, r"method must be one of ps-map, l-map, got 'fs-map'"),
        ({"precision": "fp8"}, r"precision must be one of fp32, tf32, bf16, fp16"),
        ({"reg_schedule": "up"}, r"reg_schedule must be one of"),
        ({"batchnorm": "none"}, r"batchnorm must be one of joint, batch, frozen"),
        ({"estimator": "magic"}, r"unknown trace estimator 'magic'"),
        ({"epochs": 0}, r"epochs must be at least 1, got 0"),
        ({"weight_decay": -1.0}, r"weight_decay must be at least 0, got -1.0"),
        ({"clip": 0.0}, r"clip must be > 0, got"),
        ({"beta": 0.0}, r"beta must be > 0 and finite, got 0"),
        ({"sam": 0.1}, r"sam is a baseline for ps-map"),
        ({"reg_schedule": "warmup"}, r"rises over reg_warmup_epochs"),
    ],
)
def test_settings_are_checked(change: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 65}, r"batch_size=65 is larger than the training set, 64 images"),
        ({"model": "image_cases:TinyNet?classes=9"}, r"returned shape \(2, 9\) .* needs \(2, 10\)"),
        ({"model": "torch.nn:Linear?in_features=5&out_features=10"}, r"cannot take images of fmn"),
        ({"precision": "fp16"}, r"precision='fp16' needs a CUDA device, got cpu"),
        ({"graph": True}, r"graph=True needs a CUDA device, got cpu"),
        ({"model": "image_cases:noisy", "compile": True}, r"random layers.*has Dropout"),
    ],
)
def test_runs_are_checked(change: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        ImageRun(dataclasses.replace(TINY, **change))


def test_an_unknown_part_of_the_data():
    with pytest.raises(InputError, match="split must be one of train, valid, test, got 'all'"):
        ImageRun(TINY).logits("all")


def test_without_held_out_images():
    run = trained(dataclasses.replace(TINY, valid=0, epochs=1))
    assert "valid_accuracy" not in run.history[0]


def test_a_model_of_its_own():
    settings = ImageSettings(
        generated=True, limit=32, valid=8, width=2, epochs=1, batch_size=16, method="ps-map"
    )
    run = trained(settings)
    assert run.history[0]["loss"] > 0
    assert sum(p.numel() for p in run.module.parameters()) == 11_384


def test_a_glance_is_taken_once_a_step(monkeypatch):
    run = trained()
    logits, y = run.glance()
    assert torch.equal(logits, run.logits("valid")[0])  # in fp32 it is what is reported
    assert torch.equal(y, run.task.valid.y)
    calls = []
    monkeypatch.setattr(run, "logits_of", lambda *args: calls.append(args))
    assert run.glance()[0] is logits
    assert not calls
    run.restore(run.snapshot())  # other weights, perhaps, at the same step
    run.glance()
    assert len(calls) == 1


def test_half_precision_is_three_digits_less():
    torch.set_default_dtype(torch.float32)  # autocast leaves float64 alone
    try:
        run = trained()
    finally:
        torch.set_default_dtype(torch.float64)
    whole, half = (run.logits_of(run.task.test.x, kind) for kind in (None, torch.bfloat16))
    assert half.dtype == whole.dtype
    assert 1e-6 < (half - whole).norm() / whole.norm() < 2e-2


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


def test_gradients_reach_the_optimizer_in_the_layout_of_the_weights():
    """Fused SGD reads weights and gradients by place, whatever a compiler makes of a layout."""
    plain, turned = ImageRun(TINY), ImageRun(TINY)
    turned._step.feeder.prepare(0, "regularized")
    inner = turned._step.make("regularized")

    def otherwise(params, buffers, inputs):
        found = inner(params, buffers, inputs)
        last_first = [g.permute(*reversed(range(g.ndim))).contiguous() for g in found.grads]
        return found._replace(grads=[g.permute(*reversed(range(g.ndim))) for g in last_first])

    turned._step.gradients["regularized"] = otherwise
    for run in (plain, turned):
        run._step(0, lr=0.1, reg_strength=1e-3)
    for p, q in zip(plain._step.params.values(), turned._step.params.values(), strict=True):
        assert q.grad.stride() == q.stride()
        assert torch.equal(p, q)
