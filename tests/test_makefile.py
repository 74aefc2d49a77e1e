"""What ``make paper`` does, read from what make would run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_the_report_of_make_paper_shows_the_results_that_are_kept():
    """A full-size run in results/ is worth more than a quick one in runs/."""
    command = ("make", "-n", "-o", ".venv/.ready", "paper")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "fsmap report runs results --out report" in done.stdout
    assert list((ROOT / "results").glob("*/summary.json"))


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_full_can_be_interrupted_and_writes_to_results():
    command = ("make", "-n", "-o", ".venv/.ready", "full")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "fsmap run all --device cpu --out results --resume" in done.stdout
