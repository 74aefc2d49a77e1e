"""λ steered by held-out data: a real run, collapse and recovery, ranks, checkpoints, refusals."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fsmap
from fsmap.errors import InputError, UnsupportedModuleError
from fsmap.train.guard import PATIENCE, health
from fsmap.train.optim import Authority

PX = fsmap.px.Normal(shape=(8,))


def made_up() -> tuple[torch.Tensor, torch.Tensor]:
    """Eight columns, two classes, one label in ten wrong."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4500, 8, generator=generator)
    y = (x[:, 0] * x[:, 1] + 0.5 * x[:, 2] > 0).long()
    return x, torch.where(torch.rand(4500, generator=generator) < 0.1, 1 - y, y)


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(8, 48), nn.BatchNorm1d(48), nn.GELU()),
        *(nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 2)),
    )


class Loop:
    """A plain training loop."""

    def __init__(self, epochs: int, **options: object) -> None:
        self.x, self.y = made_up()
        self.model = network()
        self.lm = fsmap.LMAP(self.model, PX, num_points=32)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, epochs)
        held_out = (self.x[200:500], self.y[200:500])
        self.control = fsmap.TemperatureControl(
            self.lm, held_out, optimizer=self.optimizer, **{"warmup": 2, **options}
        )
        self.order = torch.Generator().manual_seed(0)

    def epoch(self, strength: float | None = None) -> None:
        for rows in torch.randperm(200, generator=self.order).split(40):
            out, R = self.lm(self.x[rows])
            lam = self.control.strength if strength is None else strength
            loss = F.cross_entropy(out, self.y[rows]) + lam * R
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.schedule.step()

    def tested(self) -> tuple[float, float]:
        """Accuracy and log T on the test points."""
        self.model.eval()
        with torch.no_grad():
            out = self.model(self.x[500:])
        y = self.y[500:]
        return fsmap.metrics.accuracy(out, y), math.log(fsmap.metrics.temperature(out, y))


@pytest.mark.parametrize("start", [None, 1e-2])
def test_a_real_run_ends_calibrated(start: float | None, seeded: None):
    """Plain training ends with T above 2.5; steered, T comes near 1."""
    epochs = 40
    plain = Loop(epochs)
    for _ in range(epochs):
        plain.epoch(strength=0.0)
    accuracy, over_confident = plain.tested()
    assert over_confident > math.log(2.5)
    steered = Loop(epochs, start=start)
    for _ in range(epochs):
        steered.epoch()
        steered.control.update()
    after, left = steered.tested()
    assert abs(left) < over_confident / 4
    assert after > accuracy - 0.02
    assert steered.control.strength > 1e-5
    assert steered.control.status == "steering"
    assert steered.control.collapses == 0


def test_collapse_is_recognized_and_recovered(seeded: None):
    """From a λ that makes a constant of the network: restored, lowered, capped, trained on."""
    epochs = 24
    loop = Loop(epochs, start=3e3, bounds=(1e-9, 1e6), warmup=3)
    collapsed = []
    for _ in range(epochs):
        loop.epoch()
        before = loop.model[0].weight.detach().clone()
        good = {n: t.clone() for n, t in loop.control.good.tensors.items()}
        loop.control.update()
        if loop.control.history[-1].verdict == "collapsed":
            collapsed.append(loop.control.history[-1])
            assert not torch.equal(loop.model[0].weight.detach(), before)
            torch.testing.assert_close(
                loop.model[0].weight.detach(), good["model/module.0.weight"], rtol=0, atol=0
            )
    assert collapsed
    assert loop.control.collapses == len(collapsed)
    assert loop.control.steering.cap < 3e3
    assert loop.control.strength < 300
    assert loop.tested()[0] > 0.65
    assert health(loop.model(loop.x[500:]), loop.y[500:]).spread > 0.01


def test_a_rule_without_guard_would_drive_it_up():
    """The design's failure: the constant predictor asks for more λ; the control lowers it."""
    y = torch.arange(100) % 10
    alive = 3.0 * F.one_hot(y, 10).double()
    alive[::5] = alive[::5].roll(1, 0)
    constant = torch.zeros(100, 10)
    constant[:, 3] = 4.0
    control = fsmap.TemperatureControl(None, None, start=1e-3, warmup=1)
    control.observe(alive, y)
    before = control.steering.strength
    seen = control.observe(constant, y)
    assert seen.signal == pytest.approx(math.log(16))
    assert seen.verdict == "collapsed"
    assert control.strength == pytest.approx(before / 10)


