"""λ steered in an image run: warm-up, steering, collapse and recovery, resume."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fsmap import metrics
from fsmap.errors import CheckpointError, DivergedError, InputError
from fsmap.train import image_control, temperature
from fsmap.train.ceiling import ceiling
from fsmap.train.guard import PATIENCE
from fsmap.train.image_control import ALMOST_ZERO, SteerStrength
from fsmap.train.images import ImageRun, ImageSettings
from fsmap.train.images import run as images_run
from fsmap.train.images.log import epoch_row

SETTINGS = ImageSettings(
    px="train",
    epochs=6,
    batch_size=32,
    num_points=16,
    limit=256,
    valid=96,
    generated=True,
    lr=0.1,
)


def run_of(
    hook: SteerStrength | None, epochs: int = SETTINGS.epochs, **options: object
) -> ImageRun:
    """A run of a network that learns stripes in a moment."""
    settings = dataclasses.replace(SETTINGS, epochs=epochs)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(
            *(nn.Conv2d(1, 12, 7, stride=3), nn.BatchNorm2d(12), nn.ReLU()),
            *(nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(48, 10)),
        )
    return ImageRun(settings, module=module, hooks=[hook] if hook else [], **options)


@pytest.fixture(autouse=True)
def as_users_have_it():
    """The trainer computes in the default precision of its parameters."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def strengths(run: ImageRun) -> list[float]:
    return [row["reg_strength"] for row in run.history]


def test_first_strength_is_one_percent_of_the_loss():
    hook = SteerStrength(updates=2)
    run = run_of(hook)
    run.train(until_epoch=1, progress=False)
    row = run.history[0]
    assert row["reg_strength"] == 0  # of the epoch; R was measured nevertheless
    assert hook.control.steering.low == pytest.approx(0.01 * row["loss"] / row["laplacian"] / 1e6)
    run.train(progress=False)
    assert len(hook.control.history) == 1 + 2 * 5
    assert run.reg_strength == hook.control.strength > 0
    assert {row["control"] for row in run.history} <= {"warm-up", "steering", "not needed"}


def test_collapse_in_a_run(monkeypatch):
    monkeypatch.setattr(temperature, "even_strength", lambda *_: math.inf)
    hook = SteerStrength(1e4, updates=2, bounds=(1e-12, 1e6))
    run = run_of(hook)
    run.train(progress=False)
    assert hook.control.collapses >= 1
    assert run.history[-1]["collapses"] == hook.control.collapses
    assert hook.control.strength < 1e4
    logits, _ = run.logits("valid")
    assert float(logits.var(0).mean()) > 1e-4


def test_lambda_r_stays_below_its_ceiling():
    hook = SteerStrength(1e4, updates=2, bounds=(1e-12, 1e6))
    run = run_of(hook)
    limits = []

    observe = temperature.TemperatureControl.observe

    def watched(control: object, logits: Tensor, y: Tensor, a: float, laplacian: float) -> object:
        seen = observe(control, logits, y, a, laplacian)
        limits.append((a, control.steering.strength * laplacian / metrics.nll(logits, y)))
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(temperature.TemperatureControl, "observe", watched)
        run.train(progress=False)
    assert hook.control.collapses == 0  # where the one above collapsed
    for authority, times in limits:
        assert times <= ceiling(authority) * 1.001
    assert max(times / ceiling(authority) for authority, times in limits) > 0.99  # it held


