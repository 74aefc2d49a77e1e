"""Run experiments unit by unit, write each unit when it is done, then draw and judge the rows.

    OUT/ID/rows.jsonl  units.jsonl  *.png  *.svg  summary.json (last of all)
    OUT/.fsmap/ID.lock        held while a run writes
    OUT/.fsmap/ID.previous/   the finished run that was replaced last

``units.jsonl`` is the first file of a run, so a kill at any moment leaves a folder that can be
resumed. A run that is there already is refused, unless

- ``--resume``: an unfinished run is continued; a finished one stays as it is, and a full run
  satisfies ``--quick``, as in ``run all --quick``. Fields that only choose units
  (``Experiment.selecting``) may differ: missing units are added, and the summary stays until one of
  all units replaces it. A summary that is missing, damaged or of other rows is made again;
- ``--force``: it makes room for the new run. A finished one is kept aside.
"""

from __future__ import annotations

import dataclasses
import datetime
import errno
import shlex
import time
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args, get_origin

import torch

from fsmap.errors import CheckpointError, FsmapError, InputError, MissingDataError, did_you_mean
from fsmap.paper.experiment import Context, Experiment, coverage, get, registry
from fsmap.paper.report import figures
from fsmap.paper.rows import (
    DAMAGED,
    Content,
    Place,
    Row,
    RunFolder,
    Unit,
    circumstances,
    claim_entry,
    key_of,
    locked,
    plain,
)
from fsmap.progress import Silent, progress

Say = Callable[[str], None]

ZERO_IS_NONE = frozenset(
    ("warmup", "chain_warmup", "decays", "reg_strength", "strengths")
    + ("fmnist_weight_decay", "cifar10_weight_decay")
)
"""Names, in any config, whose zero switches something off."""

LARGEST = 1e12

BOOLEANS = {
    **dict.fromkeys(("true", "yes", "1", "on"), True),
    **dict.fromkeys(("false", "no", "0", "off"), False),
}

NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""Errors of a disk that takes no more: no bug, so no traceback."""


class Options(NamedTuple):
    """Options of a run, as on the command line."""

    out: Path = Path("runs")  # folder of all runs
    quick: bool = False  # quick size
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1" …
    seeds: int | None = None  # how many seeds, or None for the experiment's own number
    assignments: tuple[str, ...] = ()  # key=value texts
    resume: bool = False  # continue an unfinished run
    force: bool = False  # start anew although a run is there
    data_dir: Path | None = None  # where to look for data first
    silent: bool = False  # no progress bar

    @property
    def size(self) -> str:
        """``"quick"`` or ``"full"``."""
        return "quick" if self.quick else "full"

    def command(self, *names: str, resume: bool = False) -> str:
        """The command line that means the same."""
        words = ["fsmap", "run", *names]
        words += ["--quick"] if self.quick else []
        words += [] if self.out == Path("runs") else ["--out", str(self.out)]
        words += [] if self.device == "auto" else ["--device", self.device]
        words += [] if self.seeds is None else ["--seeds", str(self.seeds)]
        words += [] if self.data_dir is None else ["--data-dir", str(self.data_dir)]
        words += [word for text in self.assignments for word in ("--set", text)]
        words += ["--resume"] if resume else []
        return shlex.join(words)


def configure(experiment: Experiment, options: Options, *, lenient: bool = False) -> Any:
    """The config of a run; ``lenient`` leaves out settings the experiment does not have."""
    config = experiment.quick if options.quick else experiment.config
    wanted = list(options.assignments)
    if options.seeds is not None:
        wanted.append(f"seeds={options.seeds}")
    if lenient:
        wanted = [text for text in wanted if _key(text) in _names(config)]
    return override(config, wanted)


def _key(assignment: str) -> str:
    return assignment.partition("=")[0].strip()


def _names(config: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def override(config: Any, assignments: Iterable[str]) -> Any:
    """Change fields of a frozen dataclass by ``key=value`` texts; a tuple is written ``1,2,3``."""
    kinds = typing.get_type_hints(type(config))
    fields = {field.name: field for field in dataclasses.fields(config)}
    known = "Known: " + ", ".join(f"{name} ({_spell(kinds[name])})" for name in fields) + "."
    changes = {}
    for text in assignments:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            message = f"--set takes key=value, got {text!r}. {known}"
            raise InputError(message)
        if key not in fields:
            message = f"--set {text}: there is no field {key!r}.{did_you_mean(key, fields)} {known}"
            raise InputError(message)
        try:
            changes[key] = parse(value, kinds[key])
            check_range(fields[key], changes[key])
        except ValueError as error:
            message = f"--set {text}: {key} is {_spell(kinds[key])}, got {value!r}. {error}"
            raise InputError(message) from error
    return dataclasses.replace(config, **changes)


def _spell(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def parse(text: str, kind: Any) -> Any:
    """Read an int, float, str or bool, a tuple of these, or one of these or None.

    Examples:
        >>> parse("1e4", int), parse("100, 200", tuple[int, ...]), parse("none", float | None)
        (10000, (100, 200), None)
    """
    args = get_args(kind)
    if get_origin(kind) is tuple:
        return tuple(parse(part.strip(), args[0]) for part in text.split(",") if part.strip())
    if type(None) in args:
        return None if text.lower() == "none" else parse(text, args[0])
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in BOOLEANS:
            message = "Write true or false."
            raise ValueError(message)
        return BOOLEANS[text.lower()]
    try:
        number = float(text)  # 1e4 is a fine way to write ten thousand
    except ValueError:
        number = None
    if number is None or (kind is int and not number.is_integer()):
        message = "Write a whole number." if kind is int else "Write a number."
        raise ValueError(message)
    return kind(number)


def check_range(field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a number, or one in a tuple, that a field cannot mean: by its name and its default.

    A whole number is at least 1, another one positive; zero is allowed if the default has one or
    the name is in ``ZERO_IS_NONE``; anything, if a default is negative.
    """
    if value == () and field.default != ():
        message = "It needs at least one value."
        raise ValueError(message)
    usual = _numbers(field.default)
    zero = 0 in usual or field.name in ZERO_IS_NONE
    for number in _numbers(value):
        if not abs(number) <= LARGEST:
            message = f"Write a finite number. At most {LARGEST:g} is allowed."
            raise ValueError(message)
        counts = isinstance(number, int)
        free = min(usual, default=0) < 0 or not (usual or counts)
        if not (free or number > 0 or (number == 0 and zero)):
            bound = "at least 0" if zero else "at least 1" if counts else "positive"
            message = f"It must be {bound}."
            raise ValueError(message)


