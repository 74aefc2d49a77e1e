"""A table from cells to a tested model: linear, PS-MAP and L-MAP, and the best of them is used.

Test rows are kept apart and looked at once. Among the other rows every one is held out by one
member of each ensemble; that decides the strengths and the method. Then the chosen method is
trained again on all rows.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsmap import metrics
from fsmap.errors import InputError
from fsmap.tables import network
from fsmap.tables.encoder import (
    CATEGORY,
    DATE,
    LEFT_OUT,
    NUMBER,
    REGRESSION,
    Encoder,
    Target,
    UnseenWarning,
    _names,
    check_columns,
    find_target,
    infer,
    learn_encoder,
    with_target,
)
from fsmap.tables.model import COVER, Spread, TableModel
from fsmap.tables.network import AUTO, Learned, Options, deal, learn, row_losses
from fsmap.tables.reader import Table

FEWEST = 20  # rows
CONSTANT, BOOSTING = "constant", "boosting"
IMPORTANCE_ROWS = 2_000


class TableOptions(NamedTuple):
    """What a user may decide; the rest is decided by the rows."""

    task: str = AUTO
    drop: tuple[str, ...] = ()
    category: tuple[str, ...] = ()
    method: str = AUTO
    ensemble: int = 4
    hidden: tuple[int, ...] | str = AUTO
    activation: str = "silu"
    px: str = "normal"
    steps: int | None = None
    test: float = 0.15
    seed: int = 0
    device: str = AUTO
    progress: bool = True


class Fitted(NamedTuple):
    """A tested model, and everything that a page about it shows.

    Attributes:
        model: Trained on all rows.
        train: Rows to train and to choose by.
        test: Test rows.
        y: Targets of the test rows: standardized ``[n, 1]``, or labels ``[n]``.
        out: Outputs for the test rows by method; also of a constant and of boosting.
        measured: Numbers on the test rows by method.
        learned: What was trained, by method.
        spread: Of the chosen method before it saw the test rows; regression only.
        importance: By how much the test loss grows if a column is shuffled, largest first.
        notes: What is worth saying about the table.
        seconds: In all.
    """

    model: TableModel
    train: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]
    y: Tensor
    out: dict[str, Tensor]
    measured: dict[str, dict[str, float]]
    learned: dict[str, Learned]
    spread: Spread | None
    importance: list[tuple[str, float]]
    notes: list[str]
    seconds: float


def fit_table(
    table: Table,
    target: str,
    options: TableOptions,
    say: Callable[[str], None] = lambda text: None,
) -> Fitted:
    """Train, choose, test, and train again on all rows.

    Args:
        table: All rows.
        target: The column to predict.
        options: What the user decided.
        say: Told what is going on, a line at a time.

    Returns:
        The model and its test.
    """
    start = time.perf_counter()
    table = with_target(table, target)
    if table.num_rows < FEWEST:
        count = f"{table.num_rows} row{'s' if table.num_rows != 1 else ''}"
        message = f"the table has {count}; at least {FEWEST} are needed to train and to test."
        raise InputError(message)
    goal = find_target(table, target, options.task)
    say(f"target {target!r}: {goal.task} ({goal.why})")
    test, train = _split(table, goal, options)
    encoder = _encoder(table, target, train, options)
    notes = [*table.notes, *encoder.notes, *_rare(table, goal)]
    for note in notes:
        say(note)
    if goal.task == REGRESSION:
        goal = goal.standardized(goal.values(table)[train])
    with warnings.catch_warnings():  # what test rows bring is theirs, not a mistake
        warnings.simplefilter("ignore", UnseenWarning)
        x = torch.from_numpy(encoder.encode(table))
    y = torch.from_numpy(goal.labels(table))
    say(f"rows: {len(train)} to train and to choose by, {len(test)} to test; {_width(encoder)}")

    def fit(rows: npt.NDArray[np.int64], **given: Any) -> dict[str, Learned]:
        own = {n: v for n, v in options._asdict().items() if n in Options.__annotations__}
        labels = y[rows] if goal.classes else None
        folds = deal(len(rows), options.ensemble, 0.15, options.seed, labels)
        settings = Options(**{**own, **given})
        seed, progress = options.seed, options.progress
        return learn(x[rows], y[rows], folds, settings, seed=seed, progress=progress)

    learned = fit(train)
    chosen = network.best(learned)
    for method, one in learned.items():
        say(f"{method}: {len(one.search)} configurations, held-out loss {one.loss:.4g}")
    spreads = {m: _spread(one, y[train], goal) for m, one in learned.items()}
    out = {m: one.module.outputs(x[test]) for m, one in learned.items()}
    out |= _others(x[train].numpy(), y[train], x[test].numpy(), options.seed)
    measured = {m: _measure(o, y[test], goal, spreads.get(m)) for m, o in out.items()}
    importance = _importance(learned[chosen], encoder, x[test], y[test], options.seed)
    say(f"{chosen} is best on held-out rows; it is trained again on all rows")
    config = learned[chosen].config
    final = fit(
        np.arange(table.num_rows),
        method=chosen,
        weight_decay=config.weight_decay,
        reg_strength=config.reg_strength,
    )
    networks = {m: one.module for m, one in {**learned, **final}.items()}
    kept = {**spreads, chosen: _spread(final[chosen], y, goal)}
    results = {m: {**measured[m], **one.config._asdict()} for m, one in learned.items()}
    model = TableModel(
        encoder, goal, networks, chosen, {m: s for m, s in kept.items() if s}, results
    )
    return Fitted(
        model,
        train,
        test,
        y[test],
        out,
        measured,
        learned,
        spreads[chosen],
        importance,
        notes,
        time.perf_counter() - start,
    )


def _split(
    table: Table, target: Target, options: TableOptions
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Test rows and the others; every class in both if it has three rows."""
    if not 0 < options.test < 0.9:
        message = (
            f"--test must lie between 0 and 0.9 and leave rows to train on, got {options.test:g}"
        )
        raise InputError(message)
    labels = torch.from_numpy(target.labels(table)) if target.classes else None
    place = deal(table.num_rows, 1, options.test, options.seed, labels)
    if labels is not None:
        place[labels.bincount()[labels] < 3] = -1
    test = place == 0
    return test.nonzero()[:, 0].numpy(), (~test).nonzero()[:, 0].numpy()


