"""A finished run on disk: what its ``summary.json`` says, and how much of the run it covers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fsmap.errors import CheckpointError
from fsmap.files import write_whole
from fsmap.report.records import intact, plain, read_content, revive, sealed, unsealed

COVERS = "covers"
"""Entry of the summary of a finished run that is asked for more units."""

ROWS = "rows_sha256"
"""Entry of a summary: the checksum of the rows that it was made from."""


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
    """Read a finished run, and check it against its rows.

    Args:
        folder: One with a ``summary.json``.

    Returns:
        The run.

    Raises:
        CheckpointError: If ``summary.json`` is damaged, or the rows are not those it was made from.
    """
    file = folder / "summary.json"
    content = read_content(folder)
    try:
        run = Run(folder, revive(json.loads(file.read_text())))
        # what readers rely on
        _ = run.id, "" + run.summary["size"], run.held, 0 + run.summary.get("seconds", 0)
        growing = coverage(run.summary)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wrong = f"{file} is not a summary of fsmap ({error})"
    else:
        wrong = ""
        if not intact(run.summary):
            wrong = f"{file} was altered, or written by an earlier version: its checksum is wrong"
        elif content.damaged or not (growing or run.summary.get(ROWS) == content.sha256):
            wrong = f"the rows of {folder} are not those its summary was made from"
    if wrong:
        again = " with --resume, which keeps the units that match" if content.units else ""
        message = f"{wrong}. Restore a copy, or run the experiment again{again}."
        raise CheckpointError(message)
    return run


def write_summary(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``summary.json``, with checksums of the rows and of itself.

    Args:
        folder: The run's.
        summary: Its entries.

    Returns:
        What was written.
    """
    entries = sealed({**unsealed(summary), ROWS: read_content(folder).sha256})
    text = json.dumps(plain(entries), indent=1, allow_nan=False, ensure_ascii=False)
    write_whole(folder / "summary.json", text + "\n")
    return entries


def coverage(summary: Mapping[str, Any]) -> str:
    """How much of what was asked for a ``summary.json`` covers.

    Args:
        summary: Its entries.

    Returns:
        Such as ``"2 of 4 units"``; empty where nothing was asked for since it was written.
    """
    covers = summary.get(COVERS)
    return f"{covers['units']:d} of {covers['of']:d} units" if covers else ""
