"""One page about a fitted table: the verdict, how good it is, what matters, what was used."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fsmap
from fsmap import metrics
from fsmap.paper.report import figures
from fsmap.paper.report.page import environment, theme
from fsmap.paper.report.picture import Glyphs, picture
from fsmap.paper.report.tables import number
from fsmap.progress import duration
from fsmap.tables.encoder import CATEGORY, LEFT_OUT, NUMBER, REGRESSION, Column
from fsmap.tables.model import BOOSTING, CONSTANT, COVER, Fitted, difference

HEADINGS = {
    **{"rmse": "RMSE", "mae": "MAE", "r2": "R²", "nll": "NLL", "coverage": "90 % intervals hold"},
    **{"accuracy": "accuracy", "brier": "Brier", "ece": "ECE", "temperature": "T"},
}
NAMES = {
    **{"l-map": "L-MAP", "ps-map": "PS-MAP", "linear": "Linear"},
    **{CONSTANT: "Constant", BOOSTING: "Boosting"},
}
PERCENT = ("coverage", "accuracy", "ece")
LEVELS_SHOWN, COLUMNS_SHOWN, MOST_CLASSES = 6, 15, 20
MOST_DOTS = 600  # in a picture
BINS = 10
COLDEST, HOTTEST = 1e-2, 1e2
"""Ends of the search for a temperature: a value there is a bound."""

Grid = tuple[list[str], list[list[str]]]
Details = list[dict[str, Any]]


def results(fitted: Fitted) -> Grid:
    """The table of methods: test metrics and chosen strengths, the chosen method first."""
    chosen = fitted.model.chosen
    names = list(fitted.measured[chosen])
    lines = []
    for method in [chosen, *_others(fitted), *(m for m in (BOOSTING, CONSTANT) if m in fitted.out)]:
        found = fitted.measured[method]
        cells = [_cell(name, found[name]) if name in found else "—" for name in names]
        strengths = ["—", "—"]
        if method in fitted.learned:
            _, decay, strength, _ = fitted.learned[method].config
            strengths = [number(decay, 2), number(strength, 2) if strength else "—"]
        lines.append([NAMES[method], *cells, *strengths])
    return ["", *(HEADINGS[name] for name in names), "weight decay", "λ"], lines


def verdict(fitted: Fitted) -> str:
    """Which method is used, how good it is beside the base rate, and what is recommended."""
    chosen, main = fitted.model.chosen, _main(fitted)
    mine, base = (_cell(main, fitted.measured[m][main]) for m in (chosen, CONSTANT))
    unit = "squared error (standardized)" if main == "rmse" else "log loss"
    text = (
        f"{NAMES[chosen]} is used: it is best on held-out rows. On {len(fitted.test)} test rows "
        f"its {HEADINGS[main]} is {mine}; the base rate, a constant, has {base}. "
        f"{_recommendation(fitted)} Its {unit} per test row"
    )
    parts = []
    for other in _others(fitted):
        found = difference(fitted, chosen, other)
        size = f"{number(float(abs(found.mean)), 2)} ± {number(float(found.stderr), 2)}"
        word = "lower" if found.mean < 0 else "higher"
        parts.append(
            f"is {word} than that of {NAMES[other]} by {size}"
            if found.clear
            else f"cannot be told apart from that of {NAMES[other]} ({size})"
        )
    return f"{text} {'; it '.join(parts)}." if parts else text.rpartition(" Its ")[0]


def _recommendation(fitted: Fitted) -> str:
    """What to do with the model, by test rows."""
    chosen = fitted.model.chosen
    base = difference(fitted, chosen, CONSTANT)
    if not (base.clear and base.mean < 0):
        return (
            "Recommendation: do not use it yet. It is not clearly better than the base rate; it "
            "needs more rows or other columns."
        )
    if BOOSTING in fitted.out:
        found = difference(fitted, chosen, BOOSTING)
        if found.clear and found.mean > 0:
            return "Recommendation: use gradient boosting, which is better on these rows."
    if chosen != "linear" and "linear" in fitted.out:
        if not difference(fitted, chosen, "linear").clear:
            return (
                "Recommendation: use it, or the linear model (--method linear), which is simpler "
                "and not clearly worse."
            )
    return "Recommendation: use it."


def render(fitted: Fitted, *, source: str, command: str, model: str) -> str:
    """The page's text: HTML that needs nothing else.

    Args:
        fitted: A tested model.
        source: Name of the table.
        command: What made it.
        model: Name of the model's file.
    """
    target, main = fitted.model.target, _main(fitted)
    header, lines = results(fitted)
    totals = [
        {
            "name": f"{NAMES[method]}: test {HEADINGS[main]}",
            "value": _cell(main, fitted.measured[method][main]),
            "more": _calibration(fitted.measured[method]),
        }
        for method in [fitted.model.chosen, *_others(fitted), CONSTANT]
    ]
    facts = {
        "rows": f"{len(fitted.train)} to train and choose by, {len(fitted.test)} to test",
        "ensemble": str(len(fitted.model.networks[fitted.model.chosen].members)),
        "time": duration(fitted.seconds),
        "torch": torch.__version__,
        "fsmap": fsmap.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    glyphs = Glyphs()
    drawn = _predictions(fitted) if target.task == REGRESSION else _reliability(fitted)
    text: str = (
        environment()
        .get_template("table.html.j2")
        .render(
            title=f"{target.name} from {source}",
            target=target,
            verdict=verdict(fitted),
            totals=totals,
            header=header,
            lines=lines,
            picture=drawn | picture(drawn.pop("figure"), drawn["name"], glyphs)._asdict(),
            glyphs=glyphs.markup(),
            tables=_details(fitted),
            columns=[_about(column) for column in fitted.model.encoder.columns],
            notes=fitted.notes,
            commands=[command, f"fsmap predict {model} new.csv --out predictions.csv"],
            facts=facts,
            theme=theme(),
        )
    )
    return text


def page_path(model: Path) -> Path:
    """Where the page of a model goes: beside it."""
    return model.with_suffix(".html")


def _main(fitted: Fitted) -> str:
    return "rmse" if fitted.model.target.task == REGRESSION else "accuracy"


def _others(fitted: Fitted) -> list[str]:
    return [m for m in reversed(list(fitted.learned)) if m != fitted.model.chosen]


def _details(fitted: Fitted) -> Details:
    """What matters, where it errs, how sure it may be, and what was tried."""
    text = (
        "By how much the loss on test rows grows if a column is shuffled; 1 is the loss of a "
        "constant."
    )
    lines = [[name, _cell("r2", value)] for name, value in fitted.importance[:COLUMNS_SHOWN]]
    found = [_table("importance", "What matters", text, ["column", "growth"], lines)]
    found += _deciles(fitted) if fitted.spread is not None else _classes(fitted)
    lines = [
        [
            NAMES[line["method"]],
            *(number(line[key], 2) for key in ("weight_decay", "reg_strength")),
            *(number(line["value"]), str(line["step"])),
        ]
        for one in fitted.learned.values()
        for line in one.search
    ]
    header = ["method", "weight decay", "λ", "held-out loss", "steps"]
    text = "Every configuration and its loss on rows that its networks were not trained on."
    return [*found, _table("search", "How the strengths were chosen", text, header, lines)]


def _deciles(fitted: Fitted) -> Details:
    guess, truth = _units(fitted)
    assert fitted.spread is not None
    ends = fitted.spread.quantiles(guess, COVER)
    lines = []
    for rows in np.array_split(np.argsort(guess), min(BINS, max(1, len(guess) // 5))):
        inside = (ends[rows, 0] <= truth[rows]) & (truth[rows] <= ends[rows, 1])
        low, high = (number(float(end), 3) for end in (guess[rows].min(), guess[rows].max()))
        width = number(float((ends[rows, 1] - ends[rows, 0]).mean()), 3)
        lines.append([f"{low} to {high}", str(len(rows)), _cell("coverage", inside.mean()), width])
    text = "Test rows by the size of the prediction: how often the 90 % interval holds the truth."
    if np.isfinite(fitted.spread.floor):
        text += " No target is negative, so no interval goes below 0."
    header = ["prediction", "rows", "held", "width"]
    return [_table("coverage", "Intervals", text, header, lines)]


def _classes(fitted: Fitted) -> Details:
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


def _units(fitted: Fitted) -> tuple[Any, Any]:
    """Predictions of the chosen method and truth on test rows, in the unit of the target."""
    target = fitted.model.target
    return target.unscaled(fitted.out[fitted.model.chosen]), target.unscaled(fitted.y)


def _predictions(fitted: Fitted) -> dict[str, Any]:
    guess, truth = _units(fitted)
    rows = np.linspace(0, len(truth) - 1, min(len(truth), MOST_DOTS)).astype(int)
    guess, truth = guess[rows], truth[rows]
    figure, (left, right) = figures.axes(2, panel=(4.4, 3.0))
    left.axline((truth.min(), truth.min()), slope=1, color=figures.MUTED, linewidth=1)
    left.plot(truth, guess, **_dots(fitted))
    name = fitted.model.target.name.replace("$", r"\$")  # no mathematics
    left.set(xlabel=f"{name}, true", ylabel="predicted")
    right.axhline(0, color=figures.MUTED, linewidth=1)
    right.plot(guess, truth - guess, **_dots(fitted))
    right.set(xlabel="predicted", ylabel="true − predicted")
    caption = "Test rows: predictions against truth, and what is left, against the prediction."
    return {"name": "predictions", "caption": caption, "figure": figure}


def _reliability(fitted: Fitted) -> dict[str, Any]:
    table = metrics.reliability(fitted.out[fitted.model.chosen], fitted.y, BINS)
    full = table.count > 0
    figure, ax = figures.axes(panel=(4.4, 3.0))
    ax.plot([0, 1], [0, 1], color=figures.MUTED, linewidth=1, label="_as confident as right")
    ax.plot(table.confidence[full], table.accuracy[full], **_dots(fitted))
    ax.set(xlabel="confidence", ylabel="accuracy on test rows")
    caption = (
        "Calibration: of the rows predicted with some confidence, the share that is right. Below "
        "the line the model is over-confident, above it under-confident."
    )
    return {"name": "calibration", "caption": caption, "figure": figure}


def _dots(fitted: Fitted) -> dict[str, Any]:
    method = fitted.model.chosen
    look = {"color": figures.COLORS.get(method, figures.COLORS["fs-map"]), "alpha": 0.6}
    return {**look, "linestyle": "", "marker": "o", "label": f"_{NAMES[method]}"}


def _cell(name: str, value: Any) -> str:
    if name == "temperature" and not COLDEST < value < HOTTEST:
        return f"≤ {COLDEST:g}" if value <= COLDEST else f"≥ {HOTTEST:g}"
    if name in PERCENT:
        return f"{100 * value:.1f} %"
    # three digits, zeros included, so that a column can be compared
    text = f"{value:#.3g}" if 1e-3 <= abs(value) < 1e3 else number(float(value))
    return text.rstrip(".").replace("-", "−")


def _calibration(measured: dict[str, float]) -> str:
    if "coverage" in measured:
        return f"90 % intervals hold {_cell('coverage', measured['coverage'])}"
    return f"ECE {_cell('ece', measured['ece'])}" if "ece" in measured else "base rate"


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
        about = f"{number(float(column.low))} to {number(float(column.high))}"
        about += f"; missing: median {number(float(column.fill))}, marked" if column.missing else ""
    else:
        about = f"{column.form}: days, season, weekday, hour"
    return {"name": column.name, "kind": column.kind, "about": about}
