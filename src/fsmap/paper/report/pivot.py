"""A table with one line per metric (or method), turned into one with a column for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsmap.paper.report.numbers import with_error
from fsmap.paper.report.tables import columns

VALUES = ("ours", "stderr", "paper", "paper_stderr", "runs", "edge")
TUNED = ("weight_decay", "reg_strength", "alpha")
"""What was chosen for one method: not shown in a table with a column per method."""

HEADINGS = {
    "accuracy": "accuracy %",
    "selective": "selective %",
    "nll": "NLL",
    "ece": "ECE %",
    "brier": "Brier",
    "nll_scaled": "NLL after T",
    "ece_scaled": "ECE % after T",
    "ood_auroc": "OOD AUROC %",
    "temperature": "T",
    "laplacian_joint": "R in training mode",
    "laplacian_other": "R at D'",
    "laplacian_train": "R at train",
    "reg_strength": "λ",
    "rise": "rise of the loss",
}
"""What metrics are called above a column."""


def pivot(table: Sequence[Mapping[str, Any]], over: str = "metric") -> list[dict[str, Any]]:
    """Lines that differ in nothing but the metric become one; the paper's value in parentheses.

    Args:
        table: Entries with ``metric`` and ``ours``, and possibly ``stderr``, ``paper``,
            ``paper_stderr``, ``runs``, ``edge``; a table in which an entry has no metric stays as
            it is.
        over: ``"metric"``, or ``"method"`` for a column per method.

    Returns:
        Entries with a column of text per metric; a cell with fewer runs than its line says so.

    Examples:
        >>> line = {"dataset": "a", "metric": "ece", "ours": 1.0, "stderr": 0.1, "paper": 2.0}
        >>> pivot([line, {**line, "metric": "nll", "ours": 0.3, "stderr": None, "paper": None}])
        [{'dataset': 'a', 'ECE %': '1.00 ± 0.10 (2)', 'NLL': '0.3', 'runs': None}]
    """
    if not all(over in entry for entry in table):
        return [dict(entry) for entry in table]
    hidden = (over, *VALUES, *(TUNED if over == "method" else ()))
    keys = [name for name in columns(table) if name not in hidden]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for entry in table:
        groups.setdefault(tuple(entry.get(key) for key in keys), []).append(entry)
    blank = dict.fromkeys((HEADINGS.get(e[over], e[over]) for e in table), "")
    found = []
    for place, entries in groups.items():
        runs = max((e["runs"] for e in entries if e.get("runs") is not None), default=None)
        cells = {HEADINGS.get(e[over], e[over]): _cell(e, runs) for e in entries}
        found.append({**dict(zip(keys, place, strict=True)), **blank, **cells, "runs": runs})
    return found


def _cell(entry: Mapping[str, Any], runs: int | None) -> str:
    text = with_error(entry["ours"], entry.get("stderr"))
    if entry.get("paper") is not None:
        text += f" ({with_error(entry['paper'], entry.get('paper_stderr'))})"
    if entry.get("edge"):
        text += f" {entry['edge']}"
    fewer = entry.get("runs")
    if fewer is None or fewer == runs:
        return text
    return f"{text}, {fewer} run{'' if fewer == 1 else 's'}"
