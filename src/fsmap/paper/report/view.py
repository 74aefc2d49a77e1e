"""What the page shows of one run: its table, claims, pictures, slider and facts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fsmap.paper.report.figures import NAMES
from fsmap.paper.report.inline_svg import Glyphs, inline
from fsmap.paper.report.tables import columns, number, shown, with_error
from fsmap.paper.rows import DIFFERS, plain, verdict
from fsmap.paper.run_folder import Run, coverage
from fsmap.progress import duration

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


METHODS = {
    **NAMES,
    "l-map \u2212 ps-map": "L-MAP \u2212 PS-MAP",
    "sklearn-mlp": "scikit-learn MLP",
    "boosting": "scikit-learn boosting",
    "ridge": "scikit-learn ridge",
}
"""What methods are called in a table."""

METRICS = {
    "peak": "θ_R at the peak",
    "left_height": "height of the left bump",
    "right_height": "height of the right bump",
}
"""What metrics are called in a table; others by their name, with spaces."""

LONG_TABLE = 12
"""Lines; a longer table is folded, unless it is a table of the paper's."""


def view(run: Run, others: Sequence[Run], glyphs: Glyphs) -> dict[str, Any]:
    """Everything the template needs for one experiment."""
    summary = run.summary
    header, lines = shown(_arranged(summary.get("table", []), summary.get("group")))
    return {
        "id": run.id,
        "label": summary.get("label", ""),
        "title": summary.get("title") or run.id,
        "see": summary.get("see", ""),
        "size": summary["size"],
        "held": DIFFERS not in run.verdicts,
        "claims": [_claim(claim) for claim in summary["claims"]],
        "figures": list(_figures(run, glyphs)),
        "slider": _slider(run, glyphs),
        "header": header,
        "lines": lines,
        "numeric": _numeric(lines),
        "fold": len(lines) > LONG_TABLE and not str(summary.get("label")).startswith("Table"),
        "command": summary.get("command", f"fsmap run {run.id}"),
        "facts": _facts(summary),
        "config": [(key, number(value)) for key, value in (summary.get("config") or {}).items()],
        "deviations": _deviations(summary),
        "others": [_other(other) for other in others],
    }


def _arranged(table: Sequence[Mapping[str, Any]], group: str | None) -> list[dict[str, Any]]:
    """The table as the paper arranges those of this group, with words for ids."""
    named = [
        {k: METHODS.get(v, v) if k == "method" else v for k, v in entry.items()} for entry in table
    ]
    if group == "images":
        return pivot(named)
    if group == "uci":
        return pivot(named, "method")
    return [{k: _words(v) if k == "metric" else v for k, v in entry.items()} for entry in named]


def _words(metric: Any) -> Any:
    return METRICS.get(metric, metric.replace("_", " ")) if isinstance(metric, str) else metric


def _claim(claim: Mapping[str, Any]) -> dict[str, Any]:
    ours, paper = (None if claim.get(k) is None else number(claim[k]) for k in ("ours", "paper"))
    return {"claim": claim["claim"], "verdict": verdict(claim), "ours": ours, "paper": paper}


def _figures(run: Run, glyphs: Glyphs) -> list[dict[str, Any]]:
    names = run.summary.get("figures")
    if names is None:
        names = sorted(file.stem for file in run.folder.glob("*.svg"))
    pictures = []
    for place, name in enumerate(names):
        file = run.folder / f"{name}.svg"
        if file.parent == run.folder and file.is_file():
            label = f"{run.summary.get('title') or run.id}: {name}"
            picture = inline(file.read_text(), f"{run.id}-{place}", label, glyphs)
            pictures.append({"name": name, **picture._asdict()})
    return pictures


def _slider(run: Run, glyphs: Glyphs) -> dict[str, Any] | None:
    file = run.folder / "interactive.json"
    if not file.is_file():
        return None
    slider: dict[str, Any] = json.loads(file.read_text())
    _ = slider["title"], slider["parameter"], slider["frames"][0]  # what the template relies on
    for place, frame in enumerate(slider["frames"]):
        _ = frame["label"], frame["note"], frame["curves"]
        if frame.get("svg"):
            prefix = f"{run.id}-slider-{place}"
            picture = inline(frame.pop("svg"), prefix, frame["label"], glyphs)
            frame.update(markup=picture.markup, width=picture.width)
    slider["id"] = f"{run.id}-slider"
    slider["start"] = min(slider.get("start", 0), len(slider["frames"]) - 1)
    drawn = any(frame["curves"] for frame in slider["frames"])
    slider["data"] = {k: slider[k] for k in ("xlabel", "ylabel", "frames")} if drawn else None
    return slider


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = summary.get("machine") or {}
    cores = f", {machine['cores']} cores" if "cores" in machine else ""
    facts = {
        "protocol": summary.get("protocol"),
        "size": summary["size"],
        "device": f"{summary.get('device', '')}{cores}",
        "time": duration(summary["seconds"]) if "seconds" in summary else None,
        "torch": summary.get("torch"),
        "commit": summary.get("commit"),
        "date": str(summary.get("date", "")).replace("T", " ").removesuffix("+00:00"),
        "rows": number(summary.get("rows")) if "rows" in summary else None,
    }
    return [(name, str(value)) for name, value in facts.items() if value]


def _deviations(summary: Mapping[str, Any]) -> list[str]:
    covered = coverage(summary)
    missing = [f"covers {covered} that were asked for"] if covered else []
    return [*missing, *summary.get("deviations", [])]


def _numeric(lines: Sequence[Sequence[str]]) -> list[bool]:
    """Columns in which every filled cell starts like a number."""

    def starts(cell: str) -> bool:
        return (
            not cell or cell.lstrip("\u2212+<>≈ ")[:1].isdigit() or cell in ("\u2014", "nan", "∞")
        )

    return [all(starts(cell) for cell in column) for column in zip(*lines, strict=True)]


def _other(run: Run) -> str:
    return f"{run.folder}: {run.summary['size']}, {run.summary.get('device', '')}, {run.tally}"


def embedded(data: Any) -> str:
    """JSON that can stand inside a ``script`` element."""
    text = json.dumps(plain(data), ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
