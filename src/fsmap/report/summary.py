"""A finished run on disk: what its ``summary.json`` says, and how much of the run it covers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fsmap.errors import CheckpointError
from fsmap.report.records import read_lines, revive

COVERS = "covers"
"""Entry of the summary of a finished run that is asked for more units."""


class Run(NamedTuple):
    """A finished run on disk."""

    folder: Path
    summary: dict[str, Any]

    @property
    def id(self) -> str:
        """The experiment."""
        return str(self.summary["experiment"])

    @property
    def held(self) -> int:
        """How many claims hold."""
        return sum(bool(claim["holds"]) for claim in self.summary["claims"])


def read_run(folder: Path) -> Run:
    """Read a finished run.

    Args:
        folder: One with a ``summary.json``.

    Returns:
        The run.

    Raises:
        CheckpointError: If ``summary.json`` is damaged.
    """
    file = folder / "summary.json"
    try:
        run = Run(folder, revive(json.loads(file.read_text())))
        _ = run.id, run.summary["size"], run.held, coverage(run.summary)  # what readers rely on
    except (ValueError, KeyError, TypeError) as error:
        units = read_lines(folder / "units.jsonl")[0][1:]
        again = " with --resume, which keeps its units" if units else ""
        message = f"{file} is not a summary of fsmap ({error}). Run the experiment again{again}."
        raise CheckpointError(message) from error
    return run


def coverage(summary: Mapping[str, Any]) -> str:
    """How much of what was asked for a ``summary.json`` covers.

    Args:
        summary: Its entries.

    Returns:
        Such as ``"2 of 4 units"``; empty where nothing was asked for since it was written.
    """
    covers = summary.get(COVERS)
    return f"{covers['units']:d} of {covers['of']:d} units" if covers else ""
