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
from fsmap.errors import FsmapError, InputError
from fsmap.train.progress import duration

if TYPE_CHECKING:
    from fsmap.experiments.options import Options
    from fsmap.experiments.runner import Outcome


def add_parser(subparsers: Any) -> None:
    """Add the command.

    Args:
        subparsers: Where to.
    """
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
        ],
    )
    parser.add_argument("ids", nargs="+", metavar="ID", help="ids of `fsmap list`, or all")
    parser.add_argument("--quick", action="store_true", help="small sizes: seconds, not minutes")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="writes DIR/ID (default: runs)",
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
        help="continue an unfinished run, keep a finished one; finished units are not repeated",
    )
    parser.add_argument(
        "--force", action="store_true", help="start anew although an unfinished run is there"
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where to look for data first")
    parser.add_argument("--silent", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Run what was asked for.

    Args:
        arguments: The options of the command.

    Returns:
        0 if all ran or were skipped with a reason, 1 after a bug, 2 after an error, 130 if
        interrupted.

    Raises:
        InputError: If options contradict each other.
    """
    from fsmap.experiments import runner
    from fsmap.experiments.options import Options

    if arguments.resume and arguments.force:
        message = "--resume continues a run and --force drops it. Use one of them."
        raise InputError(message)
    if "all" in arguments.ids and len(arguments.ids) > 1:
        message = f"`all` stands alone, got {' '.join(arguments.ids)}."
        raise InputError(message)
    options = Options(
        out=arguments.out,
        quick=arguments.quick,
        device=arguments.device,
        seeds=arguments.seeds,
        assignments=tuple(arguments.set),
        resume=arguments.resume,
        force=arguments.force,
        data_dir=arguments.data_dir,
        silent=arguments.silent,
    )
    ids = list(dict.fromkeys(arguments.ids))
    outcomes = []
    try:
        with _terminate_as_interrupt():
            for outcome in runner.run(ids, options, console.note):
                outcomes.append(outcome)
                _tell(outcome)
    except KeyboardInterrupt:
        _tell_interrupted(ids, options)
        return 130
    return _conclude(outcomes, options)


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
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
        held = sum(claim["holds"] for claim in claims)
        took = duration(outcome.summary["seconds"])
        console.say(f"{name}  {held} of {len(claims)} claims hold  {took}  {outcome.folder}")
        for claim in claims:
            if not claim["holds"]:
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


def _conclude(outcomes: list[Outcome], options: Options) -> int:
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if len(outcomes) > 1 and failed:
        console.note(f"fsmap: {len(failed)} of {len(outcomes)} failed.")
    elif not failed and any(outcome.status == "finished" for outcome in outcomes):
        console.say(f"See it with: fsmap report {options.out}")
    if not failed:
        return 0
    bugs = [o for o in failed if not isinstance(o.error, FsmapError)]
    return 1 if bugs else 2
