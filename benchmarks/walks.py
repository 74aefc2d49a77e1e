"""The number of source files of fsmap that one call visits.

    python -m benchmarks.walks             every walk
    python -m benchmarks.walks doctor      some of them

A file counts if one of its functions runs (``sys.setprofile``, in all threads). Each walk runs
twice and the second run is counted, so that imports do not count. Other processes do not count. To
add a walk, write a function that prepares it and returns the call to count, and list it in
``WALKS`` with the number of files that it may visit.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

import fsmap

ROOT = Path(fsmap.__file__).parent


def count(call: Callable[[], object]) -> tuple[list[str], int]:
    """The files of fsmap whose functions run during a call, and how many functions."""
    seen: set[CodeType] = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    ours = [code for code in seen if Path(code.co_filename).is_relative_to(ROOT)]
    files = {Path(code.co_filename).relative_to(ROOT).as_posix() for code in ours}
    return sorted(files), len(ours)


def _network() -> nn.Module:
    """25 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def lmap() -> Callable[[], object]:
    lm = fsmap.LMAP(_network(), fsmap.px.Uniform(-1.0, 1.0, shape=(1,)), num_points=8)
    x = torch.linspace(-1, 1, 16)[:, None]
    return lambda: lm(x)


def fit() -> Callable[[], object]:
    from fsmap.train.loop import adam

    f, params = fsmap.functional(_network())
    x = torch.linspace(-1, 1, 16)[:, None]
    terms = fsmap.Gaussian(0.1), fsmap.Normal(1.0), fsmap.px.Uniform(-1.0, 1.0)
    objective = fsmap.fs_map(*terms, num_points=16, jitter=1e-4, num_data=16)
    data = fsmap.Batch(x, x.sin())
    return lambda: fsmap.fit(objective, f, params, data, steps=1, optimizer=adam(0.01), seed=0)


def doctor() -> Callable[[], object]:
    net = _network()
    return lambda: str(fsmap.doctor(net, torch.linspace(-1, 1, 50)[:, None]))


def command(words: str) -> Callable[[], Callable[[], object]]:
    """A command of ``fsmap``, in an empty folder with a small table."""

    def prepare() -> Callable[[], object]:
        from fsmap.cli import main

        folder = Path(tempfile.mkdtemp())
        lines = ["a,b,y", *(f"{i % 7},{i % 5},{i % 7 - i % 5}" for i in range(80))]
        (folder / "data.csv").write_text("\n".join(lines))

        def run() -> None:
            with contextlib.chdir(folder):
                code = main(words.split())
            if code:
                raise RuntimeError(f"fsmap {words} ended with code {code}")

        return run

    return prepare


# What is called, how it is prepared, and how many files it may visit.
WALKS: dict[str, tuple[str, Callable[[], Callable[[], object]], int]] = {
    "lmap": ("out, R = lm(x)", lmap, 8),
    "fit": ("one step of fit(fs_map)", fit, 12),
    "fourier": ("fsmap run fourier --quick", command("run fourier --quick --out runs"), 14),
    "train": ("fsmap train … --quick", command("train --data cifar10 --quick --out run"), 20),
    "table": ("fsmap fit data.csv", command("fit data.csv --target y --out model.pt"), 25),
    "doctor": ("print(doctor(net, x))", doctor, 10),
}


def main() -> None:
    names = sys.argv[1:] or list(WALKS)
    unknown = [name for name in names if name not in WALKS]
    if unknown:
        sys.exit(f"unknown walk {unknown[0]!r}; known: {', '.join(WALKS)}")
    print(f"{'walk':28}{'files':>6}{'aim':>5}{'functions':>11}")
    for name in names:
        title, prepare, most = WALKS[name]
        quiet = io.StringIO()
        try:
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                prepare()()  # imports happen here
                files, functions = count(prepare())
        except (Exception, SystemExit) as error:
            print(f"{title:28}  did not run: {error}")
            continue
        print(f"{title:28}{len(files):6}{most:5}{functions:11}")
        if sys.argv[1:]:
            print("  " + "\n  ".join(files))


if __name__ == "__main__":
    main()
