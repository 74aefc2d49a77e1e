"""The folder of a run: what is finished, what can be resumed, and how one run replaces another.

    OUT/ID/rows.jsonl  units.jsonl  *.png  *.svg  summary.json (last of all)
    OUT/.fsmap/ID.lock        held while a run writes
    OUT/.fsmap/ID.new/        a run that will replace a finished one when it is finished itself
    OUT/.fsmap/ID.previous/   the finished run that was replaced last
    OUT/.fsmap/ID.dropped/    an unfinished run that is being removed

``units.jsonl`` is the first file of a run, so a kill at any moment leaves a folder that can be
resumed. ``summary.json`` is made from the rows; one that is missing, damaged or of other rows is
made again by ``--resume``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
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
    parse,
    plain,
    read_content,
    sealed,
    unsealed,
)

ROWS = "rows_sha256"
"""Entry of a summary: the checksum of the rows that it was made from."""

HIDDEN = ".fsmap"

DAMAGED = "rows.damaged.jsonl"
"""A copy of rows that do not match their checksums."""


class RunFolder:
    """Rows and units of one run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows_file = path / "rows.jsonl"
        self.units_file = path / "units.jsonl"
        self.summary_file = path / "summary.json"

    @property
    def finished(self) -> bool:
        """Whether there is a summary, of these rows or of fewer."""
        return self.summary_file.is_file()

    @property
    def state(self) -> str:
        """``"empty"``, ``"unfinished"``, ``"damaged"`` or ``"complete"``.

        Unfinished: units or a summary of all of them are missing. Damaged: the header or a unit
        does not match its checksum.
        """
        if not self.units_file.is_file():
            return "damaged" if self.finished else "empty"
        content = self.content()
        if not content.header or content.damaged:
            return "damaged"
        if content.header.get("units", 0) > len(content.units):
            return "unfinished"
        try:
            return "complete" if self.summary()[ROWS] == content.sha256 else "unfinished"
        except CheckpointError:
            return "unfinished"

    def check(self) -> None:
        """Refuse a folder that no command of fsmap leaves behind."""
        for file in (self.rows_file, self.units_file, self.summary_file):
            if file.is_dir():
                message = f"{file} is a folder, not a file. Remove it, or choose another --out."
                raise CheckpointError(message)
        if self.state != "empty" or (self.rows_file.is_file() and self.rows_file.stat().st_size):
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

    def rows(self) -> list[Row]:
        """Rows of finished units."""
        return [line.row for line in self.content().lines]

    def done(self) -> dict[str, float]:
        """Finished units by key, and how many seconds they took."""
        return {key: line["seconds"] for key, line in self.content().units.items()}

    def header(self) -> dict[str, Any]:
        """What the run in this folder was asked for."""
        if header := self.content().header:
            return header
        message = (
            f"the first line of {self.units_file}, which says what this run is, is missing or "
            "damaged: nothing can be resumed here. Restore a copy, or start anew with --force."
        )
        raise CheckpointError(message)

    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` says; CheckpointError if it was altered."""
        found = parse(self.summary_file.read_bytes()) if self.finished else None
        if not isinstance(found, dict) or not intact(found):
            message = f"{self.summary_file} is missing or damaged. Make it again with --resume."
            raise CheckpointError(message)
        return found

    def write_summary(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``summary.json``, with checksums of the rows and of itself."""
        entries = sealed({**unsealed(summary), ROWS: self.content().sha256})
        text = json.dumps(plain(entries), indent=1, allow_nan=False, ensure_ascii=False)
        write_whole(self.summary_file, text + "\n")
        return entries

    def repair(self, header: Mapping[str, Any]) -> Content:
        """Drop what is no finished unit: what a kill left, and what does not match its checksum."""
        for file in (self.rows_file, self.units_file, self.summary_file):
            remove_partial(file)
        content = self.content()
        lost = content.damaged or (content.dropped and self.finished)
        if lost and self.rows_file.exists():
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
        return next((run for run in runs if run.state in ("unfinished", "damaged")), None)


def locked(place: Place) -> AbstractContextManager[None]:
    """Keep other processes out of a run's folder."""
    return exclusive(place.lock, place.final.path)
