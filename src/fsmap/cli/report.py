"""One static page: figures, ours beside the paper's numbers, claims.

Examples:
  fsmap report runs                      # writes report/index.html
  fsmap report runs results --out page   # runs of two folders on one page
  fsmap report runs --redraw             # also write summaries and pictures anew
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fsmap import cli
from fsmap.paper.engine import ROW_ERRORS, publish, registry
from fsmap.paper.report.page import build, find_runs
from fsmap.paper.rows import RunFolder

OPTIONS = {
    "folders DIR*": (Path, "folders with runs (runs, results); of two the full-size or first one"),
    "--out DIR": (Path, "default: report", Path("report")),
    "--redraw": (cli.FLAG, "also write summary.json and pictures anew"),
}


def run(arguments: argparse.Namespace) -> None:
    """Write the page and say where it is."""
    cli.check_installed("jinja2", "matplotlib", extra="report")
    usual = [folder for folder in cli.RESULTS if folder.is_dir()] or cli.RESULTS[:1]
    folders = arguments.folders or usual
    if arguments.redraw:
        _redraw(folders)
    cli.say(str(build(folders, arguments.out).resolve()))


def _redraw(folders: list[Path]) -> None:
    for found in find_runs(folders):
        if found.trouble:
            continue
        cli.note(f"{found.id}: drawing")
        run = RunFolder(found.folder)
        try:
            with run.lock():
                publish(registry()[found.id], run)
        except ROW_ERRORS as error:  # or a run is in progress, which draws its own rows
            cli.note(f"{found.id}: not drawn again: {error}")