def test_nothing_moves_during_the_warm_up():
    y = torch.arange(40) % 2
    wrong = 6.0 * F.one_hot(1 - y, 2).double()
    z = torch.where(torch.arange(40)[:, None] < 8, wrong, 6.0 * F.one_hot(y, 2))
    control = fsmap.TemperatureControl(None, None, start=1e-4, warmup=3)
    assert (control.strength, control.status) == (0.0, "warm-up")
    for _ in range(2):
        control.observe(z, y)
        assert control.strength == 0.0
    assert control.steering.strength == 1e-4
    control.observe(z, y)
    assert control.strength == 1e-4  # switched on
    control.observe(z, y)
    assert control.strength > 1e-4  # and steered


def test_the_warm_up_lasts_until_something_is_learned():
    """A network that never left chance cannot be told from a collapsed one: λ stays zero."""
    y = torch.arange(40) % 2
    control = fsmap.TemperatureControl(None, None, start=1e-4, warmup=0)
    for _ in range(20):
        control.observe(torch.ones(40, 2), y)
    assert (control.strength, control.status) == (0.0, "warm-up")
    control.observe(6.0 * F.one_hot(y, 2).double(), y)
    assert control.strength > 0


def under_confident() -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs that are right eight times of nine and hardly say so."""
    y = torch.arange(60) % 3
    out = 0.2 * F.one_hot(y, 3).double()
    out[::9] = out[::9].roll(1, 1)
    return out, y


def test_under_confident_at_zero_is_not_needed():
    timid, y = under_confident()
    control = fsmap.TemperatureControl(None, None, start=1e-4, warmup=0, interval=1.0)
    for _ in range(8):
        control.observe(timid, y)
    assert control.status == "not needed"
    assert control.strength == pytest.approx(1e-10)
    assert "not needed" in repr(control)
    for _ in range(3):
        control.observe(30 * timid, y)  # over-confidence that appears late is met
    assert control.status == "steering"
    assert control.strength > 1e-9


def test_lambda_waits_where_it_is_not_felt():
    timid, y = under_confident()
    control = fsmap.TemperatureControl(None, None, start=1e-4, warmup=0, interval=1.0)
    for _ in range(8):
        control.observe(timid, y, laplacian=100.0)
    nll = fsmap.metrics.nll(timid, y)
    assert control.strength == pytest.approx(1e-4 * nll / 100.0)
    assert control.status == "not needed"


def test_a_collapse_lifts_nothing():
    """Its R is almost none: λR would be nothing at any λ."""
    y = torch.arange(60) % 3
    good = 6.0 * F.one_hot(y, 3).double()
    control = fsmap.TemperatureControl(None, None, start=1e-4, warmup=0)
    control.observe(good, y, laplacian=100.0)
    strengths, verdicts = [control.strength], []
    for _ in range(PATIENCE + 3):  # in the end the guard gives up and calls it good
        seen = control.observe(torch.zeros(60, 3), y, laplacian=1e-9)
        strengths.append(control.strength)
        verdicts.append(seen.verdict)
    assert verdicts[:PATIENCE] == ["collapsed"] * PATIENCE
    fallen = strengths[PATIENCE]
    assert fallen < 1e-2 * strengths[0]
    assert max(strengths[PATIENCE:]) <= 1e2 * fallen  # by what log T asks for, within the rate


def test_the_cap_is_said():
    y = torch.arange(60) % 3
    bold = 9.0 * F.one_hot(y, 3).double()
    bold[::4] = bold[::4].roll(1, 1)
    control = fsmap.TemperatureControl(None, None, start=1e-4, warmup=0, bounds=(1e-5, 1e-3))
    for _ in range(20):
        control.observe(bold, y)
    assert control.status == "capped"
    assert control.strength == pytest.approx(1e-3)


def test_first_strength_is_one_percent_of_the_loss(seeded: None):
    x, y = made_up()
    model = network()
    held_out = (x[:200], y[:200])
    model.eval()
    nll = fsmap.metrics.nll(model(x[:200]).detach(), y[:200])
    model.train()
    for wrapped in (
        fsmap.LMAP(model, PX, num_points=32),
        fsmap.LaplacianPenalty(model, PX, num_points=32),
    ):
        control = fsmap.TemperatureControl(wrapped, held_out)
        expected = fsmap.suggest_strength(wrapped, loss=nll, x=x[:128]).reg_strength
        assert control.steering.strength == pytest.approx(expected)
        assert model.training


def test_gaussian_regression(seeded: None):
    """Errors larger than the noise ask for more λ; a constant is seen as a collapse."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(200, 1, generator=generator)
    noisy = y + 0.3 * torch.randn(200, 1, generator=generator)
    control = fsmap.TemperatureControl(
        None, None, start=1e-3, warmup=0, signal="residual", noise_std=0.1
    )
    assert control.observe(noisy, y).signal == pytest.approx(2 * math.log(3), abs=0.3)
    assert control.strength > 1e-3
    assert control.observe(torch.zeros(200, 1), y).verdict == "collapsed"


