"""Tables from rows: mean ± standard error, and the paper's values."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fsmap.paper.rows import Row

Table = list[dict[str, Any]]

ROW_FIELDS = ("experiment", "metric", "method", "seed", "device")


class Mean(NamedTuple):
    """A mean and its standard error; the latter is nan for a single value."""

    mean: float
    stderr: float
    n: int


class Line(NamedTuple):
    """Means over seeds along what varies, ready to be drawn."""

    x: list[float]
    mean: list[float]
    stderr: list[float]


def field(row: Row, name: str) -> Any:
    """A field of a row (``"seed"``), or an entry of its config (``"n_train"``)."""
    return getattr(row, name) if name in ROW_FIELDS else row.config.get(name)


def select(rows: Iterable[Row], **where: Any) -> list[Row]:
    """Rows whose fields and entries of ``config`` are those of ``where`` (a tuple: any of these).

    Examples:
        >>> rows = [Row("fourier", "rmse", 0.1, "fs-map", 0, {"n_train": n}) for n in (100, 200)]
        >>> [row.config["n_train"] for row in select(rows, metric="rmse", n_train=200)]
        [200]
    """
    allowed = {name: v if isinstance(v, tuple) else (v,) for name, v in where.items()}
    return [row for row in rows if all(field(row, name) in v for name, v in allowed.items())]


def group(rows: Iterable[Row], *by: str, **where: Any) -> dict[tuple[Any, ...], list[Row]]:
    """Selected rows by fields or entries of ``config``, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in select(rows, **where):
        groups.setdefault(tuple(field(row, name) for name in by), []).append(row)
    return groups


def in_order(rows: Sequence[Row], *metrics: str) -> list[Row]:
    """Rows of these metrics, in the order of the metrics."""
    return [row for metric in metrics for row in select(rows, metric=metric)]


def values(rows: Iterable[Row], **where: Any) -> list[Any]:
    """Values of the rows that agree with all of ``where``."""
    return [row.value for row in select(rows, **where)]


def values_by(rows: Iterable[Row], name: str, **where: Any) -> dict[Any, Any]:
    """Values of selected rows by a field or an entry of ``config``; the last one counts."""
    return {field(row, name): row.value for row in select(rows, **where)}


def means_by(rows: Iterable[Row], name: str, **where: Any) -> dict[Any, float]:
    """Means of selected rows by a field or an entry of ``config``, sorted by it."""
    found = line(rows, name, **where)
    return dict(zip(found.x, found.mean, strict=True))


def mean_of(rows: Iterable[Row], **where: Any) -> float:
    """Mean of selected rows; nan if there is none."""
    return mean(values(rows, **where)).mean


def largest(numbers: Iterable[float]) -> float:
    """The largest; nan if there is none."""
    return max(numbers, default=math.nan)


def smallest(numbers: Iterable[float]) -> float:
    """The smallest; nan if there is none."""
    return min(numbers, default=math.nan)


def listed(numbers: Mapping[Any, float], name: str, form: str = ".2f") -> str:
    """Numbers with what they belong to, as in ``"0.52 (N = 100), 0.61 (N = 200)"``."""
    return ", ".join(f"{value:{form}} ({name} = {key:g})" for key, value in numbers.items())


def mean(values: Iterable[float]) -> Mean:
    """Mean, standard error (s/√n; nan for one value), and how many there were.

    Examples:
        >>> mean([1.0, 2.0, 3.0])
        Mean(mean=2.0, stderr=0.5773502691896258, n=3)
    """
    numbers = [float(value) for value in values]
    n = len(numbers)
    if not all(map(math.isfinite, numbers)):
        return Mean(sum(numbers) / n, math.nan, n)
    centre = statistics.fmean(numbers) if numbers else math.nan
    return Mean(centre, statistics.stdev(numbers) / math.sqrt(n) if n > 1 else math.nan, n)


