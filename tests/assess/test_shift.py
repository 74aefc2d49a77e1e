"""Metrics before and after a temperature from other data; corruptions do what they say."""

from __future__ import annotations

import pytest
import torch

from fsmap import metrics
from fsmap.assess.shift import (
    CORRUPTIONS,
    SEVERITIES,
    Predictions,
    block_quantization,
    corrupt,
    measure,
)
from fsmap.data.images import generate


def images(channels: int = 3, side: int = 32, n: int = 24) -> torch.Tensor:
    return generate((channels, side, side), n, seed=3).x


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).square().mean())


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_severity_grows_and_repeats(name: str):
    x = images()
    kept = x.clone()
    found = [corrupt(x, name, severity) for severity in SEVERITIES]
    changes = [distance(one, x) for one in found]
    assert changes == sorted(changes)
    assert changes[0] > 0
    assert torch.equal(x, kept)
    assert all(one.dtype == torch.uint8 and one.shape == x.shape for one in found)
    assert torch.equal(corrupt(x, name, 3), found[2])
    small = images(1, 28, 5)
    assert corrupt(small, name, 5).shape == small.shape


def test_noise_has_its_strength():
    grey = torch.full((40, 1, 28, 28), 128, dtype=torch.uint8)
    change = (corrupt(grey, "gaussian-noise", 2).double() - 128) / 255
    assert float(change.std()) == pytest.approx(0.06, rel=0.02)
    hit = corrupt(grey, "impulse-noise", 5) != 128
    assert float(hit.double().mean()) == pytest.approx(0.11, rel=0.05)


@pytest.mark.parametrize("name", ["gaussian-blur", "defocus-blur", "motion-blur", "pixelate"])
def test_blurs_keep_a_plain_picture(name: str):
    grey = torch.full((2, 3, 32, 32), 77, dtype=torch.uint8)
    assert torch.equal(corrupt(grey, name, 4), grey)
    x = images()
    rough = [float(t.double().diff(dim=-1).square().mean()) for t in (x, corrupt(x, name, 4))]
    assert rough[1] < 0.6 * rough[0]
    found = corrupt(x[:1, :, :8, :8].repeat(2_001, 1, 1, 1), name, 4)
    assert torch.equal(found[0], found[-1])


def test_contrast_shrinks_and_brightness_lifts():
    x = images()
    spread = [float(t.double().var((1, 2, 3)).mean()) for t in (x, corrupt(x, "contrast", 3))]
    assert spread[1] / spread[0] == pytest.approx(0.16, abs=0.01)
    dark = x // 2
    lifted = corrupt(dark, "brightness", 2).double() - dark.double()
    assert float(lifted.mean()) == pytest.approx(25.5, abs=0.6)


def test_compression_without_loss_is_the_identity():
    x = images().double() / 255
    again = block_quantization(x, 1e-9, torch.Generator())
    torch.testing.assert_close(again, x, atol=1e-7, rtol=0)


def drawn() -> Predictions:
    generator = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(3000, 4, generator=generator)
    y = torch.multinomial(z.softmax(1), 1, generator=generator)[:, 0]
    return Predictions(2.5 * z, y)


def test_scaling_mends_an_over_confident_classifier():
    test = drawn()
    found = measure(test, 2.5)
    assert found["accuracy"] == metrics.accuracy(*test)
    assert found["selective"] == metrics.selective_accuracy(*test)
    assert found["ece"] > 0.1 > 0.03 > found["ece_scaled"]
    assert found["nll_scaled"] == pytest.approx(metrics.nll(test.logits / 2.5, test.y))
    assert found["brier_scaled"] < found["brier"]
    # without held-out data nothing is scaled
    assert set(measure(test, None)) == {"accuracy", "selective", "nll", "ece", "brier"}
