"""Image runs: the steps are LMAP's, a resumed run equals an uninterrupted one, hooks steer."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from fsmap.errors import CheckpointError
from fsmap.linalg.probes import Stream
from fsmap.train.images import ImageRun, ImageSettings, load_model
from fsmap.train.images.captured import TracedStep

TINY = ImageSettings(
    data="fmnist",
    generated=True,
    limit=64,
    valid=32,
    width=2,
    epochs=2,
    batch_size=16,
    num_points=8,
    px="kmnist",
    reg_strength=1e-4,
)


def trained(settings: ImageSettings = TINY, **options: object) -> ImageRun:
    run = ImageRun(settings, **options)
    run.train(progress=False)
    return run


def weights(run: ImageRun) -> dict[str, torch.Tensor]:
    return run.snapshot()


def test_rows_say_what_happened(tmp_path: Path):
    run = trained(folder=tmp_path)
    assert [row["epoch"] for row in run.history] == [1, 2]
    assert all(row["laplacian"] > 0 for row in run.history)
    assert run.done
    assert run.epoch == 2
    assert run.step == 2 * 4
    module, progress = load_model(tmp_path)
    assert progress["settings"] == TINY
    torch.testing.assert_close(
        module(run.task.normalize(run.task.test.x[:3], torch.float64)),
        run.logits_of(run.task.test.x[:3]),
    )


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, stop: int):
    whole = trained()

    class Kill:
        def on_epoch(self, run: ImageRun) -> None: ...

        def on_step(self, run: ImageRun) -> None:
            if run.step == stop:
                raise KeyboardInterrupt

    cut = ImageRun(TINY, folder=tmp_path, hooks=[Kill()])
    with pytest.raises(KeyboardInterrupt):
        cut.train(progress=False, checkpoint_every=2)
    again = ImageRun(TINY, folder=tmp_path, resume=True)
    assert again.step == (stop - 1) // 2 * 2
    again.train(progress=False)
    for name, t in weights(whole).items():
        assert torch.equal(t, weights(again)[name]), name
    assert [r["loss"] for r in again.history] == [r["loss"] for r in whole.history]


def test_a_finished_or_foreign_checkpoint_is_not_overwritten(tmp_path: Path):
    trained(folder=tmp_path)
    with pytest.raises(CheckpointError, match="exists already"):
        ImageRun(TINY, folder=tmp_path)
    other = dataclasses.replace(TINY, reg_strength=1e-3)
    with pytest.raises(CheckpointError, match=r"reg_strength: 0.0001 there, 0.001 here"):
        ImageRun(other, folder=tmp_path, resume=True)


def test_hooks_steer_the_strength():
    seen = []

    class Halve:
        def on_epoch(self, run: ImageRun) -> None:
            run.history[-1]["mine"] = 1.0

        def on_step(self, run: ImageRun) -> None:
            seen.append(run.reg_strength_now)
            run.reg_strength /= 2

    run = trained(hooks=[Halve()])
    assert seen[:3] == [1e-4, 5e-5, 2.5e-5]
    assert math.isclose(run.reg_strength, 1e-4 / 2**8)
    assert run.history[0]["mine"] == 1.0


def test_psi_is_the_librarys():
    run = ImageRun(TINY)
    run.feeder.prepare(3, "regularized")
    expected = Stream(TINY.seed, 3).psi(dict(run.module.named_parameters()))
    for name, psi in run.feeder.psi.now.items():
        assert torch.equal(psi, expected[name][0]), name


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"estimator": "fd"},
        {"batchnorm": "frozen", "every": 2},
        {"batchnorm": "batch"},
        {"estimator": "vjp"},
        {"method": "ps-map", "sam": 0.05},
    ],
)
def test_the_traced_step_is_the_eager_one(change: dict[str, object]):
    settings = dataclasses.replace(TINY, epochs=1, **change)
    eager = ImageRun(settings)
    quick = ImageRun(settings)
    quick._step.__class__ = TracedStep
    for run in (eager, quick):
        run.train(progress=False)
    for name, t in weights(eager).items():
        assert torch.equal(t, weights(quick)[name]), name
