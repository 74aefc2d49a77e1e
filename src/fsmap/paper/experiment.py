"""What an experiment is: config → rows → picture, and each arrow is a function.

``run`` measures; ``table``, ``claims``, ``draw`` and ``interactive`` read rows and train nothing.
A module below ``fsmap.paper`` that defines a subclass of :class:`Experiment` with an ``id`` is
found by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import pkgutil
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from fsmap.errors import FsmapError, InputError, did_you_mean
from fsmap.paper.report import tables
from fsmap.paper.report.figures import Interactive
from fsmap.paper.report.tables import Mean, in_order, mean, summarize, with_error
from fsmap.paper.rows import (
    Claim,
    Rows,
    Source,
    Unit,
    Value,
    judge,
    key_of,
    lead,
    not_tested,
    plain,
)

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

TROUBLE = (FsmapError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What drawing and judging may raise if rows are missing or of an older version."""

Plots: TypeAlias = "dict[str, Figure]"
"""Figures by file name (without ending)."""


class Measured(NamedTuple):
    """What ``run`` yields: a value and what varies. The runner adds the rest and makes it a row."""

    metric: str  # what was measured, such as "test_rmse"
    value: Value  # a number (or 0-d tensor), or a list, array or tensor of numbers for a curve
    method: str | None = None  # "ps-map", "fs-map", "l-map", or None
    seed: int | None = None
    config: Mapping[str, Any] = MappingProxyType({})  # what varies (n_train, jitter, protocol, …)
    deviations: tuple[str, ...] = ()  # where the protocol of this number departs from the paper's


class Context(NamedTuple):
    """What the runner gives to ``run``."""

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
    see: ClassVar[str] = ""  # one sentence on what to see
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
    columns: ClassVar[tuple[str, ...]] = ()  # what tells its lines apart: "metric", "n_train", …
    config: ClassVar[Any]  # full size
    quick: ClassVar[Any]  # quick size

    def units(self, config: Any) -> list[Unit]:
        """Keys of the parts that a killed run does not repeat."""
        return [{}]

    def one_thread(self, config: Any) -> bool:
        """Whether its matrices are so small that a second thread would only wait."""
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
        """What the paper states, judged by the rows; the forms are in :mod:`fsmap.paper.rows`."""
        return []

    def draw(self, rows: Rows) -> Plots:
        """Figures by file name (without ending). Reads rows, trains nothing."""
        return {}

    def interactive(self, rows: Rows) -> Interactive | None:
        """A slider for the page, if it helps to understand."""
        return None

    def live(self, rows: Rows) -> Mapping[str, Any] | None:
        """What a script of the page needs to compute this figure anew, if there is one."""
        return None


def judge_all(
    claim: str, effects: Mapping[str, Mean], *, ratio: bool = False, **options: Any
) -> Claim:
    """A claim that holds at every N (or ε, or set): :func:`judge` of the weakest effect.

    Effects are given by where they were measured; without any the claim is not tested. With
    ``ratio`` they are of logarithms, and bounds are factors.

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
        return judge(claim, math.nan, math.nan, 0, **options)

    def support(effect: Mean) -> float:
        """By how many standard errors the effect is on the right side of its bound."""
        ahead = lead(effect.mean, **{kind: options[kind]})
        if not math.isfinite(ahead):
            return -math.inf
        if math.isnan(effect.stderr):
            return 0.0
        return ahead / effect.stderr if effect.stderr else math.copysign(math.inf, ahead)

    place, weakest = min(effects.items(), key=lambda item: support(item[1]))
    if ratio:
        factor = math.exp(weakest.mean)
        shown = f"{with_error(factor, factor * weakest.stderr)} times"
    else:
        shown = with_error(weakest.mean, weakest.stderr)
    options.setdefault("ours", f"{shown} ({place})" if place else shown)
    return judge(claim, *weakest, **options)


def compare(
    rows: Rows, one: Mapping[str, Any], other: Mapping[str, Any], *, ratio: bool = False
) -> Mean:
    """Mean and error over seeds of one - other (or log one/other), rows selected by fields."""
    sides = tables.select(rows, **one), tables.select(rows, **other)
    if not ratio:
        return tables.paired(*sides)
    a, b = ({row.seed: row.value for row in side} for side in sides)
    pairs = [(a[seed], b[seed]) for seed in a if seed in b]
    return mean(math.log(x / y) if x > 0 and y > 0 else math.nan for x, y in pairs)


def exact(
    claim: str, holds: bool, ours: Any, paper: Any = None, *, seeds: int, source: Source = "paper"
) -> Claim:
    """A claim about an exact quantity; not tested without ``seeds`` (or other repetitions)."""
    if not seeds:
        return not_tested(claim, "no rows", paper, source)
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
    """How much of the protocol a run has: ``"full"``, ``"quick"`` or ``"11 of 45 units"``.

    ``header`` is the size and config of the run, ``done`` the keys of its finished units.
    """
    quick = header["size"] == "quick"
    protocol = experiment.quick if quick else experiment.config
    try:
        units = experiment.units(protocol)
    except FsmapError:  # its data are not here
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
                raise InputError(
                    f"two experiments have the id {cls.id!r}: {names}. Rename one of them."
                )
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
