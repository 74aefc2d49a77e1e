"""The page of ``fsmap fit``: verdict, metrics, importance of columns, encoding."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import fsmap
from fsmap import metrics
from fsmap.metrics import TEMPERATURES
from fsmap.paper.report.figures import COLORS, MUTED, axes, style
from fsmap.paper.report.page import environment, theme
from fsmap.paper.report.picture import picture
from fsmap.paper.report.tables import WORDS, number
from fsmap.progress import duration
from fsmap.tables.model import BOOSTING, CONSTANT, COVER, Fitted, difference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADINGS = {
    **{"rmse": "RMSE", "mae": "MAE", "r2": "R²", "coverage": "90 % intervals hold"},
    **{"accuracy": "accuracy", "nll": "NLL", "brier": "Brier", "ece": "ECE", "temperature": "T"},
}
NAMES = WORDS | {name: name.capitalize() for name in ("linear", CONSTANT, BOOSTING)}
PERCENT = ("coverage", "accuracy", "ece")
LEVELS_SHOWN, COLUMNS_SHOWN, MOST_CLASSES = 6, 15, 20
MOST_DOTS = 600  # in a picture
BINS = 10
TINY = 0.05  # nats per row: a smaller difference of log losses does not matter
PANEL = (3.8, 3.0)  # inches

Grid = tuple[list[str], list[list[str]]]
Tables = dict[str, list[list[str]]]


def results(fitted: Fitted) -> Grid:
    """The table of methods: test metrics and chosen strengths, the chosen method first."""
    chosen = fitted.model.chosen
    names = list(fitted.measured[chosen])
    lines = []
    for method in [chosen, *_others(fitted), BOOSTING, CONSTANT]:
        found = fitted.measured[method]
        cells = [_cell(name, found[name]) if name in found else "—" for name in names]
        strengths = ["—", "—"]
        if method in fitted.learned:
            _, decay, strength = fitted.learned[method].config
            strengths = [number(decay, 2), number(strength, 2) if strength else "—"]
        lines.append([NAMES[method], *cells, *strengths])
    return ["", *(HEADINGS[name] for name in names), "weight decay", "λ"], lines


def verdict(fitted: Fitted) -> str:
    """The method that is used, its error and the base rate's, and a recommendation."""
    chosen, main = fitted.model.chosen, _main(fitted)
    mine, base = (_cell(main, fitted.measured[m][main]) for m in (chosen, CONSTANT))
    unit = "squared error (standardized)" if main == "rmse" else "log loss"
    why = ": it is best on held-out rows" if len(fitted.learned) > 1 else ""
    text = (
        f"{NAMES[chosen]} is used{why}. On {len(fitted.test)} test rows "
        f"its {HEADINGS[main]} is {mine}; the base rate, a constant, has {base}. "
        f"{_recommendation(fitted)}"
    )
    parts = []
    for other in _others(fitted):
        found = difference(fitted, chosen, other)
        size = f"{number(abs(found.mean), 2)} ± {number(found.stderr, 2)}"
        if found.clear:
            word = "lower" if found.mean < 0 else "higher"
            parts.append(f"is {word} than that of {NAMES[other]} by {size}")
        else:
            parts.append(f"cannot be told apart from that of {NAMES[other]} ({size})")
    return f"{text} Its {unit} per test row {'; it '.join(parts)}." if parts else text


def _recommendation(fitted: Fitted) -> str:
    """A recommendation by the results on test rows."""
    chosen = fitted.model.chosen
    base, boosting = (difference(fitted, chosen, m) for m in (CONSTANT, BOOSTING))
    classes = bool(fitted.model.target.classes)
    wrong = difference(fitted, chosen, BOOSTING, wrong=classes)
    right = classes and wrong.clear and wrong.mean > 0  # boosting is, clearly more often
    if right and boosting.mean < 0:
        return (
            "Recommendation: for classes use gradient boosting, which is right more often on "
            "these rows; its probabilities are worse."
        )
    if right or (boosting.clear and boosting.mean > TINY * classes):
        return "Recommendation: use gradient boosting, which is better on these rows."
    if not (base.clear and base.mean < 0):
        return (
            "Recommendation: do not use it yet. It is not clearly better than the base rate; it "
            "needs more rows or other columns."
        )
    if "linear" in _others(fitted) and not difference(fitted, chosen, "linear").clear:
        return (
            "Recommendation: use it, or the linear model (--method linear), which is simpler and "
            "not clearly worse."
        )
    return "Recommendation: use it."


