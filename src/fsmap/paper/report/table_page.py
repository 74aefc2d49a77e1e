"""One page about a fitted table: the verdict, how good it is, what matters, what was used."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np

from fsmap import metrics
from fsmap.errors import require
from fsmap.paper.report import figures
from fsmap.paper.report.page import environment, theme
from fsmap.paper.report.picture import Glyphs, picture
from fsmap.paper.report.tables import MINUS, number
from fsmap.paper.rows import circumstances
from fsmap.progress import duration
from fsmap.tables.encoder import CATEGORY, LEFT_OUT, NUMBER, REGRESSION, Column
from fsmap.tables.model import BOOSTING, CONSTANT, COVER, Fitted, difference

HEADINGS = {
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R²",
    "nll": "NLL",
    "coverage": "90 % intervals hold",
    "accuracy": "accuracy",
    "brier": "Brier",
    "ece": "ECE",
    "temperature": "T",
}
NAMES = {**figures.NAMES, "linear": "Linear", CONSTANT: "Constant", BOOSTING: "Boosting"}
PERCENT = ("coverage", "accuracy", "ece")
LEVELS_SHOWN, COLUMNS_SHOWN, MOST_CLASSES = 6, 15, 20
MOST_DOTS = 600  # in a picture: more would be a blot, and a slow page
BINS = 10
COLDEST, HOTTEST = 1e-2, 1e2
"""Where the search for a temperature ends: what lies there may lie beyond."""

Grid = tuple[list[str], list[list[str]]]


def results(fitted: Fitted) -> Grid:
    """The table of methods: test metrics and chosen strengths, the chosen method first."""
    chosen = fitted.model.chosen
    names = list(fitted.measured[chosen])
    header = ["", *(HEADINGS[name] for name in names), "weight decay", "λ"]
    order = [chosen, *(m for m in reversed(list(fitted.learned)) if m != chosen)]
    lines = []
    for method in [*order, *(m for m in (BOOSTING, CONSTANT) if m in fitted.out)]:
        found = fitted.measured[method]
        cells = [_cell(name, found[name]) if name in found else "—" for name in names]
        strengths = ["—", "—"]
        if method in fitted.learned:
            _, decay, strength, _ = fitted.learned[method].config
            strengths = [number(decay, 2), number(strength, 2) if strength else "—"]
        lines.append([NAMES[method], *cells, *strengths])
    return header, lines


def verdict(fitted: Fitted) -> str:
    """Which method is used, how good it is beside the base rate, and by how much it is better."""
    chosen = fitted.model.chosen
    main = _main(fitted)
    mine, base = (_cell(main, fitted.measured[m][main]) for m in (chosen, CONSTANT))
    text = (
        f"{NAMES[chosen]} is used: it is best on held-out rows. On {len(fitted.test)} test rows "
        f"its {HEADINGS[main]} is {mine}; the base rate, a constant, has {base}."
    )
    regression = fitted.model.target.task == REGRESSION
    unit = "squared error (standardized)" if regression else "log loss"
    for other in (m for m in reversed(list(fitted.learned)) if m != chosen):
        found = difference(fitted, chosen, other)
        size = f"{number(abs(found.mean), 2)} ± {number(found.stderr, 2)}"
        if not found.clear:
            text += f" It cannot be told apart from {NAMES[other]} ({unit}: {size} per row)."
        else:
            word = "lower" if found.mean < 0 else "higher"
            text += f" Its {unit} is {word} than {NAMES[other]}'s, by {size} per row."
    if BOOSTING in fitted.out:
        found = difference(fitted, chosen, BOOSTING)
        if found.clear and found.mean > 0:
            text += " Gradient boosting is better on these rows."
    return text


def render(fitted: Fitted, *, source: str, command: str, model: str) -> str:
    """The page's text: HTML that needs nothing else.

    Args:
        fitted: A tested model.
        source: Name of the table.
        command: What made it.
        model: Name of the model's file.

    Returns:
        The text.
    """
    glyphs = Glyphs()
    target, main = fitted.model.target, _main(fitted)
    shown = []
    for name, caption, figure in _pictures(fitted):
        drawn = picture(figure, name, glyphs)
        shown.append({"name": name, "caption": caption, **drawn._asdict()})
    header, lines = results(fitted)
    order = [fitted.model.chosen, *(m for m in fitted.learned if m != fitted.model.chosen)]
    totals = [
        {
            "name": f"{NAMES[method]}: test {HEADINGS[main]}",
            "value": _cell(main, fitted.measured[method][main]),
            "more": _calibration(fitted.measured[method]),
        }
        for method in [*order, CONSTANT]
    ]
    origin = circumstances("cpu")
    text: str = (
        environment()
        .get_template("table.html.j2")
        .render(
            title=f"{target.name} from {source}",
            target=target,
            source=source,
            verdict=verdict(fitted),
            totals=totals,
            header=header,
            lines=lines,
            pictures=shown,
            tables=_tables(fitted),
            columns=[_about(column) for column in fitted.model.encoder.columns],
            notes=fitted.notes,
            command=command,
            predict=f"fsmap predict {model} new.csv --out predictions.csv",
            facts={
                "rows": f"{len(fitted.train)} to train and choose by, {len(fitted.test)} to test",
                "ensemble": str(len(fitted.model.networks[fitted.model.chosen].members)),
                "time": duration(fitted.seconds),
                "torch": origin.torch,
                "fsmap": origin.commit,
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            },
            glyphs=glyphs.markup(),
            theme=theme(),
        )
    )
    return text


def page_path(model: Path) -> Path:
    """Where the page of a model goes: beside it."""
    return model.with_suffix(".html")


def _main(fitted: Fitted) -> str:
    return "rmse" if fitted.model.target.task == REGRESSION else "accuracy"


def _tables(fitted: Fitted) -> list[dict[str, Any]]:
    """What matters, where it errs, how sure it may be, and what was tried."""
    columns = fitted.importance[:COLUMNS_SHOWN]
    lines = [[name, _cell("r2", value)] for name, value in columns]
    found = [
        _table(
            "importance",
            "What matters",
            "By how much the loss on test rows grows if a column is shuffled; 1 is the loss of a "
            "constant.",
            ["column", "growth"],
            lines,
        )
    ]
    found += _deciles(fitted) if fitted.spread is not None else _classes(fitted)
    search = [line for one in fitted.learned.values() for line in one.search]
    lines = [
        [
            NAMES[line["method"]],
            number(line["weight_decay"], 2),
            number(line["reg_strength"], 2),
            number(line["value"]),
            str(line["step"]),
        ]
        for line in search
    ]
    header = ["method", "weight decay", "λ", "held-out loss", "steps"]
    text = "Every configuration and its loss on rows that its networks had not seen."
    return [*found, _table("search", "How the strengths were chosen", text, header, lines)]


def _deciles(fitted: Fitted) -> list[dict[str, Any]]:
    guess, truth = _units(fitted)
    assert fitted.spread is not None
    ends = fitted.spread.quantiles(guess, COVER)
    lines = []
    for rows in np.array_split(np.argsort(guess), min(BINS, max(1, len(guess) // 5))):
        inside = (ends[rows, 0] <= truth[rows]) & (truth[rows] <= ends[rows, 1])
        span = f"{number(float(guess[rows].min()), 3)} to {number(float(guess[rows].max()), 3)}"
        width = float((ends[rows, 1] - ends[rows, 0]).mean())
        share = _cell("coverage", float(inside.mean()))
        lines.append([span, str(len(rows)), share, number(width, 3)])
    text = "Test rows by the size of the prediction: how often the 90 % interval holds the truth."
    if np.isfinite(fitted.spread.floor):
        text += " No target is negative, so no interval goes below 0."
    header = ["prediction", "rows", "held", "width"]
    return [_table("coverage", "Intervals", text, header, lines)]


def _classes(fitted: Fitted) -> list[dict[str, Any]]:
    out, names = fitted.out[fitted.model.chosen], fitted.model.target.classes
    found = []
    if len(names) <= MOST_CLASSES:
        counts = np.zeros((len(names), len(names)), dtype=int)
        np.add.at(counts, (fitted.y.numpy(), out.argmax(1).numpy()), 1)
        lines = [[n, *map(str, row)] for n, row in zip(names, counts.tolist(), strict=True)]
        text = "Test rows: true classes down, predicted ones across."
        found.append(_table("confusion", "Confusion", text, ["", *names], lines))
    bins = metrics.reliability(out, fitted.y, BINS)
    lines = [
        [f"{c:.2f}", f"{a:.2f}", str(int(n))]
        for c, a, n in zip(bins.confidence, bins.accuracy, bins.count, strict=True)
        if n
    ]
    header = ["confidence", "accuracy", "rows"]
    text = "Test rows by the probability of the predicted class: the two columns should agree."
    return [*found, _table("bins", "Calibration", text, header, lines)]


def _table(
    name: str, title: str, text: str, header: list[str], lines: list[list[str]]
) -> dict[str, Any]:
    return {"name": name, "title": title, "text": text, "header": header, "lines": lines}


def _pictures(fitted: Fitted) -> list[tuple[str, str, Any]]:
    matplotlib = require("matplotlib", extra="report")
    with figures.style(), matplotlib.rc_context({"text.parse_math": False}):
        if fitted.model.target.task == REGRESSION:
            return [_predictions(fitted)]
        return [_reliability(fitted)]


def _units(fitted: Fitted) -> tuple[Any, Any]:
    """Predictions of the chosen method and truth on test rows, in the unit of the target."""
    target = fitted.model.target
    both = (fitted.out[fitted.model.chosen], fitted.y)
    guess, truth = (target.mean + target.std * t[:, 0].double().numpy() for t in both)
    return guess, truth


def _look(fitted: Fitted, **changes: Any) -> dict[str, Any]:
    method = fitted.model.chosen
    known = method if method in figures.COLORS and method in figures.MARKERS else "ps-map"
    return figures.method_style(known, label=NAMES[method], **changes)


def _predictions(fitted: Fitted) -> tuple[str, str, Any]:
    guess, truth = _units(fitted)
    figure, (left, right) = figures.axes(2)
    rows = np.linspace(0, len(truth) - 1, min(len(truth), MOST_DOTS)).astype(int)
    look = _look(fitted, linestyle="none", alpha=0.55, markersize=4)
    left.plot(truth[rows], guess[rows], **look)
    ends = [min(truth.min(), guess.min()), max(truth.max(), guess.max())]
    left.axline((ends[0], ends[0]), (ends[1], ends[1]), color=figures.MUTED, linewidth=0.8)
    left.set_xlabel(f"{fitted.model.target.name}, true")
    left.set_ylabel("predicted")
    right.plot(guess[rows], (truth - guess)[rows], **look)
    right.axhline(0, color=figures.MUTED, linewidth=0.8)
    right.set_xlabel("predicted")
    right.set_ylabel("true − predicted")
    caption = "Test rows: predictions against truth, and what is left, against the prediction."
    return "predictions", caption, figure


def _reliability(fitted: Fitted) -> tuple[str, str, Any]:
    figure, ax = figures.axes()
    ax.axline((0, 0), (1, 1), color=figures.MUTED, linewidth=0.8)
    table = metrics.reliability(fitted.out[fitted.model.chosen], fitted.y, BINS)
    full = table.count > 0
    ax.plot(table.confidence[full], table.accuracy[full], **_look(fitted))
    ax.set_xlabel("confidence")
    ax.set_ylabel("accuracy on test rows")
    caption = (
        "Calibration: of the rows predicted with some confidence, the share that is right. Below "
        "the line the model is over-confident, above it under-confident."
    )
    return "calibration", caption, figure


def _cell(name: str, value: float) -> str:
    if name == "temperature" and not COLDEST < value < HOTTEST:
        return f"≤ {COLDEST:g}" if value <= COLDEST else f"≥ {HOTTEST:g}"
    if name in PERCENT:
        return f"{100 * value:.1f} %"
    # three digits, zeros included, so that a column can be compared
    text = f"{value:#.3g}" if 1e-3 <= abs(value) < 1e3 else number(value, 4)
    return text.rstrip(".").replace("-", MINUS)


def _calibration(measured: dict[str, float]) -> str:
    if "coverage" in measured:
        return f"90 % intervals hold {_cell('coverage', measured['coverage'])}"
    if "ece" in measured:
        return f"ECE {_cell('ece', measured['ece'])}"
    return "base rate"


def _about(column: Column) -> dict[str, str]:
    """A line about a column."""
    if column.kind == LEFT_OUT:
        about = column.reason
    elif column.kind == CATEGORY:
        more = len(column.levels) - LEVELS_SHOWN
        about = ", ".join(column.levels[:LEVELS_SHOWN]) + (f" and {more} more" if more > 0 else "")
        about += f"; {len(column.others)} rare ones count as other" if column.others else ""
        about += "; missing values are a level" if column.missing else ""
    elif column.kind == NUMBER:
        about = f"{number(column.low)} to {number(column.high)}"
        about += f"; missing: median {number(column.fill)}, marked" if column.missing else ""
    else:
        about = f"{column.form}: days, season, weekday, hour"
    return {"name": column.name, "kind": column.kind, "about": about}
