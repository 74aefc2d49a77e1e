"""A grid over values of an experiment's config: one run per point, and a table of all of them.

    OUT/ID/POINT/ID/rows.jsonl …   the run of a point, as ``fsmap run`` leaves it
    OUT/ID/table.csv               means over seeds of every metric, a line per point and method

A point is resumed, replaced and refused like any run; a larger grid keeps the points it shares with
a smaller one, and the table has the finished points of all grids of one size in the folder. A point
that was asked for more units is in it again when it has them all: means are over the same seeds.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from fsmap.errors import InputError
from fsmap.files import write_whole
from fsmap.paper.engine import Plan, Say
from fsmap.paper.experiment import Experiment, get
from fsmap.paper.options import Options, configure, fields
from fsmap.paper.report.tables import mean
from fsmap.paper.rows import Row, encode
from fsmap.paper.run_folder import RunFolder

MAX_POINTS = 10_000
MAX_NAME = 120  # characters; file systems allow 255


class Finished(NamedTuple):
    """A point that was measured: what was written for each key, and its run."""

    values: Mapping[str, str]
    run: RunFolder


class Point(NamedTuple):
    """A point of the grid, and the plan of its run."""

    values: Mapping[str, str]
    run: RunFolder
    plan: Plan


def points(name: str, grid: Sequence[str], options: Options) -> list[Point]:
    """Every combination of values given as ``key=a,b,c`` (lists: ``key=1,2;3,4``)."""
    experiment = get(name)
    axes = _axes(experiment, grid, options)
    total = math.prod(map(len, axes.values()))
    if total > MAX_POINTS:
        message = (
            f"this grid has {total} points, at most {MAX_POINTS} are allowed. Use fewer values."
        )
        raise InputError(message)
    made = []
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        texts = tuple(f"{key}={value}" for key, value in chosen.items())
        here = options._replace(out=options.out / name / folder_name(texts), assignments=texts)
        plan = Plan(experiment, configure(experiment, here), here)
        made.append(Point(chosen, RunFolder(plan.folder), plan))
    return made


def _axes(
    experiment: Experiment, grid: Sequence[str], options: Options
) -> dict[str, tuple[str, ...]]:
    kinds = fields(experiment.config)
    axes: dict[str, tuple[str, ...]] = {}
    for text in grid:
        key, equals, written = (part.strip() for part in text.partition("="))
        separator = ";" if get_origin(kinds.get(key)) is tuple else ","
        values = tuple(v.strip() for v in written.split(separator) if v.strip())
        if key in axes:
            message = f"--set {key} comes twice. Write its values as one list: {key}=a,b,c."
            raise InputError(message)
        if equals and key in kinds and not values:
            message = f"--set {text}: a value is missing. Write {key}=a{separator}b{separator}c."
            raise InputError(message)
        # what is no assignment, or names no field, is refused as `fsmap run` would
        for value in values or ("",):
            configure(experiment, options._replace(assignments=(f"{key}{equals}{value}",)))
        axes[key] = tuple(dict.fromkeys(values))
    if not axes:
        known = ", ".join(kinds)
        message = f"a sweep needs --set KEY=A,B,C. Fields of {experiment.id}: {known}."
        raise InputError(message)
    return axes


def folder_name(texts: Iterable[str]) -> str:
    """A point's folder: its settings, and a few digits if a file system does not take them all.

    Examples:
        >>> folder_name(["steps=500", "lr=0.1"])
        'steps=500 lr=0.1'
    """
    name = " ".join(texts)
    safe = re.sub(r"[^\w=.,+\- ]", "-", name)[:MAX_NAME].strip()
    if safe == name:
        return name
    return f"{safe} {hashlib.blake2b(name.encode(), digest_size=3).hexdigest()}"


def earlier(made: Sequence[Point], say: Say = lambda _: None) -> list[Finished]:
    """Points of other grids beside these: of the same experiment, in the same size."""
    experiment, _, options, _ = made[0].plan
    mine = {point.plan.folder for point in made}
    found = []
    for file in sorted(options.out.parent.glob(f"*/{experiment.id}/summary.json")):
        run = RunFolder(file.parent)
        if run.path in mine:
            continue
        if run.state != "complete":
            say(f"left out of the table: {run.path} is {run.state}")
            continue
        summary = run.summary()
        values = _assigned(summary.get("command", ""))
        if summary["size"] == options.size and values:
            found.append(Finished(values, run))
    return found


def _assigned(command: str) -> dict[str, str]:
    """What a command line gives to ``--set``."""
    words = shlex.split(command)
    texts = (after for word, after in itertools.pairwise(words) if word == "--set")
    return {key.strip(): value.strip() for key, _, value in (t.partition("=") for t in texts)}


def table_lines(made: Iterable[Point | Finished]) -> list[dict[str, Any]]:
    """Means over seeds of every number that the finished points measured."""
    return [line for point in made if point.run.state == "complete" for line in _lines(point)]


def write_table(made: Sequence[Point | Finished], path: Path) -> None:
    """Write the lines of the finished points as CSV."""
    lines = table_lines(made)
    swept = [key for point in made for key in point.values]
    header = list(dict.fromkeys([*swept, *(key for line in lines for key in line)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, header, restval="")
    writer.writeheader()
    writer.writerows(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.getvalue())


def _lines(point: Point | Finished) -> Iterable[dict[str, Any]]:
    groups: dict[str, list[Row]] = {}
    for row in point.run.rows():
        if isinstance(row.value, int | float):  # curves have no place in a table
            same = encode([row.metric, row.method, row.config])
            groups.setdefault(same, []).append(row)
    for rows in groups.values():
        first, found = rows[0], mean(row.value for row in rows)
        config = {key: value for key, value in first.config.items() if key not in point.values}
        yield {
            **point.values,
            "method": first.method or "",
            **config,
            "metric": first.metric,
            "mean": found.mean,
            "stderr": found.stderr,
            "runs": found.n,
        }
