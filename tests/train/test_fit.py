"""``fit`` against a plain torch loop, its seeds, its stops, and its resumption after a kill."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

import fsmap
from cases import case, interrupt
from fsmap import adam, cosine, fit, sgd
from fsmap.errors import CheckpointError, DivergedError, InputError, UnsupportedModuleError
from fsmap.px import Stream
from fsmap.train.loop import Batches, Schedule
from fsmap.types import Batch, Draws, Params

NOISE, PRIOR = fsmap.Gaussian(0.2), fsmap.Normal(1.0)


def uniform() -> fsmap.px.Uniform:
    return fsmap.px.Uniform(-1.0, 1.0)


def data(n: int = 24) -> Batch:
    x = torch.linspace(-1, 1, n)[:, None]
    return Batch(x, torch.sin(3 * x))


def quiet(objective: fsmap.Objective, train: object = None, **knobs: object):
    it, train = case("tanh_mlp"), data() if train is None else train
    return fit(objective, it.f, it.params, train, progress=False, **knobs)


def fs_map(**knobs: object) -> fsmap.Objective:
    knobs = {"num_points": 12, "jitter": 1e-3, "num_data": 24} | knobs
    return fsmap.fs_map(NOISE, PRIOR, uniform(), **knobs)


def l_map(**knobs: object) -> fsmap.Objective:
    knobs = {"num_points": 6, "jitter": 2.0, "num_data": 24} | knobs
    return fsmap.l_map(NOISE, PRIOR, uniform(), **knobs)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_fs_map_equals_a_plain_loop():
    """Mini-batches, warm-up, clipping, and the log-posterior of the function written out."""
    steps, it, train = 15, case("tanh_mlp"), data()
    knobs = {"optimizer": adam(0.05), "schedule": Schedule(warmup=5), "batch_size": 8, "seed": 3}
    state, history = quiet(fs_map(), steps=steps, clip=6.0, **knobs)

    twin = {n: p.detach().clone().requires_grad_() for n, p in it.params.items()}
    moving = torch.optim.Adam(twin.values(), lr=0.05)
    batches = Batches(24, 8, seed=3)
    noise, prior = torch.distributions.Normal(0, 0.2), torch.distributions.Normal(0, 1.0)
    for step in range(steps):
        rows = batches.rows(step)
        x_eval = uniform().sample(12, Stream(3, step).points())
        jac = torch.cat([j.flatten(1) for j in jacrev(it.f)(twin, x_eval).values()], 1)
        parts = [
            3 * noise.log_prob(train.y[rows] - it.f(twin, train.x[rows])).sum(),
            prior.log_prob(torch.cat([p.reshape(-1) for p in twin.values()])).sum(),
            -0.5 * torch.logdet(jac.mT @ jac / 12 + 1e-3 * torch.eye(10)),
        ]
        recorded = [history.parts[step][name] for name in ("likelihood", "prior", "geometry")]
        assert recorded == pytest.approx([p.item() for p in parts], rel=1e-8)
        loss = -sum(parts) / 24
        assert history.loss[step].item() == pytest.approx(loss.item(), rel=1e-8)
        moving.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.values(), 6.0)  # not all gradients are longer
        for group in moving.param_groups:
            group["lr"] = 0.05 * min(1, (step + 1) / 5)
        moving.step()
    torch.testing.assert_close(state.params, twin, rtol=1e-8, atol=1e-10)


def test_l_map_equals_a_plain_loop():
    steps, it, train = 12, case("tanh_mlp"), data()
    state, _ = quiet(l_map(estimator="fd"), steps=steps, optimizer=sgd(1e-3, momentum=0.9), seed=1)
    twin = {n: p.detach().clone().requires_grad_() for n, p in it.params.items()}
    moving = torch.optim.SGD(twin.values(), lr=1e-3, momentum=0.9)
    noise, prior = torch.distributions.Normal(0, 0.2), torch.distributions.Normal(0, 1.0)
    for step in range(steps):
        stream = Stream(1, step)
        x_eval, psi = uniform().sample(6, stream.points()), stream.psi(twin)
        moved = {n: p + 1e-3 * psi[n][0] for n, p in twin.items()}
        R = (it.f(moved, x_eval) - it.f(twin, x_eval)).square().sum() / 6 / 1e-6
        log_p = noise.log_prob(train.y - it.f(twin, train.x)).sum() - R / (2 * 2.0)
        log_p = log_p + prior.log_prob(torch.cat([p.reshape(-1) for p in twin.values()])).sum()
        moving.zero_grad()
        (-log_p / 24).backward()
        moving.step()
    torch.testing.assert_close(state.params, twin, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("spec", "theirs"), [(sgd(0.1), torch.optim.SGD), (adam(0.1), torch.optim.Adam)]
)
def test_a_gradient_with_other_strides(spec: object, theirs: type, generator: torch.Generator):
    """Torch's fused optimizers ignore them."""
    x, w = torch.randn(24, 2, generator=generator), torch.randn(3, 2, generator=generator)
    train, objective = Batch(x, x @ w.mT + 1), fsmap.ps_map(NOISE, fsmap.Flat(), num_data=24)
    f = lambda p, x: x @ p["w"].mT.contiguous()  # noqa: E731
    state, _ = fit(objective, f, {"w": w}, train, steps=3, optimizer=spec, progress=False)
    twin = w.clone().requires_grad_()
    moving = theirs([twin], lr=0.1, fused=False)
    for _ in range(3):
        moving.zero_grad()
        objective.loss(f, {"w": twin}, train, Draws())[0].backward()
        moving.step()
    torch.testing.assert_close(state.params["w"], twin.detach())


