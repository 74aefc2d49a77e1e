"""A model of a table: chosen on held-out rows, tested once, trained on all rows, kept in one file.

Test rows are kept apart. Each of the other rows is held out by one member of each ensemble; that
decides the strengths and the method. Then the chosen method is trained again on all rows and kept.
The file is a checkpoint (:mod:`fsmap.train.checkpoint`): safetensors and JSON; loading it executes
nothing.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsmap import metrics
from fsmap.errors import CheckpointError, InputError
from fsmap.tables import encoder as encoding
from fsmap.tables import network as nets
from fsmap.tables.encoder import Encoder, Target
from fsmap.tables.reader import Table
from fsmap.train import checkpoint as files

KIND = "table-model-5"
HINT = "Give a file that `fsmap fit` wrote, unchanged."
LEVELS = np.linspace(0.005, 0.995, 199)
COVER = (0.05, 0.95)  # ends of the intervals that are reported
FEWEST = 20  # rows
CONSTANT, BOOSTING = "constant", "boosting"
IMPORTANCE_ROWS = 2_000

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


class Spread(NamedTuple):
    """The distribution of prediction errors, by the size of the prediction.

    Errors of held-out rows are divided by a scale: the mean absolute error of rows with similar
    predictions. An interval is the prediction plus quantiles of the scaled errors times the scale
    (split conformal prediction).
    """

    knots: Floats  # predictions at which the scale is known
    scale: Floats  # the scale there; between them it is interpolated
    table: Floats  # quantiles of scaled errors at LEVELS
    std: float  # standard deviation of scaled errors
    floor: float  # no prediction or interval goes below: 0 if no target was negative

    @classmethod
    def learn(cls, guess: Floats, truth: Floats) -> Spread:
        """From predictions of held-out rows and their targets, ``[n]`` each."""
        floor, n = 0.0 if truth.min() >= 0 else -math.inf, len(truth)
        guess = np.maximum(guess, floor)
        error = truth - guess
        order = np.argsort(guess, kind="stable")
        overall = float(np.abs(error).mean()) + 1e-12 * (1 + float(np.abs(truth).max()))
        bins = np.array_split(order, min(max(n // 30, 1), 10))
        knots = np.array([guess[rows].mean() for rows in bins])
        near = np.array([np.abs(error[rows]).sum() + 10 * overall for rows in bins])
        scale = np.maximum(near / np.array([len(rows) + 10 for rows in bins]), 0.02 * overall)
        ratio = np.sort(error / np.interp(guess, knots, scale))
        place = np.where(LEVELS < 0.5, np.floor(LEVELS * (n + 1)), np.ceil(LEVELS * (n + 1)))
        table = ratio[np.clip(place.astype(int) - 1, 0, n - 1)]
        return cls(knots, scale, table, float(np.sqrt(np.mean(ratio**2))), floor)

    def quantiles(self, guess: Floats, levels: Sequence[float]) -> Floats:
        """Quantiles of the target, ``[n, len(levels)]``."""
        guess, shift = np.maximum(guess, self.floor), np.interp(levels, LEVELS, self.table)
        found = guess[:, None] + np.interp(guess, self.knots, self.scale)[:, None] * shift
        return np.maximum(found, self.floor)


class TableModel(NamedTuple):
    """Encoder, target and networks of a table."""

    encoder: Encoder  # from cells to numbers
    target: Target  # from numbers to cells
    network: nets.Members  # an ensemble, of encoded rows
    chosen: str  # its method
    spread: Spread | None  # of regression
    missing: tuple[str, ...] = ()  # further cells that mean "no value"

    def predict(self, table: Table) -> dict[str, npt.NDArray[Any]]:
        """Predictions as columns.

        ``prediction`` comes with ``low`` and ``high`` (a 90 % interval) of a number, or with the
        probability of each class, ``p(class)``.
        """
        out = self.network.outputs(torch.from_numpy(self.encoder.encode(table)))
        if self.spread is not None:
            value = np.maximum(self.target.unscaled(out), self.spread.floor)
            low, high = self.spread.quantiles(value, COVER).T
            return {"prediction": value, "low": low, "high": high}
        classes, chance = self.target.classes, out.exp().numpy()
        by_class = {f"p({name})": chance[:, k] for k, name in enumerate(classes)}
        return {"prediction": np.array(classes)[chance.argmax(1)], **by_class}

    def save(self, path: Path) -> None:
        """Write the file; the one that was there stays until the new one is complete."""
        network, first = self.network, cast("nets.TableNet", self.network.members[0])
        arrays = {"encoder/mean": self.encoder.mean, "encoder/std": self.encoder.std}
        if self.spread is not None:
            arrays |= {f"spread/{n}": np.asarray(v) for n, v in self.spread._asdict().items()}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        tensors |= {f"network/{n}": t.float() for n, t in network.state_dict().items()}
        config: dict[str, Any] = {"kind": KIND, "chosen": self.chosen, "missing": self.missing}
        config["columns"] = [column._asdict() for column in self.encoder.columns]
        config |= {"target": self.target._asdict(), "members": len(network.members)}
        config |= {"sizes": list(first.sizes), "edges": first.edges.shape[1]}
        files.save(path, files.Checkpoint(tensors, config, {}))


def load_model(path: str | Path) -> TableModel:
    """Read a model that ``fsmap fit`` saved; CheckpointError if it is damaged or another file."""
    found = files.load(Path(path), hint=HINT)
    kind = found.config.get("kind")
    if kind != KIND:
        old = str(kind).startswith("table-model")
        more = " It was made by another version of fsmap: fit again." if old else ""
        raise CheckpointError(
            f"{path} is a checkpoint of {kind!r}, not a model from `fsmap fit`.{more}"
        )
    with files.readable(Path(path), hint=HINT):
        return _decode(found)


def _decode(found: files.Checkpoint) -> TableModel:
    config, scale, spread = found.config, found.group("encoder"), None
    columns = (encoding.Column(**c | {"levels": tuple(c["levels"])}) for c in config["columns"])
    encoder = Encoder(tuple(columns), scale["mean"].numpy(), scale["std"].numpy())
    target = Target(**{**config["target"], "classes": tuple(config["target"]["classes"])})
    network = _ensemble(config, found.group("network"), bool(target.classes))
    if not target.classes:
        parts: dict[str, Any] = {n: t.numpy() for n, t in found.group("spread").items()}
        spread = Spread(**parts | {n: float(parts[n]) for n in ("std", "floor")})
    missing = tuple(config.get("missing", ()))
    model = TableModel(encoder, target, network, config["chosen"], spread, missing)
    _check(model)
    return model


def _ensemble(config: dict[str, Any], state: dict[str, Tensor], labels: bool) -> nets.Members:
    """The networks; ValueError, before allocating, if the tensors do not fit the sizes."""
    sizes, edges, members = config["sizes"], config["edges"], config["members"]
    units = [sizes[0] * edges, *sizes[1:]]
    count = sum((a + 1) * b for a, b in pairwise(units)) + units[0]
    there = sum(map(Tensor.numel, state.values()))
    if min(*sizes, edges, members) < 1 or count * members != there:
        raise ValueError(f"the tensors do not make {members} networks of sizes {sizes}")
    net = nets.TableNet(sizes, torch.zeros(sizes[0], edges), torch.Generator())  # overwritten
    ensemble = nets.Members([copy.deepcopy(net) for _ in range(members)], labels=labels).float()
    ensemble.load_state_dict(state)
    return ensemble.double().eval()


def _check(model: TableModel) -> None:
    """Raise if parts do not fit each other, or are no finite numbers."""
    encoder, target, spread = model.encoder, model.target, model.spread
    width, sizes = len(encoder.names()), cast("nets.TableNet", model.network.members[0]).sizes
    texts = [target.name, model.chosen, *target.classes, *(c.name for c in encoder.columns)]
    texts += model.missing
    numbers: list[Any] = [encoder.mean, encoder.std, target.mean, target.std]
    numbers += [c.fill for c in encoder.columns] + [*(spread or ())[:4]]
    numbers += [t.numpy() for t in model.network.state_dict().values()]
    fits = (
        (sizes[0], sizes[-1]) == (width, len(target.classes) or 1),
        len(encoder.mean) == len(encoder.std) == width,
        spread is None or spread.table.shape == LEVELS.shape,
        spread is None or len(spread.knots) == len(spread.scale),
        spread is None or spread.floor in (0.0, -math.inf),
        target.task in encoding.TASKS,
        all(isinstance(text, str) for text in texts),
        all(np.isfinite(array).all() for array in numbers),
    )
    if not all(fits):
        raise ValueError("encoder, target, networks and results do not fit, or are not finite")


@dataclass(kw_only=True, eq=False)
class TableOptions(nets.Options):
    """The options of :func:`fit_table`; ``"auto"`` is decided by the data."""

    task: str = nets.AUTO
    drop: Sequence[str] = ()
    category: Sequence[str] = ()
    keep: Sequence[str] = ()
    missing: Sequence[str] = ()  # those that the table was read with: kept with the model
    test: float = 0.15
    seed: int = 0
    device: str = nets.AUTO
    progress: bool = True


class Fitted(NamedTuple):
    """A tested model, and the data of its page."""

    model: TableModel  # trained on all rows
    train: Rows  # rows to train and to choose by
    test: Rows
    y: Tensor  # targets of the test rows: standardized [n, 1], or labels [n]
    out: dict[str, Tensor]  # outputs for the test rows by method; also of a constant and boosting
    measured: dict[str, dict[str, float]]  # metrics on the test rows by method
    learned: dict[str, nets.Learned]  # what was trained, by method
    spread: Spread | None  # of the chosen method, without the test rows; regression only
    importance: list[tuple[str, float]]  # see _importance
    notes: list[str]  # remarks about the table
    seconds: float


def fit_table(
    table: Table, target: str, options: TableOptions, say: Callable[[str], None] = lambda text: None
) -> Fitted:
    """Train, choose, test, and train again on all rows; ``say`` gets a line for each step."""
    start = time.perf_counter()
    table = encoding.with_target(table, target)
    if table.num_rows < FEWEST:
        raise InputError(f"the table has {table.num_rows} rows; at least {FEWEST} are needed.")
    goal = encoding.find_target(table, target, options.task)
    say(f"target {target!r}: {goal.task} ({goal.why})")
    test, train = _split(table, goal, options)
    encoding.check_columns(table, options.drop)
    if target in options.drop:
        raise InputError(f"--drop {target} would leave out the target")
    features = [name for name in table.columns if name != target and name not in options.drop]
    with warnings.catch_warnings():  # rare values are not a mistake of the user
        warnings.simplefilter("ignore", encoding.UnseenWarning)
        asked: Any = {"category": options.category, "keep": options.keep}
        encoder = encoding.learn_encoder(table, features, **asked, rows=train)
        x = torch.from_numpy(encoder.encode(table))
    counts = Counter(table.columns[target])
    rare = [name for name in goal.classes if counts[name] < 3]
    notes = [*table.notes, *encoder.notes]
    notes += [f"class {name!r} is too rare to be tested (rows: {counts[name]})" for name in rare]
    pairs = zip(map(np.ndarray.tobytes, x.numpy()), table.columns[target], strict=True)
    if copies := len(x) - len(set(pairs)):
        notes.append(f"{copies} of {len(x)} rows are copies of others: the test may be too easy")
    for note in notes:
        say(note)
    if not goal.classes:
        goal = goal.standardized(goal.values(table)[train])
    y = torch.from_numpy(goal.labels(table))
    say(f"rows: {len(train)} to train and to choose by, {len(test)} to test")

    learned = nets.learn(x[train], y[train], options, seed=options.seed, progress=options.progress)
    chosen = nets.best(learned)
    for method, one in learned.items():
        say(f"{method}: {len(one.search)} configurations, held-out loss {one.loss:.4g}")
    spreads = {m: _spread(one, y[train], goal) for m, one in learned.items()}
    out = {m: one.module.outputs(x[test]) for m, one in learned.items()}
    out |= _baselines(x[train].numpy(), y[train], x[test].numpy(), options.seed)
    measured = {m: _measure(o, y[test], goal, spreads.get(m)) for m, o in out.items()}
    importance = _importance(learned[chosen], encoder, x[test], y[test], options.seed)
    why = "is best on held-out rows" if len(learned) > 1 else "was asked for"
    say(f"{chosen} {why}; it is trained again on all rows")
    again = replace(options, reg_nats=None, **learned[chosen].config._asdict())
    final = nets.learn(x, y, again, seed=options.seed, progress=options.progress)[chosen]
    spread, missing = _spread(final, y, goal), tuple(options.missing)
    model = TableModel(encoder, goal, final.module, chosen, spread, missing)
    found = (out, measured, learned, spreads[chosen], importance, notes)
    return Fitted(model, train, test, y[test], *found, time.perf_counter() - start)


def _split(table: Table, target: Target, options: TableOptions) -> tuple[Rows, Rows]:
    """Test rows and the others; every class in both if it has three rows."""
    if not 0 < options.test < 0.9:
        raise InputError(f"--test must lie between 0 and 0.9, got {options.test:g}")
    y = torch.from_numpy(target.labels(table))
    place = nets.assign_folds(y, 1, options.seed, options.test)
    if target.classes:
        place[y.bincount()[y] < 3] = -1
    test = place == 0
    return test.nonzero()[:, 0].numpy(), (~test).nonzero()[:, 0].numpy()


def _spread(found: nets.Learned, y: Tensor, target: Target) -> Spread | None:
    if target.classes:
        return None
    held = torch.isfinite(found.out[:, 0])
    return Spread.learn(target.unscaled(found.out[held]), target.unscaled(y[held]))


def _constant(y: Tensor) -> Tensor:
    """Output of the best constant, ``[1, K]``."""
    if y.is_floating_point():
        return y.double().mean(0, keepdim=True)
    return ((y.bincount().double() + 1e-9) / len(y)).log()[None]


def _baselines(x: Any, y: Tensor, test: Any, seed: int) -> dict[str, Tensor]:
    """Outputs of the best constant and of scikit-learn's gradient boosting."""
    from sklearn import ensemble

    constant = _constant(y).expand(len(test), -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if y.is_floating_point():
            model = ensemble.HistGradientBoostingRegressor(random_state=seed).fit(x, y[:, 0])
            boosting = torch.from_numpy(model.predict(test))[:, None].double()
        else:
            model = ensemble.HistGradientBoostingClassifier(random_state=seed).fit(x, y)
            chance = torch.full_like(constant, 1e-9)
            chance[:, model.classes_] = torch.from_numpy(model.predict_proba(test)).clamp_min(1e-9)
            boosting = chance.log()
    return {CONSTANT: constant, BOOSTING: boosting}


def _measure(out: Tensor, y: Tensor, target: Target, spread: Spread | None) -> dict[str, float]:
    """Metrics on test rows, in the unit of the target."""
    if target.classes:
        names = ("accuracy", "nll", "brier", "ece", "temperature")
        return {name: float(getattr(metrics, name)(out, y)) for name in names}
    guess, truth = target.unscaled(out), target.unscaled(y)
    guess = guess if spread is None else np.maximum(guess, spread.floor)
    error = truth - guess
    found = {
        "rmse": metrics.rmse(guess, truth),
        "mae": float(np.abs(error).mean()),
        "r2": float(1 - np.mean(error**2) / truth.var()) if np.ptp(truth) else math.nan,
    }
    if spread is not None:
        sigma = np.maximum(spread.std * np.interp(guess, spread.knots, spread.scale), 1e-12)
        nll = 0.5 * (error / sigma) ** 2 + np.log(sigma) + 0.5 * math.log(2 * math.pi)
        ends = spread.quantiles(guess, COVER)
        inside = (ends[:, 0] <= truth) & (truth <= ends[:, 1])
        found |= {"nll": float(nll.mean()), "coverage": float(inside.mean())}
    return found


def _importance(
    found: nets.Learned, encoder: Encoder, x: Tensor, y: Tensor, seed: int
) -> list[tuple[str, float]]:
    """By how much the loss grows if a column is shuffled, as a share of the loss of a constant."""
    x, y = x[:IMPORTANCE_ROWS], y[:IMPORTANCE_ROWS]
    before = float(nets.row_losses(found.module.outputs(x), y).mean())
    unit = float(nets.row_losses(_constant(y).expand(len(y), -1), y).mean()) or 1.0
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    grown, start = [], 0
    for column in encoder.used:
        end = start + len(column.names())
        shuffled = x.clone()
        shuffled[:, start:end] = x[order, start:end]
        after = float(nets.row_losses(found.module.outputs(shuffled), y).mean())
        grown.append((column.name, (after - before) / unit))
        start = end
    return sorted(grown, key=lambda pair: -pair[1])


class Difference(NamedTuple):
    """Mean difference of the loss per test row between two methods, and its standard error."""

    mean: float
    stderr: float
    clear: bool  # more than two standard errors


def difference(fitted: Fitted, first: str, second: str, *, wrong: bool = False) -> Difference:
    """First minus second: negative if the first is better; or of the share of wrong classes."""
    outs = fitted.out[first], fitted.out[second]
    one, two = (o.argmax(1) != fitted.y if wrong else nets.row_losses(o, fitted.y) for o in outs)
    rows = one.double() - two.double()
    mean, stderr = float(rows.double().mean()), float(rows.double().std() / math.sqrt(len(rows)))
    return Difference(mean, stderr, abs(mean) > 2 * stderr)
