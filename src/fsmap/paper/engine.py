"""Experiments (config → rows → picture, each arrow a function) and their runner.

``Experiment.run`` measures; ``table``, ``claims``, ``draw`` and ``interactive`` read rows and train
nothing. A module below ``fsmap.paper`` that defines a subclass with an ``id`` is registered.
A run is written unit by unit, then drawn and judged:

    OUT/ID/rows.jsonl  units.jsonl  *.png  *.svg  summary.json (last of all)
    OUT/.fsmap/ID.lock        held while a run writes
    OUT/.fsmap/ID.previous/   the finished run that was replaced last

``units.jsonl`` is the first file of a run, so a kill at any moment leaves a folder that can be
resumed. A run that exists already is an error, unless

- ``--resume``: an unfinished run is continued; a finished one stays as it is, and a full run
  satisfies ``--quick``. Fields that only choose units (``Experiment.selecting``) may differ:
  missing units are added. A summary that differs from the rows is written again;
- ``--force``: the run starts anew. A finished one is kept aside.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import pkgutil
import shlex
import time
import traceback
import typing
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, get_args, get_origin

import torch

from fsmap.errors import CheckpointError, FsmapError, InputError, MissingDataError, did_you_mean
from fsmap.files import circumstances, plain
from fsmap.functional import as_device
from fsmap.paper import rows as records
from fsmap.paper.report import figures, tables
from fsmap.paper.report.figures import Interactive
from fsmap.paper.report.tables import Mean, in_order, mean, summarize, with_error
from fsmap.paper.rows import Claim, Content, Row, Rows, RunFolder, Source, Unit, Value, key_of
from fsmap.progress import progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Say = Callable[[str], None]  # takes a note for the user, one line
Plots: TypeAlias = "dict[str, Figure]"  # figures by file name (without ending)
ROW_ERRORS = (FsmapError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of figures and claims if rows are missing or of an older version."""


class Measured(NamedTuple):
    """What ``run`` yields: a value and what varies. The runner adds the rest and makes it a row."""

    metric: str  # what was measured, such as "test_rmse"
    value: Value  # a number (or 0-d tensor), or a list, array or tensor of numbers for a curve
    method: str | None = None  # "ps-map", "fs-map", "l-map", or None
    seed: int | None = None
    config: Mapping[str, Any] = MappingProxyType({})  # what varies (n_train, jitter, protocol, …)
    deviations: tuple[str, ...] = ()  # where the protocol of this number departs from the paper's


class Context(NamedTuple):
    """The runner's arguments to ``run``."""

    device: torch.device  # where to compute
    out: Path  # the run's folder, for checkpoints and the like
    # advance(0.3) moves the progress bar to 30 % of this unit, advance("step 40") shows a text
    advance: Callable[[float | str], None] = lambda _: None
    size: str = "full"  # "quick" or "full"
    data_dir: Path | None = None  # where to look for data first, or None


class Experiment:
    """Base class of all experiments.

    ``config`` and ``quick`` are instances of one frozen dataclass, whose fields are numbers,
    strings, booleans or tuples of those. A field ``seeds`` (an int: how many) is what
    ``--seeds N`` sets. ``table``, ``claims``, ``draw`` and ``interactive`` get all rows of a run.
    """

    id: ClassVar[str] = ""  # name on the command line
    label: ClassVar[str] = ""  # the paper's label, such as "Fig. 2 a-d"
    title: ClassVar[str] = ""  # a few words
    see: ClassVar[str] = ""  # one sentence on what the figure shows
    device: ClassVar[str] = "cpu"  # or "gpu" for what needs one at full size
    cost: ClassVar[str] = ""  # time at full size, such as "20 s"
    protocol: ClassVar[str] = ""  # true objective, or the paper's numerical protocol, in words
    group: ClassVar[str] = "closed-form"  # or "theory", "networks", "uci", "images"
    # where all its numbers depart from the paper's protocol; a row can name more
    departures: ClassVar[tuple[str, ...]] = ()
    # fields of the config that choose among units, or say how they are computed, and change none:
    # a run can be resumed with other values, and so be made in pieces
    selecting: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[tuple[str, ...]] = ()  # scalars that the table shows, in this order
    columns: ClassVar[tuple[str, ...]] = ()  # keys of its lines: "metric", "n_train", …
    config: ClassVar[Any]  # full size
    quick: ClassVar[Any]  # quick size

    def units(self, config: Any) -> list[Unit]:
        """Keys of the parts that a killed run does not repeat."""
        return [{}]

    def one_thread(self, config: Any) -> bool:
        """Whether to use one thread: its matrices are too small for two."""
        return True

    def run(self, config: Any, unit: Unit, context: Context) -> Iterable[Measured]:
        """Measure one of ``units(config)``; its values are written when it is done."""
        raise NotImplementedError

    def table(self, rows: Rows) -> list[dict[str, Any]]:
        """The paper's table or figure in numbers, a dict per line.

        Columns ``ours, stderr, paper, paper_stderr`` are shown as ``ours ± stderr`` beside the
        paper's. By default: means of ``metrics`` over the rows that agree in ``columns``.
        """
        return summarize(in_order(rows, *self.metrics), *self.columns)

    def claims(self, rows: Rows) -> list[Claim]:
        """Statements of the paper, tested on the rows; see :mod:`fsmap.paper.rows`."""
        return []

    def draw(self, rows: Rows) -> Plots:
        """Figures by file name (without ending). Reads rows, trains nothing."""
        return {}

    def interactive(self, rows: Rows) -> Interactive | None:
        """A slider for the page, if it helps to understand."""
        return None

    def live(self, rows: Rows) -> Mapping[str, Any] | None:
        """Data for a script of the page that computes this figure anew; None: no script."""
        return None


