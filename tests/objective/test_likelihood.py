"""Likelihoods against torch.distributions, point by point, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, distributions
from torch.func import vmap
from torch.testing import assert_close

from fsmap.errors import InputError
from fsmap.objective.objective import Bernoulli, Categorical, Gaussian


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(*shape: int, classes: int, seed: int = 1) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def normal(std):
    return lambda f: distributions.Normal(f, std)


def categorical(f):
    return distributions.Categorical(logits=f)


def bernoulli(f):
    return distributions.Bernoulli(logits=f)


STD3 = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)
# name -> likelihood, outputs, targets, the same density by torch.distributions
CASES = {
    "gaussian": (Gaussian(0.7), draw(5, 3), draw(5, 3, seed=1), normal(0.7)),
    "gaussian_per_output": (Gaussian(STD3), draw(5, 3), draw(5, 3, seed=1), normal(STD3)),
    "gaussian_flat": (Gaussian(2.0), draw(5), draw(5, seed=1), normal(2.0)),
    "gaussian_time": (Gaussian(STD3), draw(4, 2, 3), draw(4, 2, 3, seed=1), normal(STD3)),
    "categorical": (Categorical(), draw(6, 4), labels(6, classes=4), categorical),
    "categorical_time": (Categorical(), draw(5, 2, 4), labels(5, 2, classes=4), categorical),
    "bernoulli": (Bernoulli(), draw(6, 2), labels(6, 2, classes=2), bernoulli),
    "bernoulli_flat": (Bernoulli(), draw(6), labels(6, classes=2) > 0, bernoulli),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def test_scale_is_vmapped():
    out, y, per_output = draw(5, 2), draw(5, 2, seed=1), torch.tensor([[0.1, 1.0], [2.0, 3.0]])
    for scales in (torch.tensor([0.1, 1.0, 3.0]), per_output):  # [M], [M, K]
        alone = torch.stack([Gaussian(s).value(out, y) for s in scales])
        assert_close(vmap(lambda s: Gaussian(s).value(out, y))(scales), alone)


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), Bernoulli()])
def test_a_column_is_a_vector(likelihood):
    out, y = draw(7), labels(7, classes=2).double()
    pairs = itertools.product([(7,), (7, 1)], repeat=2)
    values = [likelihood.value(out.reshape(a), y.reshape(b)) for a, b in pairs]
    assert_close(torch.stack(values), values[0].expand(4))


def test_probabilities_as_targets():
    out, p = draw(5, 4), draw(5, 4, seed=1).softmax(-1)
    Categorical().check(out, p)
    assert_close(Categorical().value(out, p), (p * out.log_softmax(-1)).sum())
    hard = torch.nn.functional.one_hot(labels(5, classes=4), 4).double()
    assert_close(Categorical().value(out, hard), Categorical().value(out, labels(5, classes=4)))
    time = torch.stack([p, p], 1)
    assert_close(
        Categorical().value(out[:, None].expand(5, 2, 4), time), 2 * Categorical().value(out, p)
    )


@pytest.mark.parametrize(("z", "value"), [(40.0, -4.248354255291589e-18), (-700.0, -700.0)])
def test_bernoulli_keeps_small_probabilities(z, value):
    for out, y in ((z, 1), (-z, 0)):
        found = Bernoulli().value(torch.tensor([out]), torch.tensor([y]))
        assert_close(found, torch.tensor(value), rtol=1e-12, atol=0)


def test_is_the_sum_of_log_densities(case):
    likelihood, out, y, density = case
    target = y.to(out.dtype) if isinstance(density(out), distributions.Bernoulli) else y
    likelihood.check(out, y)
    value = likelihood.value(out, y)
    assert value.shape == ()
    assert_close(value, density(out).log_prob(target).sum(), rtol=1e-12, atol=1e-12)


def test_gradients_and_members(case):
    likelihood, out, y, _ = case
    leaf = out.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda f: likelihood.value(f, y), (leaf,))
    members = torch.stack([out, out + 1, 2 * out])
    alone = torch.stack([likelihood.value(f, y) for f in members])
    assert_close(vmap(lambda f: likelihood.value(f, y))(members), alone, rtol=1e-12, atol=1e-12)


def test_precision(case):
    likelihood, out, y, _ = case
    y = y.float() if y.is_floating_point() else y
    single = likelihood.value(out.float(), y)
    assert single.dtype == torch.float32
    exact = likelihood.value(out, y.double() if y.is_floating_point() else y)
    assert_close(single.double(), exact, rtol=1e-6, atol=1e-6)  # float32 resolves 1e-7
    half = likelihood.value(out.bfloat16(), y)  # summed in float32
    assert half.dtype == torch.float32
    assert_close(half, likelihood.value(out.bfloat16().float(), y))


SHAPES = [
    ((7, 2), (7,)),
    ((7,), (6,)),
    ((7, 1), (1, 7)),
    ((7, 2), (7, 3)),
    ((7,), (7, 7)),
    ((), ()),
]


@pytest.mark.parametrize("likelihood", [Gaussian(1.0), Bernoulli()])
@pytest.mark.parametrize(("out", "y"), SHAPES)
def test_mismatched_shapes_are_refused(likelihood, out, y):
    for use in (likelihood.value, likelihood.check):
        with pytest.raises(InputError, match="match"):
            use(torch.zeros(out), torch.zeros(y))
