"""Numbers at fixed seeds stay what they were; ``python tests/make_golden.py --check`` runs all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import make_golden

GOLDEN = json.loads(make_golden.FILE.read_text())
FAST = "fourier-noise theory-metric theory-any-parameter theory-symmetry theory-flat".split()


def test_library_numbers_are_the_golden_ones() -> None:
    assert not make_golden.differences(GOLDEN["library"], make_golden.library())


@pytest.mark.parametrize("name", FAST)
def test_numbers_of_quick_experiments_are_the_golden_ones(name: str, tmp_path: Path) -> None:
    if make_golden.machine() != GOLDEN["machine"]:
        pytest.skip(f"trained numbers hold on {GOLDEN['machine']} only")
    expected = make_golden.of_experiments(GOLDEN["experiments"], [name])
    assert expected
    assert not make_golden.differences(expected, make_golden.experiments([name], tmp_path))


def test_a_difference_is_named() -> None:
    number = {"dtype": "float64", "value": 1.0}
    found = {"a": {**number, "value": 1.0 + 1e-8}, "b": number}
    assert [line[:1] for line in make_golden.differences({"a": number}, found)] == ["a", "b"]
    assert not make_golden.differences({"a": number}, {"a": {**number, "value": 1.0 + 1e-10}})
