"""The scripts that corrupt files and kill processes, at a small size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("script", "count"), [("corruptions", 27), ("kills", 7)])
def test_nothing_is_accepted_stuck_or_different(script: str, count: int):
    file = Path(__file__).with_name(f"{script}.py")
    command = [sys.executable, "-W", "ignore", str(file), "--count", str(count), "--seed", "7"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" {script}, seed 7: 0 " in done.stdout
