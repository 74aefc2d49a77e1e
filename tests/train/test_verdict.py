"""Members that diverge."""

from __future__ import annotations

import pytest
import torch

from fsmap.errors import DivergedError, DivergedWarning
from fsmap.train.grid import Grid
from fsmap.train.history import Recorder
from fsmap.train.population import Verdict


def flushed(rows: list[list[float]], first: int = 0) -> tuple[Recorder, torch.Tensor]:
    recorder = Recorder(every=1)
    for step, row in enumerate(rows):
        recorder.add(first + step, 0.1, torch.tensor(row).expand(5, -1))
    return recorder, recorder.flush()


def test_the_first_step_counts_and_stays():
    verdict = Verdict(Grid(a=[1.0, 2.0, 3.0]))
    verdict.judge(*flushed([[1, 1, 1], [1, torch.nan, 1], [1, 1, 1]], first=10))
    assert verdict.diverged.tolist() == [-1, 11, -1]
    verdict.judge(*flushed([[torch.inf, torch.nan, 1]], first=13))
    assert verdict.diverged.tolist() == [13, 11, -1]
    with pytest.warns(
        DivergedWarning, match=r"2 of 3 members diverged: \{'a': 1.0\} at step 13; \{'a': 2.0\}"
    ):
        verdict.report()


def test_any_column_counts():
    verdict = Verdict(Grid(a=[1.0, 2.0]))
    recorder = Recorder(every=1)
    row = torch.ones(5, 2)
    row[3, 1] = torch.nan
    recorder.add(0, 0.1, row)
    verdict.judge(recorder, recorder.flush())
    assert verdict.diverged.tolist() == [-1, 0]


def test_a_long_list_is_cut():
    verdict = Verdict(Grid(a=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    verdict.diverged[:5] = 7
    with pytest.warns(DivergedWarning, match=r"and 2 more"):
        verdict.report()


def test_nothing_to_tell():
    Verdict(Grid(a=[1.0])).report()  # a warning would be an error here


def test_nobody_left_ends_training():
    verdict = Verdict(Grid(a=[1.0, 2.0]))
    with pytest.raises(DivergedError, match=r"all 2 members diverged, between step 3 and 4.*clip"):
        verdict.judge(*flushed([[torch.nan, 1], [1, torch.nan]], first=3))
