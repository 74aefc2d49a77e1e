"""Adam on stacked members: the same as alone, the same as torch's, warm-up and divergence."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from fsmap.errors import DivergedError
from fsmap.paper.descent import descend, one_thread

TARGETS = torch.tensor([[1.0, -2.0], [0.3, 4.0], [-1.0, 0.0]], dtype=torch.float64)


def distance(target):
    return lambda theta: (theta - target).square().sum(-1) + (theta - target).abs().sum(-1).exp()


def test_a_member_of_the_stack_ends_where_it_would_end_alone():
    start = torch.zeros_like(TARGETS)
    together = descend(distance(TARGETS), start, lr=0.1, steps=40, warmup=7)
    alone = [
        descend(distance(t), s, lr=0.1, steps=40, warmup=7)
        for t, s in zip(TARGETS, start, strict=True)
    ]
    assert_close(together, torch.stack(alone), rtol=1e-14, atol=1e-14)
    assert not start.any()


def test_it_is_torchs_adam_with_a_linear_warmup():
    theta = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=0.0, fused=True)
    for step in range(12):
        optimizer.param_groups[0]["lr"] = 0.3 * min(step / 5, 1)
        optimizer.zero_grad()
        distance(TARGETS[0])(theta).backward()
        optimizer.step()
    ours = descend(distance(TARGETS[0]), torch.zeros(2), lr=0.3, steps=12, warmup=5)
    assert_close(ours, theta.detach())
    assert not descend(distance(TARGETS[0]), torch.zeros(2), lr=0.3, steps=1, warmup=5).any()


def test_it_finds_the_minimum_and_says_how_far_it_is():
    seen: list[float] = []
    found = descend(distance(TARGETS), TARGETS + 1, lr=0.05, steps=1_000, advance=seen.append)
    assert_close(found, TARGETS, rtol=0, atol=0.1)
    assert seen == [step / 1_000 for step in range(0, 1_000, 50)]


def test_divergence_is_an_error():
    with pytest.raises(DivergedError, match=r"1 of 2 members have parameters.*after 3 steps"):
        descend(lambda t: t.abs().sqrt().sum(-1), torch.tensor([[0.0], [1.0]]), lr=0.1, steps=3)


def test_threads_are_put_back_even_after_an_error():
    before = torch.get_num_threads()

    def fail() -> None:
        with one_thread():
            assert torch.get_num_threads() == 1
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert torch.get_num_threads() == before