def test_a_signal_of_ones_own():
    control = fsmap.TemperatureControl(
        None, None, start=1e-3, warmup=0, signal=lambda out, y: -0.3, interval=0.1, trend=0.0
    )
    control.observe(torch.eye(4), torch.arange(4))
    assert control.strength == pytest.approx(1e-3 * math.exp(-0.18))


def test_a_resumed_control_goes_on_as_if_nothing_had_happened(seeded: None, tmp_path: Path):
    loop = Loop(10, start=1e-4)
    for _ in range(4):
        loop.epoch()
        loop.control.update()
    torch.save(loop.control.state_dict(), tmp_path / "state.pt")
    other = fsmap.TemperatureControl(
        loop.lm, loop.control.held_out.data, start=1.0, optimizer=loop.optimizer, warmup=2
    )
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.strength == loop.control.strength
    assert other.update() == loop.control.update()
    assert other.history == loop.control.history


def test_held_out_outputs_by_a_function():
    y = torch.arange(40) % 2
    control = fsmap.TemperatureControl(
        None, lambda: (F.one_hot(y, 2).double(), y), start=1e-3, warmup=0
    )
    assert control.update() < 1e-3  # no errors: under-confident
    assert control.history[-1].score == 1.0


def test_authority_comes_from_the_optimizer(seeded: None):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    y = torch.arange(40) % 2
    moved = []
    for given in (optimizer, None):
        control = fsmap.TemperatureControl(
            model, None, start=1e-3, warmup=0, optimizer=given, signal=lambda out, y: 0.1
        )
        control.observe(F.one_hot(y, 2).double(), y)  # at the largest learning rate
        before = control.strength
        optimizer.step()
        schedule.step()
        control.observe(F.one_hot(y, 2).double(), y)  # at half of it
        moved.append(math.log(control.strength / before))
    assert moved[0] == pytest.approx(2 * 0.5 * moved[1])  # boost and trust


