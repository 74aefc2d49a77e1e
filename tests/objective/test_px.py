"""Evaluation distributions: moments, shapes, reproducible draws, copies, errors."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from fsmap import px
from fsmap.errors import InputError

POINTS = torch.arange(24, dtype=torch.float64).reshape(12, 2)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(n, 2, generator=generator, dtype=torch.float64)


DISTRIBUTIONS = {
    "uniform": lambda: px.Uniform([-1, 0], [1, 5]),
    "normal": lambda: px.Normal([0.0, 1.0], 2.0),
    "empirical": lambda: px.Empirical(POINTS),
    "lattice": lambda: px.Lattice([-5, -5], [5, 5], 4),
    "mixture": lambda: px.Mixture([px.Uniform(0, 1, shape=2), POINTS, noise], [1, 2, 3]),
    "function": lambda: px.as_px(noise),
}


@pytest.fixture(params=DISTRIBUTIONS)
def distribution(request):
    return DISTRIBUTIONS[request.param]()


def test_same_seed_same_points(distribution):
    first, again = (distribution.sample(7, source(3)) for _ in range(2))
    assert first.shape == (7, 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, distribution.sample(7, source(4)))


def test_draws_go_on_in_one_stream(distribution):
    generator = source()
    assert not torch.equal(distribution.sample(7, generator), distribution.sample(7, generator))


def test_one_point(distribution):
    assert distribution.sample(1, source()).shape == (1, 2)
    assert distribution.sample(np.int64(3), source()).shape == (3, 2)


def test_is_a_distribution_already(distribution):
    assert isinstance(distribution, px.EvalDistribution)
    assert px.as_px(distribution) is distribution


def test_moves_to_a_dtype(distribution):
    before = distribution.sample(5, source()).dtype
    moved = distribution.to(dtype=torch.float32)
    assert type(moved) is type(distribution)
    assert moved.sample(5, source()).dtype == torch.float32
    assert distribution.sample(5, source()).dtype == before  # itself unchanged
    assert distribution.to("cpu").sample(5, source()).dtype == before


def test_a_copy_draws_the_same(distribution):
    twin = copy.deepcopy(distribution)
    assert torch.equal(twin.sample(5, source()), distribution.sample(5, source()))


@pytest.mark.gpu
def test_points_do_not_depend_on_the_device(distribution):
    there = distribution.to("cuda")
    points = there.sample(6, source())
    assert points.device.type == "cuda"
    assert_close(points.cpu(), distribution.sample(6, source()))
    if not isinstance(distribution, px.FromFunction | px.Mixture):
        generator = torch.Generator("cuda").manual_seed(0)
        assert there.sample(6, generator).device.type == "cuda"
        with pytest.raises(InputError, match=r"generator lives on cuda.* the distribution on cpu"):
            distribution.sample(6, generator)


@pytest.mark.parametrize("n", [0, -1, 2.0, True, None])
def test_number_of_points_is_checked(distribution, n):
    with pytest.raises(InputError, match=rf"must be an integer >= 1, got {n}"):
        distribution.sample(n, source())


def test_generator_is_required(distribution):
    with pytest.raises(InputError, match=r"sample needs a torch.Generator, got NoneType"):
        distribution.sample(3, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("uniform", "Uniform([-1, 0], [1, 5], shape=(2,))"),
        ("normal", "Normal(mean=[0, 1], std=2, shape=(2,))"),
        ("empirical", "Empirical(12 points, shape=(2,), dtype=float64, device=cpu)"),
        ("lattice", "Lattice(low=-5, high=5, num=4)"),
        ("function", "FromFunction(noise)"),
    ],
)
def test_repr(name, text):
    assert repr(DISTRIBUTIONS[name]()) == text


def test_repr_of_a_mixture_names_its_components():
    text = repr(DISTRIBUTIONS["mixture"]())
    assert text.startswith("Mixture([Uniform(0, 1, shape=(2,)), Empirical(12 points")
    assert text.endswith("FromFunction(noise)], weights=[1.0, 2.0, 3.0])")


# ---- Mixture


def test_mixture_counts_are_multinomial():
    mixture = px.Mixture([torch.zeros(1), torch.ones(1), 2 * torch.ones(1)], [1, 3, 6])
    generator = source()
    draws = torch.stack([mixture.sample(20, generator) for _ in range(2000)])  # [2000, 20]
    counts = torch.stack([(draws == k).sum(1) for k in range(3)], 1).double()
    p = torch.tensor([0.1, 0.3, 0.6])
    assert_close(counts.sum(1), torch.full((2000,), 20.0))
    deviation = (20 * p * (1 - p)).sqrt()
    assert ((counts.mean(0) - 20 * p).abs() < 5 * deviation / math.sqrt(2000)).all()
    expected = 20 * (p.diag() - p[:, None] * p)  # covariance of Multinomial(20, p)
    assert_close(counts.mT.cov(), expected, rtol=0.15, atol=0.15)


def test_mixture_is_in_random_order():
    """Any one position sees every component with its weight."""
    mixture, generator = px.Mixture([torch.zeros(1), torch.ones(1)]), source()
    first = torch.stack([mixture.sample(4, generator)[0] for _ in range(1000)])
    assert abs(first.mean() - 0.5) < 5 * 0.5 / math.sqrt(1000)


def test_mixture_leaves_out_what_has_no_weight():
    x = px.Mixture([torch.zeros(5), torch.ones(5)], [0, 2]).sample(50, source())
    assert (x == 1).all()


def test_mixture_of_dicts():
    part = {"a": torch.zeros(6, 2), "b": torch.zeros(6, dtype=torch.long)}
    other = {"a": torch.ones(6, 2), "b": torch.ones(6, dtype=torch.long)}
    x = px.Mixture([part, other]).sample(10, source())
    assert x["a"].shape == (10, 2)
    assert torch.equal(x["a"][:, 0].long(), x["b"])
    assert 0 < x["b"].sum() < 10


def test_a_mixture_is_no_dict():
    with pytest.raises(InputError, match="a list of components and a list of weights, got a dict"):
        px.Mixture({px.Uniform(0, 1): 0.8, px.Normal(): 0.2})


@pytest.mark.parametrize("weights", [[1], [1, -1], [1, math.nan], [[1, 1]], [1, 1, 1]])
def test_mixture_weights_are_checked(weights):
    with pytest.raises(InputError, match=r"one finite weight >= 0 for each component, got 2 comp"):
        px.Mixture([POINTS, POINTS], weights)


def test_mixture_needs_something_to_draw_from():
    with pytest.raises(InputError, match=r"all weights of the mixture are zero"):
        px.Mixture([POINTS, POINTS], [0, 0])
    with pytest.raises(InputError, match=r"got 0 components"):
        px.Mixture([])


@pytest.mark.parametrize("other", [px.Normal(shape=3), {"a": POINTS}])
def test_mixture_components_must_fit(other):
    with pytest.raises(InputError, match=r"draw points that do not fit together: \[\[\(.*2\)\]"):
        px.Mixture([POINTS, other]).sample(40, source())


# ---- as_px


@pytest.mark.parametrize("data", [POINTS, POINTS.numpy(), (POINTS, POINTS), {"x": POINTS}])
def test_data_become_an_empirical_distribution(data):
    assert len(px.as_px(data)) == 12


def test_a_dataset_becomes_an_empirical_distribution():
    data = torch.utils.data.TensorDataset(POINTS, torch.zeros(12))
    for given_data in (data, torch.utils.data.DataLoader(data, batch_size=5)):
        assert torch.equal(px.as_px(given_data).all(), POINTS)


@pytest.mark.parametrize(
    "obj",
    [
        None,
        3.0,
        "train",
        px.Uniform,
        torch.nn.Linear(2, 2, device="meta"),
        torch.distributions.Normal(0.0, 1.0),
        [1.0, 2.0],
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_what_is_no_distribution_is_refused(obj):
    with pytest.raises(InputError, match=r"is no evaluation distribution. Allowed are px.Uniform"):
        px.as_px(obj)


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (
            lambda n, g: torch.zeros(n + 1, 2),
            r"asked for 3 points and returned Tensor of .*\(4, 2\)",
        ),
        (lambda n, g: torch.zeros(()), r"returned Tensor of shapes \[\(\)\]"),
        (
            lambda n, g: {"a": torch.zeros(n), "b": torch.zeros(1)},
            r"returned dict of .*\(3,\), \(1,\)",
        ),
        (lambda n, g: None, r"returned NoneType"),
    ],
)
def test_a_function_must_return_n_points(function, got):
    with pytest.raises(InputError, match=got):
        px.as_px(function).sample(3, source())


def test_a_function_takes_n_and_a_generator():
    with pytest.raises(InputError, match=r"<lambda>\(n\) cannot be an evaluation distribution"):
        px.as_px(lambda n: torch.zeros(n, 2))
    assert px.as_px(lambda *args: torch.zeros(args[0], 2)).sample(3, source()).shape == (3, 2)
