"""``fsmap data``: which data sets there are, where they are, and how to get them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.cli import console

if TYPE_CHECKING:
    from fsmap.data.catalogue import DataSet


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = console.add_command(
        subparsers,
        "data",
        run_list,
        summary="data sets: where they are looked for, how to get them, checksums",
        examples=[
            "fsmap data list                    # every data set and where it is",
            "fsmap data get boston protein      # from the official source, or from a package",
            "fsmap data get uci                 # the eight tables of the paper's Table 1",
            "fsmap data check                   # checksums of everything that is there",
        ],
    )
    parser.set_defaults(names=[], data_dir=None)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    first, into = "where to look first", "where to put it (default: the cache)"
    for name, handler, names, summary, folder in (
        ("list", run_list, "*", "every data set, and where it is", first),
        ("get", run_get, "+", "make data sets available", into),
        ("check", run_check, "*", "verify checksums", first),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        which = "data sets; uci: the eight tables of Table 1"
        action.add_argument("names", nargs=names, metavar="NAME", help=which)
        action.add_argument("--data-dir", type=Path, metavar="DIR", help=folder)
        action.set_defaults(handler=handler)


def run_list(arguments: argparse.Namespace) -> int:
    """Print every data set, where it is, and where it would be looked for."""
    from fsmap.data.catalogue import advice, roots

    searched = roots(arguments.data_dir)
    lines = []
    for entry in _chosen(arguments.names):
        copies = [[root.path / f.path for root in searched] for f in entry.files]
        found = [next((path for path in one if path.is_file()), None) for one in copies]
        if all(found):
            place = console.styled(str(found[0].parent), console.GREEN)  # type: ignore[union-attr]
        elif any(found):
            place = f"{found.count(None)} of {len(found)} files are missing"
        else:
            place = advice(entry) if arguments.names else "not here"
        lines.append([entry.name, entry.title, f"{entry.size / 1e6:.2f} MB", place])
    console.table(["name", "what", "size", "where"], lines)
    console.say()
    for number, root in enumerate(searched, start=1):
        there = "" if root.path.is_dir() else "  (not there)"
        console.say(f"{number}. {root.why}: {root.path}{there}")
    console.say("Get one with: fsmap data get NAME")
    return 0


def run_get(arguments: argparse.Namespace) -> int:
    """Make data sets available."""
    from fsmap.data.fetch import get
    from fsmap.errors import MissingDataError

    failed = False
    for entry in _chosen(arguments.names):
        try:
            files = get(entry.name, arguments.data_dir, say=console.note)
        except MissingDataError as error:
            console.note(f"fsmap: {error}")
            failed = True
            continue
        folder = next(iter(files.values())).parent
        console.say(f"{entry.name}: {len(files)} files in {folder}, checksums right")
    return 2 if failed else 0


def run_check(arguments: argparse.Namespace) -> int:
    """Verify the checksums of what is there."""
    from fsmap.data.catalogue import describe_missing, look_for

    failed = False
    for entry in _chosen(arguments.names):
        found = [look_for(file, arguments.data_dir) for file in entry.files]
        damaged = any(item.damaged for item in found)
        missing = any(item.path is None for item in found)
        for path in (path for item in found for path in item.damaged):
            console.say(f"{entry.name}: {console.styled('wrong checksum', console.RED)}: {path}")
        if not missing:
            console.say(f"{entry.name}: {console.styled('right', console.GREEN)}")
        elif arguments.names or damaged:
            console.say(describe_missing(entry, found, arguments.data_dir))
        else:
            console.say(f"{entry.name}: not here")
        failed |= damaged or (missing and bool(arguments.names))
    return 2 if failed else 0


def _chosen(names: list[str]) -> list[DataSet]:
    """The entries that were named; all if none was."""
    from fsmap.data.catalogue import PAPER_TABLES, catalogue, find

    if not names or names == ["all"]:
        return list(catalogue().values())
    asked = [one for name in names for one in (PAPER_TABLES if name == "uci" else [name])]
    return list({entry.name: entry for entry in map(find, asked)}.values())
