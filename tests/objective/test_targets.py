"""Outputs and targets that do not fit together are refused, with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.objective.likelihood import Bernoulli, Categorical, Gaussian, LaplaceNoise, aligned


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def labels(*shape: int, classes: int) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("out", [(4,), (4, 1)])
@pytest.mark.parametrize("y", [(4,), (4, 1)])
def test_vectors_and_columns_align_as_columns(out, y):
    a, b = aligned(torch.arange(4.0).reshape(out), torch.arange(4).reshape(y))
    assert a.shape == b.shape == (4, 1)
    assert a.dtype == b.dtype
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("out", "y"),
    [((7, 2), (7,)), ((7,), (6,)), ((7, 1), (1, 7)), ((7, 2), (7, 3)), ((7,), (7, 7)), ((), ())],
)
@pytest.mark.parametrize("likelihood", [Gaussian(1.0), LaplaceNoise(1.0), Bernoulli()])
def test_mismatched_shapes_are_refused(likelihood, out, y):
    message = rf"outputs \[{', '.join(map(str, out))}\] and targets .* do not match"
    with pytest.raises(InputError, match=message):
        likelihood.value(torch.zeros(out), torch.zeros(y))
    with pytest.raises(InputError, match=message):
        likelihood.check(torch.zeros(out), torch.zeros(y))


@pytest.mark.parametrize("likelihood", [Gaussian(1.0), LaplaceNoise(1.0), Bernoulli()])
def test_check_reads_the_batch(likelihood):
    y = torch.tensor([0.0, float("nan"), 1.0])
    with pytest.raises(
        InputError, match=r"targets hold 1 values that are nan or infinite \(of 3\)"
    ):
        likelihood.check(draw(3), y)
    with pytest.raises(InputError, match=r"the batch is empty: outputs \[0\], targets \[0\]"):
        likelihood.check(draw(0), draw(0))
    with pytest.raises(InputError, match=r"outputs have dtype torch.int64"):
        likelihood.check(torch.ones(3).long(), torch.ones(3))


@pytest.mark.parametrize(
    ("out", "y", "message"),
    [
        (draw(3), labels(3, classes=2), r"needs logits \[B, K\].*got \[3\].*use Bernoulli"),
        (draw(3, 1), labels(3, classes=2), r"K >= 2, got \[3, 1\]"),
        (draw(3, 2), labels(3, 1, classes=2), r"integer targets of shape \[3, 1\] do not fit"),
        (draw(3, 2), torch.ones(3), r"float targets are probabilities of shape \[3\].*y\.long\(\)"),
        (draw(3, 5, 2), labels(3, classes=2), r"expected \[3, 5\]"),
        (draw(3, 2), torch.ones(3, dtype=torch.bool), r"labels have dtype torch.bool"),
    ],
)
def test_categorical_refuses_wrong_shapes_and_dtypes(out, y, message):
    with pytest.raises(InputError, match=message):
        Categorical().value(out, y)
    with pytest.raises(InputError, match=message):
        Categorical().check(out, y)


def test_empty_classification_batch_is_refused():
    with pytest.raises(InputError, match=r"the batch is empty: outputs \[0, 3\]"):
        Categorical().check(draw(0, 3), labels(0, classes=3))
