"""One page about a fitted table: who is better, how sure it is, what was chosen, what was used."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from fsmap.assess.table_fit import LINEAR, METHODS, Fitted
from fsmap.data.columns import LEFT_OUT, NUMBER, Column
from fsmap.data.target import REGRESSION
from fsmap.progress import duration
from fsmap.report.circumstances import circumstances
from fsmap.report.figures import NAMES, to_svg
from fsmap.report.inline_svg import Glyphs, inline
from fsmap.report.numbers import MINUS, number
from fsmap.report.page import environment, theme
from fsmap.report.table_figures import pictures

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
PERCENT = ("coverage", "accuracy", "ece")
LEVELS_SHOWN = 6
COLDEST, HOTTEST = 1e-2, 1e2
"""Where the search for a temperature ends: what lies there may lie beyond."""


def method_name(method: str) -> str:
    """How a method is written."""
    return {**NAMES, LINEAR: "Linear"}[method]


def results(fitted: Fitted) -> tuple[list[str], list[list[str]]]:
    """The table of methods: test metrics, calibration, chosen strengths.

    Args:
        fitted: A tested model.

    Returns:
        The header, and a line of cells per method.
    """
    names = list(fitted.runs["l-map"].measured)
    header = ["", *(HEADINGS[name] for name in names), "weight decay", "λ"]
    lines = []
    for method in METHODS:
        run = fitted.runs[method]
        cells = [_cell(name, run.measured[name]) for name in names]
        decay, strength = run.trained.config
        chosen = [number(decay, 2), number(strength, 2) if strength else "—"]
        lines.append([method_name(method), *cells, *chosen])
    return header, lines


def verdict(fitted: Fitted) -> str:
    """L-MAP beside PS-MAP in one sentence, with the paired standard error.

    Args:
        fitted: A tested model.

    Returns:
        The sentence.
    """
    found = fitted.versus
    regression = fitted.model.target.task == REGRESSION
    unit = "squared error (standardized)" if regression else "log loss"
    size = f"{number(abs(found.mean), 2)} ± {number(found.stderr, 2)}"
    if not found.clear:
        return (
            f"On {len(fitted.y)} test rows L-MAP and PS-MAP cannot be told apart: {unit} differs "
            f"by {size} per row."
        )
    which = "lower" if found.mean < 0 else "higher"
    return (
        f"On {len(fitted.y)} test rows L-MAP's {unit} is {which} than PS-MAP's, by {size} per row."
    )


def edges(fitted: Fitted) -> list[str]:
    """A sentence for each chosen strength that lies at an end of what was tried."""
    told = [(method_name(m), text) for m, texts in fitted.edges.items() for text in texts]
    return [f"{name}: {re.sub('e-0*', f'e{MINUS}', text)}" for name, text in told]


def render(fitted: Fitted, *, source: str, command: str, model: str) -> str:
    """The page's text.

    Args:
        fitted: A tested model.
        source: Name of the table.
        command: What made it.
        model: Name of the model's file.

    Returns:
        HTML that needs nothing else.
    """
    glyphs = Glyphs()
    target = fitted.model.target
    shown = []
    for picture in pictures(fitted):
        drawn = inline(to_svg(picture.figure), picture.name, picture.caption, glyphs)
        shown.append({"name": picture.name, "caption": picture.caption, **drawn._asdict()})
    header, lines = results(fitted)
    main = "rmse" if target.task == REGRESSION else "accuracy"
    totals = [
        {
            "name": f"{method_name(method)}: test {HEADINGS[main]}",
            "value": _cell(main, fitted.runs[method].measured[main]),
            "more": _calibration(fitted.runs[method].measured),
        }
        for method in reversed(METHODS)
    ]
    sizes = [len(part) for part in fitted.parts]
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
            columns=_columns(fitted),
            notes=fitted.notes,
            edges=edges(fitted),
            sizes=sizes,
            command=command,
            predict=f"fsmap predict {model} new.csv --out predictions.csv",
            facts={
                "rows": f"{sizes[0]} to train, {sizes[1]} to choose by, {sizes[2]} to test",
                "network": ", ".join(map(str, fitted.model.networks["l-map"].sizes)),
                "time": duration(sum(run.seconds for run in fitted.runs.values())),
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


def _cell(name: str, value: float) -> str:
    if name == "temperature" and not COLDEST < value < HOTTEST:
        return f"≤ {COLDEST:g}" if value <= COLDEST else f"≥ {HOTTEST:g}"
    if name in PERCENT:
        return f"{100 * value:.1f} %"
    # three digits, zeros included, so that a column can be compared
    text = f"{value:#.3g}" if 1e-3 <= abs(value) < 1e3 else number(value, 4)
    return text.replace("-", MINUS)


def _calibration(measured: dict[str, float]) -> str:
    if "coverage" in measured:
        return f"90 % intervals hold {_cell('coverage', measured['coverage'])}"
    return f"ECE {_cell('ece', measured['ece'])}, {_temperature(measured)}"


def _temperature(measured: dict[str, float]) -> str:
    cell = _cell("temperature", measured["temperature"])
    return f"T {cell}" if cell[0] in "≤≥" else f"T = {cell}"


def _columns(fitted: Fitted) -> list[dict[str, str]]:
    encoder = fitted.model.encoder
    scale = dict(zip(encoder.names(), zip(encoder.mean, encoder.std, strict=True), strict=True))
    found = []
    for column in encoder.columns:
        about = _about(column)
        if column.kind == NUMBER:
            mean, std = map(float, scale[column.name])
            about = f"mean {number(mean)}, standard deviation {number(std)}" + about
        found.append({"name": column.name, "kind": column.kind, "about": about})
    return found


def _about(column: Column) -> str:
    """What else is to be said about a column."""
    if column.kind == NUMBER:
        stand_in = f"; missing values: median {number(column.fill)}, and a column marks them"
        return stand_in if column.missing else ""
    if column.kind == LEFT_OUT:
        return column.reason
    more = len(column.levels) - LEVELS_SHOWN
    text = ", ".join(column.levels[:LEVELS_SHOWN]) + (f" and {more} more" if more > 0 else "")
    text += f"; {len(column.others)} rare ones count as other" if column.others else ""
    return text + ("; missing values are a level" if column.missing else "")
