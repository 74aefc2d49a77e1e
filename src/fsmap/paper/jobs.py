"""A run as a job: its folder, opened and locked, and the units that are left to do.

What happens to a folder that is there already:

- a finished run is replaced when, and only when, the new one is finished (the old one is kept in
  ``OUT/.fsmap/ID.previous``), and a full-size one by a quick one, or by one that lacks units of
  it, only with ``--force``;
- with ``--resume`` it is left as it is, and a full-size run also serves who asks for the quick
  size, as it does in ``run all --quick``. Fields that only choose units
  (``Experiment.selecting``) may differ: units that are missing are added, the others stay, and so
  does the summary, until it is replaced by one of them all;
- an unfinished run is continued with ``--resume``, dropped with ``--force``, else refused;
- with ``--resume`` a run whose summary cannot be read is continued as an unfinished one.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from fsmap.errors import FsmapError, InputError, MissingDataError
from fsmap.paper.experiment import Experiment
from fsmap.paper.measure import Result, Task
from fsmap.paper.options import Options, choose_device
from fsmap.paper.publish import ask_for_more, header_of, publish
from fsmap.paper.report.records import Content, key_of, plain
from fsmap.paper.report.summary import coverage
from fsmap.paper.run_folder import DAMAGED, Place, RunFolder, locked

Say = Callable[[str], None]

NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""What the system says of a disk that takes no more: no bug, so no traceback."""


class Outcome(NamedTuple):
    """How one experiment went.

    Attributes:
        id: The experiment.
        status: ``"finished"``, ``"kept"`` (was finished before), ``"skipped"`` or ``"failed"``.
        folder: Where its files are.
        reason: Why it was skipped or failed.
        summary: What stands in ``summary.json``; empty if it was skipped or failed.
        error: What it failed with.
    """

    id: str
    status: str
    folder: Path
    reason: str = ""
    summary: Mapping[str, Any] = {}
    error: BaseException | None = None


class Plan(NamedTuple):
    """One experiment with its config, and what was asked for.

    Attributes:
        experiment: The experiment.
        config: Its config.
        options: What was asked for.
        lenient: One of many: skip it where its data or its device is missing.
    """

    experiment: Experiment
    config: Any
    options: Options
    lenient: bool = False

    @property
    def folder(self) -> Path:
        """Where its files go."""
        return self.options.out / self.experiment.id


class Job(NamedTuple):
    """An experiment whose folder is open, and the units that are left to do."""

    plan: Plan
    place: Place
    folder: RunFolder
    header: Mapping[str, Any]
    tasks: Sequence[Task]

    def add(self, task: Task, result: Result) -> None:
        """Write a finished unit."""
        self.folder.add(task.unit, result.rows, result.seconds)

    def finish(self) -> Outcome:
        """Draw and judge the rows, and let the run take its place."""
        experiment = self.plan.experiment
        self.folder.arrange(experiment.units(self.plan.config))
        command = self.plan.options.command(experiment.id)
        summary = publish(experiment, self.folder, self.header, {"command": command})
        return Outcome(experiment.id, "finished", self.place.settle().path, summary=summary)


def begin(plan: Plan, say: Say, stack: ExitStack, *, remote: bool = False) -> Job | Outcome:
    """Open the folder of a run.

    Args:
        plan: The experiment.
        say: Takes notes for the user.
        stack: Holds the folder's lock.
        remote: Units will be measured elsewhere: what this machine lacks, another may have.

    Returns:
        What is left to do; or the outcome, if nothing is or it is skipped.

    Raises:
        InputError: If the config asks for nothing, or the folder holds something else.
    """
    experiment, config, options, _ = plan
    if not remote:
        device = choose_device(experiment, options.device)
        if plan.lenient and experiment.device == "gpu" and device == "cpu" and not options.quick:
            reason = f"needs a GPU at full size. Try: {options.command(experiment.id)} --quick"
            return Outcome(experiment.id, "skipped", plan.folder, reason)
    header = header_of(experiment, config, options.size)
    units = experiment.units(config)
    if not units:
        empty = [f"{name} is empty" for name, value in header["config"].items() if value == []]
        why = ", ".join(empty) or header["config"]
        message = f"there is nothing to do with this config: {why}."
        raise InputError(message)
    place = Place.of(options.out, experiment.id)
    stack.enter_context(locked(place))
    place.settle()
    if not (options.resume or options.force) and place.final.finished:
        lost = _lost(place.final, units, options)
        if lost and plan.lenient:
            return _kept(experiment, place.final, "finished before at full size")
        if lost:
            message = (
                f"{place.final.path} holds a finished full-size run, {lost}. Choose another --out, "
                "keep it with --resume, or replace it with --force."
            )
            raise InputError(message)
    folder = _open(place, header, options, say, experiment.selecting, units)
    if folder is None:
        return _kept(experiment, place.final, "finished before")
    done = folder.done()
    todo = [unit for unit in units if key_of(unit) not in done]
    tasks = [Task(experiment, config, unit, options, folder.path) for unit in todo]
    return Job(plan, place, folder, header, tasks)


