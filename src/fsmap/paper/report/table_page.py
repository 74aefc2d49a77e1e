"""The page of a fitted table: predictions, calibration, and how the strengths were chosen."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fsmap import metrics
from fsmap.assess.table_fit import LINEAR, METHODS, Fitted
from fsmap.assess.tables import LEVELS, coverage_curve
from fsmap.data.columns import LEFT_OUT, NUMBER, Column
from fsmap.data.target import REGRESSION
from fsmap.paper.report import figures
from fsmap.paper.report.figures import NAMES, to_svg
from fsmap.paper.report.inline_svg import Glyphs, inline
from fsmap.paper.report.page import environment, theme
from fsmap.paper.report.tables import MINUS, number
from fsmap.paper.rows import circumstances
from fsmap.train.progress import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = ("ps-map", "l-map")
MOST_DOTS = 600  # per panel: more would be a blot, and a slow page
SHADES = (0.25, 0.5, 0.75, 1.0)  # of lines that differ in weight decay
BINS = 10


class Picture(NamedTuple):
    """A figure and what to see in it."""

    name: str
    figure: Figure
    caption: str


def pictures(fitted: Fitted) -> list[Picture]:
    """All pictures of the page."""
    with figures.style():
        if fitted.model.target.task == REGRESSION:
            return [_predictions(fitted), _coverage(fitted), _search(fitted)]
        return [_reliability(fitted), _search(fitted)]


def _predictions(fitted: Fitted) -> Picture:
    target = fitted.model.target
    figure, panels = figures.axes(2, sharex=True, sharey=True)
    truth = target.mean + target.std * fitted.y[:, 0].numpy()
    rows = np.linspace(0, len(truth) - 1, min(len(truth), MOST_DOTS)).astype(int)
    for ax, method in zip(panels, SHOWN, strict=True):
        guess = target.mean + target.std * fitted.runs[method].out[:, 0].numpy()
        look = figures.method_style(method, linestyle="none", alpha=0.55, markersize=4)
        ax.plot(truth[rows], guess[rows], **look)
        _diagonal(ax, [min(truth.min(), guess.min()), max(truth.max(), guess.max())])
        ax.set_title(figures.NAMES[method])
        ax.set_xlabel(f"{target.name}, true")
    panels[0].set_ylabel("predicted")
    caption = "Test rows: what was predicted against what is true. On the line, both agree."
    return Picture("predictions", figure, caption)


def _coverage(fitted: Fitted) -> Picture:
    figure, ax = figures.axes()
    _diagonal(ax, [0, 1])
    for method in SHOWN:
        run = fitted.runs[method]
        assert run.spread is not None
        found = coverage_curve(run.out, fitted.y, fitted.model.target, run.spread)
        ax.plot(LEVELS, found, **figures.method_style(method, markersize=3.5))
    ax.set_xlabel("intervals that should hold")
    ax.set_ylabel("that do, on test rows")
    ax.legend()
    caption = (
        "Calibration: intervals of every level, as wide as errors on validation rows say. Above "
        "the line they are wider than they had to be, below it they promise too much."
    )
    return Picture("calibration", figure, caption)


def _reliability(fitted: Fitted) -> Picture:
    figure, ax = figures.axes()
    _diagonal(ax, [0, 1])
    for method in SHOWN:
        table = metrics.reliability(fitted.runs[method].out, fitted.y, BINS)
        full = table.count > 0
        ax.plot(table.confidence[full], table.accuracy[full], **figures.method_style(method))
    ax.set_xlabel("confidence")
    ax.set_ylabel("accuracy on test rows")
    ax.legend()
    caption = (
        "Calibration: of the rows predicted with some confidence, the share that is right. Below "
        "the line the model is over-confident, above it under-confident."
    )
    return Picture("calibration", figure, caption)


def _search(fitted: Fitted) -> Picture:
    regression = fitted.model.target.task == REGRESSION
    ylabel = "validation RMSE (standardized)" if regression else "validation log loss"
    figure, (left, right) = figures.axes(2, sharey=True)
    search = fitted.runs["l-map"].trained.search
    decays = sorted({line["weight_decay"] for line in search})
    for decay, shade in zip(decays, SHADES, strict=True):
        lines = [line for line in search if line["weight_decay"] == decay]
        look = figures.method_style("l-map", alpha=shade, label=f"L-MAP, w = {number(decay)}")
        left.plot([v["reg_strength"] for v in lines], [v["value"] for v in lines], **look)
    best = fitted.runs["ps-map"].trained.value
    left.axhline(best, color=figures.COLORS["ps-map"], linestyle="--", label="best PS-MAP")
    left.set_xscale("log")
    left.set_xlabel(r"strength $\lambda$")
    left.set_ylabel(ylabel)
    left.legend(fontsize=8)
    for method in SHOWN:
        steps, values = zip(*fitted.runs[method].trained.curve, strict=True)
        right.plot(steps, values, **figures.method_style(method, marker=""))
    right.set_xlabel("steps of the chosen run")
    right.legend()
    _from_the_useful_range(left, fitted)
    caption = (
        "How the strengths were chosen: the validation loss of every configuration of one "
        "population (left; w is the weight decay), and of the two chosen runs while they trained."
    )
    return Picture("strengths", figure, caption)


def _from_the_useful_range(ax: Axes, fitted: Fitted) -> None:
    """Cut off the start of training, where any network is bad."""
    runs = [fitted.runs[method].trained for method in SHOWN]
    values = [line["value"] for run in runs for line in run.search]
    finite = [value for value in values if np.isfinite(value)]
    low, high = min(finite), max(finite)
    room = max(high - low, 0.05 * low)
    ax.set_ylim(low - 0.1 * room, high + 0.6 * room)


def _diagonal(ax: Axes, ends: list[Any]) -> None:
    ax.axline((ends[0], ends[0]), (ends[1], ends[1]), color=figures.MUTED, linewidth=0.8)


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
    """The table of methods: test metrics, calibration, chosen strengths."""
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
    """L-MAP beside PS-MAP in one sentence, with the paired standard error."""
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
    """The page's text."""
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
