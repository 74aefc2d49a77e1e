"""Rows: one measured number a line, with its circumstances, in a file that survives a kill.

A run folder holds

- ``rows.jsonl``: one :class:`Row` a line;
- ``units.jsonl``: a header (experiment, size, config), then one line per finished unit, written
  after its rows are on disk.

A unit is finished if, and only if, its line stands in ``units.jsonl``. Rows of any other unit are
the rest of a killed run: a resumed run drops them. JSON has no nan and no infinities, so they are
written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which every parser accepts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fsmap.errors import CheckpointError

Value = float | Sequence[Any]
"""A number, or a (nested) list of numbers: a curve, a histogram, an image."""

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Row(NamedTuple):
    """One measured value and where it comes from.

    Attributes:
        experiment: The experiment's id, such as ``"fourier"``.
        metric: What was measured, such as ``"test_rmse"``.
        value: A number, or a list of numbers for a curve.
        method: ``"ps-map"``, ``"fs-map"``, ``"l-map"``, or None where no method is involved.
        seed: The seed, or None.
        config: What varies within the experiment (``n_train``, ``jitter``, ``dataset``, …).
        commit: The code that measured it.
        torch: The version of torch.
        device: Where it was measured.
        seconds: What the unit took, or what the experiment says this value took.
        unit: Key of the resumable unit that made it.
        deviations: Where this number's protocol departs from the paper's.
    """

    experiment: str
    metric: str
    value: Any
    method: str | None = None
    seed: int | None = None
    config: Mapping[str, Any] = MappingProxyType({})
    commit: str = ""
    torch: str = ""
    device: str = ""
    seconds: float = 0.0
    unit: Mapping[str, Any] = MappingProxyType({})
    deviations: tuple[str, ...] = ()


class Claim(NamedTuple):
    """A statement of the paper, and whether the rows of this run bear it out.

    Attributes:
        claim: The statement, in words.
        holds: What the rows say.
        ours: The number (or short text) that decides it.
        paper: What the paper prints, or None.
    """

    claim: str
    holds: bool
    ours: Any = None
    paper: Any = None


def plain(value: Any) -> Any:
    """Turn tensors, arrays, tuples and non-finite floats into what JSON can hold.

    Args:
        value: Anything made of numbers, strings, mappings, sequences, tensors and arrays.

    Returns:
        The same, made of dicts, lists, strings, finite numbers, booleans and None.
    """
    if hasattr(value, "tolist"):  # torch tensors, numpy arrays and numpy scalars
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def revive(value: Any) -> Any:
    """Undo the spelling of non-finite numbers that :func:`plain` chose.

    Args:
        value: What a JSON parser returned.

    Returns:
        The same with floats in place of ``"nan"``, ``"inf"`` and ``"-inf"``.
    """
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: revive(item) for key, item in value.items()}
    if isinstance(value, list):
        return [revive(item) for item in value]
    return value


def encode(record: Any) -> str:
    """One line of strict JSON.

    Args:
        record: What to write.

    Returns:
        The line, without its end.
    """
    return json.dumps(plain(record), allow_nan=False, ensure_ascii=False)


def key_of(unit: Mapping[str, Any]) -> str:
    """The canonical spelling of a unit's key, the same before and after a trip through a file.

    Args:
        unit: The key.

    Returns:
        JSON with sorted keys.
    """
    return json.dumps(plain(unit), sort_keys=True, ensure_ascii=False)


def append_lines(path: Path, records: Iterable[Any]) -> None:
    """Append records in one write, and return once they are on disk.

    Args:
        path: A file of JSON lines.
        records: One line each.
    """
    text = "".join(encode(record) + "\n" for record in records)
    with path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> tuple[list[Any], int]:
    """Read JSON lines; a last line that a kill cut off is left out.

    Args:
        path: A file of JSON lines; a missing one reads as empty.

    Returns:
        The records, and how many lines were left out (0 or 1).

    Raises:
        CheckpointError: If a line other than the last is damaged.
    """
    if not path.exists():
        return [], 0
    *whole, rest = path.read_bytes().split(b"\n")  # rest: what follows the last line end
    records = []
    for number, line in enumerate(whole, start=1):
        try:
            records.append(revive(json.loads(line)))
        except ValueError as error:
            message = (
                f"line {number} of {path} is not JSON. The file was altered after it was written: "
                "restore it, or run the experiment again without --resume."
            )
            raise CheckpointError(message) from error
    return records, int(bool(rest.strip()))


def read_rows(path: Path) -> tuple[list[Row], int]:
    """Read the rows of a run.

    Args:
        path: A ``rows.jsonl``.

    Returns:
        The rows, and how many cut-off lines were left out (0 or 1).

    Raises:
        CheckpointError: If a line is damaged or is no row.
    """
    records, dropped = read_lines(path)
    try:
        rows = [Row(**{**record, "deviations": tuple(record["deviations"])}) for record in records]
    except (TypeError, KeyError) as error:
        message = (
            f"{path} holds a line that is no row of fsmap ({error}). "
            "Run the experiment again without --resume."
        )
        raise CheckpointError(message) from error
    return rows, dropped