def test_authority_while_the_learning_rate_rises():
    """A warm-up is no sign that training is nearly over."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    authority = Authority()
    assert authority.of(None) is None
    assert authority.of(optimizer) is None  # no schedule
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    found = []
    for _ in range(9):
        found.append(authority.of(optimizer))
        optimizer.step()
        schedule.step()
    peak = 3
    assert found[:peak] == [1.0] * peak
    assert found[-1] < 0.1
    assert found[peak:] == sorted(found[peak:], reverse=True)


def test_bad_observations_change_nothing():
    control = fsmap.TemperatureControl(None, None, start=1e-3, warmup=0)
    y = torch.arange(4) % 2
    out = F.one_hot(y, 2).double()
    for args, message in (
        ((out, y, 2.0), "authority in .0, 1.*authority=2.0"),
        ((out[:0], y[:0]), "at least one held-out point.*got 0 points"),
        ((out, y, None, torch.ones(2)), r"one number, R; got shape \[2\]"),
    ):
        with pytest.raises(InputError, match=message):
            control.observe(*args)
    assert (control.updates, control.guard.best, control.history) == (0, 0.0, [])


def test_the_first_strength_is_limited_too():
    y = torch.arange(40) % 2
    sure = 9.0 * F.one_hot(torch.where(torch.arange(40) < 10, 1 - y, y), 2).double()
    control = fsmap.TemperatureControl(None, None, start=1e3, warmup=2)
    loss = float(F.cross_entropy(sure, y))
    for _ in range(2):
        control.observe(sure, y, laplacian=100.0)
    assert control.strength == pytest.approx(10 * loss / 100)


def test_R_limits_lambda_by_the_loss():
    y = torch.arange(40) % 2
    sure = 9.0 * F.one_hot(torch.where(torch.arange(40) < 10, 1 - y, y), 2).double()
    loss = F.cross_entropy(sure, y)
    control = fsmap.TemperatureControl(None, None, start=1e-3, warmup=0)
    assert control.observe(sure, y, laplacian=1e6).strength == pytest.approx(10 * float(loss) / 1e6)
    assert control.observe(sure, y, laplacian=torch.tensor(0.0)).strength > 2e-5  # no R, no limit
    assert control.observe(sure, y).strength > 4e-5


@pytest.mark.parametrize(
    ("model", "held_out", "options", "message"),
    [
        (None, None, {}, "found only from the LMAP or LaplacianPenalty"),
        (
            None,
            None,
            {"start": 1.0, "warmup": -1},
            "warmup >= 0 and batch_size >= 1, got warmup=-1",
        ),
    ],
)
def test_refusals(model, held_out, options, message):
    with pytest.raises(InputError, match=message):
        fsmap.TemperatureControl(model, held_out, **options)


def test_nothing_to_look_at():
    with pytest.raises(InputError, match="without a model and held-out data there is nothing"):
        fsmap.TemperatureControl(None, None, start=1.0).update()


def test_regression_needs_a_loss_or_a_start(seeded: None):
    model = nn.Linear(8, 1)
    x = torch.zeros(3, 8)
    penalty = fsmap.LaplacianPenalty(model, PX, num_points=4)
    with pytest.raises(InputError, match="to find start, give loss"):
        fsmap.TemperatureControl(penalty, (x, torch.zeros(3, 1)), signal="residual", noise_std=1.0)


WORKER = """
import sys
import torch, torch.distributed as dist
import fsmap
torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(0)
z = 3 * torch.randn(90, 4, generator=generator)
y = torch.multinomial((z / 2).softmax(1), 1, generator=generator)[:, 0]
part = slice(0, 60) if rank == 0 else slice(60, 90)
for signal in ("slope", "temperature"):
    control = fsmap.TemperatureControl(None, None, start=1e-3, warmup=0, signal=signal)
    control.observe(z[part], y[part])
    limited = fsmap.TemperatureControl(None, None, start=1e-3, warmup=0, signal=signal)
    limited.observe(z[part], y[part], 0.9, 1e6 * (1 + rank))  # R differs between ranks
    alone = fsmap.train.signals.find_signal(signal)(z, y)
    right = (z.argmax(1) == y).double().mean().item()
    with open(f"{sys.argv[1]}/{signal}-{rank}", "w") as file:
        print(control.strength, control.history[0].signal - alone,
              control.history[0].score - right, file=file)
    with open(f"{sys.argv[1]}/{signal}-limited-{rank}", "w") as file:
        print(limited.strength, file=file)
dist.barrier()
dist.destroy_process_group()
"""


def test_all_ranks_have_the_same_strength(tmp_path: Path):
    """Slope and accuracy of shares average to those of the whole; λ is the same, bit for bit."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(str(script), str(tmp_path)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    for signal in ("slope", "temperature"):
        ranks = [(tmp_path / f"{signal}-{rank}").read_text() for rank in (0, 1)]
        assert ranks[0] == ranks[1]
        held = [(tmp_path / f"{signal}-limited-{rank}").read_text() for rank in (0, 1)]
        assert held[0] == held[1]
        assert float(held[0]) < 1e-5  # the ceiling held, from 1e-3
    shares = (tmp_path / "slope-0").read_text().split()[1:]
    assert all(abs(float(number)) < 1e-12 for number in shares)


