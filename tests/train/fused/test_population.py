"""``fit_population(engine="fused")``: members, draws, resuming, refusals."""

from __future__ import annotations

import pytest
import torch

import fsmap
from fsmap.errors import DivergedWarning, InputError
from fsmap.models.mlp import MLP
from fsmap.train.fused.feed import BLOCK_STEPS, BlockFeed
from fsmap.train.fused.layout import Layout
from fsmap.train.splits import as_splits

FEATURES, POINTS, BATCH = 3, 8, 16


def data(seed: int = 0) -> fsmap.Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, FEATURES, generator=generator)
    return fsmap.Batch(x, x.sum(1, keepdim=True).sin())


def network(seed: int = 0) -> MLP:
    generator = torch.Generator().manual_seed(seed)
    return MLP([FEATURES, 16, 16, 1], "relu", init="lecun", generator=generator)


def build(decay, strength):
    return fsmap.l_map(
        fsmap.Gaussian(0.7),
        fsmap.Normal((80 * decay) ** -0.5),
        fsmap.px.Normal(shape=FEATURES),
        num_points=POINTS,
        num_data=40,
        reg_strength=strength,
        estimator="fd",
    )


F, _ = fsmap.functional(network())
GRID = fsmap.Grid(decay=[1e-4, 1e-2], strength=[0.0, 1e-3, 1e-1], seed=[0, 1])


def train(grid=GRID, **changes):
    options = {"steps": 50, "batch_size": BATCH, "replace": True, "init": network} | changes
    options = {"engine": "fused", "progress": False} | options
    return fsmap.fit_population(build, grid, F, options.pop("data", data()), **options)


