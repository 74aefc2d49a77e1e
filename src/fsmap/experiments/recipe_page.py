"""``docs/recipe.md``, made from the rows of ``image-recipe``: every number in it was measured.

python -m fsmap.experiments.recipe_page results > docs/recipe.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsmap.experiments.image_pictures import NAMES
from fsmap.experiments.recipe_verdict import recipe_claims, recipe_table
from fsmap.experiments.run_folder import RunFolder
from fsmap.report.numbers import number
from fsmap.report.records import Row

COLUMNS = {
    "run": "run",
    "lam": "λ at the end",
    "accuracy": "accuracy %",
    "nll": "NLL",
    "ece": "ECE %",
    "temperature": "T",
    "nll_scaled": "NLL after T",
    "ms_per_step": "ms a step, all in",
    "pareto": "Pareto",
}

OPENING = """\
# A recipe that calibrates

Which λ, BatchNorm mode, estimator, S and `every` give the best calibration at no loss of accuracy?
This page is made from the rows of the experiment `image-recipe` and holds no number that was not
measured there. Make it again with

    fsmap run image-recipe --out results --resume
    python -m fsmap.experiments.recipe_page results > docs/recipe.md

Every run is named by its BatchNorm mode and its λ; `auto` is λ steered by held-out images
([guide/temperature.md](guide/temperature.md)), from one percent of the loss or from the value
named. T is the temperature that fits held-out images; "after T" is after dividing the logits by
it, for PS-MAP as well: that is the baseline a calibration method has to beat. A run is on the
Pareto front (✓) if no other on the same set is at least as good in accuracy, NLL, ECE and NLL
after T, and better in one of them. Times include evaluation and checkpoints.
"""

NOTHING = """\

**Nothing has been measured at full size yet**: there are no rows in `results/image-recipe`. The
tables and the verdict appear here once there are.
"""


def page(rows: Sequence[Row], command: str = "") -> str:
    """The page.

    Args:
        rows: Rows of ``image-recipe``; none: the page says so.
        command: What repeats the run.

    Returns:
        Markdown.
    """
    if not rows:
        return OPENING + NOTHING
    parts = [OPENING]
    table = recipe_table(rows)
    for dataset in dict.fromkeys(line["dataset"] for line in table):
        mine = [line for line in table if line["dataset"] == dataset]
        about = next(row.config for row in rows if row.config["dataset"] == dataset)
        made = " (generated images)" if about["generated"] else ""
        parts.append(f"\n## {NAMES[dataset]}, {about['epochs']} epochs{made}\n")
        parts.append(_markdown(mine))
    parts.append("\n## Verdict\n")
    parts += [f"- {_mark(c.holds)} {c.claim}: {c.ours}" for c in recipe_claims(rows)]
    devices = ", ".join(dict.fromkeys(row.device for row in rows))
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    parts.append(f"\nMeasured on {devices}, commit {commits}. {command}".rstrip())
    return "\n".join(parts) + "\n"


def _markdown(lines: Sequence[dict[str, Any]]) -> str:
    head = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    body = ["| " + " | ".join(_cell(line, key) for key in COLUMNS) + " |" for line in lines]
    return "\n".join([*head, *body])


def _cell(line: dict[str, Any], key: str) -> str:
    value = line[key]
    if key == "pareto":
        return "✓" if value else ""
    return number(value, 3 if key in ("lam", "temperature", "ms_per_step") else 4)


def _mark(holds: bool) -> str:
    return "✓" if holds else "✗"


def read(results: Path) -> list[Row]:
    """Rows of the finished full-size run in a folder of results; none where there is none."""
    run = RunFolder(results / "image-recipe")
    return run.rows() if run.finished and run.header()["size"] == "full" else []


if __name__ == "__main__":
    sys.stdout.write(page(read(Path(sys.argv[1] if len(sys.argv) > 1 else "results"))))