def test_the_start_is_never_modified_and_the_seed_decides():
    it = case("tanh_mlp")
    before = {n: p.detach().clone() for n, p in it.params.items()}
    one, first = quiet(l_map(), steps=4, seed=0, batch_size=8)
    with torch.no_grad():
        two, second = quiet(l_map(), steps=4, seed=0, batch_size=8)
    three, _ = quiet(l_map(), steps=4, seed=1, batch_size=8)
    assert same(one.params, two.params)
    assert torch.equal(first.loss, second.loss)
    assert not same(one.params, three.params)
    fit(l_map(), it.f, it.params, data(), steps=2, progress=False)
    assert same(before, {n: p.detach() for n, p in it.params.items()})
    assert not any(p.requires_grad for p in one.params.values())


def test_dropout_is_repeatable_and_leaves_torch_alone(seeded: None):
    module = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, 1))
    f, params = fsmap.functional(module)
    state = torch.random.get_rng_state()
    one, two, three = (fit(l_map(), f, params, data(), steps=3, seed=s)[0] for s in (0, 0, 1))
    assert same(one.params, two.params)
    assert not same(one.params, three.params)
    assert torch.equal(state, torch.random.get_rng_state())


def metric(*values: float):
    """A metric that returns these values one after the other."""
    found = iter(values)
    return lambda out, y: next(found)


def test_validation_keeps_the_best():
    params = []
    keep = lambda step, p: params.append({n: t.clone() for n, t in p.items()})  # noqa: E731
    knobs = {"on": data(), "by": metric(3.0, 1.0, 2.0, 5.0), "validate_every": 5}
    state, history = quiet(l_map(), steps=20, callback=keep, **knobs)
    assert (state.best.step, state.best.value) == (10, 1.0)
    assert same(state.best.params, params[9])
    assert same(state.params, params[19])
    assert history.validation["step"].tolist() == [5, 10, 15, 20]
    assert history.validation["value"].tolist() == [3.0, 1.0, 2.0, 5.0]


def test_the_last_step_is_validated_and_nan_is_never_best():
    values = metric(torch.nan, torch.nan)
    state, history = quiet(l_map(), steps=7, on=data(), by=values, validate_every=5)
    assert history.validation["step"].tolist() == [5, 7]
    assert state.best is None


