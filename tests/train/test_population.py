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
from cases import Shared, case
from fsmap.errors import CheckpointError, DivergedError, DivergedWarning, InputError
from fsmap.train.fit import fit
from fsmap.train.grid import Grid
from fsmap.train.optim import adam, adamw, cosine, sgd, warmup
from fsmap.train.population import fit_population, initialize
from fsmap.types import Batch, Params

SAME = {"rtol": 1e-10, "atol": 1e-10}
RUN = {"steps": 20, "optimizer": adam(0.02), "batch_size": 8, "progress": False}


def data(shift: float = 0.0) -> Batch:
    x = torch.linspace(-1, 1, 24)[:, None]
    return Batch(x, torch.sin(3 * x + shift))


def terms(std: object = 1.0) -> tuple[object, object, object]:
    return fsmap.Gaussian(0.2), fsmap.Normal(std), fsmap.px.Uniform(-1.0, 1.0)


def ps_map(prior_std: object) -> fsmap.Objective:
    return fsmap.ps_map(*terms(prior_std)[:2], num_data=24)


def fs_map(prior_std: object, jitter: object) -> fsmap.Objective:
    return fsmap.fs_map(*terms(prior_std), num_points=12, jitter=jitter, num_data=24)


def dual(prior_std: object, jitter: object) -> fsmap.Objective:
    return fsmap.fs_map(*terms(prior_std), num_points=4, jitter=jitter, num_data=24)


def l_map(prior_std: object, jitter: object, **knobs: object) -> fsmap.Objective:
    return fsmap.l_map(*terms(prior_std), num_points=6, jitter=jitter, num_data=24, **knobs)


def strength(reg_strength: object) -> fsmap.Objective:
    return fsmap.l_map(*terms(), num_points=6, reg_strength=reg_strength, num_data=24)


def nats(reg_nats: object, **knobs: object) -> fsmap.Objective:
    return fsmap.l_map(*terms(), num_points=6, reg_nats=reg_nats, num_data=24, every=2, **knobs)


def estimator(name: str) -> Callable[..., fsmap.Objective]:
    return lambda prior_std, jitter: l_map(prior_std, jitter, estimator=name)


BUILDS = {
    "ps_map": (ps_map, {"prior_std": [0.3, 1.0, 3.0]}),
    "fs_map": (fs_map, {"prior_std": [0.5, 2.0], "jitter": [1e-2, 1.0]}),
    "fs_map_dual": (dual, {"prior_std": [0.5, 2.0], "jitter": [1e-2, 1.0]}),
    **{
        f"l_map_{name}": (estimator(name), {"prior_std": [0.5, 2.0], "jitter": [1e-2, 1.0]})
        for name in ("fd", "fd_central", "jvp", "vjp", "exact")
    },
    "l_map_every": (
        lambda prior_std, jitter: l_map(prior_std, jitter, every=3),
        {"prior_std": [0.5, 2.0], "jitter": [0.1]},
    ),
    "l_map_probes": (
        lambda prior_std, jitter: l_map(prior_std, jitter, probes=3),
        {"prior_std": [0.5, 2.0], "jitter": [0.1]},
    ),
    "strength": (strength, {"reg_strength": [0.0, 1e-3, 1e-1]}),
    "nats": (nats, {"reg_nats": [0.0, 0.05, 1.0]}),
    "nats_r0": (lambda reg_nats, r0: nats(reg_nats, r0=r0), {"reg_nats": [0.1], "r0": [0.1, 2.0]}),
}


def mlp() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))


def assert_members_are_runs_alone(
    build: Callable[..., fsmap.Objective],
    grid: Grid,
    f: object,
    init: object,
    train: object,
    **knobs: object,
) -> None:
    states, history = fit_population(build, grid, f, train, init=init, **knobs)
    alone = {k: v for k, v in knobs.items() if k not in ("chunk", "graph")}
    for k, member in enumerate(grid):
        hypers = {n: member[n] for n in grid.hyper_names}
        own = train[member["split"]] if "split" in member else train
        seed = member.get("seed", 0)
        state, expected = fit(build(**hypers), f, init(seed), own, seed=seed, **alone)
        for n, p in state.params.items():
            torch.testing.assert_close(states.params[n][k], p, **SAME)
        for name in ("loss", "likelihood", "prior", "geometry", "grad_norm", "lr", "step"):
            found = history.member(k).columns[name]
            torch.testing.assert_close(found, expected.columns[name], rtol=1e-9, atol=1e-9)