def _encoder(
    table: Table, target: str, train: npt.NDArray[np.int64], options: TableOptions
) -> Encoder:
    """Kinds of columns by all rows (so that messages name the right one), the rest by training."""
    check_columns(table, [*options.drop, *options.category])
    if target in options.drop:
        message = f"--drop {target} would leave out the target"
        raise InputError(message)
    features = [n for n in table.columns if n != target and n not in options.drop]
    kinds = [infer(n, table.columns[n], category=n in options.category) for n in features]
    category = [column.name for column in kinds if column.kind == CATEGORY]
    gone = {column.name: column for column in kinds if column.kind == LEFT_OUT}
    some = table.take(train)
    blank = np.array([None] * len(train), dtype=object)
    columns = {n: blank if n in gone else cells for n, cells in some.columns.items()}
    forms = {column.name: column.form for column in kinds if column.kind in (NUMBER, DATE)}
    found = learn_encoder(Table(columns), features, category=category, forms=forms)
    named = tuple(gone.get(column.name, column) for column in found.columns)
    reasons = {f"column {n!r} is left out: {c.reason}" for n, c in gone.items()}
    notes = [note for note in found.notes if not any(f"column {n!r} " in note for n in gone)]
    return found._replace(columns=named, notes=(*sorted(reasons), *notes))


def _rare(table: Table, target: Target) -> Iterator[str]:
    """A remark for each class that is too rare to be tested."""
    if target.classes:
        for name, count in zip(
            target.classes, np.bincount(target.labels(table)).tolist(), strict=True
        ):
            if count < 3:
                yield f"class {name!r} has {count} row{'' if count == 1 else 's'}: none to test on"


def _spread(found: Learned, y: Tensor, target: Target) -> Spread | None:
    if target.classes:
        return None
    held = torch.isfinite(found.out[:, 0])
    unit = [target.mean + target.std * t[held, 0].double().numpy() for t in (found.out, y)]
    return Spread.learn(*unit)


