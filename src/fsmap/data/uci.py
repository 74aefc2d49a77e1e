"""Regression tables: read, split, standardize.

The splits are those of the paper: seed 0 is the default split of the ``bayesian_benchmarks``
loaders, other seeds reshuffle its rows; 10 % of the rows are test data, and 10 % of the others are
held out for validation.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fsmap.data.catalogue import Folder, find, locate
from fsmap.errors import InputError
from fsmap.types import Batch

Array = NDArray[np.float64]
NAMES = tuple("boston concrete energy naval power protein winered winewhite".split())
"""The eight tables of the paper's Table 1."""

SCALINGS = ("train", "authors")
TEST_SHARE, VALID_SHARE = 0.1, 0.1
DEFAULT_ORDER_SEED, VALID_SEED = 0, 42  # the seeds of the loaders and of the authors' code


class Table(NamedTuple):
    """A regression table as it was published, constant columns dropped."""

    name: str
    x: Array  # [N, d]
    y: Array  # [N, 1]


class Rows(NamedTuple):
    """Rows of a table for training, validation and test."""

    train: NDArray[np.int64]
    valid: NDArray[np.int64]
    test: NDArray[np.int64]


class Split(NamedTuple):
    """Standardized training, validation and test points."""

    train: Batch  # x [N, d], y [N, 1]
    valid: Batch
    test: Batch


def read_table(name: str, data_dir: Folder = None) -> Table:
    """Read one of the tables of the catalogue, such as ``"boston"``.

    Constant columns (two of ``naval``) are left out.
    """
    name = find(name).name
    path = next(iter(locate(name, data_dir).values()))
    if path.suffix != ".csv":
        raise InputError(f"{name!r} is not a table; tables are {', '.join(NAMES)}")
    return parse_table(name, path)


def parse_table(name: str, path: Path) -> Table:
    """Read a CSV file of numbers with a header and the target in the last column."""
    with path.open(encoding="utf-8") as stream:
        names = len(stream.readline().split(","))
        try:
            values = np.loadtxt(stream, delimiter=",", ndmin=2)
        except ValueError as error:
            raise InputError(f"{path} is not a table of numbers: {error}") from error
    columns = values.shape[1]
    if names < 2 or names != columns:
        raise InputError(f"{path} has {names} names in its first line, {columns} columns")
    x, y = values[:, :-1], values[:, -1:]
    return Table(name, x[:, np.ptp(x, axis=0) > 0], y)


def split_rows(num_rows: int, seed: int) -> Rows:
    """Which rows are for training, validation and test; seeds but 0 reshuffle the default split."""
    num_train = int(num_rows * (1 - TEST_SHARE))
    num_valid = int(num_train * VALID_SHARE)
    if num_valid < 1 or num_train == num_rows:
        raise InputError(f"{num_rows} rows are too few for training, validation and test data")
    order = _shuffled(num_rows, DEFAULT_ORDER_SEED)
    if seed != 0:
        order = order[_shuffled(num_rows, seed)]
    train, test = order[:num_train], order[num_train:]
    train = train[_shuffled(num_train, VALID_SEED)]
    return Rows(train[num_valid:], train[:num_valid], test)


def split(
    table: Table,
    seed: int,
    *,
    scaling: str = "train",
    dtype: torch.dtype = torch.float32,
    max_rows: int | None = None,
) -> Split:
    """Split a table and standardize it.

    ``scaling`` is ``"train"``: inputs and targets by mean and standard deviation of the training
    rows. Or ``"authors"``, as the authors' code does: all rows by the statistics of all rows, then
    training and validation rows, but not test rows, once more by their own. The test rows then
    are on a slightly different scale. With ``max_rows`` only so many rows are used.
    """
    if scaling not in SCALINGS:
        raise InputError(f"scaling must be one of {', '.join(SCALINGS)}, got {scaling!r}")
    x, y = table.x[:max_rows], table.y[:max_rows]
    rows = split_rows(len(x), seed)
    both = np.hstack([x, y])  # [N, d + 1]
    if scaling == "train":
        scaled = _standardized(both, both[rows.train])
        parts = [scaled[part] for part in rows]
    else:
        scaled = _standardized(both, both, floor=1e-6)
        seen = scaled[np.concatenate([rows.valid, rows.train])]
        parts = [_standardized(scaled[part], seen, floor=1e-8) for part in rows[:2]]
        parts.append(scaled[rows.test])
    tensors = [torch.as_tensor(part, dtype=dtype) for part in parts]
    return Split(*(Batch(t[:, :-1].contiguous(), t[:, -1:].contiguous()) for t in tensors))


def _shuffled(size: int, seed: int) -> NDArray[np.int64]:
    return np.random.RandomState(seed).permutation(size)


def _standardized(values: Array, reference: Array, floor: float = 0.0) -> Array:
    """By mean and standard deviation of the reference; a constant column becomes zero."""
    std = reference.std(0) + floor
    return np.asarray((values - reference.mean(0)) / np.where(std > 0, std, 1.0))
