"""A table from cells to a tested model: a linear model, PS-MAP and L-MAP, side by side.

Training rows teach, validation rows stop the training and choose the strengths, and test rows are
looked at once, at the end.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fsmap.assess import tables as measures
from fsmap.assess.tables import Difference, Spread
from fsmap.data import encoder as encoders
from fsmap.data.columns import CATEGORY, LEFT_OUT, Column, numbers
from fsmap.data.encoder import Encoder, UnseenWarning
from fsmap.data.rows import Parts, check_enough, split_rows
from fsmap.data.tables import Table
from fsmap.data.target import REGRESSION, Target, find_target, labels
from fsmap.errors import EdgeOfGridWarning, InputError
from fsmap.models.mlp import MLP
from fsmap.train.linear import learn_linear
from fsmap.train.search import Trained, at_edges
from fsmap.train.table_model import TableModel, forward
from fsmap.train.tabular import AUTO, learn

LINEAR = "linear"
METHODS = (LINEAR, "ps-map", "l-map")


class TableOptions(NamedTuple):
    """What a user may decide; the rest is decided by the rows."""

    task: str = AUTO
    drop: tuple[str, ...] = ()
    category: tuple[str, ...] = ()
    hidden: tuple[int, ...] | str = AUTO
    activation: str = "relu"
    px: str = "normal"
    steps: int | None = None
    valid: float = 0.15
    test: float = 0.15
    seed: int = 0
    device: str = AUTO
    progress: bool = True


class Run(NamedTuple):
    """One method: how it was trained and what it says about the test rows."""

    trained: Trained
    out: Tensor  # [n, K]  of the test rows
    measured: dict[str, float]
    spread: Spread | None  # regression only
    seconds: float


class Fitted(NamedTuple):
    """A tested model, and everything that a page about it shows.

    The ``edges`` say which chosen strengths lie at an end of what was tried.
    """

    model: TableModel
    parts: Parts
    y: Tensor  # targets of the test rows
    runs: dict[str, Run]
    notes: list[str]
    versus: Difference  # L-MAP minus PS-MAP, loss per test row
    edges: dict[str, list[str]]


def fit_table(
    table: Table,
    target: str,
    options: TableOptions,
    say: Callable[[str], None] = lambda text: None,
) -> Fitted:
    """Train, choose and test.

    Args:
        table: All rows.
        target: The column to predict.
        options: What the user decided.
        say: Told what is going on, a line at a time.

    Returns:
        The model and its test.
    """
    encoders.check_columns(table, [target])
    check_enough(table.num_rows)
    goal = find_target(table, target, options.task)
    say(f"target {target!r}: {goal.task} ({goal.why})")
    classes = labels(table, goal) if goal.classes else None
    parts = split_rows(
        table.num_rows, valid=options.valid, test=options.test, seed=options.seed, labels=classes
    )
    encoder, notes = _encoder(table, target, parts, options)
    notes += _rare(goal, classes, parts)
    for note in [*table.notes, *notes]:
        say(note)
    if goal.task == REGRESSION:
        goal = goal.standardized(numbers(table.columns[target])[0][parts.train])
    with warnings.catch_warnings():  # what validation and test rows bring is theirs, not a mistake
        warnings.simplefilter("ignore", UnseenWarning)
        x = encoder.encode(table)
    y = torch.from_numpy(labels(table, goal))
    sizes = [len(part) for part in parts]
    say("rows: {} to train, {} to choose by, {} to test; ".format(*sizes) + _width(encoder))
    networks, runs = {}, {}
    for method in METHODS:
        network, runs[method] = _run(method, x, y, parts, goal, options)
        networks[method] = network
        chosen, tried = runs[method].trained, len(runs[method].trained.search)
        steps = f"{chosen.step} step{'' if chosen.step == 1 else 's'}"
        say(f"{method}: {tried} configurations, {steps}, {runs[method].seconds:.1f} s")
    results = {method: _result(run) for method, run in runs.items()}
    model = TableModel(encoder, goal, networks, options.activation, results)
    seen = y[parts.test]
    versus = measures.difference(runs["l-map"].out, runs["ps-map"].out, seen, goal)
    edges = {method: at_edges(runs[method].trained) for method in METHODS if method != LINEAR}
    return Fitted(model, parts, seen, runs, [*table.notes, *notes], versus, edges)


def _encoder(
    table: Table, target: str, parts: Parts, options: TableOptions
) -> tuple[Encoder, list[str]]:
    """Kinds of columns by all rows (so that messages name the right one), the rest by training."""
    encoders.check_columns(table, [*options.drop, *options.category])
    if target in options.drop:
        message = f"--drop {target} would leave out the target"
        raise InputError(message)
    features = [n for n in table.columns if n != target and n not in options.drop]
    kinds = encoders.learn(table, features, category=options.category).columns
    used = [column.name for column in kinds if column.kind != LEFT_OUT]
    category = [column.name for column in kinds if column.kind == CATEGORY]
    found = encoders.learn(table.take(parts.train), used, category=category)
    left_out = [column for column in (*kinds, *found.columns) if column.kind == LEFT_OUT]
    notes = [f"column {column.name!r} is left out: {column.reason}" for column in left_out]
    return found, notes


def _rare(target: Target, labels: npt.NDArray[np.int64] | None, parts: Parts) -> Iterator[str]:
    """A remark for each class that is too rare to be in every part."""
    if labels is None:
        return
    for label, name in enumerate(target.classes):
        count = int((labels == label).sum())
        uses = {"train": parts.train, "choose by": parts.valid, "test on": parts.test}
        lacking = [use for use, rows in uses.items() if label not in labels[rows]]
        if lacking:
            text = f"class {name!r} has {count} row{'' if count == 1 else 's'}: "
            yield text + ", ".join(f"none to {use}" for use in lacking)


def _run(
    method: str,
    x: npt.NDArray[Any],
    y: Tensor,
    parts: Parts,
    target: Target,
    options: TableOptions,
) -> tuple[MLP, Run]:
    rows = np.concatenate([parts.train, parts.valid])
    held = torch.arange(len(rows)) >= len(parts.train)
    start = time.perf_counter()
    inputs = torch.from_numpy(x[rows])
    network: nn.Module
    if method == LINEAR:
        network, trained = learn_linear(inputs, y[rows], held)
    else:
        network, trained = _learn_network(method, inputs, y[rows], held, options)
    seconds = time.perf_counter() - start
    assert isinstance(network, MLP)
    return network, _tested(network, trained, x, y, parts, target, seconds)


def _learn_network(
    method: str, x: Tensor, y: Tensor, held: Tensor, options: TableOptions
) -> tuple[nn.Module, Trained]:
    with warnings.catch_warnings():  # said by remarks(), a line for the terminal and the page
        warnings.simplefilter("ignore", EdgeOfGridWarning)
        return learn(
            x,
            y,
            held,
            method=method,
            hidden=options.hidden,
            activation=options.activation,
            px=options.px,
            steps=options.steps,
            device=options.device,
            seed=options.seed,
            progress=options.progress,
        )


def _tested(
    network: nn.Module,
    trained: Trained,
    x: npt.NDArray[Any],
    y: Tensor,
    parts: Parts,
    target: Target,
    seconds: float,
) -> Run:
    out, seen = forward(network, x[parts.test]), y[parts.test]
    if target.task != REGRESSION:
        return Run(trained, out, measures.classification(out, seen), None, seconds)
    spread = measures.spread(forward(network, x[parts.valid]), y[parts.valid], target)
    measured = measures.regression(out, seen, target, spread)
    return Run(trained, out, measured, spread, seconds)


def _result(run: Run) -> dict[str, Any]:
    """What the model's file says about a method."""
    result = {**run.trained.config._asdict(), **run.measured, "step": run.trained.step}
    if run.spread is not None:
        result |= {"noise_std": run.spread.noise_std, "margin": run.spread.margin}
    return result


def _width(encoder: Encoder) -> str:
    kinds: Sequence[Column] = encoder.used
    categories = sum(column.kind == CATEGORY for column in kinds)
    gaps = sum(column.missing for column in kinds)
    numeric = len(kinds) - categories
    word = "column" if numeric == 1 else "columns"
    text = f"{numeric} {word} of numbers, {categories} of categories"
    return text + (f", {gaps} with missing values" if gaps else "")