def _numbers(value: Any) -> list[int | float]:
    values = value if isinstance(value, tuple) else (value,)
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def choose_device(experiment: Experiment, wanted: str) -> str:
    """Where to compute; ``"auto"``: a GPU for what is made for one, if there is one."""
    if wanted == "auto":
        return "cuda" if experiment.device == "gpu" and torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        message = f"--device {wanted} cannot be used here: {reason} Use cpu, cuda or auto."
        raise InputError(message) from error
    return wanted


class Outcome(NamedTuple):
    """How one experiment went."""

    id: str  # the experiment
    status: str  # "finished", "kept" (was finished before), "skipped" or "failed"
    folder: Path  # where its files are
    reason: str = ""  # why it was skipped or failed
    # what stands in summary.json; empty if it was skipped or failed
    summary: Mapping[str, Any] = {}
    error: BaseException | None = None  # what it failed with


class Task(NamedTuple):
    """A unit and all that is needed to measure it; it can be sent to another process."""

    experiment: Experiment
    config: Any
    options: Options
    folder: Path
    unit: Unit

    def num_gpus(self) -> float:
        """One for what is made for a GPU, unless another device was asked for."""
        wanted, made_for = self.options.device, self.experiment.device
        return float(wanted.startswith("cuda") or (made_for == "gpu" and wanted == "auto"))

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.unit.items())


def measure(
    task: Task, advance: Callable[[float | str], None] = lambda _: None
) -> tuple[list[Row], float]:
    """Rows of a unit and seconds it took, on the device of the machine this runs on."""
    experiment, config, options, folder, unit = task
    device = choose_device(experiment, options.device)
    context = Context(torch.device(device), folder, advance, options.size, options.data_dir)
    start = time.perf_counter()
    measured = list(experiment.run(config, dict(unit), context))
    seconds = time.perf_counter() - start
    around = {"experiment": experiment.id, "unit": unit, **circumstances(device)._asdict()}
    rows = []
    for item in measured:
        took = round(seconds if item.seconds is None else item.seconds, 4)
        entries = {**item._asdict(), "value": plain(item.value), "seconds": took}
        rows.append(Row(**around, **entries))
    return rows, seconds


Ended = tuple[int, Any, BaseException | None]
"""Place of an item, its value and its error."""