def test_validation_switches_random_layers_off(seeded: None):
    module = nn.Sequential(nn.Linear(1, 40), nn.Dropout(0.5), nn.Linear(40, 1))
    module[0].eval()
    f, params = fsmap.functional(module)
    outputs = []
    knobs = {"steps": 1, "on": data(), "by": lambda out, y: outputs.append(out) or 0.0}
    state, _ = fit(l_map(), f, params, data(), **knobs, progress=False)
    assert [m.training for m in module.modules()] == [True, False, True, True]
    module.eval()
    torch.testing.assert_close(outputs[0], f(state.params, data().x))


def test_a_callback_sees_every_step_and_may_stop():
    """The step at which it stops is the last one, and validated."""
    seen = []
    stop = lambda step, params: seen.append(step) or step == 6  # noqa: E731
    state, history = quiet(l_map(), steps=50, callback=stop, on=data(), by=fsmap.metrics.rmse)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert state.step == state.best.step == 6
    assert len(history.loss) == 6


def test_divergence_names_the_term():
    text = r"step [1-9]\d*: the likelihood term .*values: loss \d"
    with pytest.raises(DivergedError, match=text):
        quiet(fsmap.ps_map(NOISE, fsmap.Flat(), num_data=24), steps=400, optimizer=sgd(1e30))
    with pytest.raises(DivergedError, match=r"step 0: the geometry term .*values: none.*jitter"):
        quiet(l_map(jitter=1e-320), steps=5)


class Kink(NamedTuple):
    """A prior whose derivative at 0 is infinite."""

    def value(self, params: Params) -> Tensor:
        return torch.stack([p.abs().sqrt().sum() for p in params.values()]).sum()

    def check(self, params: Params) -> None:
        pass


@pytest.mark.parametrize("log_every", [1, 50])
def test_divergence_of_the_gradient_alone(log_every: int):
    objective = fsmap.ps_map(NOISE, Kink(), num_data=24)
    start = {"w": torch.zeros(1)}
    with pytest.raises(DivergedError, match=r"step 0: grad_norm, but no term.*derivative"):
        fit(objective, line, start, data(), steps=3, log_every=log_every, progress=False)


def line(params: Params, x: Tensor) -> Tensor:
    return x * params["w"]


def test_clipping_shortens_the_step():
    objective = fsmap.ps_map(fsmap.Gaussian(0.01), fsmap.Flat(), num_data=24)
    start = {"w": torch.ones(1), "unused": torch.ones(2)}
    knobs = {"steps": 1, "optimizer": sgd(1.0), "progress": False}
    state, history = fit(objective, line, start, data(), clip=0.3, **knobs)
    assert float((state.params["w"] - 1).abs()) == pytest.approx(0.3, rel=1e-6)
    assert history.columns["grad_norm"][0] > 100  # the norm before clipping
    assert state.params["unused"].tolist() == [1.0, 1.0]


def test_the_history_is_thinned_and_keeps_the_last_step():
    _, whole = quiet(l_map(), steps=108)
    _, thin = quiet(l_map(), steps=108, log_every=30)
    assert thin.columns["step"].tolist() == [0, 30, 60, 90, 107]
    assert torch.equal(thin.loss, whole.loss[[0, 30, 60, 90, 107]])
    assert (whole.columns["seconds"].diff() >= 0).all()
    assert whole.loss[-1].item() == pytest.approx(-sum(whole.parts[-1].values()) / 24, rel=1e-12)
    assert repr(thin) == "History(5 steps, 0 validations)"


def test_active_batchnorm_is_refused(seeded: None):
    body = nn.Sequential(nn.Linear(1, 3), *(nn.BatchNorm1d(3) for _ in range(4)), nn.Linear(3, 1))
    f, params = fsmap.functional(body)
    with pytest.raises(UnsupportedModuleError, match=r"'3' \(BatchNorm1d\) and 1 more.*\.eval\(\)"):
        fit(l_map(), f, params, data(), steps=1)
    body.eval()
    state, _ = fit(l_map(), f, params, data(), steps=1, progress=False)
    assert state.step == 1