CHUNKED = [
    (name, chunk) for name in ("ps_map", "fs_map", "l_map_every", "nats") for chunk in (1, 3)
]


@pytest.mark.parametrize(("name", "chunk"), [*((name, "auto") for name in BUILDS), *CHUNKED])
def test_a_member_is_the_same_run_alone(name: str, chunk: object):
    build, axes = BUILDS[name]
    f, _ = fsmap.functional(mlp())
    knobs = RUN | {"steps": 8, "chunk": chunk, "clip": 3.0, "schedule": warmup(5)}
    grid = Grid(**axes, seed=[0, 7])
    assert_members_are_runs_alone(
        build, grid, f, lambda s: initialize(f.module, s), data(), **knobs
    )


def test_a_resumed_population_keeps_r0(tmp_path: Path):
    f, _ = fsmap.functional(mlp())
    grid, path = Grid(reg_nats=[0.05, 1.0], seed=[0, 7]), tmp_path / "run.ckpt"
    whole, _ = fit_population(nats, grid, f, data(), **RUN)
    knobs = RUN | {"checkpoint": path, "resume": True}
    fit_population(nats, grid, f, data(), **(knobs | {"steps": 8}))
    again, _ = fit_population(nats, grid, f, data(), **knobs)
    for n, p in whole.params.items():
        assert torch.equal(again.params[n], p)


@pytest.mark.parametrize(
    "moving",
    [sgd(1e-3, momentum=0.9, nesterov=True), adamw(0.02, weight_decay=0.1)],
    ids=lambda m: m.name,
)
@pytest.mark.parametrize("batch_size", [None, 40])
def test_with_every_optimizer_and_kind_of_batch(moving: object, batch_size: int | None):
    f, _ = fsmap.functional(mlp())
    knobs = RUN | {"optimizer": moving, "batch_size": batch_size, "replace": batch_size == 40}
    grid = Grid(prior_std=[0.5, 2.0], jitter=[0.1], seed=range(3))
    build = BUILDS["l_map_jvp"][0]
    init = lambda s: initialize(f.module, s)  # noqa: E731
    assert_members_are_runs_alone(build, grid, f, init, data(), **knobs, schedule=cosine())


@pytest.mark.parametrize("batch_size", [None, 8])
def test_splits(batch_size: int | None):
    f, _ = fsmap.functional(mlp())
    grid = Grid(prior_std=[0.5, 2.0], jitter=[0.1], split=["a", "b"], seed=range(2))
    train = {"a": data(), "b": data(1.0)}
    build = BUILDS["l_map_jvp"][0]
    init = lambda s: initialize(f.module, s)  # noqa: E731
    assert_members_are_runs_alone(build, grid, f, init, train, **RUN | {"batch_size": batch_size})
    whole = Batch(
        torch.cat([t.x for t in train.values()]), torch.cat([t.y for t in train.values()])
    )
    rows = {"a": torch.arange(24), "b": torch.arange(24, 48)}
    one, _ = fit_population(build, grid, f, train, **RUN)
    two, _ = fit_population(build, grid, f, (whole, rows), **RUN)
    assert all(torch.equal(one.params[n], two.params[n]) for n in one.params)


