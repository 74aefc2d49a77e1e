"""Run experiments of the paper and write rows, pictures and a summary.

Examples:
  fsmap run fourier --quick                      # seconds
  fsmap run fourier --set steps=500 --seeds 10   # fields: fsmap list fourier
  fsmap run all --quick                          # skips experiments without data
  fsmap run fourier --resume                     # go on after an interruption
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from fsmap import cli
from fsmap.errors import InputError
from fsmap.paper import engine
from fsmap.paper.rows import tally
from fsmap.progress import duration

OPTIONS = {
    "ids ID+": (str, "ids of `fsmap list`, or all"),
    "--quick": (cli.FLAG, "small sizes: seconds, not minutes"),
    "--out DIR": (Path, "writes DIR/ID (default: runs)", Path("runs")),
    **cli.DEVICE,
    "--seeds N": (int, "number of seeds"),
    "--set KEY=VALUE": (cli.MANY, "change a field of the config (a list: 1,2,3); can be repeated"),
    "--resume": (cli.FLAG, "add the units that are missing; finished ones are not repeated"),
    "--force": (cli.FLAG, "start anew; a finished run is kept in DIR/.fsmap/ID.previous"),
    **cli.DATA_DIR,
    "--silent": (cli.FLAG, "no progress bar"),
}


def run(arguments: argparse.Namespace) -> int:
    """Run the experiments and print their outcomes."""
    if "all" in arguments.ids and len(arguments.ids) > 1:
        raise InputError(f"`all` cannot be combined with other ids, got {' '.join(arguments.ids)}.")
    if arguments.resume and arguments.force:
        raise InputError("--resume continues a run and --force drops it. Use one of them.")
    cli.check_installed("matplotlib", extra="report")
    given = vars(arguments)
    own = {name: given[name] for name in engine.Options._fields if name in given}
    chosen = engine.Options(**own, assignments=tuple(arguments.set))
    ids = list(dict.fromkeys(arguments.ids))
    outcomes = []
    # SIGTERM ends a run as Ctrl-C does
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for outcome in engine.run(ids, chosen, cli.note):
            outcomes.append(outcome)
            _print(outcome)
    except KeyboardInterrupt:
        again = chosen.command(*ids, resume=True)
        cli.note(f"\nfsmap: interrupted. Finished units are kept. Continue with:\n  {again}")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if len(outcomes) > 1 and failed:
        cli.note(f"fsmap: {len(failed)} of {len(outcomes)} failed.")
    elif not failed and ids != ["all"] and any(o.status == "finished" for o in outcomes):
        cli.say(f"Make a page of it with: fsmap report {chosen.out}")
    if not failed:
        return 0
    return 1 if any(engine.is_bug(outcome.error) for outcome in failed) else 2


def _print(outcome: engine.Outcome) -> None:
    name = cli.styled(outcome.id, cli.BOLD)
    if outcome.status == "finished":
        claims = outcome.summary["claims"]
        took = duration(outcome.summary["seconds"])
        cli.say(f"{name}  {tally(claims)}  {took}  {outcome.folder}")
        for claim in claims:
            if claim["holds"] is False:
                cross = cli.styled("\u2717", cli.RED)
                ours = cli.styled(f"({claim['ours']})", cli.DIM)
                cli.say(f"  {cross} {claim['claim']} {ours}")
    elif outcome.status == "kept":
        cli.say(f"{name}  {outcome.reason}  {outcome.folder}")
    elif outcome.status == "skipped":
        cli.say(f"{name}  skipped: {' '.join(outcome.reason.split())}")
    else:
        cli.note(f"fsmap: {outcome.id}: {outcome.reason}")
