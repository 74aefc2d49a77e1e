"""The folder of a run: what is finished, what can be resumed, and how one run replaces another.

    OUT/ID/rows.jsonl  units.jsonl  *.png  *.svg  interactive.json  summary.json (last of all)
    OUT/.fsmap/ID.lock        held while a run writes
    OUT/.fsmap/ID.new/        a run that will replace a finished one when it is finished itself
    OUT/.fsmap/ID.previous/   the finished run that was replaced last
    OUT/.fsmap/ID.dropped/    an unfinished run that is being removed

A folder with ``summary.json`` is finished. One with ``units.jsonl`` and no summary is unfinished. A
finished run that is asked for more units keeps its summary, which then says what it covers, until
the next one replaces it. One whose summary cannot be read, or is not that of its rows, is resumed
from its units. ``units.jsonl`` is the first file of a run, so that a kill at any moment leaves a
folder that can be resumed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fsmap.errors import CheckpointError
from fsmap.files import exclusive, remove_partial, write_whole
from fsmap.report import records
from fsmap.report.records import Content, Line, Row, plain
from fsmap.report.summary import coverage, read_run

HIDDEN = ".fsmap"

DAMAGED = "rows.damaged.jsonl"
"""A copy of rows that do not match their checksums, for a person to look at."""


class RunFolder:
    """Rows and units of one run on disk.

    Args:
        path: The folder.
    """

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
    def unfinished(self) -> bool:
        """Whether a run was begun here and not brought to its end."""
        return self.units_file.is_file() and not self.finished

    @property
    def damaged(self) -> bool:
        """Whether a run was finished here and its summary cannot be read or does not fit."""
        try:
            if self.finished:
                self.summary()
        except CheckpointError:
            return True
        return False

    @property
    def growing(self) -> bool:
        """Whether a finished run was asked for more than its summary covers."""
        return self.finished and not self.damaged and bool(coverage(self.summary()))

    @property
    def complete(self) -> bool:
        """Whether a finished run has a summary that covers all that was asked for."""
        return self.finished and not self.damaged and not self.growing

    def check(self) -> None:
        """Refuse a folder that no command of fsmap leaves behind.

        Raises:
            CheckpointError: If a file of a run is a folder, or there are rows without a header.
        """
        for file in (self.rows_file, self.units_file, self.summary_file):
            if file.is_dir():
                message = f"{file} is a folder, not a file. Remove it, or choose another --out."
                raise CheckpointError(message)
        if self.unfinished or (self.rows_file.is_file() and self.rows_file.stat().st_size):
            self.header()

    @property
    def foreign(self) -> bool:
        """Whether something else is here. Hidden files and rows are what a kill may leave."""
        if not self.path.exists() or self.finished or self.unfinished:
            return False
        files = self.path.iterdir() if self.path.is_dir() else [self.path]
        return any(not f.name.startswith(".") and f != self.rows_file for f in files)

    def begin(self, header: Mapping[str, Any]) -> None:
        """Start an empty run. The header is the first file: a folder with it can be resumed.

        Args:
            header: What must agree when it is resumed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._write_units(header, [])

    def content(self) -> Content:
        """Rows and units, checked against each other."""
        return records.read_content(self.path)

    def summary(self) -> dict[str, Any]:
        """What stands in ``summary.json``.

        Returns:
            Its entries.

        Raises:
            CheckpointError: If it is damaged, or not made from the rows that are here.
        """
        return read_run(self.path).summary

    def header(self) -> dict[str, Any]:
        """What the run in this folder was asked for.

        Returns:
            Experiment, size and config.

        Raises:
            CheckpointError: If the folder does not say.
        """
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
        """Finished units.

        Returns:
            Seconds by key.
        """
        return {key: line["seconds"] for key, line in self.content().units.items()}

    def repair(self, header: Mapping[str, Any]) -> Content:
        """Drop what is no finished unit: what a kill left, and what does not match its checksum.

        Args:
            header: What the run is asked for now.

        Returns:
            What was found.
        """
        for file in (self.rows_file, self.units_file, self.summary_file):
            remove_partial(file)
        content = self.content()
        if content.damaged and self.rows_file.exists():
            write_whole(self.path / DAMAGED, self.rows_file.read_bytes())
        self._write_units(header, content.units.values())
        self._write_rows(content.lines)
        return content

    def add(self, unit: Mapping[str, Any], rows: Sequence[Row], seconds: float) -> None:
        """Write a finished unit: its rows, then the line that says so.

        Args:
            unit: Its key.
            rows: Its rows.
            seconds: What it took.
        """
        lines = [records.encode(row._asdict()) for row in rows]
        records.append_lines(self.rows_file, lines)
        about = {"unit": unit, "rows": len(rows), "seconds": seconds}
        sealed = records.sealed(about, [line.encode() for line in lines])
        records.append_lines(self.units_file, [records.encode(sealed)])

    def arrange(self, units: Sequence[Mapping[str, Any]]) -> None:
        """Put units that were added in any order into theirs; others, added before, come first.

        Args:
            units: Their keys, in order.
        """
        place = {records.key_of(unit): number for number, unit in enumerate(units)}
        content = self.content()
        done = sorted(content.units, key=lambda key: place.get(key, -1))
        if done != list(content.units):
            order = {key: number for number, key in enumerate(done)}
            lines = sorted(content.lines, key=lambda line: order[records.key_of(line.row.unit)])
            self._write_rows(lines)
            self._write_units(self.header(), [content.units[key] for key in done])

    def rows(self) -> list[Row]:
        """All rows of finished units.

        Returns:
            The rows; where there is no ``units.jsonl`` (results that were copied), all of them.
        """
        return [line.row for line in self.content().lines]

    def _write_rows(self, lines: Iterable[Line]) -> None:
        write_whole(self.rows_file, b"".join(line.text + b"\n" for line in lines))

    def _write_units(self, header: Mapping[str, Any], units: Iterable[Mapping[str, Any]]) -> None:
        lines = [records.sealed(plain(header)), *units]
        write_whole(self.units_file, "".join(records.encode(line) + "\n" for line in lines))


