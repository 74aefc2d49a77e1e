"""Every experiment: id, figure or table, device, cost, last result.

Examples:
  fsmap list                   # all of them
  fsmap list fourier           # one of them, with what --set can change
"""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

from fsmap import cli
from fsmap.paper import rows as records
from fsmap.paper.engine import ROW_ERRORS, Experiment, coverage, get, registry, section
from fsmap.paper.rows import AGREES, DIFFERS, VERDICTS, Content, RunFolder, verdict

OPTIONS = {
    "id ID?": (str, "show one experiment in detail"),
    "--out DIR+": (Path, "where to look for results (default: runs, then results)", cli.RESULTS),
}


def run(arguments: argparse.Namespace) -> None:
    """Print the list."""
    if arguments.id:
        _detail(get(arguments.id), arguments.out)
        return
    lines = []
    for heading, experiments in groupby(registry().values(), key=section):
        lines.append([heading])
        for one in experiments:
            cost = textwrap.shorten(one.cost.split(";")[0].split(",")[0], 17, placeholder=" …")
            label = textwrap.shorten(one.label, 24, placeholder=" …")
            lines.append([one.id, label, one.device, cost, last_result(one, arguments.out)])
    cli.table(["id", "paper", "device", "cost", "last result"], lines)


def last_result(experiment: Experiment, folders: list[Path]) -> str:
    """The last result of an experiment; a full-size one is preferred to a quick one."""
    runs = [RunFolder(folder / experiment.id) for folder in folders]
    pairs = [(run, run.content()) for run in runs]
    found = [(c, s, run.path.parent) for run, c in pairs if (s := run.state_of(c)) != "empty"]
    complete = [content for content, state, _ in found if state == "complete"]
    full = [content for content in complete if content.header["size"] == "full"]
    if full or (found and found[0][1] == "complete"):
        return _outcome(experiment, (full or complete)[0])
    if not found:
        return "\u2013"
    content, state, folder = found[0]
    if state == "unfinished" and content.units:
        return f"{_outcome(experiment, content)}, unfinished"
    text = f"{state} in {folder}"
    return cli.styled(text, cli.RED) if state == "damaged" else text


def _outcome(experiment: Experiment, run: Content) -> str:
    try:
        claims = records.judged(map(records.claim_entry, experiment.claims(run.rows)))
    except ROW_ERRORS as error:
        return f"cannot be judged: {type(error).__name__}"
    found = list(map(verdict, claims))
    parts = [f"{found.count(AGREES)}/{len(found)} agree" if found else "no claims"]
    parts += [f"{found.count(v)} {v.rstrip('s')}" for v in VERDICTS[1:] if v in found]
    words = cli.styled(", ".join(parts), cli.RED if DIFFERS in found else cli.GREEN)
    size = coverage(experiment, run.header, run.units).partition(",")[0]
    return f"{words}, {size.replace(' of ', '/')}"


def _detail(experiment: Experiment, folders: list[Path]) -> None:
    cli.say(cli.styled(f"{experiment.id}  {experiment.title}", cli.BOLD))
    cli.say(f"{experiment.label}; {experiment.device}; {experiment.cost} at full size")
    cli.say(experiment.see)
    cli.say(f"protocol: {experiment.protocol}")
    cli.say(f"last result: {last_result(experiment, folders)}\n")
    full, quick = dataclasses.asdict(experiment.config), dataclasses.asdict(experiment.quick)
    lines = [[name, _short(full[name]), _short(quick[name])] for name in full]
    cli.table(["--set", "full", "quick"], lines)


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