def render(fitted: Fitted, *, source: str, command: str, model: str) -> str:
    """The page's text: HTML that needs nothing else. ``command`` made the file ``model``."""
    chosen, target = fitted.model.chosen, fitted.model.target
    facts = {
        "rows": f"{len(fitted.train)} to train and choose by, {len(fitted.test)} to test",
        "ensemble": str(len(fitted.model.network.members)),
        "time": duration(fitted.seconds),
        "torch": torch.__version__,
        "fsmap": fsmap.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    tables = {
        "importance": [[n, _cell("r2", value)] for n, value in fitted.importance[:COLUMNS_SHOWN]],
        **(_classes(fitted) if target.classes else _deciles(fitted)),
    }
    with style():
        drawn = picture(_figure(fitted), "test-rows")
    template = environment().get_template("table.html.j2")
    return template.render(
        title=f"{target.name} from {source}",
        fitted=fitted,
        target=target,
        verdict=verdict(fitted),
        methods=[chosen, *_others(fitted), CONSTANT],
        main=_main(fitted),
        names=NAMES,
        headings=HEADINGS,
        results=results(fitted),
        tables=tables,
        picture=drawn,
        most_levels=LEVELS_SHOWN,
        commands=[command, f"fsmap predict {model} new.csv --out predictions.csv"],
        facts=facts,
        theme=theme(),
        cell=_cell,
        number=number,
    )


def _main(fitted: Fitted) -> str:
    return "accuracy" if fitted.model.target.classes else "rmse"


def _others(fitted: Fitted) -> list[str]:
    return [m for m in reversed(list(fitted.learned)) if m != fitted.model.chosen]


def _deciles(fitted: Fitted) -> Tables:
    """How often intervals hold the truth, by the size of the prediction."""
    guess, truth = _units(fitted)
    assert fitted.spread is not None
    ends = fitted.spread.quantiles(guess, COVER)
    lines = []
    for rows in np.array_split(np.argsort(guess), min(BINS, max(1, len(guess) // 5))):
        inside = (ends[rows, 0] <= truth[rows]) & (truth[rows] <= ends[rows, 1])
        span = f"{number(guess[rows].min(), 3)} to {number(guess[rows].max(), 3)}"
        width = number((ends[rows, 1] - ends[rows, 0]).mean(), 3)
        lines.append([span, str(len(rows)), _cell("coverage", inside.mean()), width])
    return {"coverage": lines}


def _classes(fitted: Fitted) -> Tables:
    """The confusion matrix, unless it is too large."""
    out, names = fitted.out[fitted.model.chosen], fitted.model.target.classes
    if len(names) > MOST_CLASSES:
        return {}
    counts = np.zeros((len(names), len(names)), dtype=int)
    np.add.at(counts, (fitted.y.numpy(), out.argmax(1).numpy()), 1)
    pairs = zip(names, counts.tolist(), strict=True)
    return {"confusion": [[name, *map(str, row)] for name, row in pairs]}


def _units(fitted: Fitted) -> tuple[Any, Any]:
    """Predictions of the chosen method and truth on test rows, in the unit of the target."""
    target = fitted.model.target
    return target.unscaled(fitted.out[fitted.model.chosen]), target.unscaled(fitted.y)


def _figure(fitted: Fitted) -> Figure:
    """Test rows: predictions against truth, and residuals; or a reliability diagram."""
    chosen = fitted.model.chosen
    look: Any = {"color": COLORS.get(chosen, COLORS["fs-map"]), "label": f"_{NAMES[chosen]}"}
    if fitted.model.target.classes:
        table = metrics.reliability(fitted.out[chosen], fitted.y, BINS)
        full = table.count > 0
        figure, ax = axes(panel=PANEL)
        ax.axline((0, 0), (1, 1), color=MUTED, linewidth=0.8)
        ax.scatter(table.confidence[full], table.accuracy[full], **look)
        ax.set(xlabel="confidence", ylabel="accuracy on test rows")
        return figure
    guess, truth = _units(fitted)
    rows = np.linspace(0, len(truth) - 1, min(len(truth), MOST_DOTS)).astype(int)
    guess, truth = guess[rows], truth[rows]
    figure, (left, right) = axes(2, panel=PANEL)
    left.axline((truth[0], truth[0]), slope=1, color=MUTED, linewidth=0.8)
    left.scatter(truth, guess, s=9, alpha=0.6, **look)
    left.set(xlabel="true", ylabel="predicted")
    right.axhline(0, color=MUTED, linewidth=0.8)
    right.scatter(guess, truth - guess, s=9, alpha=0.6, **look)
    right.set(xlabel="predicted", ylabel="true \u2212 predicted")
    return figure


def _cell(name: str, value: Any) -> str:
    if name == "temperature" and value in TEMPERATURES:
        return f"{'≤' if value < 1 else '≥'} {value:g}"
    if name in PERCENT:
        return f"{100 * value:.1f} %"
    # three digits, zeros included, so that a column can be compared
    text = f"{value:#.3g}" if 1e-3 <= abs(value) < 1e3 else number(value)
    return text.rstrip(".").replace("-", "−")
