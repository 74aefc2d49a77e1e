"""Signals: zero where calibrated, positive where over-confident, derivatives by autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from fsmap.errors import InputError
from fsmap.train.signals import (
    ResidualRatio,
    even_strength,
    find_signal,
    log_temperature,
    temperature_slope,
)


def drawn(scale: float, n: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels drawn from softmax(z), and scale·z: T = scale."""
    generator = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(n, 5, generator=generator)
    y = torch.multinomial(z.softmax(1), 1, generator=generator)[:, 0]
    return scale * z, y


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_log_temperature_is_the_scale(scale: float):
    assert_close(log_temperature(*drawn(scale)), math.log(scale), atol=0.05, rtol=0)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_slope_is_the_derivative(scale: float):
    z, y = drawn(scale)
    log_t = torch.zeros((), requires_grad=True)
    torch.nn.functional.cross_entropy(z / log_t.exp(), y).backward()
    assert_close(temperature_slope(z, y), -log_t.grad.item(), rtol=1e-9, atol=1e-12)
    assert math.copysign(1, temperature_slope(z, y)) == math.copysign(1, math.log(scale))


def test_a_constant_predictor_says_over_confident():
    """The design's failure: it must be caught by the guard, because no temperature tells."""
    y = torch.arange(100) % 10
    constant = torch.zeros(100, 10)
    constant[:, 3] = 5.0
    assert log_temperature(constant, y) == pytest.approx(math.log(16))


def test_residual_against_noise():
    generator = torch.Generator().manual_seed(0)
    y = 0.3 * torch.randn(10_000, 1, generator=generator)
    assert_close(ResidualRatio(0.3)(torch.zeros(10_000, 1), y), 0.0, atol=0.05, rtol=0)
    assert ResidualRatio(0.1)(torch.zeros(10_000, 1), y) > 2
    assert find_signal("residual", 0.1) == ResidualRatio(0.1)


def test_names_and_functions():
    assert find_signal("slope") is temperature_slope
    assert find_signal(len) is len
    with pytest.raises(InputError, match="unknown signal 'heat'; allowed are temperature, slope"):
        find_signal("heat")
    with pytest.raises(InputError, match="give noise_std > 0, got None"):
        find_signal("residual")


def test_even_strength():
    y = torch.tensor([0, 1, 1])
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.5, 0.0]])
    loss = torch.nn.functional.cross_entropy(logits, y)
    assert even_strength(logits, y, 50.0) == pytest.approx(float(loss) / 50)
    for out, target, R in (
        (logits, y, None),
        (logits, y, 0.0),
        (logits, y, math.nan),
        (logits, logits, 50.0),  # regression
        (1e4 * torch.nn.functional.one_hot(y, 2).double(), y, 50.0),  # no loss to compare with
    ):
        assert even_strength(out, target, R) == math.inf