class Pool(Protocol):
    """Calls a function with many items, somewhere: :class:`fsmap.integrations.ray.RayPool`."""

    def map(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        *,
        num_gpus: Callable[[Any], float],
    ) -> Iterator[Ended]:
        """What came of the items, as each one ends."""


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
        known = {name for experiment in experiments for name in _names(experiment.config)}
        for text in options.assignments:
            if _key(text) not in known:
                message = (
                    f"--set {text}: no experiment has a field {_key(text)!r}. "
                    f"Known: {sorted(known)}."
                )
                raise InputError(message)
    jobs = [Job(experiment, options, everything) for experiment in experiments]
    if pool is not None:
        return _run(jobs, say, pool, "units")
    places = (f"{n}/{len(jobs)} " * (len(jobs) > 1) for n in range(1, len(jobs) + 1))
    pairs = zip(jobs, places, strict=True)
    return (ended for job, n in pairs for ended in _run([job], say, None, n + job.experiment.id))


def _run(jobs: Sequence[Job], say: Say, pool: Pool | None, label: str) -> Iterator[Outcome]:
    """All units of some jobs, on a pool or here; each is written by this process as it ends."""
    with ExitStack() as stack:
        owners: list[tuple[Job, Task]] = []
        for job in jobs:
            try:
                ended = job.begin(say, stack, remote=pool is not None)
            except Exception as error:  # a bug in one experiment must not take the others with it
                ended = job.failed(error)
            if ended is not None or not job.tasks:
                yield ended or job.outcome()
            owners += [(job, task) for task in job.tasks]
        if not owners:
            return
        tasks = [task for _, task in owners]
        with progress(len(tasks), label, silent=jobs[0].options.silent) as bar:
            results = (
                _measure_here(tasks, bar)
                if pool is None
                else pool.map(measure, tasks, num_gpus=Task.num_gpus)
            )
            for done, (index, result, raised) in enumerate(results, start=1):
                job, task = owners[index]
                job.take(task, result, raised)
                bar.update(done)
                if pool is not None and not job.left:
                    yield job.outcome()
                if pool is None and job.errors:
                    break
        if pool is None:
            yield job.outcome()


def _measure_here(tasks: Sequence[Task], bar: Silent) -> Iterator[Ended]:
    for index, task in enumerate(tasks):

        def advance(news: float | str, index: int = index) -> None:
            if isinstance(news, str):
                bar.update(text=news)
            else:
                bar.update(index + min(max(float(news), 0.0), 1.0))

        advance(str(task))
        try:
            result = measure(task, advance)
        except Exception as error:
            yield index, None, error
        else:
            yield index, result, None


