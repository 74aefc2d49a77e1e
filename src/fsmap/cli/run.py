"""``fsmap run``: run experiments of the paper."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.cli import console
from fsmap.errors import InputError, require
from fsmap.paper.rows import tally
from fsmap.progress import duration

if TYPE_CHECKING:
    from fsmap.paper.engine import Outcome, Pool
    from fsmap.paper.options import Options


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = console.add_command(
        subparsers,
        "run",
        run,
        summary="run experiments of the paper and write rows, pictures and a summary",
        examples=[
            "fsmap run fourier --quick                      # seconds",
            "fsmap run fourier --set steps=500 --seeds 10   # fields: fsmap list fourier",
            "fsmap run all --quick                          # what lacks its data is skipped",
            "fsmap run fourier --resume                     # go on after an interruption",
            "fsmap run fourier uci-table --ray              # all units at once, on all cores",
            "fsmap run fourier --ray head:6379              # ... or on a cluster",
        ],
    )
    parser.add_argument("ids", nargs="+", metavar="ID", help="ids of `fsmap list`, or all")
    add_options(parser, Path("runs"))


def add_options(parser: argparse.ArgumentParser, out: Path) -> None:
    """What ``run`` and ``sweep`` have in common."""
    parser.add_argument("--quick", action="store_true", help="small sizes: seconds, not minutes")
    parser.add_argument(
        "--out",
        type=Path,
        default=out,
        metavar="DIR",
        help=f"writes DIR/ID (default: {out})",
    )
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="how many seeds")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a field of the config; a list is written 1,2,3; can be repeated",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue an unfinished run, add units that are missing to a finished one, else keep "
        "it; finished units are not repeated",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="start anew although an unfinished run is there, or a full-size one that has more",
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where to look for data first")
    parser.add_argument("--silent", action="store_true", help="no progress bar")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="measure all units at once on a Ray cluster (HOST:6379, or auto: this machine's); "
        "without an address one is started on this machine",
    )
    parser.add_argument(
        "--retries",
        type=int,
        default=2,
        metavar="N",
        help="with --ray: try a unit again after its worker died or it failed (default: 2)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run what was asked for."""
    from fsmap.paper import engine

    if "all" in arguments.ids and len(arguments.ids) > 1:
        message = f"`all` stands alone, got {' '.join(arguments.ids)}."
        raise InputError(message)
    require("matplotlib", extra="report")  # before the work, not after it
    options = options_of(arguments, tuple(arguments.set))
    ids = list(dict.fromkeys(arguments.ids))
    outcomes = []
    try:
        with terminate_as_interrupt(), pool_of(arguments) as pool:
            for outcome in engine.run(ids, options, console.note, pool):
                outcomes.append(outcome)
                _tell(outcome)
    except KeyboardInterrupt:
        _tell_interrupted(ids, options)
        return 130
    return _conclude(outcomes, ids, options)


def options_of(arguments: argparse.Namespace, assignments: tuple[str, ...]) -> Options:
    """Options of a run out of those of the command."""
    from fsmap.paper.options import Options

    if arguments.resume and arguments.force:
        message = "--resume continues a run and --force drops it. Use one of them."
        raise InputError(message)
    return Options(
        out=arguments.out,
        quick=arguments.quick,
        device=arguments.device,
        seeds=arguments.seeds,
        assignments=assignments,
        resume=arguments.resume,
        force=arguments.force,
        data_dir=arguments.data_dir,
        silent=arguments.silent,
    )


@contextmanager
def pool_of(arguments: argparse.Namespace) -> Iterator[Pool | None]:
    """The pool that ``--ray`` asks for; None without it."""
    if arguments.ray is None:
        if arguments.retries != 2:
            message = "--retries goes with --ray: here, a unit that fails is a bug to look at."
            raise InputError(message)
        yield None
        return
    from fsmap.integrations.ray import RayPool

    with RayPool(arguments.ray or None, retries=arguments.retries, say=console.note) as pool:
        yield pool


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """A polite kill (SIGTERM) ends a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may choose what signals do
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(outcome: Outcome) -> None:
    name = console.styled(outcome.id, console.BOLD)
    if outcome.status == "finished":
        claims = outcome.summary["claims"]
        took = duration(outcome.summary["seconds"])
        console.say(f"{name}  {tally(claims)}  {took}  {outcome.folder}")
        for claim in claims:
            if claim["holds"] is False:
                cross = console.styled("\u2717", console.RED)
                ours = console.styled(f"({claim['ours']})", console.DIM)
                console.say(f"  {cross} {claim['claim']} {ours}")
    elif outcome.status == "kept":
        console.say(f"{name}  {outcome.reason}  {outcome.folder}")
    elif outcome.status == "skipped":
        console.say(f"{name}  skipped: {' '.join(outcome.reason.split())}")
    else:
        console.note(f"fsmap: {outcome.id}: {outcome.reason}")


def _tell_interrupted(ids: list[str], options: Options) -> None:
    console.note(
        "\nfsmap: interrupted. Finished units are kept. Continue with:\n"
        f"  {options.command(*ids, resume=True)}"
    )


def _conclude(outcomes: list[Outcome], ids: list[str], options: Options) -> int:
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if len(outcomes) > 1 and failed:
        console.note(f"fsmap: {len(failed)} of {len(outcomes)} failed.")
    elif not failed and ids != ["all"] and any(o.status == "finished" for o in outcomes):
        console.say(f"Make a page of it with: fsmap report {options.out}")
    if not failed:
        return 0
    from fsmap.paper.engine import is_bug

    return 1 if any(is_bug(outcome.error) for outcome in failed) else 2
