"""Predictions of a model that `fsmap fit` saved.

Examples:
  fsmap predict model.pt new.csv                         # to the terminal
  fsmap predict model.pt new.csv --out predictions.csv
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from fsmap import cli
from fsmap.cli.fit import check_writable
from fsmap.files import write_whole
from fsmap.tables.encoder import UnseenWarning
from fsmap.tables.model import load_model
from fsmap.tables.reader import read_table, write_table

OPTIONS = {
    "model MODEL": (Path, "a model written by `fsmap fit`"),
    "table FILE": (Path, "CSV, columns by name"),
    "--out FILE": (Path, "CSV (default: the terminal)"),
    "--missing TEXT": (cli.MANY, "as for `fsmap fit`; those given there count here, too"),
    "--force": (cli.FLAG, "overwrite --out"),
}


def run(arguments: argparse.Namespace) -> None:
    """Predict and write."""
    if arguments.out is not None:
        inputs = (arguments.table, arguments.model)
        check_writable(arguments.out, force=arguments.force, inputs=inputs)
    model = load_model(arguments.model)
    table = read_table(arguments.table, missing=(*model.missing, *arguments.missing))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnseenWarning)
        columns = model.predict(table)
    for text in (*table.notes, *(warning.message for warning in caught)):
        cli.note(f"fsmap: {text}")
    known = {column.name for column in model.encoder.columns} | {model.target.name}
    extra = [name for name in table.columns if name not in known]
    if extra:
        cli.note(f"fsmap: columns that the model does not use: {', '.join(extra)}")
    content = write_table({name: column.tolist() for name, column in columns.items()})
    if arguments.out is None:
        sys.stdout.write(content)
    else:
        write_whole(arguments.out, content)
        cli.note(f"{arguments.out}: predictions of {model.target.name!r}, {table.num_rows} rows")
