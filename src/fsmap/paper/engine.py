"""Run experiments unit by unit, write each unit when it is done, then draw and judge the rows.

What happens to a folder that is there already:

- A finished run is replaced when the new one is finished; the old one is kept in
  ``OUT/.fsmap/ID.previous``. A quick run, or one that lacks units of it, replaces a full-size run
  only with ``--force``.
- With ``--resume`` a finished run stays as it is, and a full run satisfies ``--quick``, as in
  ``run all --quick``. Fields that only choose units (``Experiment.selecting``) may differ: missing
  units are added, and the summary stays until one of all units replaces it.
- An unfinished run is continued with ``--resume``, dropped with ``--force``, else refused.
- With ``--resume`` a run whose summary cannot be read is continued as an unfinished one.
"""

from __future__ import annotations

import dataclasses
import datetime
import errno
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from fsmap.errors import CheckpointError, FsmapError, InputError, MissingDataError
from fsmap.paper.experiment import Context, Experiment, coverage, get, registry
from fsmap.paper.options import Options, check_settings, choose_device, configure
from fsmap.paper.report import figures
from fsmap.paper.rows import Content, Row, circumstances, claim_entry, key_of, plain
from fsmap.paper.run_folder import DAMAGED, Place, RunFolder, locked
from fsmap.progress import progress

Say = Callable[[str], None]
Unit = Mapping[str, Any]

NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""Errors of a disk that takes no more: no bug, so no traceback."""


class Outcome(NamedTuple):
    """How one experiment went."""

    id: str  # the experiment
    status: str  # "finished", "kept" (was finished before), "skipped" or "failed"
    folder: Path  # where its files are
    reason: str = ""  # why it was skipped or failed
    # what stands in summary.json; empty if it was skipped or failed
    summary: Mapping[str, Any] = {}
    error: BaseException | None = None  # what it failed with


class Plan(NamedTuple):
    """One experiment with its config, and what was asked for.

    With ``lenient`` it is one of many: skipped if its data or its device is missing.
    """

    experiment: Experiment
    config: Any
    options: Options
    lenient: bool = False

    @property
    def folder(self) -> Path:
        """Where its files go."""
        return self.options.out / self.experiment.id

    def header(self) -> dict[str, Any]:
        """What must agree for a run to be resumed, as JSON holds it."""
        config = plain(dataclasses.asdict(self.config))
        return {"experiment": self.experiment.id, "size": self.options.size, "config": config}


class Task(NamedTuple):
    """A unit and all that is needed to measure it; it can be sent to another process."""

    experiment: Experiment
    config: Any
    unit: Unit
    options: Options
    folder: Path

    def anywhere(self) -> Task:
        """The same for a process that works in another folder."""
        data = self.options.data_dir
        options = self.options._replace(data_dir=None if data is None else data.absolute())
        return self._replace(options=options, folder=self.folder.absolute())

    def __str__(self) -> str:
        unit = (f"{key}={value}" for key, value in self.unit.items())
        return " ".join([self.experiment.id, *self.options.assignments, *unit])


class Result(NamedTuple):
    """The rows of a unit, and what it took."""

    rows: list[Row]
    seconds: float


def measure(task: Task, advance: Callable[[float | str], None] = lambda _: None) -> Result:
    """Measure a unit on the device of the machine this runs on; write nothing."""
    experiment, config, unit, options, folder = task
    device = choose_device(experiment, options.device)
    context = Context(torch.device(device), folder, advance, options.size, options.data_dir)
    start = time.perf_counter()
    measured = list(experiment.run(config, dict(unit), context))
    seconds = time.perf_counter() - start
    around = circumstances(device)._asdict()
    rows = [
        Row(
            experiment=experiment.id,
            metric=item.metric,
            value=plain(item.value),
            method=item.method,
            seed=item.seed,
            config=dict(item.config),
            **around,
            seconds=round(seconds if item.seconds is None else item.seconds, 4),
            unit=unit,
            deviations=tuple(item.deviations),
        )
        for item in measured
    ]
    return Result(rows, seconds)


class Pool(Protocol):
    """Calls a function with many items, somewhere: :class:`fsmap.integrations.ray.RayPool`."""

    def map(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        *,
        num_gpus: Callable[[Any], float],
        name: Callable[[Any], str],
    ) -> Iterator[tuple[int, Any, BaseException | None, int]]:
        """Place of the item, value, error and number of attempts, as each one ends."""


def run(
    names: Sequence[str], options: Options, say: Say = lambda _: None, pool: Pool | None = None
) -> Iterator[Outcome]:
    """Run experiments one after another, or all their units at once on a pool.

    Args:
        names: Ids, or ``["all"]``: then one that lacks its data or its device is skipped.
        options: What was asked for.
        say: Takes notes for the user, one line each.
        pool: Where to measure; None: here.
    """
    everything = list(names) == ["all"]
    experiments = list(registry().values()) if everything else [get(name) for name in names]
    if everything:
        check_settings(experiments, options)
    plans = [
        Plan(e, configure(e, options, lenient=everything), options, everything) for e in experiments
    ]
    return run_plans(plans, say, pool)


def run_plans(plans: Sequence[Plan], say: Say, pool: Pool | None = None) -> Iterator[Outcome]:
    """As :func:`run`, for plans."""
    if pool is None:
        many = len(plans) > 1
        labels = (f"{place}/{len(plans)} " * many for place in range(1, len(plans) + 1))
        return (_run_here(plan, say, label) for plan, label in zip(plans, labels, strict=True))
    return _run_on(pool, plans, say)


def _run_here(plan: Plan, say: Say, place: str) -> Outcome:
    with ExitStack() as stack:
        try:
            job = begin(plan, say, stack)
            if isinstance(job, Outcome):
                return job
            silent = plan.options.silent or not job.tasks
            with progress(len(job.tasks), place + plan.experiment.id, silent=silent) as bar:
                for index, task in enumerate(job.tasks):

                    def advance(news: float | str, index: int = index) -> None:
                        if isinstance(news, str):
                            bar.update(text=news)
                        else:
                            bar.update(index + min(max(float(news), 0.0), 1.0))

                    advance(" ".join(f"{key}={value}" for key, value in task.unit.items()))
                    job.folder.add(task.unit, *measure(task, advance))
                    bar.update(index + 1)
            return job.finish()
        except Exception as error:  # a bug in one experiment must not take the others with it
            return failure(plan, error)


def _run_on(pool: Pool, plans: Sequence[Plan], say: Say) -> Iterator[Outcome]:
    """All units of all runs at once; this process writes each as it ends."""
    with ExitStack() as stack:
        jobs: list[Job] = []
        for plan in plans:
            try:
                job = begin(plan, say, stack, remote=True)
            except Exception as error:
                job = failure(plan, error)
            if isinstance(job, Outcome):
                yield job
            else:
                jobs.append(job)
        yield from (job.outcome() for job in jobs if not job.left)
        owners = [(job, task.anywhere()) for job in jobs for task in job.tasks]
        if not owners:
            return
        tasks = [task for _, task in owners]
        with progress(len(tasks), "units", silent=plans[0].options.silent) as bar:
            for index, result, raised, _ in pool.map(measure, tasks, num_gpus=_num_gpus, name=str):
                job, task = owners[index]
                job.take(task, result, raised)
                bar.advance()
                if not job.left:
                    yield job.outcome()


def _num_gpus(task: Task) -> float:
    """One for what is made for a GPU, unless another device was asked for."""
    wanted, made_for = task.options.device, task.experiment.device
    return float(wanted.startswith("cuda") or (made_for == "gpu" and wanted == "auto"))


class Job:
    """An experiment whose folder is open, and the units that are left to do."""

    def __init__(self, plan: Plan, place: Place, folder: RunFolder, todo: Sequence[Unit]) -> None:
        self.plan, self.place, self.folder = plan, place, folder
        experiment, config, options, _ = plan
        self.tasks = [Task(experiment, config, unit, options, folder.path) for unit in todo]
        self.left = len(self.tasks)
        self.errors: dict[str, Exception] = {}

    def take(self, task: Task, result: Result, error: BaseException | None) -> None:
        """Write a unit that came back from a pool, or note its error."""
        self.left -= 1
        try:
            if error is not None:
                raise error
            self.folder.add(task.unit, *result)
        except Exception as failed:
            self.errors[str(task)] = failed

    def finish(self) -> Outcome:
        """Draw and judge the rows, and let the run take its place."""
        experiment = self.plan.experiment
        self.folder.arrange(experiment.units(self.plan.config))
        keep = {"command": self.plan.options.command(experiment.id)}
        summary = publish(experiment, self.folder, self.plan.header(), keep)
        return Outcome(experiment.id, "finished", self.place.settle().path, summary=summary)

    def outcome(self) -> Outcome:
        """As :meth:`finish`, but whatever failed becomes the outcome."""
        if not self.errors:
            try:
                return self.finish()
            except Exception as error:
                return failure(self.plan, error)
        outcome = failure(self.plan, next(iter(self.errors.values())))
        if outcome.status == "skipped":
            return outcome
        counted = f"{len(self.errors)} of {len(self.tasks)} units failed ({'; '.join(self.errors)})"
        return outcome._replace(reason=f"{counted}. The first: {outcome.reason}")


def is_bug(error: BaseException | None) -> bool:
    """Whether an error is neither one of fsmap's own nor a disk that takes no more."""
    full = isinstance(error, OSError) and error.errno in NO_PLACE
    return not (full or isinstance(error, FsmapError))