@pytest.mark.parametrize(
    "name", ["cnn", "layernorm", "batchnorm_eval", "sequence_eval", "frozen", "dict_input"]
)
def test_on_other_architectures(name: str):
    it = case(name)
    with torch.no_grad():
        y = torch.zeros_like(it.f(it.params, it.x))
    px = fsmap.px.as_px(lambda n, generator: it.x)

    def build(prior_std: object) -> fsmap.Objective:
        return fsmap.l_map(
            fsmap.Gaussian(0.5),
            fsmap.Normal(prior_std),
            px,
            num_points=len(y),
            jitter=1.0,
            num_data=len(y),
        )

    init = lambda seed: {n: (1 + 0.1 * seed) * p for n, p in it.params.items()}  # noqa: E731
    knobs = RUN | {"steps": 5, "batch_size": None}
    assert_members_are_runs_alone(
        build, Grid(prior_std=[0.5, 2.0], seed=range(2)), it.f, init, (it.x, y), **knobs
    )


def test_shared_parameters_and_dropout():
    with torch.random.fork_rng(devices=[]):
        f, _ = fsmap.functional(
            nn.Sequential(nn.Linear(1, 3), Shared(), nn.Dropout(0.4), nn.Linear(3, 1))
        )
    grid = Grid(prior_std=[0.5, 2.0], jitter=[0.1], seed=range(2))
    init = lambda s: initialize(f.module, s)  # noqa: E731
    assert_members_are_runs_alone(
        BUILDS["l_map_fd"][0], grid, f, init, data(), **RUN | {"steps": 6}
    )


def test_classification():
    it = case("wide")
    y = torch.tensor([0, 1, 2, 1, 0])

    def build(prior_std: object) -> fsmap.Objective:
        return fsmap.ps_map(fsmap.Categorical(), fsmap.Normal(prior_std), num_data=5)

    knobs = RUN | {"batch_size": 3}
    assert_members_are_runs_alone(
        build, Grid(prior_std=[0.5, 2.0]), it.f, lambda s: dict(it.params), (it.x, y), **knobs
    )


def test_neighbors_do_not_matter():
    f, _ = fsmap.functional(mlp())
    build = BUILDS["l_map_jvp"][0]
    many, _ = fit_population(
        build, Grid(prior_std=[0.1, 1.0], jitter=[0.1, 5.0], seed=range(4)), f, data(), **RUN
    )
    few, _ = fit_population(
        build, Grid([{"prior_std": 1.0, "jitter": 5.0, "seed": 2}]), f, data(), **RUN
    )
    k = many.grid.members.index({"prior_std": 1.0, "jitter": 5.0, "seed": 2})
    for n, p in few.params.items():
        torch.testing.assert_close(many.params[n][k], p[0], **SAME)


def test_float32_agrees_to_rounding():
    f, _ = fsmap.functional(mlp().float())
    grid = Grid(prior_std=[0.5, 2.0], jitter=[0.1], seed=range(2))
    build = BUILDS["l_map_jvp"][0]
    states, _ = fit_population(build, grid, f, data(), **RUN)
    for k, m in enumerate(grid):
        start = initialize(f.module, m["seed"])
        state, _ = fit(build(m["prior_std"], m["jitter"]), f, start, data(), seed=m["seed"], **RUN)
        for n, p in state.params.items():
            assert p.dtype == torch.float32
            torch.testing.assert_close(states.params[n][k], p, rtol=1e-4, atol=1e-4)


def test_p_x_may_depend_on_a_hyper_parameter():
    """Then the configurations of a seed have draws of their own, from the same stream."""

    def build(width: object) -> fsmap.Objective:
        px = fsmap.px.as_px(lambda n, generator: width * torch.rand(n, 1, generator=generator))
        return fsmap.l_map(*terms()[:2], px, num_points=6, jitter=0.1, num_data=24)

    f, _ = fsmap.functional(mlp())
    init = lambda s: initialize(f.module, s)  # noqa: E731
    assert_members_are_runs_alone(
        build, Grid(width=[0.5, 3.0], seed=range(2)), f, init, data(), **RUN
    )


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
    f, _ = fsmap.functional(mlp())
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
    assert not torch.isfinite(
        torch.stack([history.columns[c][step, 1] for c in ("loss", "grad_norm")])
    ).all()
    assert torch.isfinite(history.loss[:step, 1]).all()
    with pytest.raises(DivergedError):
        states.member(1)
    with pytest.raises(DivergedError):
        fit(build(1.0, 1e-306), f, initialize(f.module, 0), data(), **knobs)
    for k in (0, 2):
        state, expected = fit(build(**grid[k]), f, initialize(f.module, 0), data(), **knobs)
        torch.testing.assert_close(history.member(k).loss, expected.loss, **SAME)
        for n, p in state.params.items():
            torch.testing.assert_close(states.params[n][k], p, **SAME)


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
    f, _ = fsmap.functional(mlp())
    with pytest.raises(DivergedError, match=r"all 2 members diverged"):
        fit_population(ps_map, Grid(prior_std=[1e-200, 1e-180]), f, data(), **RUN)


