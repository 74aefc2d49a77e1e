"""Runs trained together; what needs a GPU is in ``test_cuda.py``."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fsmap.errors import InputError
from fsmap.train.images import ImageRun
from fsmap.train.images.together import _turn, train_together
from image_cases import TINY


def test_on_a_cpu_one_after_another():
    kinds = [TINY, dataclasses.replace(TINY, seed=1)]
    runs = [ImageRun(kind) for kind in kinds]
    train_together(runs)
    alone = ImageRun(kinds[1])
    alone.train(progress=False)
    assert all(run.done for run in runs)
    for name, t in alone.snapshot().items():
        assert torch.equal(t, runs[1].snapshot()[name]), name


def test_turns_end_with_the_steps():
    class Stream:
        entered = 0

        def __enter__(self) -> None:
            Stream.entered += 1

        def __exit__(self, *_: object) -> None: ...

    steps = iter([None] * 45)
    assert [_turn(Stream(), steps) for _ in range(3)] == [True, True, False]
    assert next(steps, "none left") == "none left"
    assert Stream.entered == 3


def test_determinism_is_for_all_or_none():
    runs = [ImageRun(dataclasses.replace(TINY, deterministic=d)) for d in (False, True)]
    with pytest.raises(InputError, match="agree in deterministic"):
        train_together(runs)