def failure(plan: Plan, error: Exception) -> Outcome:
    """Skipped, if it lacks its data and is one of many; else failed, with the reason."""
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


def begin(plan: Plan, say: Say, stack: ExitStack, *, remote: bool = False) -> Job | Outcome:
    """Open the folder of a run: what is left to do, or the outcome if nothing is or it is skipped.

    ``stack`` keeps the folder's lock. ``remote``: units are measured on other machines, so this
    one needs no device for them.
    """
    experiment, config, options, lenient = plan
    if not remote:
        device = choose_device(experiment, options.device)
        if lenient and experiment.device == "gpu" and device == "cpu" and not options.quick:
            reason = f"needs a GPU at full size. Try: {options.command(experiment.id)} --quick"
            return Outcome(experiment.id, "skipped", plan.folder, reason)
    units = experiment.units(config)
    if not units:
        asked = plan.header()["config"]
        empty = [f"{name} is empty" for name, value in asked.items() if value == []]
        message = f"there is nothing to do with this config: {', '.join(empty) or asked}."
        raise InputError(message)
    place = Place.of(options.out, experiment.id)
    stack.enter_context(locked(place))
    place.settle()
    if not (options.resume or options.force) and place.final.finished:
        lost = _lost(place.final, units, options)
        if lost and lenient:
            return Outcome(experiment.id, "kept", place.final.path, "finished before at full size")
        if lost:
            message = (
                f"{place.final.path} holds a finished full-size run, {lost}. Choose another --out, "
                "keep it with --resume, or replace it with --force."
            )
            raise InputError(message)
    folder = _open(plan, place, units, say)
    if folder is None:
        return Outcome(experiment.id, "kept", place.final.path, "finished before")
    done = folder.done()
    return Job(plan, place, folder, [unit for unit in units if key_of(unit) not in done])


def _open(plan: Plan, place: Place, units: Sequence[Unit], say: Say) -> RunFolder | None:
    """The folder to write to, ready for the next unit; None if there is nothing left to do."""
    options, header = plan.options, plan.header()
    if not options.force:
        for run in (place.fresh, place.final):
            if not run.finished or options.resume:
                run.check()
    pending = place.pending()
    found = pending or (place.final if place.final.finished else None)
    if options.resume and not options.force and found is not None:
        whole = found.state == "complete"
        if found.finished and options.quick and found.header()["size"] == "full":
            if found.state != "damaged":
                return None  # a full run satisfies --quick
        _check_same(found, header, plan.experiment.selecting)
        done = found.done()
        if whole and all(key_of(unit) in done for unit in units):
            return None
        header["units"] = len({*done, *map(key_of, units)})
        say(f"{plan.experiment.id}: {_resuming(found.repair(header))}")
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
    folder.begin({**header, "units": len(units)})
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


def _lost(run: RunFolder, units: Sequence[Unit], options: Options) -> str:
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


def publish(
    experiment: Experiment, run: RunFolder, header: Mapping[str, Any], keep: Mapping[str, Any]
) -> dict[str, Any]:
    """Draw and judge the rows of a run; write ``summary.json`` last of all.

    ``keep`` are entries that are known already, such as the ``command`` that repeats the run.
    """
    rows, done = run.rows(), run.done()
    with figures.style():
        for name, figure in experiment.draw(rows).items():
            figures.save(figure, run.path, name)
    size = coverage(experiment, header, done)
    missing = [] if size in ("quick", "full") else [size]
    summary = {
        "experiment": experiment.id,
        "size": header["size"],
        "protocol": experiment.protocol,
        "seconds": round(sum(done.values()), 3),
        "device": _joined(row.device for row in rows),
        "commit": _joined(row.commit for row in rows),
        "claims": [claim_entry(claim) for claim in experiment.claims(rows)],
        "table": experiment.table(rows),
        "label": experiment.label,
        "title": experiment.title,
        "config": header["config"],
        "units": size,
        "torch": _joined(row.torch for row in rows),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": len(rows),
        "deviations": [*missing, *dict.fromkeys(d for row in rows for d in row.deviations)],
        **keep,
    }
    return run.write_summary(summary)


def redraw(experiment: Experiment, run: RunFolder) -> dict[str, Any]:
    """Draw and judge the rows of a run again, with the code of today."""
    if not run.rows():
        message = (
            f"{run.path} has no rows of finished units, so that there is nothing to draw. Restore "
            f"{run.rows_file.name} and {run.units_file.name}, or run the experiment again."
        )
        raise CheckpointError(message)
    try:
        old = run.summary()
    except CheckpointError:
        old = {}
    keep = {key: old[key] for key in ("date", "command") if key in old}
    try:
        return publish(experiment, run, run.header(), keep)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        message = f"the rows of {run.path} cannot be drawn ({error!r}); --debug shows where."
        raise CheckpointError(message) from error


def _joined(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(value for value in values if value))