class Interrupted(Exception):
    """Stands for a kill between two steps."""


@pytest.mark.parametrize("at", [3, 17])
def test_resume_is_bit_exact_with_a_diverged_member(tmp_path: Path, at: int):
    f, _ = fsmap.functional(mlp())
    build = BUILDS["l_map_jvp"][0]
    grid = Grid(prior_std=[1.0], jitter=[1e-306, 0.1], seed=range(2))
    path = tmp_path / "run.ckpt"
    knobs = RUN | {
        "on": data(0.1),
        "by": fsmap.metrics.rmse,
        "validate_every": 4,
        "checkpoint_every": 6,
    }

    def interrupt(step: int, params: Params) -> None:
        if step == at:
            raise Interrupted

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergedWarning)
        whole, expected = fit_population(build, grid, f, data(), **knobs)
        with pytest.raises(Interrupted):
            fit_population(build, grid, f, data(), checkpoint=path, callback=interrupt, **knobs)
        again, found = fit_population(build, grid, f, data(), checkpoint=path, resume=True, **knobs)
    for n, p in whole.params.items():
        assert torch.equal(again.params[n], p)
        assert torch.equal(again.best.params[n], whole.best.params[n])
    for name in set(expected.columns) - {"seconds"}:
        torch.testing.assert_close(
            found.columns[name], expected.columns[name], rtol=0, atol=0, equal_nan=True
        )
    assert torch.equal(found.diverged, expected.diverged)
    assert torch.equal(again.best.step, whole.best.step)


def test_another_population_is_refused(tmp_path: Path):
    f, _ = fsmap.functional(mlp())
    knobs = RUN | {"steps": 2, "checkpoint": tmp_path / "run.ckpt"}
    fit_population(ps_map, Grid(prior_std=[0.5, 2.0]), f, data(), **knobs)
    with pytest.raises(CheckpointError, match=r"members.1.prior_std: 2.0 there, 3.0 here"):
        fit_population(ps_map, Grid(prior_std=[0.5, 3.0]), f, data(), resume=True, **knobs)
    with pytest.raises(CheckpointError, match=r"kind: fit_population there, fit here"):
        fit(ps_map(0.5), f, initialize(f.module, 0), data(), resume=True, **knobs)


def test_validation_keeps_the_best_of_every_member():
    f, _ = fsmap.functional(mlp())
    grid = Grid(prior_std=[0.05, 2.0], seed=range(2))
    valid = data(0.3)
    knobs = RUN | {"steps": 40, "optimizer": adam(0.1), "validate_every": 4, "patience": 2}
    states, history = fit_population(
        ps_map, grid, f, data(), on=valid, by=fsmap.metrics.rmse, **knobs
    )
    assert history.validation["value"].shape[1] == 4
    for k, m in enumerate(grid):

        def validation(params: Params) -> float:
            with torch.no_grad():
                return fsmap.metrics.rmse(f(params, valid.x), valid.y)

        start = initialize(f.module, m["seed"])
        state, _ = fit(
            ps_map(m["prior_std"]), f, start, data(), seed=m["seed"], validation=validation, **knobs
        )
        best = states.member(k).best
        assert best.step == state.best.step
        assert best.value == pytest.approx(state.best.value, rel=1e-9)
        for n, p in state.best.params.items():
            torch.testing.assert_close(best.params[n], p, **SAME)