def _others(x: Any, y: Tensor, test: Any, seed: int) -> dict[str, Tensor]:
    """What the best constant says, and scikit-learn's gradient boosting if it is installed."""
    n = len(test)
    if y.is_floating_point():
        found = {CONSTANT: y.mean(0, keepdim=True).double().expand(n, -1)}
    else:
        share = (y.bincount().double() + 1e-9) / len(y)
        found = {CONSTANT: share.log().expand(n, -1)}
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    except ImportError:
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if y.is_floating_point():
            guess = HistGradientBoostingRegressor(random_state=seed).fit(x, y[:, 0]).predict(test)
            return {**found, BOOSTING: torch.from_numpy(guess)[:, None].double()}
        model = HistGradientBoostingClassifier(random_state=seed).fit(x, y)
        chance = torch.full((n, int(y.max()) + 1), 1e-9, dtype=torch.float64)
        chance[:, model.classes_] = torch.from_numpy(model.predict_proba(test)).clamp_min(1e-9)
        return {**found, BOOSTING: chance.log()}


def _measure(out: Tensor, y: Tensor, target: Target, spread: Spread | None) -> dict[str, float]:
    """Numbers on test rows, in the unit of the target."""
    if target.classes:
        names = ("accuracy", "nll", "brier", "ece", "temperature")
        return {name: float(getattr(metrics, name)(out, y)) for name in names}
    guess = target.mean + target.std * out[:, 0].double().numpy()
    truth = target.mean + target.std * y[:, 0].double().numpy()
    error = truth - guess
    found = {
        "rmse": float(np.sqrt(np.mean(error**2))),
        "mae": float(np.abs(error).mean()),
        "r2": float(1 - np.mean(error**2) / truth.var()) if np.ptp(truth) else math.nan,
    }
    if spread is not None:
        sigma = np.maximum(spread.deviation(guess), 1e-12)
        nll = 0.5 * (error / sigma) ** 2 + np.log(sigma) + 0.5 * math.log(2 * math.pi)
        ends = spread.quantiles(guess, COVER)
        inside = (ends[:, 0] <= truth) & (truth <= ends[:, 1])
        found |= {"nll": float(nll.mean()), "coverage": float(inside.mean())}
    return found


def _importance(
    found: Learned, encoder: Encoder, x: Tensor, y: Tensor, seed: int
) -> list[tuple[str, float]]:
    """Permutation importance of the columns on test rows, as a share of the loss of a constant."""
    x, y = x[:IMPORTANCE_ROWS], y[:IMPORTANCE_ROWS]
    before = float(row_losses(found.module.outputs(x), y).mean())
    unit = float(row_losses(*_constant(y)).mean()) or 1.0
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    grown, start = [], 0
    for column in encoder.used:
        end = start + len(_names(column))
        shuffled = x.clone()
        shuffled[:, start:end] = x[order, start:end]
        after = float(row_losses(found.module.outputs(shuffled), y).mean())
        grown.append((column.name, (after - before) / unit))
        start = end
    return sorted(grown, key=lambda pair: -pair[1])


def _constant(y: Tensor) -> tuple[Tensor, Tensor]:
    if y.is_floating_point():
        return y.mean(0, keepdim=True), y
    return ((y.bincount() + 1e-9) / len(y)).log().expand(len(y), -1), y


def _width(encoder: Encoder) -> str:
    kinds = encoder.used
    categories = sum(column.kind == CATEGORY for column in kinds)
    gaps = sum(column.missing for column in kinds)
    numeric = len(kinds) - categories
    word = "column" if numeric == 1 else "columns"
    text = f"{numeric} {word} of numbers, {categories} of categories"
    return text + (f", {gaps} with missing values" if gaps else "")


class Difference(NamedTuple):
    """Mean difference of the loss per test row between two methods, and its standard error."""

    mean: float
    stderr: float

    @property
    def clear(self) -> bool:
        """Whether it is more than two standard errors."""
        return abs(self.mean) > 2 * self.stderr


def difference(fitted: Fitted, first: str, second: str) -> Difference:
    """First minus second: negative if the first is better."""
    rows = row_losses(fitted.out[first], fitted.y) - row_losses(fitted.out[second], fitted.y)
    rows = rows.double()
    return Difference(float(rows.mean()), float(rows.std() / math.sqrt(len(rows))))
