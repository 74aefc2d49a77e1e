"""``fsmap report``: one static page, ours beside the paper's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fsmap.cli import console


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = console.add_command(
        subparsers,
        "report",
        run,
        summary="one static page: figures, ours beside the paper's numbers, claims",
        examples=[
            "fsmap report runs                      # writes report/index.html",
            "fsmap report runs results --out page   # runs of two folders on one page",
            "fsmap report runs --redraw             # also write summaries and pictures anew",
        ],
    )
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="folders with runs (default: runs, and results if it is there); of two runs of one "
        "experiment the full-size one, then the first is shown",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("report"), metavar="DIR", help="default: report"
    )
    parser.add_argument(
        "--redraw", action="store_true", help="also write summary.json and pictures anew"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from fsmap.paper.report.page import build

    usual = [folder for folder in (Path("runs"), Path("results")) if folder.is_dir()]
    folders = arguments.folders or usual or [Path("runs")]
    if arguments.redraw:
        _redraw(folders)
    console.say(str(build(folders, arguments.out).resolve()))
    return 0


def _redraw(folders: list[Path]) -> None:
    from fsmap.paper.engine import publish
    from fsmap.paper.experiment import TROUBLE, registry
    from fsmap.paper.report.page import find_runs
    from fsmap.paper.rows import RunFolder

    for found in find_runs(folders):
        if found.trouble:
            continue
        console.note(f"{found.id}: drawing")
        run = RunFolder(found.folder)
        try:
            with run.lock():
                publish(registry()[found.id], run)
        except TROUBLE as error:  # or a run that goes on: it draws its own rows
            console.note(f"{found.id}: not drawn again: {error}")
