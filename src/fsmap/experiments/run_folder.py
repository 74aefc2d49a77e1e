"""The folder of a run: what is finished, what can be resumed, and how one run replaces another.

    OUT/ID/rows.jsonl  units.jsonl  *.png  *.svg  interactive.json  summary.json (last of all)
    OUT/.fsmap/ID.lock        held while a run writes
    OUT/.fsmap/ID.new/        a run that will replace a finished one when it is finished itself
    OUT/.fsmap/ID.previous/   the finished run that was replaced last

A folder with ``summary.json`` is finished. One with ``units.jsonl`` and no summary is unfinished. A
finished run that is asked for more units keeps its summary, which then says what it covers, until
the next one replaces it. One whose summary cannot be read is resumed from its units.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fsmap.errors import CheckpointError
from fsmap.report import records
from fsmap.report.records import Row
from fsmap.report.summary import coverage, read_run
from fsmap.train.files import write_whole
from fsmap.train.lock import exclusive

HIDDEN = ".fsmap"


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
        """Whether a run was finished here and its summary cannot be read."""
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

    @property
    def foreign(self) -> bool:
        """Whether something else is here."""
        here = self.path.exists() and any(self.path.iterdir())
        return here and not self.finished and not self.unfinished

    def begin(self, header: Mapping[str, Any]) -> None:
        """Start an empty run.

        Args:
            header: What must agree when it is resumed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.summary_file.unlink(missing_ok=True)
        write_whole(self.rows_file, "")
        write_whole(self.units_file, records.encode(header) + "\n")

    def restate(self, header: Mapping[str, Any]) -> None:
        """Say anew what the run was asked for.

        Args:
            header: What must agree when it is resumed.
        """
        lines, _ = records.read_lines(self.units_file)
        if dict(lines[0]) != dict(header):
            self._rewrite(self.units_file, [header, *lines[1:]])

    def summary(self) -> dict[str, Any]:
        """What stands in ``summary.json``.

        Returns:
            Its entries.

        Raises:
            CheckpointError: If it is damaged.
        """
        return read_run(self.path).summary

    def header(self) -> dict[str, Any]:
        """What the run in this folder was asked for.

        Returns:
            Experiment, size and config.

        Raises:
            CheckpointError: If the folder does not say.
        """
        lines, _ = records.read_lines(self.units_file)
        if lines:
            return dict(lines[0])
        if self.finished:
            summary = self.summary()
            return {key: summary.get(key) for key in ("experiment", "size", "config")}
        message = f"{self.units_file} is empty: nothing can be resumed here. Use --force."
        raise CheckpointError(message)

    def done(self) -> dict[str, float]:
        """Finished units.

        Returns:
            Seconds by key.
        """
        lines, _ = records.read_lines(self.units_file)
        return {records.key_of(line["unit"]): line["seconds"] for line in lines[1:]}

    def repair(self) -> int:
        """Drop what a kill left: rows of unfinished units and lines that were cut off.

        Returns:
            How many rows and lines were dropped.
        """
        rows, cut = records.read_rows(self.rows_file)
        lines, cut_units = records.read_lines(self.units_file)
        done = self.done()
        kept = [row for row in rows if records.key_of(row.unit) in done]
        dropped = len(rows) - len(kept) + cut
        if dropped or cut_units:
            self._rewrite(self.rows_file, [row._asdict() for row in kept])
            self._rewrite(self.units_file, lines)
        return dropped

    def add(self, unit: Mapping[str, Any], rows: Sequence[Row], seconds: float) -> None:
        """Write a finished unit: its rows, then the line that says so.

        Args:
            unit: Its key.
            rows: Its rows.
            seconds: What it took.
        """
        records.append_lines(self.rows_file, [row._asdict() for row in rows])
        line = {"unit": unit, "rows": len(rows), "seconds": seconds}
        records.append_lines(self.units_file, [line])

    def arrange(self, units: Sequence[Mapping[str, Any]]) -> None:
        """Put units that came back in any order into theirs, as one process leaves them.

        Args:
            units: Their keys, in order.
        """
        place = {records.key_of(unit): number for number, unit in enumerate(units)}
        rows, _ = records.read_rows(self.rows_file)
        (header, *lines), _ = records.read_lines(self.units_file)
        rows.sort(key=lambda row: place.get(records.key_of(row.unit), len(place)))
        lines.sort(key=lambda line: place.get(records.key_of(line["unit"]), len(place)))
        self._rewrite(self.rows_file, [row._asdict() for row in rows])
        self._rewrite(self.units_file, [header, *lines])

    def rows(self) -> list[Row]:
        """All rows of finished units.

        Returns:
            The rows; where there is no ``units.jsonl`` (results that were copied), all of them.
        """
        rows, _ = records.read_rows(self.rows_file)
        if not self.units_file.is_file():
            return rows
        done = self.done()
        return [row for row in rows if records.key_of(row.unit) in done]

    @staticmethod
    def _rewrite(path: Path, lines: Sequence[Any]) -> None:
        write_whole(path, "".join(records.encode(line) + "\n" for line in lines))


class Place(NamedTuple):
    """Where a run's folders are."""

    final: RunFolder
    fresh: RunFolder
    previous: Path
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
        return cls(final, fresh, hidden / f"{name}.previous", hidden / f"{name}.lock")

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