class Place(NamedTuple):
    """Where a run's folders are."""

    final: RunFolder
    fresh: RunFolder
    previous: Path
    dropped: Path
    lock: Path

    @classmethod
    def of(cls, out: Path, name: str) -> Place:
        """The folders of one experiment.

        Args:
            out: The folder of all runs.
            name: The experiment's id.

        Returns:
            Its folders, whether they exist or not.
        """
        hidden = out / HIDDEN
        final, fresh = RunFolder(out / name), RunFolder(hidden / f"{name}.new")
        beside = (hidden / f"{name}.{end}" for end in ("previous", "dropped", "lock"))
        return cls(final, fresh, *beside)

    def settle(self) -> RunFolder:
        """Let a finished new run take its place; the finished run that was there is kept aside.

        Returns:
            The folder of the latest finished run.
        """
        if self.fresh.finished:
            if self.final.path.exists():
                shutil.rmtree(self.previous, ignore_errors=True)
                self.final.path.rename(self.previous)
            self.fresh.path.rename(self.final.path)
        return self.final

    def drop(self, run: RunFolder) -> None:
        """Remove a run: in one piece, so that a kill leaves no part of it in its place.

        Args:
            run: One of these folders.
        """
        shutil.rmtree(self.dropped, ignore_errors=True)
        if run.path.exists():
            run.path.rename(self.dropped)
            shutil.rmtree(self.dropped, ignore_errors=True)

    def pending(self) -> RunFolder | None:
        """The run that lacks units or its summary, if there is one.

        Returns:
            The newest.
        """
        runs = (self.fresh, self.final)
        return next((run for run in runs if run.unfinished or run.growing), None)


@contextmanager
def locked(place: Place) -> Iterator[None]:
    """Keep other processes out of a run's folder.

    Args:
        place: The run's folders.

    Yields:
        Nothing.

    Raises:
        InputError: If the folder cannot be written, or another process writes it.
    """
    with exclusive(place.lock, place.final.path):
        yield
