"""Descriptions of optimizers and schedules, against torch's own classes and formulas."""

from __future__ import annotations

import pytest
import torch

from fsmap.train import loop

SPECS = {
    "adam": (loop.adam(0.1, betas=(0.8, 0.99)), lambda p: torch.optim.Adam(p, 0.1, (0.8, 0.99))),
    "sgd": (
        loop.sgd(0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_fused_form_takes_torchs_steps(name: str, generator: torch.Generator):
    spec, make = SPECS[name]
    start = torch.randn(4, 3, generator=generator)
    a, b = start.clone().requires_grad_(), start.clone().requires_grad_()
    ours, theirs = spec.build([a]), make([b])
    for _ in range(5):
        a.grad = b.grad = torch.randn(4, 3, generator=generator)
        ours.step()
        theirs.step()
    torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)
    assert (a - start).abs().min() > 1e-3


def test_schedules():
    steps = (0, 49, 100, 150, 200)
    for schedule, factors in (
        (loop.Schedule(), [1, 1, 1, 1, 1]),
        (loop.Schedule(warmup=100), [0.01, 0.5, 1, 1, 1]),
        (loop.cosine(warmup=100), [0.01, 0.5, 1, 0.5, 0]),
    ):
        assert [schedule.factor(step, 200) for step in steps] == pytest.approx(factors, abs=1e-15)
