"""``fsmap sweep``: an experiment at every point of a grid over its config."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.cli import console
from fsmap.cli.run import add_options, options_of, pool_of, terminate_as_interrupt
from fsmap.errors import FsmapError, InputError, require
from fsmap.paper.rows import tally
from fsmap.progress import duration

if TYPE_CHECKING:
    from fsmap.paper.engine import Outcome
    from fsmap.paper.sweep import Point


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = console.add_command(
        subparsers,
        "sweep",
        run,
        summary="an experiment at every point of a grid over its config, and a table of all points",
        examples=[
            "fsmap sweep fourier --quick --set lr=0.03,0.1,0.3 --set steps=100,200",
            'fsmap sweep fourier --set "sizes=100,200;400,800" --metric test_rmse   # lists: by ;',
            "fsmap sweep uci-table --set steps=5000,10000 --ray head:6379 --resume",
        ],
    )
    parser.add_argument("id", metavar="ID", help="an id of `fsmap list`")
    parser.add_argument("--metric", metavar="NAME", help="show this metric of every point")
    add_options(parser, Path("sweeps"))


def run(arguments: argparse.Namespace) -> int:
    """Run every point of the grid."""
    from fsmap.paper import engine, sweep

    require("matplotlib", extra="report")  # before the work, not after it
    options = options_of(arguments, ())
    points = sweep.points(arguments.id, arguments.set, options)
    table = options.out / arguments.id / "table.csv"
    console.note(f"{arguments.id}: {_count(len(points))} in {table.parent}")
    outcomes: list[Outcome] = []
    try:
        with terminate_as_interrupt(), pool_of(arguments) as pool:
            plans = [point.plan for point in points]
            for outcome in engine.run_plans(plans, console.note, pool):
                outcomes.append(outcome)
                _tell(outcome, len(outcomes), len(points))
    except KeyboardInterrupt:
        _tell_how_to_go_on(arguments, "interrupted")
        return 130
    others = sweep.earlier(points, console.note)
    sweep.write_table([*points, *others], table)
    _show(points, sweep.table_lines(points), arguments.metric)
    also = f", and of {_count(len(others))} measured before" if others else ""
    console.say(f"{table} has every metric{also}; a point: fsmap report {_quoted(points[0])}")
    return _conclude(outcomes, arguments)


def _tell(outcome: Outcome, number: int, total: int) -> None:
    where = outcome.folder.parent.name
    if outcome.status == "failed":
        console.note(f"fsmap: {where}: {outcome.reason}")
    else:
        console.note(f"{number}/{total}  {where}  {outcome.status}")


def _show(points: list[Point], lines: list[dict[str, Any]], metric: str | None) -> None:
    keys = list(points[0].values)
    if metric is not None:
        _show_metric(keys, lines, metric)
        return
    cells = []
    for point in points:
        state, took = _state(point)
        cells.append([*point.values.values(), state, took, point.plan.folder.parent.name])
    console.table([*keys, "claims", "took", "folder"], cells)


def _state(point: Point) -> tuple[str, str]:
    if point.run.state != "complete":
        return point.run.state, ""
    summary = point.run.summary()
    return tally(summary["claims"]), duration(summary["seconds"])


def _show_metric(keys: list[str], lines: list[dict[str, Any]], metric: str) -> None:
    shown = [line for line in lines if line["metric"] == metric]
    if not shown:
        known = ", ".join(dict.fromkeys(line["metric"] for line in lines)) or "none: no point ended"
        message = f"no point has a metric {metric!r}. Known: {known}."
        raise InputError(message)
    hidden = {"metric", "mean", "stderr", "runs"}
    columns = [key for line in shown for key in line if key not in hidden]
    header = list(dict.fromkeys([*keys, *columns]))
    cells = []
    for line in shown:
        value = f"{line['mean']:.4g} ± {line['stderr']:.2g}"
        cells.append([*(str(line.get(key, "")) for key in header), value, str(line["runs"])])
    console.table([*header, metric, "runs"], cells)


def _conclude(outcomes: list[Outcome], arguments: argparse.Namespace) -> int:
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if not failed:
        return 0
    _tell_how_to_go_on(arguments, f"{len(failed)} of {_count(len(outcomes))} failed")
    return 1 if any(not isinstance(o.error, FsmapError) for o in failed) else 2


def _tell_how_to_go_on(arguments: argparse.Namespace, what: str) -> None:
    options = options_of(arguments, tuple(arguments.set))
    command = options.command(arguments.id, verb="sweep", resume=True)
    if arguments.ray is not None:
        command += f" --ray {shlex.quote(arguments.ray)}" if arguments.ray else " --ray"
    console.note(f"fsmap: {what}. Finished units are kept. Continue with:\n  {command}")


def _count(points: int) -> str:
    return "1 point" if points == 1 else f"{points} points"


def _quoted(point: Point) -> str:
    return shlex.quote(str(point.plan.options.out))
