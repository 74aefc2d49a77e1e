"""``fsmap predict``: predictions of a model that ``fsmap fit`` saved."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsmap.cli import console, options
from fsmap.cli.fit import check_writable
from fsmap.errors import InputError

if TYPE_CHECKING:
    from fsmap.tables.model import TableModel
    from fsmap.tables.reader import Table


def levels(text: str) -> list[float]:
    """The type of ``--quantiles``."""
    found = [options.number(word) for word in text.split(",")]
    if not all(0 < level < 1 for level in found):
        message = f"must be numbers between 0 and 1, such as 0.1,0.5,0.9; got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return found


OPTIONS = {
    "model MODEL": (Path, "what `fsmap fit` wrote"),
    "table FILE": (Path, "CSV or Parquet, columns by name"),
    "--out FILE": (Path, "CSV or Parquet (default: CSV to the terminal)"),
    "--method": (("l-map", "ps-map", "linear"), "another one than was chosen"),
    "--missing TEXT": (options.MANY, "as for `fsmap fit`"),
    "--clip": (options.FLAG, "replace numbers outside the training range by its ends"),
    "--quantiles Q,Q": (levels, "of a number, such as 0.1,0.5,0.9, in place of the interval"),
    "--force": (options.FLAG, "overwrite --out"),
}


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = console.add_command(
        subparsers,
        "predict",
        run,
        summary="predictions of a model that `fsmap fit` saved",
        examples=[
            "fsmap predict model.pt new.csv                         # to the terminal",
            "fsmap predict model.pt new.csv --out predictions.csv   # or .parquet",
            "fsmap predict model.pt new.csv --method ps-map         # not the chosen one",
        ],
    )
    options.add(parser, OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Predict and write."""
    from fsmap.files import write_whole
    from fsmap.tables.encoder import UnseenWarning
    from fsmap.tables.model import load_model
    from fsmap.tables.reader import read_table, write_table

    if arguments.out is not None:
        inputs = (arguments.table, arguments.model)
        check_writable(arguments.out, force=arguments.force, inputs=inputs)
    model = load_model(arguments.model)
    table = read_table(arguments.table, missing=arguments.missing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnseenWarning)
        how = {"clip": arguments.clip, "quantiles": arguments.quantiles}
        columns = model.predict(table, arguments.method, **how)
    for warning in caught:
        console.note(f"fsmap: {warning.message}")
    known = {column.name for column in model.encoder.columns} | {model.target.name}
    extra = [name for name in table.columns if name not in known]
    if extra:
        console.note(f"fsmap: columns that the model does not use: {', '.join(extra)}")
    _tell_score(model, table, arguments)
    values = {name: column.tolist() for name, column in columns.items()}
    content = write_table(arguments.out or Path("predictions.csv"), values)
    if arguments.out is None:
        sys.stdout.write(content.decode())
        return 0
    write_whole(arguments.out, content)
    console.note(f"{arguments.out}: predictions of {model.target.name!r} for {_rows(table)}")
    return 0


def _rows(table: Table) -> str:
    return f"{table.num_rows} row{'' if table.num_rows == 1 else 's'}"


def _tell_score(model: TableModel, table: Table, arguments: argparse.Namespace) -> None:
    """If the target is there, say how good the predictions are."""
    import torch

    from fsmap import metrics
    from fsmap.tables.encoder import REGRESSION, with_target

    target = model.target
    if target.name not in table.columns:
        return
    try:
        table = with_target(table, target.name)
        y = torch.from_numpy(target.labels(table))
    except InputError as error:
        console.note(f"fsmap: not compared with the target: {error}")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.outputs(table, arguments.method, clip=arguments.clip)
    if target.task == REGRESSION:
        text = f"RMSE {target.std * metrics.rmse(out, y):.4g}"
    else:
        text = f"accuracy {metrics.accuracy(out, y):.4g}, NLL {metrics.nll(out, y):.4g}"
    console.note(f"{target.name!r} is in the table: {text} on {_rows(table)}")