def is_bug(error: BaseException | None) -> bool:
    """Whether an error is neither one of fsmap's own nor a disk that takes no more."""
    full = isinstance(error, OSError) and error.errno in NO_PLACE
    return not (full or isinstance(error, FsmapError))


def failure(plan: Plan, error: Exception) -> Outcome:
    """The outcome of an experiment that raised.

    Args:
        plan: The experiment.
        error: What it raised.

    Returns:
        Skipped, if it lacks its data and is one of many; else failed, with the reason.
    """
    name, folder = plan.experiment.id, plan.folder
    if isinstance(error, FsmapError):
        skip = plan.lenient and isinstance(error, MissingDataError)
        return Outcome(name, "skipped" if skip else "failed", folder, str(error), error=error)
    reason = str(error)
    if is_bug(error):
        reason = "".join(traceback.format_exception(error)).rstrip()
    again = plan.options.command(name, resume=True)
    reason += f"\nFinished units are kept. When this is mended, continue with: {again}"
    return Outcome(name, "failed", folder, reason, error=error)


def _open(
    place: Place,
    header: Mapping[str, Any],
    options: Options,
    say: Say,
    selecting: Sequence[str],
    units: Sequence[Mapping[str, Any]],
) -> RunFolder | None:
    """The folder to write to, ready for the next unit; None if there is nothing left to do."""
    if not options.force:
        for run in (place.fresh, place.final):
            if not run.finished or options.resume:
                run.check()
    pending = place.pending()
    if options.resume and not options.force:
        found = pending or (place.final if place.final.finished else None)
        if found is not None:
            done = found.done()
            finished = found.finished and not (found.damaged and done)
            if finished and found.header()["size"] == "full" and options.quick:
                return None  # who asks for the quick size is served by the full one
            _check_same(found, header, selecting)
            if finished:
                if not found.growing and all(key_of(unit) in done for unit in units):
                    return None
                ask_for_more(found, units)
            say(f"{header['experiment']}: {_resuming(found.repair(header))}")
            return found
    if pending is not None and not options.force and (done := pending.done()):
        message = (
            f"{pending.path} holds an unfinished run ({len(done)} units done). "
            "Continue it with --resume, or start anew with --force."
        )
        raise InputError(message)
    if place.final.foreign:
        message = f"{place.final.path} exists and holds no run of fsmap. Choose another --out."
        raise InputError(message)
    for run in (place.fresh, place.final):
        if not run.finished:
            place.drop(run)
    folder = place.fresh if place.final.finished else place.final
    folder.begin(header)
    return folder


def _resuming(content: Content) -> str:
    text = f"resuming, {len(content.units)} units are done"
    if content.damaged:
        units = ", ".join(content.damaged[:8]) + (" …" if len(content.damaged) > 8 else "")
        text += f", {len(content.damaged)} do not match their checksum and run again ({units}; a "
        text += f"copy of all rows: {DAMAGED})"
    if content.dropped:
        text += f", {content.dropped} rows of an unfinished unit dropped"
    return text


def _kept(experiment: Experiment, run: RunFolder, reason: str) -> Outcome:
    """The outcome of a run that stays as it is; one that lacks units says so."""
    covered = coverage(run.summary())
    reason += f", covers {covered} that were asked for" if covered else ""
    return Outcome(experiment.id, "kept", run.path, reason)


def _lost(run: RunFolder, units: Sequence[Mapping[str, Any]], options: Options) -> str:
    """What a finished full-size run would lose if a new one took its place; "" if nothing."""
    if run.header()["size"] != "full":
        return ""
    if options.quick:
        return "which a quick one would replace"
    done = run.done()
    less = len(done.keys() - map(key_of, units))
    return f"and {less} of its {len(done)} units would not be in the new one" if less else ""


def _check_same(found: RunFolder, header: Mapping[str, Any], selecting: Sequence[str]) -> None:
    there = plain(found.header())
    before, now = ({"size": h["size"], **(h["config"] or {})} for h in (there, header))
    keys = [
        key for key in {**before, **now} if key not in selecting and before.get(key) != now.get(key)
    ]
    if not keys and there["experiment"] == header["experiment"]:
        return
    changed = ", ".join(f"{key}: {before.get(key)} there, {now.get(key)} now" for key in keys)
    message = (
        f"{found.path} holds a run with another config ({changed}). Resume it with its own "
        "settings, choose another --out, or start anew with --force."
    )
    raise InputError(message)