def test_it_looks_with_fresh_statistics(monkeypatch):
    looks = []
    look = ImageRun.look
    monkeypatch.setattr(ImageRun, "look", lambda run: looks.append(run.step) or look(run))
    run = run_of(SteerStrength(updates=2), epochs=3)
    run.train(progress=False)
    per = run.steps_per_epoch
    assert looks == [per, per + per // 2, 2 * per, 2 * per + per // 2, 3 * per]


@pytest.mark.parametrize(("steps", "updates"), [(7, 4), (11, 4), (3, 4), (8, 2)])
def test_looks_are_spread_evenly(monkeypatch, steps: int, updates: int):
    hook = SteerStrength(updates=updates)
    run = run_of(hook, epochs=3)
    monkeypatch.setattr(ImageRun, "steps_per_epoch", property(lambda _: steps))
    hook.updates, hook.control = min(updates, steps), object()
    places = []
    monkeypatch.setattr(hook, "_look", lambda run, _: places.append(run.step % steps))
    for run.step in range(steps, 2 * steps):
        hook.on_step(run)
    assert len(places) == min(updates, steps)
    gaps = [b - a for a, b in itertools.pairwise([*places, steps])]
    assert max(gaps) - min(gaps) <= 1


def test_a_look_at_the_end_of_an_epoch_knows_its_r(monkeypatch):
    hook = SteerStrength(1e-6, updates=1)
    run = run_of(hook, epochs=5)
    given = []
    observe = temperature.TemperatureControl.observe
    monkeypatch.setattr(
        temperature.TemperatureControl,
        "observe",
        lambda control, *args: given.append(args[-1]) or observe(control, *args),
    )
    run.train(progress=False)
    measured = [row.get("laplacian") for row in run.history]
    assert [r is None for r in measured] == [
        False,
        True,
        True,
        False,
        False,
    ]  # felt in the last two
    assert given == [*measured[:1] * 3, *measured[3:]]
    assert [row["signal"] for row in run.history] == [s.signal for s in hook.control.history]
    assert [row["reg_strength"] > 0 for row in run.history] == [False, False, False, True, True]


def test_the_first_step_has_no_r_either():
    run = run_of(SteerStrength())
    assert run.reg_strength == ALMOST_ZERO


def test_a_lambda_below_its_bounds_is_resumed(tmp_path: Path):
    """The ceiling counts for more than the bounds."""
    options = {"updates": 2, "bounds": (0.1, 1e3)}
    run_of(SteerStrength(1.0, **options), folder=tmp_path).train(until_epoch=2, progress=False)
    hook = SteerStrength(1.0, **options)
    run_of(hook, folder=tmp_path, resume=True)
    assert hook.control.steering.strength < 0.1


@pytest.mark.parametrize(
    "constant",
    [
        *("image_control.SHARE", "image_control.LOOKS", "image_control.MARGIN"),
        *("image_control.ALARM", "steering.RANGE", "steering.TRUST", "steering.NEAR"),
        *("steering.AFTER_COLLAPSE", "steering.CAP_BELOW_COLLAPSE", "ceiling.LEAST"),
        *("ceiling.LATE", "ceiling.HALF", "ceiling.LEFT", "ceiling.TOP", "ceiling.STEADY"),
        *("ceiling.SLOPE", "ceiling.FIRM", "ceiling.OPEN", "ceiling.STEEP", "ceiling.FIRST"),
        "ceiling.CALM",
    ],
)
def test_a_controller_is_described_by_its_constants(constant: str, monkeypatch: pytest.MonkeyPatch):
    before = SteerStrength().describe()
    monkeypatch.setattr(f"fsmap.train.{constant}", 0.123)
    assert SteerStrength().describe() != before


def test_a_controller_is_described_by_its_options():
    words = {
        SteerStrength(**options).describe()
        for options in ({}, {"start": 1e-5}, {"updates": 2}, {"warmup": 2}, {"margin": 0.3})
    }
    assert len(words) == 5
    assert SteerStrength(gain=6.0).describe() == SteerStrength().describe()  # the default
    for name in ("gain", "trend", "rate", "boost"):
        assert f"{name}=" in SteerStrength().describe()


def test_a_run_is_not_resumed_with_another_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_of(SteerStrength(), folder=tmp_path).train(until_epoch=1, progress=False)
    run_of(SteerStrength(), folder=tmp_path, resume=True)
    monkeypatch.setattr(image_control, "MARGIN", 0.123)
    with pytest.raises(CheckpointError, match="hooks"):
        run_of(SteerStrength(), folder=tmp_path, resume=True)


def test_it_waits_for_an_epoch_that_has_r():
    settings = dataclasses.replace(SETTINGS, epochs=4, every=20, width=2)  # 5 steps an epoch
    hook = SteerStrength()
    run = ImageRun(settings, hooks=[hook])
    assert run.steps_per_epoch < 20
    del run.hooks[0]
    run.train(until_epoch=2, progress=False)
    assert "laplacian" not in run.history[1]
    hook.on_epoch(run)
    assert hook.control is None
    run.history[1]["laplacian"] = 1.0
    hook.on_epoch(run)
    assert hook.control is not None


class Break:
    """Spoils the weights after some steps."""

    def __init__(self, value: float, *steps: int) -> None:
        self.value, self.steps = value, steps

    def on_epoch(self, run: ImageRun) -> None: ...

    def on_step(self, run: ImageRun) -> None:
        if run.step in self.steps:
            with torch.no_grad():
                for p in run.module.parameters():
                    p.fill_(self.value)


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("often", [100, 3])
def test_a_collapse_into_nan_is_undone(monkeypatch, updates: int, after: int, often: int):
    """Wherever it happens, and whether a look or the check of the sums sees it first."""
    monkeypatch.setattr(images_run, "LOOK_EVERY", often)
    hook = SteerStrength(1e-6, updates=updates)
    run = run_of(hook, epochs=4)
    assert run.steps_per_epoch == 8
    run.hooks.append(Break(math.nan, 2 * 8 + after))
    run.train(progress=False)
    assert hook.control.collapses == 1
    assert math.isfinite(run.history[-1]["loss"])
    assert run.history[-1]["valid_accuracy"] > 0.5
    assert run.history[2].get("loss", 1.0) > 1e-6  # a mean over the steps that count, or none


def test_a_run_that_diverges_again_and_again_ends(monkeypatch):
    monkeypatch.setattr(images_run, "LOOK_EVERY", 1)
    hook = SteerStrength(1e-6, updates=1)
    run = run_of(hook)
    run.hooks.append(Break(math.nan, *range(20, 40)))
    with pytest.raises(DivergedError, match="training diverged"):
        run.train(progress=False)
    assert hook.control.collapses == PATIENCE


def test_without_steering_divergence_ends_the_run():
    run = run_of(None)
    run.hooks.append(Break(math.nan, 3))
    with pytest.raises(DivergedError, match="training diverged"):
        run.train(progress=False)


def test_the_row_of_an_epoch_whose_end_collapsed_is_of_what_came_back():
    run = run_of(SteerStrength(1e-6, updates=2), epochs=4)
    run.hooks.insert(0, Break(0.0, 3 * 8))
    run.train(progress=False)
    assert run.history[2]["collapses"] == 1
    assert run.history[2]["valid_accuracy"] > 0.5


@pytest.mark.parametrize("epoch", [2, 3, 5])  # in the second λ is not felt yet
def test_a_resumed_run_is_steered_the_same_way(tmp_path: Path, epoch: int):
    whole = run_of(SteerStrength(1e-5, updates=2))
    whole.train(progress=False)
    first = run_of(SteerStrength(1e-5, updates=2), folder=tmp_path)
    first.train(until_epoch=epoch, progress=False)
    hook = SteerStrength(1e-5, updates=2)
    second = run_of(hook, folder=tmp_path, resume=True)
    assert hook.control is not None
    second.train(progress=False)
    assert strengths(second) == strengths(whole)
    for a, b in zip(second.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("epochs", "looks"), [(6, 4), (30, 3), (50, 2), (200, 2)])
def test_long_runs_look_less_often(epochs: int, looks: int):
    hook = SteerStrength()
    run = run_of(hook, epochs=epochs)
    run.train(until_epoch=2, progress=False)
    assert hook.updates == looks
    assert len(hook.control.history) == 1 + looks


def test_refusals():
    with pytest.raises(InputError, match="updates >= 1 and warmup >= 1 epochs, got updates=0"):
        SteerStrength(updates=0)
    for start in (0.0, -1.0, math.inf):
        with pytest.raises(InputError, match="must be positive and finite"):
            SteerStrength(start)
    for changes, message in (
        ({"valid": 0}, "needs held-out images, 30 at least"),
        ({"valid": 29}, "needs held-out images, 30 at least"),
        ({"epochs": 1}, "begins after 1 epochs of warm-up"),
        ({"method": "ps-map"}, "for L-MAP"),
        ({"reg_schedule": "cosine"}, "has no schedule"),
    ):
        with pytest.raises(InputError, match=message):
            ImageRun(dataclasses.replace(SETTINGS, width=2, **changes), hooks=[SteerStrength()])


def test_the_last_good_state_is_in_the_checkpoint(tmp_path: Path):
    hook = SteerStrength(1e-4, updates=2)
    run = run_of(hook, folder=tmp_path)
    run.train(until_epoch=3, progress=False)
    hook.control.collapses = 2
    run.save()
    again = SteerStrength(1e-4, updates=2)
    other = run_of(again, folder=tmp_path, resume=True)
    assert again.control.collapses == 2
    assert again.control.steering.interval == hook.control.steering.interval == 0.5
    assert again.good.keys() == hook.good.keys() == run.snapshot().keys()
    for name, tensor in hook.good.items():
        assert torch.equal(tensor, again.good[name]), name
    with torch.no_grad():
        for parameter in other.module.parameters():
            parameter.fill_(torch.nan)
    assert again.on_diverged(other)
    for name, tensor in other.snapshot().items():
        assert torch.equal(tensor, hook.good[name]), name


def test_a_run_is_resumed_with_the_same_controller(tmp_path: Path):
    run_of(SteerStrength(gain=5.0), folder=tmp_path).train(until_epoch=2, progress=False)
    with pytest.raises(CheckpointError, match=r"gain=5.0.* there, .*gain=4.0.* here"):
        run_of(SteerStrength(gain=4.0), folder=tmp_path, resume=True)
    assert run_of(SteerStrength(gain=5.0), folder=tmp_path, resume=True).epoch == 2


def test_a_run_that_was_not_steered_is_not_resumed_steered(tmp_path: Path):
    run_of(None, folder=tmp_path).train(until_epoch=1, progress=False)
    with pytest.raises(CheckpointError, match="hooks"):
        run_of(SteerStrength(), folder=tmp_path, resume=True)


def test_a_warm_up_of_the_learning_rate_is_no_end_of_training():
    run = run_of(SteerStrength())
    assert image_control._authority(run) == 1.0
    run.settings = dataclasses.replace(SETTINGS, warmup_epochs=2.0)
    run.step = run.steps_per_epoch
    assert run.lr < SETTINGS.lr
    assert image_control._authority(run) == 1.0
    run.step = run.steps - 1
    assert image_control._authority(run) < 0.1
    run.settings = dataclasses.replace(SETTINGS, decay="none")
    assert image_control._authority(run) is None
    run.settings = dataclasses.replace(SETTINGS, lr=0.0)
    assert image_control._authority(run) == 1.0


def test_the_sums_of_an_epoch_survive_a_collapse(monkeypatch):
    monkeypatch.setattr(temperature, "even_strength", lambda *_: math.inf)
    run = run_of(SteerStrength(1e4, updates=2, bounds=(1e-12, 1e6)))
    counted = []
    monkeypatch.setattr(
        "fsmap.train.images.run.epoch_row",
        lambda run, totals: counted.append(totals["steps"]) or epoch_row(run, totals),
    )
    run.train(progress=False)
    assert run.hooks[0].control.collapses >= 1
    assert counted == [run.steps_per_epoch] * SETTINGS.epochs