def judge_all(
    claim: str, effects: Mapping[str, Mean], *, ratio: bool = False, need: str = "", **options: Any
) -> Claim:
    """A claim that holds at every N (or ε, or set): :func:`judge` of the weakest effect.

    Effects are given by where they were measured; without any the claim is not tested, and ``need``
    is the command that would. With ``ratio`` they are of logarithms, and bounds are factors.

    Examples:
        >>> found = {"N = 100": Mean(-0.4, 0.1, 5), "N = 200": Mean(-0.3, 0.02, 5)}
        >>> judge_all("the error falls", found, below=0).ours
        '−0.40 ± 0.10 (N = 100)'
    """
    (kind,) = {"below", "above", "within"} & options.keys()
    if ratio:
        options[kind] = math.log(options[kind])
    effects = {place: effect for place, effect in effects.items() if effect.n}
    if not effects:
        untested = records.judge(claim, math.nan, math.nan, 0, **options)
        return untested._replace(reason=need or untested.reason)

    def support(effect: Mean) -> float:
        """How far the effect is on the right side of its bound, in half widths of its interval."""
        ahead = records.margin(effect.mean, **{kind: options[kind]})
        if not ahead > -math.inf:  # or nan
            return -math.inf
        if math.isnan(effect.stderr):
            return 0.0
        reach = records.t95(effect.n) * effect.stderr
        return ahead / reach if reach else math.copysign(math.inf, ahead)

    place, weakest = min(effects.items(), key=lambda item: support(item[1]))
    if ratio:
        factor = math.exp(weakest.mean)
        shown = f"{with_error(factor, factor * weakest.stderr)} times"
    else:
        shown = with_error(weakest.mean, weakest.stderr)
    options.setdefault("ours", f"{shown} ({place})" if place else shown)
    return records.judge(claim, *weakest, **options)


def paired_effect(
    rows: Rows, one: Mapping[str, Any], other: Mapping[str, Any], *, ratio: bool = False
) -> Mean:
    """Mean and error over seeds of one - other (or log one/other), rows selected by fields."""
    if not ratio:
        return tables.paired(tables.select(rows, **one), tables.select(rows, **other))
    a, b = (tables.values_by(rows, "seed", **where) for where in (one, other))
    pairs = [(a[seed], b[seed]) for seed in a if seed in b]
    return mean(math.log(x / y) if x > 0 and y > 0 else math.nan for x, y in pairs)


def exact(
    claim: str, holds: bool, ours: Any, paper: Any = None, *, seeds: int, source: Source = "paper"
) -> Claim:
    """A claim about an exact quantity; not tested without ``seeds`` (or other repetitions)."""
    if not seeds:
        return records.not_tested(claim, "no rows", paper, source)
    return Claim(claim, bool(holds), ours, paper, seeds=seeds, source=source)


ORDER = """
    mixture-posterior fourier fourier-points fourier-pX fourier-noise mixture-bma
    uci-table image-table image-tuning transfer landscape laplacian-trace image-S label-noise shift
    reparam logdet-mc laplacian-vs-logdet moons-eigs moons-solutions
    theory-any-parameter theory-metric theory-flat theory-large-data theory-symmetry moons-pathology
""".split()
"""Ids in the paper's order: its figures and tables, then statements. Others come last."""