def test_a_callback_sees_the_stack():
    seen = []
    f, _ = fsmap.functional(mlp())
    states, _ = fit_population(
        ps_map,
        Grid(prior_std=[0.5, 2.0, 3.0]),
        f,
        data(),
        **RUN,
        callback=lambda step, params: seen.append(params["0.bias"].shape) or step == 2,
    )
    assert seen == [(3, 5), (3, 5)]
    assert states.step == 2


@pytest.mark.parametrize(
    ("build", "grid", "knobs", "text"),
    [
        (
            ps_map,
            Grid(lr=[0.1, 0.2]),
            {},
            r"lr cannot vary within a population.*one value for all members",
        ),
        (
            ps_map,
            Grid(width=[1.0]),
            {},
            r"the grid varies \['width'\], and build takes \(prior_std",
        ),
        (fs_map, Grid(prior_std=[1.0]), {}, r"missing a required argument: 'jitter'"),
        (lambda a: 3, Grid(a=[1.0]), {}, r"build must return an objective .* got int"),
        (ps_map, Grid(prior_std=[1.0, -1.0]), {}, r"must be finite and > 0, got -1"),
        (ps_map, Grid(prior_std=[1.0]), {"on": data()}, r"validation needs both: on"),
        (ps_map, Grid(prior_std=[1.0]), {"patience": 2}, r"patience counts validations"),
        (
            ps_map,
            Grid(prior_std=[1.0]),
            {"graph": True},
            r"graph=True needs a CUDA device, and the parameters are on cpu",
        ),
        (
            ps_map,
            Grid(prior_std=[1.0]),
            {"graph": "yes"},
            r"graph must be 'auto', True or False, got 'yes'",
        ),
        (
            ps_map,
            Grid(prior_std=[1.0]),
            {"batch_size": 25},
            r"batch_size=25 is larger than the data",
        ),
        (
            ps_map,
            Grid(prior_std=[1.0], seed=[1, 2]),
            {"init": lambda seed: {"w": torch.ones(seed)}},
            r"share one architecture, but seed 2 starts with parameters \{'w': \(2,\)\}",
        ),
        (
            lambda a: ps_map(2.0 if a > 1 else 1.0),
            Grid(a=[0.5, 1.5]),
            {},
            r"decides something by the value of a hyper-parameter.*one population per decision",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    build: object, grid: Grid, knobs: dict[str, object], text: str
):
    f, _ = fsmap.functional(mlp())
    with pytest.raises(InputError, match=text):
        fit_population(build, grid, f, data(), **RUN | knobs)


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
    f, _ = fsmap.functional(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    x = torch.linspace(-1, 1, 12)[:, None]

    def build(prior_std: object) -> fsmap.Objective:
        terms = fsmap.Gaussian(0.2), fsmap.Normal(prior_std), fsmap.px.Uniform(-1.0, 1.0)
        return fsmap.l_map(*terms, num_points=6, jitter=0.1, num_data=12, every=every)

    grid = Grid(prior_std=[0.5, 2.0], seed=range(2))
    knobs = {"steps": 4, "batch_size": 6, "progress": False}
    eager, _ = fit_population(build, grid, f, (x, x.sin()), **knobs)
    found, _ = fit_population(build, grid, f, (x, x.sin()), compile=True, chunk=chunk, **knobs)
    for n, p in eager.params.items():
        torch.testing.assert_close(found.params[n], p, rtol=1e-9, atol=1e-12)


def test_random_layers_are_not_compiled(seeded: None):
    f, _ = fsmap.functional(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)))

    def build(prior_std: object) -> fsmap.Objective:
        return fsmap.ps_map(fsmap.Gaussian(1.0), fsmap.Normal(prior_std), num_data=4)

    data = (torch.ones(4, 1), torch.ones(4, 1))
    with pytest.raises(InputError, match=r"random layers"):
        fit_population(build, Grid(prior_std=[1.0]), f, data, steps=1, compile=True)