def test_labels_out_of_range_are_found_before_training():
    """Also if the first batch does not hold them."""
    it = case("wide")
    y = torch.tensor([0, 1, 2, 0, -100])
    objective = fsmap.ps_map(fsmap.Categorical(), PRIOR, num_data=5)
    with pytest.raises(InputError, match=r"labels .*from -100"):
        fit(objective, it.f, it.params, (it.x, y), steps=1, batch_size=2)


def test_data_may_come_in_three_forms_and_takes_the_dtype_of_the_parameters():
    x, y = data()
    start = {"w": torch.ones(1, dtype=torch.float32)}
    forms = (data(), [x, y], SimpleNamespace(x=x, y=y))
    ends = [fit(fsmap.ps_map(NOISE, PRIOR, num_data=24), line, start, d, steps=2) for d in forms]
    assert all(same(state.params, ends[0][0].params) for state, _ in ends)
    assert ends[0][0].params["w"].dtype == torch.float32


@pytest.mark.parametrize("replace", [False, True])
def test_batches_depend_on_seed_and_step_alone(replace: bool):
    one, two = (Batches(20, 6, seed=1, replace=replace) for _ in range(2))
    forward = [one.rows(step) for step in range(8)]
    with torch.device("meta"):  # the default device is not that of the generator
        backward = [two.rows(step) for step in reversed(range(8))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    assert not torch.equal(forward[0], Batches(20, 6, seed=2, replace=replace).rows(0))
    if not replace:
        first, second = torch.cat(forward[:3]), torch.cat(forward[3:6])
        assert len(first.unique()) == len(second.unique()) == 18  # an epoch has each point once
        assert not torch.equal(first, second)


def test_with_replacement_a_batch_may_be_larger_than_the_data():
    counts = Batches(4, 512, seed=0, replace=True).rows(3).bincount()
    assert (counts - 128).abs().max() < 5 * (512 * 0.25 * 0.75) ** 0.5


RUN = {"steps": 30, "optimizer": adam(0.02), "batch_size": 7, "clip": 5.0, "seed": 2}
RUN["checkpoint_every"] = 4


@pytest.mark.parametrize("at", [1, 4, 15])
@pytest.mark.parametrize("moving", [adam(0.02), sgd(1e-3, momentum=0.9)], ids=["adam", "sgd"])
def test_resume_is_bit_exact(tmp_path: Path, at: int, moving: object):
    values = {"on": data(), "by": fsmap.metrics.rmse, "validate_every": 3}
    knobs = RUN | values | {"optimizer": moving, "schedule": cosine(warmup=5)}
    whole, history = quiet(l_map(), **knobs)

    path = tmp_path / "run.ckpt"
    with pytest.raises(KeyboardInterrupt):
        quiet(l_map(), **knobs, checkpoint=path, callback=interrupt(at))
    assert path.exists() == (at > 4)
    again, resumed = quiet(l_map(), **knobs, checkpoint=path, resume=True)
    assert same(again.params, whole.params)
    assert same(again.best.params, whole.best.params)
    assert again.best[1:3] == whole.best[1:3]
    del history.columns["seconds"], resumed.columns["seconds"]
    assert same(history.columns, resumed.columns)
    assert same(history.validation, resumed.validation)


def test_a_resumed_run_keeps_r0(tmp_path: Path):
    """Also where it is started from other parameters than the first time."""
    objective, path = l_map(jitter=None, reg_nats=0.3), tmp_path / "run.ckpt"
    knobs = {"checkpoint": path, "resume": True, "optimizer": adam(0.02), "progress": False}
    it, other = case("tanh_mlp"), case("tanh_mlp", seed=1)
    alone = {"optimizer": adam(0.02), "progress": False}
    whole, _ = fit(objective, it.f, it.params, data(), **alone, steps=20)
    fit(objective, it.f, it.params, data(), **knobs, steps=8)
    again, _ = fit(objective, it.f, other.params, data(), **knobs, steps=20)
    assert same(again.params, whole.params)


@pytest.mark.gpu
def test_resume_is_bit_exact_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With deterministic kernels, as torch defines them."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    it, path = case("tanh_mlp"), tmp_path / "run.ckpt"
    there = {n: p.detach().cuda() for n, p in it.params.items()}

    def there_with(**knobs: object):
        return fit(l_map(), it.f, there, data(), progress=False, **(RUN | knobs))[0].params

    try:
        torch.use_deterministic_algorithms(True)
        whole = there_with()
        there_with(steps=13, checkpoint=path)
        again = there_with(checkpoint=path, resume=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(again, whole)


def test_a_finished_run_is_read_back_and_a_longer_one_goes_on(tmp_path: Path):
    path = tmp_path / "run.ckpt"
    short, _ = quiet(l_map(), **RUN, checkpoint=path)
    again, history = quiet(l_map(), **RUN, checkpoint=path, resume=True)
    assert same(short.params, again.params)
    assert len(history.loss) == 30
    longer, history = quiet(l_map(), **(RUN | {"steps": 40}), checkpoint=path, resume=True)
    whole, expected = quiet(l_map(), **(RUN | {"steps": 40}))
    assert same(longer.params, whole.params)
    assert torch.equal(history.loss, expected.loss)


@pytest.mark.parametrize(
    ("objective", "train", "knobs", "text"),
    [
        ({"jitter": 3.0}, None, {}, r"objective.geometry.jitter: 2.0 there, 3.0 here"),
        ({}, None, {"seed": 9, "clip": 1.0}, r"seed: 2 there, 9 here; clip: 5.0 there, 1.0 here"),
        ({}, None, {"optimizer": adam(0.02, betas=(0.5, 0.9))}, r"optimizer.betas"),
        ({}, None, {"schedule": Schedule(warmup=3)}, r"schedule.warmup: 0 there, 3 here"),
        ({}, None, {"schedule": cosine()}, r"steps: any there, 30 here"),
        ({}, None, {"log_every": 2}, r"log_every: 1 there, 2 here"),
        ({}, None, {"on": data(), "by": fsmap.metrics.rmse}, r"validate_every: None there, 100"),
        ({}, (data().x, -data().y), {}, r"data.y: float64 \[24, 1\] sha256"),
        ({}, None, {"resume": False}, r"exists already. Pass resume=True"),
        ({}, None, {"steps": 3}, r"has taken 30 steps already, more than steps=3"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, objective: dict, train: object, knobs, text: str):
    path = tmp_path / "run.ckpt"
    quiet(l_map(), **RUN, checkpoint=path)
    with pytest.raises(CheckpointError, match=text):
        quiet(l_map(**objective), train, **(RUN | {"checkpoint": path, "resume": True} | knobs))


def test_numbers_of_numpy_are_those_of_python(tmp_path: Path):
    """In the settings that a checkpoint holds."""
    plain = RUN | {"log_every": 1, "schedule": cosine(), "checkpoint": tmp_path / "run.ckpt"}
    numpy = plain | {k: np.int64(v) for k, v in plain.items() if isinstance(v, int)}
    quiet(l_map(), **(numpy | {"clip": torch.tensor(5.0)}))
    quiet(l_map(), **plain, resume=True)
    with pytest.raises(CheckpointError, match="seed: 2 there, 3 here"):
        quiet(l_map(), **(numpy | {"seed": np.int64(3)}), resume=True)


def test_another_architecture_is_refused(tmp_path: Path):
    path, it = tmp_path / "run.ckpt", case("relu")
    quiet(l_map(), **RUN, checkpoint=path)
    objective, train = fsmap.ps_map(NOISE, PRIOR, num_data=6), (it.x, torch.zeros(6, 1))
    with pytest.raises(CheckpointError, match=r"0.weight: float64 \[3, 1\] there, .* \[4, 2\]"):
        fit(objective, it.f, it.params, train, steps=3, checkpoint=path, resume=True)


def test_another_number_of_rows_than_the_objective_was_made_for_is_said():
    objective = fsmap.ps_map(NOISE, fsmap.Flat(), num_data=7)
    with pytest.warns(UserWarning, match="made for num_data=7, the data have 24 rows"):
        quiet(objective, steps=1)
