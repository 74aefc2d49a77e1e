"""The folder of a run: what is finished, what can be resumed, and how one run replaces another.

    OUT/ID/rows.jsonl  units.jsonl  *.png  *.svg  interactive.json  summary.json (last of all)
    OUT/.fsmap/ID.lock        held while a run writes
    OUT/.fsmap/ID.new/        a run that will replace a finished one when it is finished itself
    OUT/.fsmap/ID.previous/   the finished run that was replaced last
    OUT/.fsmap/ID.dropped/    an unfinished run that is being removed

A folder with ``summary.json`` is finished. One with ``units.jsonl`` and no summary is unfinished.
``units.jsonl`` is the first file of a run, so a kill at any moment leaves a folder that can be
resumed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fsmap.errors import CheckpointError
from fsmap.files import exclusive, remove_partial, write_whole
from fsmap.paper.rows import (
    Content,
    Line,
    Row,
    append_lines,
    encode,
    intact,
    key_of,
    plain,
    read_content,
    revive,
    sealed,
    tally,
    unsealed,
    verdict,
)

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
    def tally(self) -> str:
        """How the claims come out, in words."""
        return tally(self.summary["claims"])

    @property
    def verdicts(self) -> list[str]:
        """The verdict of each claim."""
        return [verdict(claim) for claim in self.summary["claims"]]


def read_run(folder: Path) -> Run:
    """Read a finished run, and check it against its rows.

    Raises:
        CheckpointError: If ``summary.json`` is damaged, or the rows are not those it was made from.
    """
    file = folder / "summary.json"
    content = read_content(folder)
    try:
        run = Run(folder, revive(json.loads(file.read_text())))
        # what readers rely on
        _ = run.id, "" + run.summary["size"], run.tally, 0 + run.summary.get("seconds", 0)
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
    """Write ``summary.json``, with checksums of the rows and of itself."""
    entries = sealed({**unsealed(summary), ROWS: read_content(folder).sha256})
    text = json.dumps(plain(entries), indent=1, allow_nan=False, ensure_ascii=False)
    write_whole(folder / "summary.json", text + "\n")
    return entries


def coverage(summary: Mapping[str, Any]) -> str:
    """How much of what was asked for a summary covers, as ``"2 of 4 units"``; "" if all."""
    covers = summary.get(COVERS)
    return f"{covers['units']:d} of {covers['of']:d} units" if covers else ""


HIDDEN = ".fsmap"

DAMAGED = "rows.damaged.jsonl"
"""A copy of rows that do not match their checksums, for a person to look at."""


class RunFolder:
    """Rows and units of one run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows_file = path / "rows.jsonl"
        self.units_file = path / "units.jsonl"
        self.summary_file = path / "summary.json"

    @property
    def finished(self) -> bool:
        """Whether a run was brought to its end here."""
        return self.summary_file.is_file()

    @property
    def state(self) -> str:
        """``"empty"``, ``"unfinished"``, ``"damaged"``, ``"growing"`` or ``"complete"``.

        Damaged: finished, but the summary cannot be read or is not that of the rows. Growing:
        finished, and asked for more units than the summary covers.
        """
        if not self.finished:
            return "unfinished" if self.units_file.is_file() else "empty"
        try:
            return "growing" if coverage(self.summary()) else "complete"
        except CheckpointError:
            return "damaged"

    def check(self) -> None:
        """Refuse a folder that no command of fsmap leaves behind."""
        for file in (self.rows_file, self.units_file, self.summary_file):
            if file.is_dir():
                message = f"{file} is a folder, not a file. Remove it, or choose another --out."
                raise CheckpointError(message)
        if self.state == "unfinished" or (
            self.rows_file.is_file() and self.rows_file.stat().st_size
        ):
            self.header()

    @property
    def foreign(self) -> bool:
        """Whether something else is here. Hidden files and rows are what a kill may leave."""
        if not self.path.exists() or self.state != "empty":
            return False
        files = self.path.iterdir() if self.path.is_dir() else [self.path]
        return any(not f.name.startswith(".") and f != self.rows_file for f in files)

    def begin(self, header: Mapping[str, Any]) -> None:
        """Start an empty run. The header is the first file: a folder with it can be resumed."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._write_units(header, [])

    def content(self) -> Content:
        """Rows and units, checked against each other."""
        return read_content(self.path)

    def summary(self) -> dict[str, Any]:
        """What stands in ``summary.json``."""
        return read_run(self.path).summary

    def header(self) -> dict[str, Any]:
        """What the run in this folder was asked for."""
        if header := self.content().header:
            return header
        if self.finished:
            summary = self.summary()
            return {key: summary.get(key) for key in ("experiment", "size", "config")}
        message = (
            f"the first line of {self.units_file}, which says what this run is, is missing or "
            "damaged: nothing can be resumed here. Restore a copy, or start anew with --force."
        )
        raise CheckpointError(message)

    def done(self) -> dict[str, float]:
        """Finished units."""
        return {key: line["seconds"] for key, line in self.content().units.items()}

    def repair(self, header: Mapping[str, Any]) -> Content:
        """Drop what is no finished unit: what a kill left, and what does not match its checksum."""
        for file in (self.rows_file, self.units_file, self.summary_file):
            remove_partial(file)
        content = self.content()
        if content.damaged and self.rows_file.exists():
            write_whole(self.path / DAMAGED, self.rows_file.read_bytes())
        self._write_units(header, content.units.values())
        self._write_rows(content.lines)
        return content

    def add(self, unit: Mapping[str, Any], rows: Sequence[Row], seconds: float) -> None:
        """Write a finished unit: its rows, then the line that says so."""
        lines = [encode(row._asdict()) for row in rows]
        append_lines(self.rows_file, lines)
        about = {"unit": unit, "rows": len(rows), "seconds": seconds}
        done = sealed(about, [line.encode() for line in lines])
        append_lines(self.units_file, [encode(done)])

    def arrange(self, units: Sequence[Mapping[str, Any]]) -> None:
        """Put units that were added in any order into theirs; others, added before, come first."""
        place = {key_of(unit): number for number, unit in enumerate(units)}
        content = self.content()
        done = sorted(content.units, key=lambda key: place.get(key, -1))
        order = {key: number for number, key in enumerate(done)}
        lines = sorted(content.lines, key=lambda line: order[key_of(line.row.unit)])
        if done != list(content.units) or lines != content.lines:
            self._write_rows(lines)
            self._write_units(self.header(), [content.units[key] for key in done])

    def rows(self) -> list[Row]:
        """Rows of finished units; all rows if there is no ``units.jsonl`` (copied results)."""
        return [line.row for line in self.content().lines]

    def _write_rows(self, lines: Iterable[Line]) -> None:
        write_whole(self.rows_file, b"".join(line.text + b"\n" for line in lines))

    def _write_units(self, header: Mapping[str, Any], units: Iterable[Mapping[str, Any]]) -> None:
        lines = [sealed(plain(header)), *units]
        write_whole(self.units_file, "".join(encode(line) + "\n" for line in lines))


class Place(NamedTuple):
    """Where a run's folders are."""

    final: RunFolder
    fresh: RunFolder
    previous: Path
    dropped: Path
    lock: Path

    @classmethod
    def of(cls, out: Path, name: str) -> Place:
        """The folders of one experiment."""
        hidden = out / HIDDEN
        final, fresh = RunFolder(out / name), RunFolder(hidden / f"{name}.new")
        beside = (hidden / f"{name}.{end}" for end in ("previous", "dropped", "lock"))
        return cls(final, fresh, *beside)

    def settle(self) -> RunFolder:
        """Let a finished new run take its place; the finished run that was there is kept aside."""
        if self.fresh.finished:
            if self.final.path.exists():
                shutil.rmtree(self.previous, ignore_errors=True)
                self.final.path.rename(self.previous)
            self.fresh.path.rename(self.final.path)
        return self.final

    def drop(self, run: RunFolder) -> None:
        """Remove a run: in one piece, so that a kill leaves no part of it in its place."""
        shutil.rmtree(self.dropped, ignore_errors=True)
        if run.path.exists():
            run.path.rename(self.dropped)
            shutil.rmtree(self.dropped, ignore_errors=True)

    def pending(self) -> RunFolder | None:
        """The run that lacks units or its summary, if there is one."""
        runs = (self.fresh, self.final)
        return next((run for run in runs if run.state in ("unfinished", "growing")), None)


@contextmanager
def locked(place: Place) -> Iterator[None]:
    """Keep other processes out of a run's folder."""
    with exclusive(place.lock, place.final.path):
        yield
