"""``fit_population``: member k is the same run alone, whoever its neighbors are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fsmap
from cases import Shared, case, interrupt
from fsmap import Grid, adam, cosine, fit, fit_population, sgd
from fsmap.errors import (
    CheckpointError,
    DivergedError,
    DivergedWarning,
    InputError,
    UnsupportedModuleError,
)
from fsmap.train import population
from fsmap.train.loop import Schedule
from fsmap.train.population import initialize, start
from fsmap.types import Batch, Params

SAME = {"rtol": 1e-10, "atol": 1e-10}
RUN = {"steps": 20, "optimizer": adam(0.02), "batch_size": 8, "progress": False}
BETAS = adam(0.02, betas=(0.8, 0.9))


def data(shift: float = 0.0) -> Batch:
    x = torch.linspace(-1, 1, 24)[:, None]
    return Batch(x, torch.sin(3 * x + shift))


def terms(std: object = 1.0) -> tuple[object, object, object]:
    return fsmap.Gaussian(0.2), fsmap.Normal(std), fsmap.px.Uniform(-1.0, 1.0)


def ps_map(prior_std: object) -> fsmap.Objective:
    return fsmap.ps_map(*terms(prior_std)[:2], num_data=24)


def fs_map(prior_std: object, jitter: object, num_points: int = 12) -> fsmap.Objective:
    return fsmap.fs_map(*terms(prior_std), num_points=num_points, jitter=jitter, num_data=24)


def l_map(prior_std: object, jitter: object, **knobs: object) -> fsmap.Objective:
    return fsmap.l_map(*terms(prior_std), num_points=6, jitter=jitter, num_data=24, **knobs)


def strength(reg_strength: object) -> fsmap.Objective:
    return l_map(1.0, None, reg_strength=reg_strength)


def nats(reg_nats: object, **knobs: object) -> fsmap.Objective:
    return l_map(1.0, None, reg_nats=reg_nats, every=2, **knobs)


def changed(**knobs: object) -> Callable[..., fsmap.Objective]:
    return lambda prior_std, jitter: l_map(prior_std, jitter, **knobs)


BUILDS = {
    "ps_map": (ps_map, {"prior_std": [0.3, 1.0, 3.0]}),
    "fs_map": (fs_map, {"prior_std": [0.5, 2.0], "jitter": [1e-2, 1.0]}),
    "fs_map_dual": (
        lambda prior_std, jitter: fs_map(prior_std, jitter, 4),
        {"prior_std": [0.5, 2.0], "jitter": [1e-2, 1.0]},
    ),
    **{
        f"l_map_{name}": (changed(estimator=name), {"prior_std": [0.5, 2.0], "jitter": [1e-2, 1.0]})
        for name in ("fd", "fd_central", "jvp", "vjp", "exact")
    },
    "l_map_every": (changed(every=3), {"prior_std": [0.5, 2.0], "jitter": [0.1]}),
    "l_map_probes": (changed(probes=3), {"prior_std": [0.5, 2.0], "jitter": [0.1]}),
    "strength": (strength, {"reg_strength": [0.0, 1e-3, 1e-1]}),
    "nats": (nats, {"reg_nats": [0.0, 0.05, 1.0]}),
    "nats_r0": (lambda reg_nats, r0: nats(reg_nats, r0=r0), {"reg_nats": [0.1], "r0": [0.1, 2.0]}),
}


def mlp() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()


f, _ = fsmap.functional(mlp())


def one(params: Params, k: int) -> Params:
    return {name: p[k] for name, p in params.items()}


def assert_members_are_runs_alone(
    build: Callable[..., fsmap.Objective],
    grid: Grid,
    f: object,
    train: object,
    init: Callable[[int], Params] | None = None,
    **knobs: object,
) -> None:
    init = init or (lambda seed: initialize(f.module, seed))
    states, history = fit_population(build, grid, f, train, init=init, **knobs)
    alone = {k: v for k, v in knobs.items() if k not in ("chunk", "graph")}
    for k, member in enumerate(grid):
        hypers = {n: member[n] for n in grid.hyper_names}
        own = train[member["split"]] if "split" in member else train
        seed = member.get("seed", 0)
        state, expected = fit(build(**hypers), f, init(seed), own, seed=seed, **alone)
        torch.testing.assert_close(one(states.params, k), state.params, **SAME)
        for name in ("loss", "likelihood", "prior", "geometry", "grad_norm", "lr", "step"):
            found = history.member(k).columns[name]
            torch.testing.assert_close(found, expected.columns[name], rtol=1e-9, atol=1e-9)


CHUNKED = [
    (name, chunk) for name in ("ps_map", "fs_map", "l_map_every", "nats") for chunk in (1, 3)
]


@pytest.mark.parametrize(("name", "chunk"), [*((name, "auto") for name in BUILDS), *CHUNKED])
def test_a_member_is_the_same_run_alone(name: str, chunk: object):
    build, axes = BUILDS[name]
    knobs = RUN | {"steps": 8, "chunk": chunk, "clip": 3.0, "schedule": Schedule(warmup=5)}
    assert_members_are_runs_alone(build, Grid(**axes, seed=[0, 7]), f, data(), **knobs)


def test_a_resumed_population_keeps_r0(tmp_path: Path):
    grid, path = Grid(reg_nats=[0.05, 1.0], seed=[0, 7]), tmp_path / "run.ckpt"
    whole, _ = fit_population(nats, grid, f, data(), **RUN)
    knobs = RUN | {"checkpoint": path, "resume": True}
    fit_population(nats, grid, f, data(), **(knobs | {"steps": 8}))
    again, _ = fit_population(nats, grid, f, data(), **knobs)
    torch.testing.assert_close(again.params, whole.params, rtol=0, atol=0)


@pytest.mark.parametrize("splits", [{}, {"split": ["a", "b"]}], ids=["one set", "splits"])
@pytest.mark.parametrize("moving", [sgd(1e-3, momentum=0.9, nesterov=True), BETAS])
@pytest.mark.parametrize("batch_size", [None, 8, 40])
def test_with_every_optimizer_and_kind_of_batch(splits: dict, moving: object, batch_size: object):
    knobs = RUN | {"optimizer": moving, "batch_size": batch_size, "replace": batch_size == 40}
    grid = Grid(prior_std=[0.5, 2.0], jitter=[0.1], **splits, seed=range(2))
    train = {"a": data(), "b": data(1.0)} if splits else data()
    build = BUILDS["l_map_jvp"][0]
    assert_members_are_runs_alone(build, grid, f, train, **knobs, schedule=cosine())


@pytest.mark.parametrize(
    "name", ["cnn", "layernorm", "batchnorm_eval", "sequence_eval", "frozen", "dict_input"]
)
def test_on_other_architectures(name: str):
    it = case(name)
    with torch.no_grad():
        y = torch.zeros_like(it.f(it.params, it.x))
    px = fsmap.px.as_px(lambda n, generator: it.x)

    def build(prior_std: object) -> fsmap.Objective:
        terms, n = (fsmap.Gaussian(0.5), fsmap.Normal(prior_std), px), len(y)
        return fsmap.l_map(*terms, num_points=n, jitter=1.0, num_data=n)

    init = lambda seed: {n: (1 + 0.1 * seed) * p for n, p in it.params.items()}  # noqa: E731
    knobs = RUN | {"steps": 5, "batch_size": None}
    assert_members_are_runs_alone(
        build, Grid(prior_std=[0.5, 2.0], seed=range(2)), it.f, (it.x, y), init, **knobs
    )


def test_shared_parameters_and_dropout():
    with torch.random.fork_rng(devices=[]):
        module = nn.Sequential(nn.Linear(1, 3), Shared(), nn.Dropout(0.4), nn.Linear(3, 1))
    f, _ = fsmap.functional(module)
    grid = Grid(prior_std=[0.5, 2.0], jitter=[0.1], seed=range(2))
    assert_members_are_runs_alone(BUILDS["l_map_fd"][0], grid, f, data(), **RUN | {"steps": 6})


def test_p_x_may_depend_on_a_hyper_parameter():
    """Then the configurations of a seed have draws of their own, from the same stream."""

    def build(width: object) -> fsmap.Objective:
        px = fsmap.px.as_px(lambda n, generator: width * torch.rand(n, 1, generator=generator))
        return fsmap.l_map(*terms()[:2], px, num_points=6, jitter=0.1, num_data=24)

    assert_members_are_runs_alone(build, Grid(width=[0.5, 3.0], seed=range(2)), f, data(), **RUN)


class Cliff(NamedTuple):
    """A prior whose Cholesky factor stops existing where w + edge is not positive."""

    edge: Tensor

    def value(self, params: Params) -> Tensor:
        matrix = (self.edge + params["w"].sum()) * torch.eye(2)
        return 1e-3 * torch.linalg.cholesky(matrix).diagonal().log().sum()

    def check(self, params: Params) -> None:
        pass


def line(params: Params, x: Tensor) -> Tensor:
    return x * params["w"]


@pytest.mark.parametrize("chunk", ["auto", 1, 2])
def test_a_diverging_member_is_reported_and_disturbs_nobody(chunk: object):
    build = BUILDS["l_map_jvp"][0]
    knobs = RUN | {"optimizer": adam(0.05), "steps": 40}
    grid = Grid([{"prior_std": 1.0, "jitter": j} for j in (0.1, 1e-306, 5.0)])
    with pytest.warns(
        DivergedWarning, match=r"1 of 3 members diverged: \{'prior_std': 1.0, 'jitter': 1e-306\}"
    ):
        states, history = fit_population(build, grid, f, data(), chunk=chunk, **knobs)
    step = int(history.diverged[1])
    assert history.diverged.tolist() == [-1, step, -1]
    assert step >= 0
    last = torch.stack([history.columns[c][step, 1] for c in ("loss", "grad_norm")])
    assert not torch.isfinite(last).all()
    assert torch.isfinite(history.loss[:step, 1]).all()
    with pytest.raises(DivergedError):
        states.member(1)
    with pytest.raises(DivergedError):
        fit(build(1.0, 1e-306), f, initialize(f.module, 0), data(), **knobs)
    for k in (0, 2):
        state, expected = fit(build(**grid[k]), f, initialize(f.module, 0), data(), **knobs)
        torch.testing.assert_close(history.member(k).loss, expected.loss, **SAME)
        torch.testing.assert_close(one(states.params, k), state.params, **SAME)


def test_a_member_whose_matrix_cannot_be_factored_disturbs_nobody():
    def build(edge: object) -> fsmap.Objective:
        return fsmap.ps_map(fsmap.Gaussian(1.0), Cliff(torch.as_tensor(edge)), num_data=4)

    train = Batch(torch.ones(4, 1), torch.full((4, 1), -3.0))
    knobs = {"steps": 40, "optimizer": adam(0.1), "progress": False, "init": {"w": torch.zeros(1)}}
    with pytest.warns(DivergedWarning, match=r"\{'edge': 1.0\}"):
        states, history = fit_population(build, Grid(edge=[5.0, 1.0, 9.0]), line, train, **knobs)
    assert history.diverged[1] > 3
    assert history.diverged[0] == history.diverged[2] == -1
    knobs.pop("init")
    for k, edge in ((0, 5.0), (2, 9.0)):
        state, _ = fit(build(edge), line, {"w": torch.zeros(1)}, train, **knobs)
        torch.testing.assert_close(states.params["w"][k], state.params["w"], **SAME)


def test_all_diverging_is_an_error():
    with pytest.raises(DivergedError, match=r"all 2 members diverged"):
        fit_population(ps_map, Grid(prior_std=[1e-200, 1e-180]), f, data(), **RUN)


@pytest.mark.parametrize("at", [3, 17])
def test_resume_is_bit_exact_with_a_diverged_member(tmp_path: Path, at: int):
    build = BUILDS["l_map_jvp"][0]
    grid = Grid(prior_std=[1.0], jitter=[1e-306, 0.1], seed=range(2))
    path = tmp_path / "run.ckpt"
    knobs = RUN | {"on": data(0.1), "by": fsmap.metrics.rmse}
    knobs |= {"validate_every": 4, "checkpoint_every": 6}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergedWarning)
        whole, expected = fit_population(build, grid, f, data(), **knobs)
        with pytest.raises(KeyboardInterrupt):
            fit_population(build, grid, f, data(), checkpoint=path, callback=interrupt(at), **knobs)
        again, found = fit_population(build, grid, f, data(), checkpoint=path, resume=True, **knobs)
    torch.testing.assert_close(again.params, whole.params, rtol=0, atol=0)
    torch.testing.assert_close(again.best.params, whole.best.params, rtol=0, atol=0)
    del found.columns["seconds"], expected.columns["seconds"]
    torch.testing.assert_close(found.columns, expected.columns, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.diverged, expected.diverged)
    assert torch.equal(again.best.step, whole.best.step)


def test_another_population_is_refused(tmp_path: Path):
    knobs = RUN | {"steps": 2, "checkpoint": tmp_path / "run.ckpt"}
    fit_population(ps_map, Grid(prior_std=[0.5, 2.0]), f, data(), **knobs)
    with pytest.raises(CheckpointError, match=r"members.1.prior_std: 2.0 there, 3.0 here"):
        fit_population(ps_map, Grid(prior_std=[0.5, 3.0]), f, data(), resume=True, **knobs)
    with pytest.raises(CheckpointError, match=r"kind: fit_population there, fit here"):
        fit(ps_map(0.5), f, initialize(f.module, 0), data(), resume=True, **knobs)


def test_validation_keeps_the_best_of_every_member():
    grid = Grid(prior_std=[0.05, 2.0], seed=range(2))
    knobs = RUN | {"steps": 40, "optimizer": adam(0.1), "validate_every": 4}
    knobs |= {"on": data(0.3), "by": fsmap.metrics.rmse}
    states, history = fit_population(ps_map, grid, f, data(), **knobs)
    assert history.validation["value"].shape[1] == 4
    for k, m in enumerate(grid):
        objective, own = ps_map(m["prior_std"]), initialize(f.module, m["seed"])
        state, _ = fit(objective, f, own, data(), seed=m["seed"], **knobs)
        best = states.member(k).best
        assert best.step == state.best.step
        assert best.value == pytest.approx(state.best.value, rel=1e-9)
        torch.testing.assert_close(best.params, state.best.params, **SAME)


ONE, TWO = Grid(prior_std=[1.0]), Grid(prior_std=[1.0], seed=[1, 2])
SETS = Grid(prior_std=[1.0], split=[0, 1])


def decides(a: Tensor) -> fsmap.Objective:
    return ps_map(2.0 if a > 1 else 1.0)


@pytest.mark.parametrize(
    ("build", "grid", "knobs", "text"),
    [
        (ps_map, Grid(lr=[0.1, 0.2]), {}, r"varies \['lr'\], and build takes.*optimizer"),
        (fs_map, ONE, {}, r"missing a required argument: 'jitter'"),
        (lambda a: 3, Grid(a=[1.0]), {}, r"build must return an objective .* got int"),
        (ps_map, Grid(prior_std=[1.0, -1.0]), {}, r"must be finite and > 0, got -1"),
        (ps_map, ONE, {"on": data()}, r"validation needs both: on"),
        (ps_map, ONE, {"batch_size": 25}, r"batch_size=25 is larger than the data"),
        (ps_map, ONE, {"chunk": 0}, r"chunk must be a number"),
        (ps_map, ONE, {"chunk": "all"}, r"chunk must be a number"),
        (ps_map, ONE, {"f": line}, r"give init="),
        (ps_map, ONE, {"init": lambda seed: 3}, r"init must give a dict .* got int"),
        (ps_map, TWO, {"init": lambda seed: {"w": torch.ones(seed)}}, r"one architecture.*\(2,\)"),
        (ps_map, SETS, {}, r"'split' axis.*got Batch"),
        (ps_map, SETS, {"train": [data()]}, r"the splits \[1\], and data has only \[0\]"),
        (ps_map, SETS, {"train": [data(), tuple(t[1:] for t in data())]}, r"size, got \[24, 23\]"),
        (decides, Grid(a=[0.5, 1.5]), {}, r"works for one member.*one population per decision"),
    ],
)
def test_what_cannot_work_is_refused(
    build: object, grid: Grid, knobs: dict[str, object], text: str
):
    given = RUN | {"f": f, "train": data()} | knobs
    with pytest.raises(InputError, match=text):
        fit_population(build, grid, given.pop("f"), given.pop("train"), **given)


def test_members_one_by_one_may_decide_by_a_hyper_parameter():
    assert_members_are_runs_alone(decides, Grid(a=[0.5, 1.5]), f, data(), **RUN, chunk=1)


def test_layers_initialize_themselves_by_seed(seeded: None):
    module = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 1))
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    state = torch.random.get_rng_state()
    a, b, c = (initialize(module, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not any(torch.equal(a[n], c[n]) for n in a)
    assert a["0.weight"].abs().max() <= 2**-0.5  # torch's own range for two inputs
    assert a["0.weight"].abs().max() > 0.9 * 2**-0.5
    assert all(torch.equal(before[n], p) for n, p in module.named_parameters())
    assert torch.equal(state, torch.random.get_rng_state())


def test_shared_frozen_and_attention_parameters_are_initialized(seeded: None):
    assert set(initialize(Shared(), 0)) == {"first.weight", "first.bias", "second.bias"}
    module = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    assert set(initialize(module, 0)) == {"1.weight", "1.bias"}
    assert len(initialize(nn.TransformerEncoderLayer(4, 2, 5), 0)) == 12


def test_a_layer_that_cannot_be_initialized_is_named(seeded: None):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

    with pytest.raises(UnsupportedModuleError, match=r"'1' \(Own\).*Give init="):
        initialize(nn.Sequential(nn.Linear(1, 1), Own()), 0)


def test_a_start_may_draw_from_torch(seeded: None):
    state = torch.random.get_rng_state()
    one, two = (start(lambda seed: nn.Linear(3, 1), f, 4) for _ in range(2))
    assert all(torch.equal(one[n], two[n]) for n in two)
    assert torch.equal(state, torch.random.get_rng_state())


def test_too_little_memory_halves_the_chunk(monkeypatch: pytest.MonkeyPatch):
    grid, sizes = Grid(prior_std=[0.5, 1.0, 2.0, 4.0], seed=range(4)), []
    expected, _ = fit_population(ps_map, grid, f, data(), **RUN)

    def limited(function: Callable, *, chunk_size: int, **options: object) -> Callable:
        sizes.append(chunk_size)
        if chunk_size > 6:
            raise torch.OutOfMemoryError
        return torch.func.vmap(function, chunk_size=chunk_size, **options)

    monkeypatch.setattr(population, "vmap", limited)
    found, _ = fit_population(ps_map, grid, f, data(), **RUN)
    assert sizes == [16, 8] + 20 * [4]
    torch.testing.assert_close(found.params, expected.params, **SAME)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize(("compiled", "every", "chunk"), [(True, 1, 4), (False, 2, 3)])
def test_the_compiled_step_equals_the_eager_one(
    seeded: None,
    fresh_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
    compiled: bool,
    every: int,
    chunk: int,
):
    """Steps without R and chunks of other sizes are recorded on their own."""
    if not compiled:
        monkeypatch.setattr(torch, "compile", lambda recorded, **options: recorded)
    build = lambda prior_std: l_map(prior_std, 0.1, every=every)  # noqa: E731
    grid, knobs = Grid(prior_std=[0.5, 2.0], seed=range(2)), RUN | {"steps": 4}
    eager, _ = fit_population(build, grid, f, data(), **knobs)
    found, _ = fit_population(build, grid, f, data(), compile=True, chunk=chunk, **knobs)
    torch.testing.assert_close(found.params, eager.params, rtol=1e-9, atol=1e-12)


def test_random_layers_are_not_compiled(seeded: None):
    f, _ = fsmap.functional(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)))
    with pytest.raises(InputError, match=r"random layers"):
        fit_population(ps_map, ONE, f, data(), **RUN, compile=True)
