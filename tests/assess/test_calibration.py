"""All metrics of a classifier, before and after a temperature that comes from other data."""

from __future__ import annotations

import pytest
import torch

from fsmap import metrics
from fsmap.assess.calibration import Predictions, measure


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


def test_without_held_out_data_nothing_is_scaled():
    assert set(measure(drawn(), None)) == {"accuracy", "selective", "nll", "ece", "brier"}