def section(experiment: Experiment) -> str:
    """The heading that an experiment stands under."""
    if experiment.label.startswith(("Fig.", "Table ")):
        return "Appendix" if "A." in experiment.label else "Figures and tables of the main text"
    stated = experiment.label.startswith(("Sec.", "Theorem", "Abstract", "App."))
    return "Statements without a figure" if stated else "Beyond the paper"


def coverage(experiment: Experiment, header: Mapping[str, Any], done: Container[str]) -> str:
    """The part of the protocol that a run has: ``"full"``, ``"quick"`` or ``"11 of 45 units"``."""
    quick = header["size"] == "quick"
    protocol = experiment.quick if quick else experiment.config
    try:
        units = experiment.units(protocol)
    except FsmapError:  # its data are missing
        return str(header["size"])
    here = sum(key_of(unit) in done for unit in units)
    parts = ["quick"] if quick else []
    parts += [f"{here} of {len(units)} units"] if here < len(units) else []
    asked, config = plain(dataclasses.asdict(protocol)), plain(header["config"])
    fields = [name for name in config if name in asked and name not in experiment.selecting]
    parts += [f"{name} = {config[name]}" for name in fields if config[name] != asked[name]]
    return ", ".join(parts) or "full"


def _modules() -> Iterable[ModuleType]:
    import fsmap.paper as package

    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


@functools.cache
def registry() -> Mapping[str, Experiment]:
    """Every experiment by id, in the order of the report."""
    found: dict[str, Experiment] = {}
    for module in _modules():
        for cls in vars(module).values():
            is_class = isinstance(cls, type) and issubclass(cls, Experiment)
            if not (is_class and cls.id and cls.__module__ == module.__name__):
                continue
            if cls.id in found:
                names = f"{type(found[cls.id]).__qualname__} and {cls.__qualname__}"
                raise InputError(f"two experiments have the id {cls.id!r}: {names}. Rename one.")
            found[cls.id] = cls()
    order = [*ORDER, *sorted(found.keys() - {*ORDER})]
    return MappingProxyType({name: found[name] for name in order if name in found})


def get(name: str) -> Experiment:
    """Look an experiment up; InputError if there is none of that name."""
    known = registry()
    if name in known:
        return known[name]
    hint = did_you_mean(name.lower(), known)
    raise InputError(f"there is no experiment {name!r}.{hint} Known: {', '.join(known)}.")


# --- running


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


def _field(text: str) -> str:
    """The field that a key=value text names."""
    return text.partition("=")[0].strip()


def override(config: Any, assignments: Iterable[str]) -> Any:
    """Change fields of a frozen dataclass by ``key=value`` texts; a tuple is written ``1,2,3``."""
    kinds = typing.get_type_hints(type(config))
    fields = {field.name: field for field in dataclasses.fields(config)}
    known = "Known: " + ", ".join(f"{name} ({_spell(kinds[name])})" for name in fields) + "."
    changes = {}
    for text in assignments:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise InputError(f"--set takes key=value, got {text!r}. {known}")
        if key not in fields:
            hint = did_you_mean(key, fields)
            raise InputError(f"--set {text}: there is no field {key!r}.{hint} {known}")
        try:
            changes[key] = parse(value, kinds[key])
            check_range(key, changes[key])
        except ValueError as error:
            raise InputError(
                f"--set {text}: {key} is {_spell(kinds[key])}, got {value!r}. {error}"
            ) from error
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
        if text.lower() not in ("true", "false"):
            raise ValueError("Write true or false.")
        return text.lower() == "true"
    try:
        number = float(text)  # 1e4 is an integer, too
    except ValueError:
        number = None
    if number is None or (kind is int and not number.is_integer()):
        raise ValueError("Write a whole number." if kind is int else "Write a number.")
    return kind(number)


def check_range(name: str, value: Any) -> None:
    """Raise ValueError if a tuple is empty, an int below 1 (warm-up: 0) or a float negative."""
    if value == ():
        raise ValueError("It needs at least one value.")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not abs(number) < 1e12:
            raise ValueError("Write a finite number, below 1e12.")
        least = 1 if isinstance(number, int) and not name.endswith("warmup") else 0
        if number < least:
            raise ValueError(f"It must be at least {least}.")


class Outcome(NamedTuple):
    """The result of running one experiment."""

    id: str  # the experiment
    status: str  # "finished", "kept" (was finished before), "skipped" or "failed"
    folder: Path  # where its files are
    reason: str = ""  # why it was skipped or failed
    summary: Mapping[str, Any] = {}  # of summary.json; empty if it was skipped or failed
    error: BaseException | None = None  # what it failed with


