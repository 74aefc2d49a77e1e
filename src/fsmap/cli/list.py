"""``fsmap list``: every experiment, what it costs, and how its last run came out."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from fsmap.cli import console
from fsmap.errors import CheckpointError
from fsmap.paper.rows import DIFFERS
from fsmap.paper.run_folder import coverage, read_run


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = console.add_command(
        subparsers,
        "list",
        run,
        summary="every experiment: id, figure or table, device, cost, last result",
        examples=[
            "fsmap list                   # all of them",
            "fsmap list fourier           # one of them, with what --set can change",
        ],
    )
    parser.add_argument("id", nargs="?", help="show one experiment in detail")
    parser.add_argument(
        "--out",
        type=Path,
        nargs="+",
        default=[Path("runs"), Path("results")],
        metavar="DIR",
        help="where to look for results (default: runs, then results)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    from fsmap.paper.experiment import GROUPS, get, registry

    if arguments.id:
        _detail(get(arguments.id), arguments.out)
        return 0
    lines: list[list[str]] = []
    group = None
    for experiment in registry().values():
        if experiment.group != group:
            group = experiment.group
            lines.append([GROUPS[group]])
        result = last_result(experiment.id, arguments.out)
        lines.append([experiment.id, experiment.label, experiment.device, experiment.cost, result])
    console.table(["id", "paper", "device", "cost", "last result"], lines)
    return 0


def last_result(name: str, folders: list[Path]) -> str:
    """How the last run of an experiment came out."""
    for folder in folders:
        here = folder / name
        if (here / "summary.json").is_file():
            return _outcome(here)
        if (here / "units.jsonl").is_file():
            return f"unfinished in {folder}"
    return "\u2013"


def _outcome(folder: Path) -> str:
    try:
        run = read_run(folder)
    except CheckpointError:
        return console.styled(f"cannot read {folder / 'summary.json'}", console.RED)
    summary = run.summary
    words = console.styled(run.tally, console.RED if DIFFERS in run.verdicts else console.GREEN)
    about = (summary["size"], str(summary.get("date", ""))[:10], coverage(summary))
    return ", ".join(filter(None, (words, *about)))


def _detail(experiment: Any, folders: list[Path]) -> None:
    console.say(console.styled(f"{experiment.id}  {experiment.title}", console.BOLD))
    console.say(f"{experiment.label}; {experiment.device}; {experiment.cost} at full size")
    console.say(experiment.see)
    console.say(f"protocol: {experiment.protocol}")
    console.say(f"last result: {last_result(experiment.id, folders)}\n")
    full, quick = dataclasses.asdict(experiment.config), dataclasses.asdict(experiment.quick)
    lines = [[name, _short(full[name]), _short(quick[name])] for name in full]
    console.table(["--set", "full", "quick"], lines)


def _short(value: Any) -> str:
    is_list = isinstance(value, tuple | list)
    return ",".join(f"{item}" for item in value) if is_list else str(value)