class Job:
    """The run of one experiment: its config, its folder and the units that are left to do.

    With ``lenient`` it is one of many: skipped if its data or its device is missing.
    """

    def __init__(self, experiment: Experiment, options: Options, lenient: bool) -> None:
        self.experiment, self.options, self.lenient = experiment, options, lenient
        self.config = configure(experiment, options, lenient=lenient)
        self.place = Place.of(options.out, experiment.id)
        self.folder = self.place.final
        self.tasks: list[Task] = []
        self.left = 0
        self.errors: dict[str, Exception] = {}

    def header(self) -> dict[str, Any]:
        """What must agree for a run to be resumed, as JSON holds it."""
        config = plain(dataclasses.asdict(self.config))
        return {"experiment": self.experiment.id, "size": self.options.size, "config": config}

    def end(self, status: str, reason: str = "", **more: Any) -> Outcome:
        """The outcome of this run."""
        return Outcome(self.experiment.id, status, self.place.final.path, reason, **more)

    def begin(self, say: Say, stack: ExitStack, *, remote: bool = False) -> Outcome | None:
        """Open the folder and note the units that are left; the outcome if there is nothing to do.

        ``stack`` keeps the folder's lock. ``remote``: units are measured on other machines, so this
        one needs no device for them.
        """
        experiment, options = self.experiment, self.options
        if not remote:
            device = choose_device(experiment, options.device)
            lacks = experiment.device == "gpu" and device == "cpu" and not options.quick
            if self.lenient and lacks:
                again = options.command(experiment.id)
                return self.end("skipped", f"needs a GPU at full size. Try: {again} --quick")
        units = experiment.units(self.config)
        if not units:
            asked = self.header()["config"]
            empty = [f"{name} is empty" for name, value in asked.items() if value == []]
            message = f"there is nothing to do with this config: {', '.join(empty) or asked}."
            raise InputError(message)
        stack.enter_context(locked(self.place))
        if self.lenient and self.folder.finished and not (options.resume or options.force):
            return self.end("kept", "finished before; --force runs it again")
        if not self._open(units, say):
            return self.end("kept", "finished before")
        done = self.folder.done()
        if options.data_dir is not None:  # absolute, because a worker has another current folder
            options = options._replace(data_dir=options.data_dir.absolute())
        about = experiment, self.config, options, self.folder.path.absolute()
        self.tasks = [Task(*about, unit) for unit in units if key_of(unit) not in done]
        self.left = len(self.tasks)
        return None

    def _open(self, units: Sequence[Unit], say: Say) -> bool:
        """Make the folder ready for the next unit; False if there is nothing left to do."""
        options, found, header = self.options, self.folder, self.header()
        if not options.force:
            found.check()
        if found.foreign:
            message = f"{found.path} exists and holds no run of fsmap. Choose another --out."
            raise InputError(message)
        state, done = found.state, found.done()
        if options.resume and state != "empty":
            full = found.finished and found.header()["size"] == "full"
            if full and options.quick and state != "damaged":
                return False  # a full run satisfies --quick
            _check_same(found, header, self.experiment.selecting)
            if state == "complete" and all(key_of(unit) in done for unit in units):
                return False
            header["units"] = len({*done, *map(key_of, units)})
            say(f"{self.experiment.id}: {_resuming(found.repair(header))}")
            return True
        if not options.force and (found.finished or done):
            there = "a finished" if state == "complete" else "an unfinished"
            message = (
                f"{found.path} holds {there} run ({len(done)} units done). Continue or keep it "
                "with --resume, start anew with --force, or choose another --out."
            )
            raise InputError(message)
        self.place.clear()
        found.begin({**header, "units": len(units)})
        return True

    def take(self, task: Task, result: Any, error: BaseException | None) -> None:
        """Write a unit that was measured, or note its error."""
        self.left -= 1
        try:
            if error is not None:
                raise error
            self.folder.add(task.unit, *result)
        except Exception as failed:
            self.errors[f"{self.experiment.id} {task}"] = failed

    def outcome(self) -> Outcome:
        """Draw and judge the rows, and let the run take its place; or say what failed."""
        if self.errors:
            outcome = self.failed(next(iter(self.errors.values())))
            if outcome.status == "skipped" or len(self.errors) == 1:
                return outcome
            units = (
                f"{len(self.errors)} of {len(self.tasks)} units failed ({'; '.join(self.errors)})"
            )
            return outcome._replace(reason=f"{units}. The first: {outcome.reason}")
        try:
            self.folder.arrange(self.experiment.units(self.config))
            keep = {"command": self.options.command(self.experiment.id)}
            summary = publish(self.experiment, self.folder, self.header(), keep)
        except Exception as error:
            return self.failed(error)
        return self.end("finished", summary=summary)

    def failed(self, error: Exception) -> Outcome:
        """Skipped, if it lacks its data and is one of many; else failed, with the reason."""
        if isinstance(error, FsmapError):
            skip = self.lenient and isinstance(error, MissingDataError)
            return self.end("skipped" if skip else "failed", str(error), error=error)
        reason = str(error)
        if is_bug(error):
            reason = "".join(traceback.format_exception(error)).rstrip()
        again = self.options.command(self.experiment.id, resume=True)
        reason += f"\nFinished units are kept. When this is mended, continue with: {again}"
        return self.end("failed", reason, error=error)


def is_bug(error: BaseException | None) -> bool:
    """Whether an error is neither one of fsmap's own nor a disk that takes no more."""
    full = isinstance(error, OSError) and error.errno in NO_PLACE
    return not (full or isinstance(error, FsmapError))


def _resuming(content: Content) -> str:
    text = f"resuming, {len(content.units)} units are done"
    if content.damaged:
        units = ", ".join(content.damaged[:8]) + (" …" if len(content.damaged) > 8 else "")
        text += f", {len(content.damaged)} do not match their checksum and run again ({units}; a "
        text += f"copy of all rows: {DAMAGED})"
    if content.dropped:
        text += f", {content.dropped} rows of an unfinished unit dropped"
    return text


def _check_same(found: RunFolder, header: Mapping[str, Any], selecting: Sequence[str]) -> None:
    there = plain(found.header())
    names = ("experiment", "size")
    before, now = ({**{n: h[n] for n in names}, **h["config"]} for h in (there, header))
    changed = [
        f"{key}: {before.get(key)} there, {now.get(key)} now"
        for key in {**before, **now}
        if key not in selecting and before.get(key) != now.get(key)
    ]
    if changed:
        message = (
            f"{found.path} holds a run with another config ({', '.join(changed)}). Resume it with "
            "its own settings, choose another --out, or start anew with --force."
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
    around = {
        name: ", ".join(dict.fromkeys(filter(None, (getattr(row, name) for row in rows))))
        for name in ("device", "commit", "torch")
    }
    summary = {
        "experiment": experiment.id,
        "size": header["size"],
        "protocol": experiment.protocol,
        "seconds": round(sum(done.values()), 3),
        **around,
        "claims": [claim_entry(claim) for claim in experiment.claims(rows)],
        "table": experiment.table(rows),
        "label": experiment.label,
        "title": experiment.title,
        "config": header["config"],
        "units": size,
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
