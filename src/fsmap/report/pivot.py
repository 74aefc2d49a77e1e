"""A table with one line per metric, turned into one with a column per metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsmap.report.numbers import with_error
from fsmap.report.tables import columns

VALUES = ("metric", "ours", "stderr", "paper", "paper_stderr", "runs")

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
    "laplacian_other": "R at D'",
    "laplacian_train": "R at train",
    "reg_strength": "λ",
    "rise": "rise of the loss",
}
"""What metrics are called above a column."""


def pivot(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lines that differ in nothing but the metric become one; the paper's value in parentheses.

    Args:
        table: Entries with ``metric`` and ``ours``, and possibly ``stderr``, ``paper``,
            ``paper_stderr``, ``runs``; a table in which an entry has no metric stays as it is.

    Returns:
        Entries with a column of text per metric.

    Examples:
        >>> line = {"dataset": "a", "metric": "ece", "ours": 1.0, "stderr": 0.1, "paper": 2.0}
        >>> pivot([line, {**line, "metric": "nll", "ours": 0.3, "stderr": None, "paper": None}])
        [{'dataset': 'a', 'ECE %': '1.00 ± 0.10 (2)', 'NLL': '0.3', 'runs': None}]
    """
    if not all("metric" in entry for entry in table):
        return [dict(entry) for entry in table]
    keys = [name for name in columns(table) if name not in VALUES]
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in table:
        place = tuple(entry.get(key) for key in keys)
        line = found.setdefault(place, {key: entry.get(key) for key in keys})
        line[HEADINGS.get(entry["metric"], entry["metric"])] = _cell(entry)
        line["runs"] = entry.get("runs")
    return [
        {**{k: v for k, v in line.items() if k != "runs"}, "runs": line["runs"]}
        for line in found.values()
    ]


def _cell(entry: Mapping[str, Any]) -> str:
    ours = with_error(entry["ours"], entry.get("stderr"))
    if entry.get("paper") is None:
        return ours
    return f"{ours} ({with_error(entry['paper'], entry.get('paper_stderr'))})"