def paired(one: Iterable[Row], other: Iterable[Row]) -> Mean:
    """Mean and error of ``one - other`` over the seeds that both have."""
    left, right = (
        {key: mean(row.value for row in rows).mean for key, rows in group(side, "seed").items()}
        for side in (one, other)
    )
    return mean(left[key] - right[key] for key in left if key in right)


def line(rows: Iterable[Row], x: str, **where: Any) -> Line:
    """Means of selected rows over everything but ``x``, sorted by it."""
    groups = sorted(group(rows, x, **where).items(), key=lambda item: item[0][0])
    means = [mean(row.value for row in members) for _, members in groups]
    return Line([key[0] for key, _ in groups], [m.mean for m in means], [m.stderr for m in means])


def summarize(
    rows: Iterable[Row], *by: str, paper: Mapping[Any, tuple[float, float | None]] | None = None
) -> Table:
    """Mean ± standard error by the values of ``by``, and the paper's ``(value, error)`` by them."""
    table = []
    for key, members in group(rows, *by).items():
        ours = mean(row.value for row in members)
        entry = dict(zip(by, key, strict=True))
        entry.update(ours=ours.mean, stderr=ours.stderr, runs=ours.n)
        if paper is not None:
            printed, error = paper.get(key, (None, None))
            entry.update(paper=printed, paper_stderr=error)
        table.append(entry)
    return table


def columns(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """All keys of a table, in order of first appearance."""
    return list(dict.fromkeys(key for entry in table for key in entry))


MINUS = "\u2212"
ERRORS = {"ours": "stderr", "paper": "paper_stderr"}  # what is shown behind ± of a column

SYMBOLS = {
    **{"n_train": "N", "jitter": "ε", "epsilon": "ε", "eps": "ε", "alpha": "α", "prior_std": "α"},
    **{"num_points": "S", "lam": "λ", "noise_std": "σ", "noise_ratio": "σ/σ*", "px": "p_X"},
}
"""Columns that are headed by the paper's letter."""


def number(value: Any, digits: int = 4) -> str:
    """A value as a table shows it.

    Examples:
        >>> number(0.123456), number(1234567.0), number(2e-7), number(None), number(3)
        ('0.1235', '1.235e6', '2e\u22127', '\u2014', '3')
    """
    if value is None:
        return "\u2014"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value).replace("-", MINUS)
    if isinstance(value, list | tuple):
        return ", ".join(number(item, digits) for item in value)
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "∞" if value > 0 else f"{MINUS}∞"
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}".replace("-", MINUS)
    places = 0 if value == 0 else max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", MINUS)


def epsilon(jitter: float) -> str:
    """A jitter in words, such as ``ε = 10`` or ``ε = 1e−6``."""
    return f"ε = {number(float(jitter), 3)}"


def with_error(value: Any, stderr: Any, places: int | None = None) -> str:
    """Mean ± standard error (None, nan: none), to ``places`` or the error's second digit.

    Examples:
        >>> with_error(0.11312, 0.01234), with_error(12.0, None), with_error(1234.5, 67.8)
        ('0.113 ± 0.012', '12', '1234 ± 68')
        >>> with_error(0.4676981, 2e-9)  # seeds that agree: no error worth a column of zeros
        '0.4677'
        >>> with_error(93.9, 0.1, 1), with_error(0.2913, None, 3)
        ('93.9 ± 0.1', '0.291')
    """
    if places is not None and _finite(value):
        error = f" ± {stderr:.{places}f}" if _finite(stderr) else ""
        return f"{value:.{places}f}{error}".replace("-", MINUS)
    if not (_finite(value) and _finite(stderr)) or stderr <= 1e-6 * abs(value):
        return number(value)
    if not 1e-4 <= max(abs(value), stderr) < 1e6:
        return f"{number(float(value), 3)} ± {number(float(stderr), 2)}"
    if stderr < 5e-7:
        return number(value)
    places = min(max(0, 1 - math.floor(math.log10(stderr))), 6)
    return f"{value:.{places}f} ± {stderr:.{places}f}".replace("-", MINUS)


