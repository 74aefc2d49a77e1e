"""Choosing among points, and the arguments of a draw."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsmap.errors import InputError
from fsmap.px import brief, check_draw, choose


class OnCuda(torch.Generator):
    """A generator that says it lives on a GPU, for machines without one."""

    device = torch.device("cuda", 0)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(total=st.integers(1, 200), share=st.floats(0, 1), seed=st.integers(0, 1000))
def test_without_replacement_there_are_no_repeats(total, share, seed):
    n = max(1, round(share * total))
    for replace in (None, False):
        rows = choose(total, n, replace, source(seed))
        assert rows.shape == (n,)
        assert len(rows.unique()) == n
        assert 0 <= rows.min() <= rows.max() < total


@pytest.mark.parametrize(("total", "n"), [(5, 3), (12, 3), (40, 10)])
def test_every_point_is_equally_likely_at_every_place(total, n):
    """Both ways of choosing (n <= total/4, and not): each place holds each point with 1/total."""
    generator, draws = source(), 4000
    rows = torch.stack([choose(total, n, None, generator) for _ in range(draws)])  # [draws, n]
    p = 1 / total
    error = 5 * math.sqrt(p * (1 - p) / draws)
    for place in range(n):
        share = rows[:, place].bincount(minlength=total) / draws
        assert ((share - p).abs() < error).all()


def test_pairs_are_equally_likely():
    """Sampling without replacement: all ordered pairs of different points have the same chance."""
    generator, draws = source(), 20_000
    rows = torch.stack([choose(8, 2, None, generator) for _ in range(draws)])
    share = (rows[:, 0] * 8 + rows[:, 1]).bincount(minlength=64).reshape(8, 8) / draws
    assert (share.diag() == 0).all()
    p = 1 / 56
    off = share[~torch.eye(8, dtype=torch.bool)]
    assert ((off - p).abs() < 5 * math.sqrt(p / draws)).all()


def test_with_replacement():
    rows = choose(3, 100, None, source())  # more than there are
    assert rows.unique().tolist() == [0, 1, 2]
    rows = choose(1000, 1000, True, source())
    assert len(rows.unique()) < 700  # 1 - 1/e of them


def test_too_many_without_replacement_are_refused():
    with pytest.raises(InputError, match=r"cannot draw 4 of 3 points without replacement"):
        choose(3, 4, False, source())


def test_the_generator_must_fit_the_device():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for device in (cpu, cuda, None):
        check_draw(1, source(), device)
    check_draw(1, OnCuda(), cuda)
    check_draw(1, OnCuda(), None)
    with pytest.raises(InputError, match=r"lives on cuda:0 and the distribution on cpu. Use a CPU"):
        check_draw(1, OnCuda(), cpu)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.full((3, 4), 2.0), "2"),
        (torch.tensor([1.0, 2.5]), "[1, 2.5]"),
        (torch.arange(6.0).reshape(2, 3), "tensor[2, 3]"),
        (torch.tensor([math.nan]), "nan"),
        (0.5, "0.5"),
    ],
)
def test_brief(value, text):
    assert brief(value) == text
