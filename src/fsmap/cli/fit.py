"""``fsmap fit``: a model for your own table, the best of L-MAP, PS-MAP and linear."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.cli import console
from fsmap.errors import InputError, require
from fsmap.files import make_folder
from fsmap.progress import duration

if TYPE_CHECKING:
    from fsmap.tables.model import TableOptions


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = console.add_command(
        subparsers,
        "fit",
        run,
        summary="a model for your own table: the best of L-MAP, PS-MAP and linear",
        examples=[
            "fsmap fit houses.csv --target price               # writes model.pt and model.html",
            "fsmap fit wine.csv --target quality --task classification --out wine.pt",
            "fsmap fit data.parquet --target y --drop id --category zip --missing -999",
        ],
    )
    parser.add_argument("table", type=Path, metavar="FILE", help="CSV (any separator) or Parquet")
    parser.add_argument("--target", required=True, metavar="COL", help="the column to predict")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("model.pt"),
        metavar="FILE",
        help="the model (default: model.pt); a page with the same name ends in .html",
    )
    parser.add_argument(
        "--task",
        choices=("auto", "regression", "classification"),
        default="auto",
        help="auto: text or two distinct numbers are classes, other numbers are not",
    )
    _add_columns(parser)
    _add_training(parser)
    parser.add_argument("--force", action="store_true", help="overwrite the model and its page")
    parser.add_argument("--silent", action="store_true", help="no progress bar")


def _add_columns(parser: argparse.ArgumentParser) -> None:
    for name, text in (
        ("drop", "leave a column out"),
        ("category", "a column of categories although it looks like numbers or free text"),
    ):
        parser.add_argument(
            f"--{name}", action="append", default=[], metavar="COL", help=f"{text}; can be repeated"
        )
    parser.add_argument(
        "--missing",
        action="append",
        default=[],
        metavar="TEXT",
        help="a cell that means 'no value', besides empty, NA, NaN, null, None, ?; can be repeated",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hidden", metavar="N,N", help="units of the hidden layers (default: by rows)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="at most (default: by rows)")
    parser.add_argument(
        "--px",
        choices=("normal", "train"),
        default="normal",
        help="where L-MAP looks at the function: N(0, I) in standardized columns, or training rows",
    )
    parser.add_argument(
        "--method",
        choices=("auto", "l-map", "ps-map", "linear"),
        default="auto",
        help="auto: the best on held-out rows",
    )
    parser.add_argument(
        "--ensemble", type=int, default=4, metavar="N", help="networks that are averaged (4)"
    )
    parser.add_argument(
        "--test", type=float, default=0.15, metavar="SHARE", help="rows to test on (0.15)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split and the training (0)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda … (default: auto)")


def run(arguments: argparse.Namespace) -> int:
    """Fit, compare, save, and write the page."""
    from fsmap.files import write_whole
    from fsmap.paper.report import table_page
    from fsmap.tables.encoder import check_columns
    from fsmap.tables.model import fit_table
    from fsmap.tables.reader import read_table

    require("jinja2", extra="report")  # before the work, not after it
    page = table_page.page_path(arguments.out)
    if page == arguments.out:
        message = f"--out {page} is where the page goes. Name the model, such as {page.stem}.pt."
        raise InputError(message)
    table = read_table(arguments.table, missing=arguments.missing)
    check_columns(table, [arguments.target])
    for path in (arguments.out, page):
        check_writable(path, force=arguments.force, inputs=(arguments.table,))
    options = _options(arguments)
    console.say(f"{arguments.table}: {table.num_rows} rows, {len(table.columns)} columns")
    fitted = fit_table(table, arguments.target, options, console.say)
    console.say()
    console.table(*table_page.results(fitted))
    console.say()
    console.say(table_page.verdict(fitted))
    fitted.model.save(arguments.out)  # first: a page can be drawn again, a fit takes long
    text = table_page.render(
        fitted,
        source=arguments.table.name,
        command=_command(arguments),
        model=str(arguments.out),
    )
    write_whole(page, text)
    took = duration(fitted.seconds)
    console.say(f"{arguments.out} and {page} written after {took}. Use the model with:")
    console.say(f"  fsmap predict {shlex.quote(str(arguments.out))} new.csv")
    return 0


def check_writable(path: Path, *, force: bool, inputs: Sequence[Path] = ()) -> None:
    """Check before the work that its result can be written, by writing an empty file beside it.

    Args:
        path: Where it will go.
        force: Whether a file there may be replaced.
        inputs: What the command reads; never replaced.

    Raises:
        InputError: If it is an input, if there is a file already, or it cannot be written.
    """
    try:
        os.lstat(path)  # a name that is too long, a folder that may not be read
    except FileNotFoundError:
        pass
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}. Choose another --out."
        raise InputError(message) from error
    for source in inputs:
        if path.exists() and source.exists() and path.samefile(source):
            message = (
                f"{path} is what this command reads ({source}), and writing it would destroy it, "
                "also with --force. Choose another --out."
            )
            raise InputError(message)
    if path.exists() and not force:
        message = f"{path} exists already. Choose another --out, or overwrite it with --force."
        raise InputError(message)
    if path.is_dir() or not path.absolute().parent.is_dir():
        message = f"cannot write {path}: {path.parent} is no folder, or {path} is one."
        raise InputError(message)
    make_folder(path.absolute().parent)


def _options(arguments: argparse.Namespace) -> TableOptions:
    from fsmap.tables.model import TableOptions

    hidden: tuple[int, ...] | str = "auto"
    if arguments.hidden is not None:
        try:
            hidden = tuple(int(units) for units in arguments.hidden.split(","))
        except ValueError as error:
            message = f"--hidden is written 128,128, got {arguments.hidden!r}"
            raise InputError(message) from error
    return TableOptions(
        task=arguments.task,
        drop=tuple(arguments.drop),
        category=tuple(arguments.category),
        hidden=hidden,
        px=arguments.px,
        steps=arguments.steps,
        method=arguments.method,
        ensemble=arguments.ensemble,
        test=arguments.test,
        seed=arguments.seed,
        device=arguments.device,
        progress=not arguments.silent,
    )


def _command(arguments: argparse.Namespace) -> str:
    """The command line that makes the same model."""
    words = ["fsmap", "fit", str(arguments.table), "--target", arguments.target]
    for name in ("drop", "category", "missing"):
        for value in getattr(arguments, name):
            words += [f"--{name}", value]
    usual = {"task": "auto", "hidden": None, "steps": None, "px": "normal", "seed": 0}
    for name, default in {**usual, "method": "auto", "ensemble": 4, "test": 0.15}.items():
        if getattr(arguments, name) != default:
            words += [f"--{name}", str(getattr(arguments, name))]
    return shlex.join([*words, "--out", str(arguments.out)])