def _finite(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)


class Cell(NamedTuple):
    """A cell of a table on the page: ours, and the paper's below it."""

    text: str = ""
    sub: str = ""


class Layout(NamedTuple):
    """A table as the page shows it."""

    name: str  # heading; "" for the main table
    groups: list[tuple[str, int]]  # names above several columns, and how many; empty: none
    header: list[str]
    lines: list[list[Cell]]
    numeric: list[bool]  # columns of numbers
    labels: list[str]  # whole names of the columns, for narrow screens

    @property
    def printed(self) -> bool:
        """Whether values of the paper are in it."""
        return any(cell.sub.startswith("(") for line in self.lines for cell in line)


METRICS = {
    **{"accuracy": "Acc. ↑ %", "selective": "Sel. pred. ↑ %", "nll": "NLL ↓", "ece": "ECE ↓ %"},
    **{"brier": "Brier", "nll_scaled": "NLL after T", "ece_scaled": "ECE after T %"},
    **{"ood_auroc": "OOD AUROC %", "temperature": "T", "laplacian_joint": "R, training mode"},
    **{"laplacian_other": "R at D'", "laplacian_train": "R at train", "reg_strength": "λ"},
    **{"rise": "rise of the loss", "peak": "θ_R at the peak"},
    **{"left_height": "height of the left bump", "right_height": "height of the right bump"},
}
"""Names of metrics in a table; others have their id, with spaces."""

MAIN = ("accuracy", "selective", "nll", "ece")  # metrics of the paper's tables of images

PLACES = {"accuracy": (2, 1), "selective": (2, 1), "ece": (2, 1), "nll": (3, 2), "rmse": (3, 3)}
"""Decimals of ours and of the paper's numbers."""

WORDS = {
    **{"ps-map": "PS-MAP", "fs-map": "FS-MAP", "l-map": "L-MAP", "bma": "BMA", "sam": "SAM"},
    **{"l-map \u2212 ps-map": "L-MAP \u2212 PS-MAP", "log-trace": "LogTrace"},
    **{"sklearn-mlp": "MLP (scikit-learn)", "boosting": "boosting", "ridge": "ridge"},
    **{"white-noise": "L-MAP, N(0, I)", "train": "L-MAP, train", "other": "L-MAP, D'"},
    **{"nats": "LogTrace", "sam+nats": "SAM + LogTrace", "label-smoothing": "label smoothing"},
    **{"fmnist": "FashionMNIST", "cifar10": "CIFAR-10"},
}
"""Names of methods, rows of Table 2 and data sets."""


CHANGES = {
    **{"wd": "weight decay {}", "lambda": "λ = {}", "nats": "{} nats", "valid": "{} held out"},
    "tuned": "tuned",
}
"""Changes of a row of Table 2, as in ``ps-map@wd-1e-3``."""


def word(name: str) -> str:
    """A name as tables and legends show it.

    Examples:
        >>> word("l-map"), word("other@lambda-1e-5"), word("boston")
        ('L-MAP', "L-MAP, D', λ = 1e-5", 'boston')
    """
    base, *changes = (f"ps-map@{name}" if name.startswith("wd-") else name).split("@")
    parts = (change.partition("-") for change in changes)
    words = (CHANGES.get(key, key).format(value) for key, _, value in parts)
    return ", ".join([WORDS.get(base, base), *words])


VALUES = ("ours", "stderr", "paper", "paper_stderr", "runs")