def run(names: Sequence[str], options: Options, say: Say = lambda _: None) -> Iterator[Outcome]:
    """Run experiments one after another; of ``["all"]`` those that have their data and device."""
    everything = list(names) == ["all"]
    experiments = list(registry().values()) if everything else [get(name) for name in names]
    known = sorted({f.name for e in experiments for f in dataclasses.fields(e.config)})
    for text in options.assignments if everything else ():
        if _field(text) not in known:
            raise InputError(f"--set {text}: no experiment has such a field. Known: {known}.")
    jobs = [Job(experiment, options, everything) for experiment in experiments]
    for number, job in enumerate(jobs, start=1):
        place = f"{number}/{len(jobs)} " if len(jobs) > 1 else ""
        try:
            yield job.run(say, place + job.experiment.id)
        except Exception as error:  # a bug in one experiment: the others still run
            yield job.failed(error)


class Job:
    """The run of one experiment; if ``lenient`` (``all``), it may lack data, device or setting."""

    def __init__(self, experiment: Experiment, options: Options, lenient: bool) -> None:
        self.experiment, self.options, self.lenient = experiment, options, lenient
        config = experiment.quick if options.quick else experiment.config
        wanted = list(options.assignments)
        if options.seeds is not None:
            if not (lenient or hasattr(config, "seeds")):
                raise InputError(f"--seeds: {experiment.id} has no seeds.")
            wanted.append(f"seeds={options.seeds}")
        if lenient:
            known = {field.name for field in dataclasses.fields(config)}
            wanted = [text for text in wanted if _field(text) in known]
        self.config = override(config, wanted)
        self.folder = RunFolder(options.out / experiment.id)

    def run(self, say: Say, label: str) -> Outcome:
        """Measure the units that are left, then draw and judge the rows."""
        experiment, options, folder = self.experiment, self.options, self.folder
        small = options.device == "auto" and experiment.device == "cpu"
        device = as_device("cpu" if small else options.device)
        lacks = experiment.device == "gpu" and device.type == "cpu" and not options.quick
        if self.lenient and lacks:
            again = options.command(experiment.id)
            return self.outcome("skipped", f"needs a GPU at full size. Try: {again} --quick")
        units = [*{key_of(unit): unit for unit in experiment.units(self.config)}.values()]
        if not units:
            raise InputError(f"there is nothing to do with this config: {self.config}.")
        with folder.lock():
            if self.lenient and folder.finished and not (options.resume or options.force):
                return self.outcome("kept", "finished before; --force runs it again")
            if (done := self._open(units, say)) is None:
                return self.outcome("kept", "finished before")
            left = [unit for unit in units if key_of(unit) not in done]
            with progress(len(left), label, silent=options.silent) as bar:
                for index, unit in enumerate(left):

                    def advance(news: float | str, index: int = index) -> None:
                        if isinstance(news, str):
                            bar.update(text=news)
                        else:
                            bar.update(index + min(max(float(news), 0.0), 1.0))

                    advance(" ".join(f"{key}={value}" for key, value in unit.items()))
                    folder.add(unit, *self._measure(unit, device, advance))
                    bar.update(index + 1)
            if options.resume:
                folder.tidy(units)
            return self.outcome("finished", summary=publish(experiment, folder))

    def _measure(
        self, unit: Unit, device: torch.device, advance: Callable[[float | str], None]
    ) -> tuple[list[Row], float]:
        """Rows of a unit and seconds it took."""
        experiment, options = self.experiment, self.options
        context = Context(device, self.folder.path, advance, options.size, options.data_dir)
        start = time.perf_counter()
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if experiment.one_thread(self.config) else threads)
        try:
            measured = list(experiment.run(self.config, dict(unit), context))
        finally:
            torch.set_num_threads(threads)
        seconds = time.perf_counter() - start
        around = {"experiment": experiment.id, "unit": unit, "seconds": round(seconds, 4)}
        around |= circumstances(str(device))
        values = (item._replace(value=plain(item.value)) for item in measured)
        return [Row(**around, **item._asdict()) for item in values], seconds

    def outcome(self, status: str, reason: str = "", **more: Any) -> Outcome:
        """The outcome of this run."""
        return Outcome(self.experiment.id, status, self.folder.path, reason, **more)

    def _open(self, units: Sequence[Unit], say: Say) -> Container[str] | None:
        """Make the folder ready for the next unit; finished units, or None if all are done."""
        options, found, content = self.options, self.folder, self.folder.content()
        config = plain(dataclasses.asdict(self.config))
        header = {"experiment": self.experiment.id, "size": options.size, "config": config}
        if found.foreign:
            raise InputError(f"{found.path} holds no run of fsmap. Choose another --out.")
        state, done, there = found.state_of(content), content.units, content.header
        anew = state == "empty" or options.force
        if not (anew or there):
            raise CheckpointError(
                f"the first line of {found.units_file}, which says what this run is, is missing or "
                "damaged: nothing can be resumed here. Restore a copy, or start anew with --force."
            )
        if anew or not (options.resume or found.finished or done):
            found.clear()
            found.begin({**header, "units": len(units)})
            return ()
        if not options.resume:
            kind = "a finished" if state == "complete" else "an unfinished"
            raise InputError(
                f"{found.path} holds {kind} run ({len(done)} units done). Continue or keep it "
                "with --resume, start anew with --force, or choose another --out."
            )
        if found.finished and there["size"] == "full" and options.quick and state != "damaged":
            return None  # a full run satisfies --quick
        _check_same(found, there, header, self.experiment.selecting)
        if state == "complete" and all(key_of(unit) in done for unit in units):
            if found.summarized(summary_of(self.experiment, content)):
                return None
        header["units"] = len({*done, *map(key_of, units)})
        say(f"{self.experiment.id}: {_resuming(found.tidy(units, header))}")
        return done

    def failed(self, error: Exception) -> Outcome:
        """The outcome after an error: skipped if data are missing and ``lenient``, else failed."""
        if isinstance(error, FsmapError):
            skip = self.lenient and isinstance(error, MissingDataError)
            return self.outcome("skipped" if skip else "failed", str(error), error=error)
        trace = "".join(traceback.format_exception(error)).rstrip()
        reason = trace if is_bug(error) else str(error)
        again = self.options.command(self.experiment.id, resume=True)
        reason += f"\nFinished units are kept. Once this is fixed, continue with: {again}"
        return self.outcome("failed", reason, error=error)