def test_the_example_runs_and_calibrates(seeded: None):
    file = Path(__file__).parents[2] / "examples" / "temperature_control.py"
    spec = importlib.util.spec_from_file_location("example_temperature_control", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_default_dtype(torch.float32)
    try:
        (plain, _), (steered, control) = module.train(steered=False), module.train()
    finally:
        torch.set_default_dtype(torch.float64)
    assert abs(math.log(steered["temperature"])) < abs(math.log(plain["temperature"])) / 4
    assert steered["nll"] < plain["nll"]
    assert steered["ece"] < plain["ece"]
    assert control.status == "steering"


class Several(nn.Module):
    """Two inputs, and an output in one of several wrappings."""

    def __init__(self, wrapping: str) -> None:
        super().__init__()
        self.inner, self.wrapping = nn.Linear(3, 2), wrapping

    def forward(self, a: torch.Tensor, b: torch.Tensor | None = None) -> object:
        out = self.inner(a if b is None else a + b)
        if self.wrapping == "pair":
            return 100 * out, out
        return SimpleNamespace(logits=out) if self.wrapping == "logits" else out


@pytest.mark.parametrize("kind", ["lmap", "penalty", "module"])
@pytest.mark.parametrize("inputs", ["tensor", "tuple", "dict"])
@pytest.mark.parametrize("wrapping", ["plain", "logits", "pair"])
def test_the_model_is_called_as_in_training(kind, inputs, wrapping, seeded):
    module, a, y = Several(wrapping), torch.randn(20, 3), torch.arange(20) % 2
    x = {"tensor": a, "tuple": (a, a), "dict": {"a": a, "b": a}}[inputs]
    wanted = module.inner(a if inputs == "tensor" else 2 * a).detach()
    forward = None
    if wrapping == "pair":

        def forward(module, x):
            first = (x,) if isinstance(x, torch.Tensor) else x
            return (module(**x) if isinstance(x, dict) else module(*first))[1]

    options = {"num_points": 4, "batchnorm": "frozen", "forward": forward}
    model = {
        "lmap": lambda: fsmap.LMAP(module, x, **options),
        "penalty": lambda: fsmap.LaplacianPenalty(module, x, **options),
        "module": lambda: module,
    }[kind]()
    control = fsmap.TemperatureControl(model, (x, y), start=1e-3)
    if kind == "module" and wrapping == "pair":
        with pytest.raises(UnsupportedModuleError, match="returned tuple.*a function as held_out"):
            control.update()
        return
    out, _ = control.held_out.outputs()
    torch.testing.assert_close(out, wanted)
    assert module.training


def sure() -> tuple[torch.Tensor, torch.Tensor]:
    """One in four is wrong, and all are certain."""
    y = torch.arange(40) % 2
    guess = torch.where(torch.arange(40) < 10, 1 - y, y)
    return 9.0 * F.one_hot(guess, 2).double(), y


@pytest.mark.parametrize(("authority", "times"), [(1.0, 1e-4), (1 / 16, 10**-0.5), (0.0, 10.0)])
def test_the_ceiling_knows_the_schedule(authority: float, times: float):
    """And not where the model is sure of everything: there it is open."""
    certain, y = sure()
    for out, factor in ((certain / 9, times), (certain, 10.0)):
        even = float(F.cross_entropy(out, y)) / 1e6
        control = fsmap.TemperatureControl(None, None, start=1.0, warmup=0)
        control.steering.ceiling.held = True
        seen = control.observe(out, y, authority, 1e6)
        assert control.steering.strength == pytest.approx(even * factor)
        felt = factor > 1e-4
        assert seen.strength == (control.steering.strength if felt else 0)
        assert (control.status == "warm-up") is not felt


def test_time_passes_in_the_warm_up_too():
    """Half of a long run is over after it, and half is to come."""
    certain, y = sure()
    strengths = []
    for warmup in (0, 80):
        control = fsmap.TemperatureControl(None, None, start=1.0, warmup=warmup, interval=1.0)
        for t in range(101):
            a = 0.5 * (1 + math.cos(math.pi * t / 200))
            control.observe(certain / 9, y, a, 1e6)
        strengths.append(control.steering.strength)
    even = float(F.cross_entropy(certain / 9, y)) / 1e6
    assert strengths == pytest.approx([1e-4 * even, 1e-4 * even])


def over_confident(times: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Three of four are right, and T is ``times``."""
    y = torch.arange(40) % 2
    guess = torch.where(torch.arange(40) < 10, 1 - y, y)
    return math.log(3) * times * (F.one_hot(guess, 2).double() - 0.5), y


def test_margin_and_alarm_as_they_are():
    even = 1e-2
    for log_t, moved, times in (
        (0.0, -0.1, 1e-4),
        (0.08, -0.02, 1e-4),
        (0.19, 0.09, 1e-4),
        (0.34, 0.24, 0.25 * math.exp(-3 * 0.3)),
        (0.375, 0.275, 0.25 * math.exp(-3 * 0.125)),
        (0.7, 0.6, 10.0),
    ):
        out, y = over_confident(math.exp(log_t))
        control = fsmap.TemperatureControl(None, None, start=1e-6, warmup=0)
        control.observe(out, y, 1.0)
        assert math.log(control.strength / 1e-6) == pytest.approx(0.05 * 1.5 * moved, abs=1e-4)
        control = fsmap.TemperatureControl(None, None, start=1.0, warmup=0)
        control.steering.ceiling.held = True
        control.observe(out, y, 1.0, float(F.cross_entropy(out, y)) / even)
        least = min(even * times, control.steering.cap)
        assert control.steering.strength == pytest.approx(least, rel=0.02)
    slope = fsmap.TemperatureControl(None, None, start=1.0, warmup=0, signal="slope")
    assert (slope.steering.margin, slope.steering.alarm) == (0.0, math.inf)


def test_the_last_good_state_is_restored_after_a_resume(seeded: None):
    module = nn.Linear(2, 2)
    x = torch.randn(40, 2)
    y = module(x).argmax(1)
    made = [fsmap.TemperatureControl(module, (x, y), start=1e-3, warmup=0) for _ in range(2)]
    made[0].update()
    made[0].collapses = 3
    good = module.weight.detach().clone()
    made[1].load_state_dict(made[0].state_dict())
    assert made[1].collapses == 3
    with torch.no_grad():
        module.weight.fill_(torch.nan)
    made[1].update()
    assert made[1].collapses == 4
    assert torch.equal(module.weight, good)


def test_a_dip_does_not_move_lambda():
    """Accuracy has halved, once: that may be noise, and its temperature too."""
    out, y = over_confident(1.0)
    control = fsmap.TemperatureControl(None, None, start=1e-3, warmup=0)
    control.observe(out, y)
    before = control.strength
    worse = 3 * torch.where((torch.arange(40) < 34)[:, None], out, out.flip(1))  # 24 are right
    seen = control.observe(worse, y)
    assert seen.verdict == "suspect"
    assert seen.signal > 0.1
    assert control.strength == before


def test_a_dip_does_not_close_the_ceiling_before_a_collapse():
    """Or the cap would be far below the λ that did it."""
    out, y = over_confident(2.0)  # an alarm
    control = fsmap.TemperatureControl(None, None, start=1e-3, warmup=0)
    even = float(F.cross_entropy(out, y)) / 1e2
    control.observe(out, y, 0.7, 1e2)
    before = control.strength
    assert before > 10 * even * 1e-4  # more than it may be without one
    worse = torch.where((torch.arange(40) < 34)[:, None], out, out.flip(1))
    assert control.observe(worse, y, 0.7, 1e2).verdict == "suspect"
    assert control.strength == before
    assert control.observe(worse, y, 0.7, 1e2).verdict == "collapsed"
    assert control.steering.cap == pytest.approx(before / 3)
    assert control.strength == pytest.approx(before / 10)


def test_the_ceiling_is_not_opened_by_a_collapse():
    """A constant is as over-confident as can be."""
    out, y = over_confident(1.0)
    control = fsmap.TemperatureControl(None, None, start=1e-3, warmup=0)
    control.observe(out, y, 1.0)
    constant = torch.zeros_like(out)
    constant[:, 0] = 30.0
    loss = float(F.cross_entropy(constant, y))
    seen = control.observe(constant, y, 1.0, loss / 1e-6)
    assert seen.verdict == "collapsed"
    assert control.steering.strength == pytest.approx(1e-10, rel=0.01)


def test_a_collapse_while_lambda_is_not_felt_is_not_its_doing():
    out, y = over_confident(1.0)
    control = fsmap.TemperatureControl(None, None, start=1e-3, warmup=0)
    control.observe(out, y, 1.0, 1e3)
    assert (control.strength, control.status) == (0.0, "warm-up")
    before = control.steering.strength, control.steering.cap
    constant = torch.zeros_like(out)
    constant[:, 0] = 30.0
    assert control.observe(constant, y, 1.0, 1e3).verdict == "collapsed"
    assert (control.steering.strength, control.steering.cap) == before
    assert control.observe(out, y, 0.1, 1e3).strength > 0


def test_a_calibrated_model_asks_for_less_at_a_high_learning_rate():
    """The margin of log T, and of no other signal."""
    out, y = over_confident(1.05)
    for signal, rises in (("temperature", False), ("slope", True)):
        control = fsmap.TemperatureControl(None, None, start=1e-3, warmup=0, signal=signal)
        control.observe(out, y, 1.0)
        assert (control.strength > 1e-3) is rises
        assert (control.strength < 1e-3) is not rises


@pytest.mark.parametrize(("times", "moves"), [(1.08, False), (1.6, True)])
def test_much_over_confidence_counts_at_any_learning_rate(times: float, moves: bool):
    """A little over-confidence is normal while the learning rate is high, a lot is not."""
    out, y = over_confident(times)
    control = fsmap.TemperatureControl(None, None, start=1e-3, warmup=0)
    seen = control.observe(out, y, 1.0)
    assert seen.signal == pytest.approx(math.log(times), abs=1e-3)
    assert (control.strength > 1.0001e-3) is moves


def test_a_collapse_before_lambda_is_on_is_not_its_fault():
    out, y = sure()
    control = fsmap.TemperatureControl(None, None, start=1e-4, warmup=6)
    control.observe(out, y)
    constant = torch.zeros_like(out)
    control.observe(constant, y)
    assert control.collapses == 1
    assert control.steering.cap == control.steering.high
    assert control.steering.strength == 1e-4


def test_a_first_strength_that_cannot_be_found(seeded: None):
    lm = fsmap.LMAP(network(), PX, num_points=8)
    x, y = made_up()
    with pytest.raises(InputError, match="the first λ, cannot be found: .* Give start instead"):
        fsmap.TemperatureControl(lm, lambda: (torch.randn(40, 2), y[:40]))


@pytest.mark.usefixtures("seeded")
def test_held_out_data_that_are_no_pair():
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    data = TensorDataset(x, y)
    for wrong in (data, DataLoader(data), x, (x, y, y)):
        with pytest.raises(InputError, match="must be a pair of inputs and targets, or a function"):
            fsmap.TemperatureControl(nn.Linear(3, 2), wrong, start=1e-4)
    pair = tuple(map(torch.cat, zip(*DataLoader(data, 2), strict=True)))  # as the message says
    control = fsmap.TemperatureControl(nn.Linear(3, 2), pair, start=1e-4)
    control.update()
    assert len(control.history) == 1
    lm = fsmap.LMAP(nn.Linear(3, 2), fsmap.px.Normal(shape=(3,)), num_points=4)
    with pytest.raises(InputError, match=r"no integer labels of \[6, 2\] outputs: torch.float"):
        fsmap.TemperatureControl(lm, (x, y.float()))


def test_a_state_of_something_else_changes_nothing():
    control = fsmap.TemperatureControl(None, None, start=1e-4, warmup=0)
    before = control.state_dict()
    for state in ({}, {**before, "updates": 7}, {"weight": torch.zeros(2)}):
        other = {k: v for k, v in state.items() if k != "guard"}
        with pytest.raises(InputError, match="no state of a TemperatureControl: it lacks .*guard"):
            control.load_state_dict(other)
    assert control.state_dict() == before


def test_the_first_lambda_is_small_after_a_warm_up_too():
    """An alarm from the first look on, and an R that grows during the warm-up."""
    out, y = over_confident(2.0)
    loss = float(F.cross_entropy(out, y))
    control = fsmap.TemperatureControl(None, None, start=1.0, warmup=4)
    for r in (1.0, 10.0, 100.0, 1000.0):
        assert control.strength == 0
        control.observe(out, y, 1.0, r)
    assert control.strength * 1000.0 == pytest.approx(0.01 * loss)


def test_the_optimizer_of_another_model_is_refused(seeded: None):
    held_out = torch.randn(40, 8), torch.arange(40) % 2
    other = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(InputError, match="holds no parameter of the model"):
        fsmap.TemperatureControl(network(), held_out, start=1e-3, optimizer=other)