def arranged(table: Sequence[Mapping[str, Any]], group: str) -> list[Layout]:
    """A table as the paper arranges those of this group of experiments, with words for ids."""
    if not table:
        return []
    if group == "uci" and all("dataset" in entry for entry in table):
        entries = [{**entry, "metric": "rmse"} for entry in table]
        return [crossed(entries, ("protocol", "method"), ("dataset",))]
    if group == "images" and all("metric" in entry for entry in table):
        across = ("dataset", "metric") if all("dataset" in e for e in table) else ("metric",)
        hidden = {*across, *VALUES, *(("method", "px") if "row" in table[0] else ("px",))}
        by = tuple(name for name in columns(table) if name not in hidden)
        main = [entry for entry in table if entry["metric"] in MAIN]
        more = [entry for entry in table if entry["metric"] not in MAIN]
        if not main:
            return [crossed(more, by, across)]
        return [crossed(main, by, across)] + [crossed(more, by, across, "More metrics")] * any(more)
    header = [name for name in columns(table) if name not in ERRORS.values()]
    lines = [
        [Cell(_word(name, entry.get(name, ""), entry.get(ERRORS.get(name)))) for name in header]
        for entry in table
    ]
    headings = list(map(_heading, header))
    return [Layout("", [], headings, lines, _numeric(lines), headings)]


def crossed(
    table: Sequence[Mapping[str, Any]], by: Sequence[str], across: Sequence[str], name: str = ""
) -> Layout:
    """A line per value of ``by``, a column per value of ``across``, ours and the paper's values."""
    by = [key for key in by if len({str(entry.get(key)) for entry in table}) > 1] or list(by[-1:])
    first = dict.fromkeys(entry[across[0]] for entry in table)
    found = dict.fromkeys(tuple(entry[key] for key in across) for entry in table)
    places = [place for name in first for place in found if place[0] == name]
    cells: dict[tuple[Any, ...], dict[tuple[Any, ...], Mapping[str, Any]]] = {}
    for entry in table:
        line = cells.setdefault(tuple(entry.get(key) for key in by), {})
        line[tuple(entry[key] for key in across)] = entry
    counted = any(entry.get("runs") for entry in table)
    lines = []
    for key, line in cells.items():
        runs = max(entry.get("runs") or 0 for entry in line.values())
        words = [Cell(_word(name, value)) for name, value in zip(by, key, strict=True)]
        values = [_cell_of(line.get(place), runs) for place in places]
        lines.append([*words, *values, *[Cell(str(runs) if runs else "")] * counted])
    named = [[_word(k, p) for k, p in zip(across, place, strict=True)] for place in places]
    left, right = list(map(_heading, by)), ["seeds"] * counted
    groups: list[tuple[str, int]] = []
    if len(across) > 1:
        spans = Counter(words[0] for words in named)
        groups = [("", len(by)), *spans.items(), *[("", 1)] * counted]
    header = [*left, *(words[-1] for words in named), *right]
    labels = [*left, *map(" ".join, named), *right]
    numeric = [False] * len(by) + [True] * (len(header) - len(by))
    return Layout(name, groups, header, lines, numeric, labels)


def _cell_of(entry: Mapping[str, Any] | None, runs: int) -> Cell:
    if entry is None:
        return Cell("\u2014")
    ours, theirs = PLACES.get(entry["metric"], (None, None))
    text = with_error(entry["ours"], entry.get("stderr"), ours)
    notes = []
    if (fewer := entry.get("runs")) and fewer != runs:
        notes.append(f"{fewer} seed{'s' * (fewer != 1)}")  # of the line above
    if entry.get("paper") is not None:
        notes.append(f"({with_error(entry['paper'], entry.get('paper_stderr'), theirs)})")
    return Cell(text, "\n".join(notes))


def _word(name: str, value: Any, stderr: Any = None) -> str:
    if not isinstance(value, str):
        return with_error(value, stderr)
    return METRICS.get(value, value.replace("_", " ")) if name == "metric" else word(value)


def _heading(name: str) -> str:
    return SYMBOLS.get(name, name.replace("_", " "))


def _numeric(lines: Sequence[Sequence[Cell]]) -> list[bool]:
    """Columns in which every filled cell starts like a number."""
    number = re.compile(r"[\u2212+<>≈ ]*\d|(\u2014|nan|∞)?$")
    return [all(number.match(cell.text) for cell in column) for column in zip(*lines, strict=True)]