def is_bug(error: BaseException | None) -> bool:
    """Whether an error is neither one of fsmap's own nor the disk's."""
    return not isinstance(error, FsmapError | OSError)


def _resuming(content: Content) -> str:
    text = f"resuming, {len(content.units)} units are done"
    if content.damaged:
        units = ", ".join(content.damaged[:8]) + (" …" if len(content.damaged) > 8 else "")
        text += f", {len(content.damaged)} do not match their checksum and run again ({units}; a "
        text += f"copy of all rows: {records.DAMAGED})"
    if content.dropped:
        text += f", {content.dropped} rows of an unfinished unit dropped"
    return text


def _check_same(found: RunFolder, there: Unit, header: Unit, selecting: Sequence[str]) -> None:
    both = plain(there), header
    before, now = ({**h["config"], "experiment": h["experiment"], "size": h["size"]} for h in both)
    keys = [key for key in {**before, **now} if key not in selecting]
    pairs = [(key, before.get(key), now.get(key)) for key in keys]
    if changed := [f"{key}: {a} there, {b} now" for key, a, b in pairs if a != b]:
        raise InputError(
            f"{found.path} holds a run with another config ({', '.join(changed)}). Resume it with "
            "its own settings, choose another --out, or start anew with --force."
        )


def summary_of(experiment: Experiment, content: Content) -> dict[str, Any]:
    """The content of ``summary.json``: a function of the rows and units of a run."""
    rows, header = content.rows, content.header
    size = coverage(experiment, header, content.units)
    missing = [] if size in ("quick", "full") else [size]
    return {
        "experiment": experiment.id,
        "size": header["size"],
        "protocol": experiment.protocol,
        "seconds": round(sum(unit["seconds"] for unit in content.units.values()), 3),
        **{name: records.origins(rows, name) for name in ("device", "commit", "torch")},
        "claims": [records.claim_entry(claim) for claim in experiment.claims(rows)],
        "table": experiment.table(rows),
        "label": experiment.label,
        "title": experiment.title,
        "config": header["config"],
        "units": size,
        "rows": len(rows),
        "deviations": [*missing, *dict.fromkeys(d for row in rows for d in row.deviations)],
    }


def publish(experiment: Experiment, run: RunFolder) -> dict[str, Any]:
    """Draw and judge the rows of a run; write ``summary.json`` last of all."""
    content = run.content()
    with figures.style():
        for name, figure in experiment.draw(content.rows).items():
            figures.save(figure, run.path, name)
    summary = summary_of(experiment, content)
    run.write_summary(summary)
    return summary
