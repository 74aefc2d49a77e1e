"""A model for your own table: the best of L-MAP, PS-MAP and linear.

Examples:
  fsmap fit houses.csv --target price               # writes model.pt and model.html
  fsmap fit wine.csv --target quality --task classification --out wine.pt
  fsmap fit data.csv --target y --drop id --category zip --missing -999
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fsmap import cli
from fsmap.errors import InputError
from fsmap.files import make_folder, write_whole
from fsmap.paper.report import table_page
from fsmap.progress import duration
from fsmap.tables.encoder import check_columns
from fsmap.tables.model import TableOptions, fit_table
from fsmap.tables.reader import read_table


def units(text: str) -> tuple[int, ...]:
    """The type of ``--hidden``."""
    return tuple(cli.count(word) for word in text.split(","))


OPTIONS = {
    "table FILE": (Path, "CSV, with any separator"),
    "--target COL": ({"required": True}, "the column to predict"),
    "--out FILE": (Path, "the model (default: model.pt); its page ends in .html", Path("model.pt")),
    "--task": (
        ("auto", "regression", "classification"),
        "auto: text or two distinct numbers are classes, other numbers are not",
        "auto",
    ),
    "--drop COL": (cli.MANY, "leave a column out; can be repeated"),
    "--keep COL": (cli.MANY, "use row numbers or an identifier as numbers; can be repeated"),
    "--category COL": (cli.MANY, "categories that look like numbers or free text; can be repeated"),
    "--missing TEXT": (
        cli.MANY,
        "a cell that means 'no value', besides empty, NA, NaN, null, None, ?; can be repeated",
    ),
    "--hidden N,N": (units, "units of the hidden layers (default: by number of rows)"),
    "--steps N": (cli.count, "most optimizer steps (default: by number of rows)"),
    "--method": (("auto", "l-map", "ps-map", "linear"), "auto: the best on held-out rows", "auto"),
    "--ensemble N": (cli.count, "networks that are averaged (4)", 4),
    "--test SHARE": (float, "share of the rows to test on (0.15)", 0.15),
    "--seed N": (cli.seed, "seed of the split and the training (0)", 0),
    **cli.DEVICE,
    "--force": (cli.FLAG, "overwrite the model and its page"),
    "--silent": (cli.FLAG, "no progress bar"),
}


def run(arguments: argparse.Namespace) -> None:
    """Fit, compare, save, and write the page."""
    cli.check_installed("sklearn", extra="data")
    cli.check_installed("jinja2", "matplotlib", extra="report")
    out: Path = arguments.out
    page = out.with_suffix(".html")
    if page == out:
        raise InputError(
            f"--out {page} is the name of the page. Name the model, such as {page.stem}.pt."
        )
    table = read_table(arguments.table, missing=arguments.missing, target=arguments.target)
    check_columns(table, [arguments.target])
    for path in (out, page):
        check_writable(path, force=arguments.force, inputs=(arguments.table,))
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    own = {name: given[name] for name in TableOptions.__dataclass_fields__ if name in given}
    cli.say(f"{arguments.table}: {table.num_rows} rows, {len(table.columns)} columns")
    decided = TableOptions(**own, progress=not arguments.silent)
    fitted = fit_table(table, arguments.target, decided, cli.say)
    cli.say()
    cli.table(*table_page.results(fitted))
    cli.say(f"\n{table_page.verdict(fitted)}")
    fitted.model.save(out)  # before the page: a fit takes long, a page can be drawn again
    source, command = arguments.table.name, arguments.command
    write_whole(page, table_page.render(fitted, source=source, command=command, model=str(out)))
    cli.say(f"{out} and {page} written after {duration(fitted.seconds)}. Use the model with:")
    cli.say(f"  fsmap predict {shlex.quote(str(out))} new.csv")


def check_writable(path: Path, *, force: bool, inputs: Sequence[Path]) -> None:
    """Raise InputError if ``path`` cannot be written; called before the work starts.

    With ``force`` a file there may be replaced, but none of the ``inputs``.
    """
    with suppress(FileNotFoundError):
        path.lstat()  # raises OSError for a name that is too long
        if any(source.exists() and path.samefile(source) for source in inputs):
            raise InputError(f"{path} is what this command reads. Choose another --out.")
        if path.is_dir() or not force:
            raise InputError(
                f"{path} exists already. Choose another --out, or overwrite it with --force."
            )
    make_folder(path.absolute().parent)