def test_a_member_is_the_same_alone():
    states, history = train()
    for index in (1, 4, 11):
        alone, own = train(fsmap.Grid([GRID[index]]))
        for name, p in alone.params.items():
            torch.testing.assert_close(p[0], states.params[name][index], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(own.loss[:, 0], history.loss[:, index], rtol=1e-10, atol=0)


def test_it_learns_like_the_other_engine():
    """Other random numbers, the same objective: the same errors within a few percent."""
    errors = {}
    for engine in ("fused", "vmap"):
        states, history = train(engine=engine, steps=600)
        out = states.outputs(data().x)
        errors[engine] = (out - data().y).square().mean((1, 2)).sqrt()
        assert (history.loss[-1] < history.loss[0]).all()
    assert errors["fused"][:2].max() < 0.3  # without R; a strong one underfits in both
    assert errors["fused"][4:6].min() > 0.4
    torch.testing.assert_close(errors["fused"], errors["vmap"], rtol=0.25, atol=0.02)


def test_lambda_zero_is_ps_map():
    """With the same seed the batches are the same, whether or not R is evaluated."""
    with_zero, _ = train(fsmap.Grid(decay=[1e-3], strength=[0.0]))
    plain, _ = fsmap.fit_population(
        lambda decay: fsmap.ps_map(
            fsmap.Gaussian(0.7), fsmap.Normal((80 * decay) ** -0.5), num_data=40
        ),
        fsmap.Grid(decay=[1e-3]),
        F,
        data(),
        steps=50,
        batch_size=BATCH,
        replace=True,
        init=network,
        engine="fused",
        progress=False,
    )
    for name, p in plain.params.items():
        torch.testing.assert_close(p, with_zero.params[name], rtol=1e-10, atol=1e-12)


def test_splits_have_their_own_data():
    grid = fsmap.Grid(decay=[1e-3], strength=[1e-2], split=["a", "b"])
    both, _ = train(grid, data={"a": data(0), "b": data(1)})
    alone, _ = train(fsmap.Grid(decay=[1e-3], strength=[1e-2]), data=data(1))
    for name, p in alone.params.items():
        torch.testing.assert_close(both.params[name][1], p[0], rtol=1e-10, atol=1e-12)


def test_resuming_takes_the_same_steps(tmp_path):
    whole, history = train(steps=50)
    path = tmp_path / "population.pt"
    train(steps=27, checkpoint=path)
    rest, resumed = train(steps=50, checkpoint=path, resume=True)
    for name, p in whole.params.items():
        assert torch.equal(p, rest.params[name])
    assert torch.equal(history.loss, resumed.loss)


def test_a_member_that_diverges_is_named_and_disturbs_no_other():
    grid = fsmap.Grid(decay=[1e-3], strength=[1e-3, 1e300])
    with pytest.warns(DivergedWarning, match=r"1 of 2 members diverged: .*1e\+300"):
        states, _ = train(grid)
    alone, _ = train(fsmap.Grid(decay=[1e-3], strength=[1e-3]))
    assert states.diverged[0] == -1
    assert states.diverged[1] >= 0
    for name, p in alone.params.items():
        torch.testing.assert_close(states.params[name][0], p[0], rtol=1e-10, atol=1e-12)


def feed(streams: list[tuple[int, int]]) -> BlockFeed:
    layout = Layout((FEATURES, 16, 16, 1), 2, BATCH, POINTS)
    splits = as_splits([data(0), data(1)], (0, 1), {"w": torch.zeros(1)})
    return BlockFeed(layout, splits, streams, fsmap.px.Normal(shape=FEATURES))


def test_draws_belong_to_seed_and_step():
    one, many = feed([(7, 1)]), feed([(3, 0), (7, 1)])
    many.make(0)
    for step in (BLOCK_STEPS + 3, 5):  # in any order
        a, b = one.make(step), many.make(step)
        assert torch.equal(a.x[0], b.x[1])
        assert torch.equal(a.rest[0][0], b.rest[0][1])
        assert torch.equal(a.rest[1][0], b.rest[1][1])
    assert not torch.equal(one.make(5).x, one.make(6).x)


def test_rows_of_a_feed():
    made = feed([(7, 1)]).make(2)
    layout, x = feed([(7, 1)]).layout, made.x[0]
    known = {tuple(row) for row in data(1).x.tolist()}
    assert {tuple(row) for row in x[:BATCH, :FEATURES].tolist()} <= known
    points = x[BATCH : BATCH + POINTS]
    assert torch.equal(points, x[layout.rows_plain : layout.rows_plain + POINTS])
    assert not (x[:, FEATURES:] != 0).any()
    assert not (x[BATCH + POINTS : layout.rows_plain] != 0).any()


def test_evaluation_points_and_psi_are_standard_normal():
    made = [feed([(s, 0)]).make(0) for s in range(20)]
    for values in (
        torch.stack([m.x[0, BATCH : BATCH + POINTS, :FEATURES] for m in made]),
        torch.stack([m.rest[1] for m in made]),
    ):
        tolerance = 5 / values.numel() ** 0.5
        assert abs(values.mean()) < tolerance
        assert abs(values.var() - 1) < 2 * tolerance


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"batch_size": None}, r"give batch_size and replace=True"),
        ({"replace": False}, r"give batch_size and replace=True"),
        ({"clip": 1.0}, r"leave out clip, on, patience, callback \(given: \['clip'\]\)"),
        ({"callback": print}, r"\(given: \['callback'\]\), or use engine='vmap'"),
    ],
)
def test_what_the_engine_does_not_do(changes, given):
    with pytest.raises(InputError, match=given):
        train(**changes)


def test_an_unknown_engine():
    with pytest.raises(InputError, match=r"engine must be one of vmap, fused, got 'magic'"):
        train(engine="magic")


@pytest.mark.gpu
def test_on_a_gpu_with_and_without_a_graph():
    def there(seed):
        return network(seed).to("cuda", torch.float32)

    with_graph, _ = train(init=there)
    without, _ = train(init=there, graph=False)
    for name, p in with_graph.params.items():
        torch.testing.assert_close(p, without.params[name], rtol=1e-3, atol=1e-4)
