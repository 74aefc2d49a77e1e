"""``docs/recipe.md``, made from rows of ``image-recipe`` and ``image-table``: all was measured.

python -m fsmap.experiments.recipe_page results > docs/recipe.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsmap.experiments.image_pictures import NAMES
from fsmap.experiments.image_verdict import full_length, mean_of, table_claims
from fsmap.experiments.recipe_verdict import recipe_claims, recipe_table
from fsmap.experiments.run_folder import RunFolder
from fsmap.report.numbers import number
from fsmap.report.records import Claim, Row
from fsmap.report.tables import Mean

COLUMNS = {
    "run": "run",
    "runs": "seeds",
    "estimator": "estimator",
    "num_points": "S",
    "every": "every",
    "lam": "λ at the end",
    "accuracy": "accuracy %",
    "nll": "NLL",
    "ece": "ECE %",
    "temperature": "T",
    "nll_scaled": "NLL after T",
    "pareto": "Pareto",
}

LONG = {
    "accuracy": "accuracy %",
    "nll": "NLL",
    "ece": "ECE %",
    "temperature": "T",
    "nll_scaled": "NLL after T",
    "ece_scaled": "ECE after T, %",
    "laplacian_other": "R at D'",
    "laplacian_joint": "R in training mode",
}
"""Columns of the table of full-length runs."""

BEST = {
    "accuracy": ("most accurate", max),
    "nll": ("lowest NLL", min),
    "ece": ("lowest ECE", min),
    "nll_scaled": ("lowest NLL after T", min),
}
"""What decides between full-length runs, in words, and which of its values is the best."""

OPENING = """\
# A recipe that calibrates

Which λ, BatchNorm mode, estimator, S and `every` give the best calibration at no loss of accuracy?
This page is made from the rows of the experiments `image-recipe` (short runs, to compare) and
`image-table` (the paper's length) that are in `results/`, and holds no number that was not measured
there. Where S, `every` and the estimator were varied besides: [guide/images.md](guide/images.md)
and `results/pieces`. It is made again by

    python -m fsmap.experiments.recipe_page results > docs/recipe.md

and `fsmap run image-recipe image-table --out results --resume` trains what is missing of both (on a
GPU: full-length runs of ResNet-18).

R is the Laplacian term, estimated at S images of p_X on every k-th step. p_X = D' is KMNIST for
FashionMNIST and CIFAR-100 for CIFAR-10; in `joint` R is the mean over the batch's training images
too, and runs of the other modes draw from both in the same proportion.
[guide/lmap.md](guide/lmap.md) has the modes, and [guide/images.md](guide/images.md) what they cost.
Every run is named by its BatchNorm mode and its λ; `auto` is λ steered by held-out images
([guide/temperature.md](guide/temperature.md)), from one percent of the loss or from the value
named. T is the temperature that fits held-out images; "after T" is after dividing the logits by it,
for PS-MAP as well: that is the baseline a calibration method has to beat. A run is on the Pareto
front (✓) if no other on the same set is at least as good in
accuracy, NLL, ECE and NLL after T, and better in one of them.
"""


def page(rows: Sequence[Row], long: Sequence[Row] = ()) -> str:
    """The page.

    Args:
        rows: Rows of ``image-recipe``.
        long: Rows of ``image-table``.

    Returns:
        Markdown.
    """
    parts = [OPENING, *_recipe(long), *_in_short(long)]
    table = recipe_table(rows)
    for dataset in dict.fromkeys(line["dataset"] for line in table):
        mine = [line for line in table if line["dataset"] == dataset]
        about = next(row.config for row in rows if row.config["dataset"] == dataset)
        made = " (generated images)" if about["generated"] else ""
        length = f"{about['epochs']} epochs{_decay(about)}{made}"
        parts.append(f"\n## {NAMES[dataset]}, {length}\n")
        parts.append(_markdown(mine))
    for dataset in dict.fromkeys(row.config["dataset"] for row in long):
        about = next(row.config for row in long if row.config["dataset"] == dataset)
        length = f"the paper's length{_decay(about)} (mean ± standard error)"
        parts.append(f"\n## {NAMES[dataset]}, {length}\n")
        parts.append(_long(full_length(long, dataset)))
    parts += ["\n## Verdict\n", "Claims compare the seeds that both sides have.\n"]
    parts += ["Short runs:\n", *_verdict(recipe_claims(rows))]
    if long:
        parts += ["\nAt the paper's length:\n", *_verdict(table_claims(long))]
    devices = ", ".join(dict.fromkeys(row.device for row in (*rows, *long)))
    commits = ", ".join(dict.fromkeys(row.commit for row in (*rows, *long)))
    parts.append(f"\nMeasured on {devices}, commit {commits}.")
    return "\n".join(parts) + "\n"


def _decay(config: Mapping[str, Any]) -> str:
    return f", weight decay {number(config['weight_decay'])}" if "weight_decay" in config else ""


def _recipe(long: Sequence[Row]) -> list[str]:
    """In a sentence what the row ``recipe`` is; nothing where it was not run."""
    config = next((row.config for row in long if row.config["row"] == "recipe"), None)
    if config is None:
        return []
    return [f"**The recipe**: {_way(config)}."]


def _in_short(long: Sequence[Row]) -> list[str]:
    """Of every set, which full-length run is best at what, means over seeds."""
    lines = []
    for dataset in dict.fromkeys(row.config["dataset"] for row in long):
        mine = full_length(long, dataset)
        names = dict.fromkeys(row.config["row"] for row in mine)
        best = []
        for metric, (words, pick) in BEST.items():
            found = {name: mean_of(mine, metric, row=name) for name in names}
            means = {name: mean.mean for name, mean in found.items() if mean.n}
            if means:
                winner = pick(means, key=means.__getitem__)
                unit = " %" if metric in ("accuracy", "ece") else ""
                best.append(f"{words} `{winner}` ({number(means[winner], 4)}{unit})")
        if best:
            lines.append(f"- {NAMES[dataset]}: {', '.join(best)}")
    return ["\n**In short**, at the paper's length (means over seeds):\n", *lines] if lines else []


def _way(config: Mapping[str, Any]) -> str:
    """Estimator, BatchNorm mode, S, ``every`` and λ; a dash for PS-MAP."""
    if config.get("estimator") is None:
        return "—"
    strength = config["reg_strength"]
    how = "λ steered" if strength == "auto" else f"λ = {number(strength)}"
    mode = f"`{config['estimator']}`, `{config['batchnorm']}`"
    return f"{mode}, S = {config['num_points']}, every = {config['every']}, {how}"


def _verdict(claims: Iterable[Claim]) -> list[str]:
    return [f"- {'✓' if c.holds else '✗'} {c.claim}: {c.ours}" for c in claims]


def _long(rows: Sequence[Row]) -> str:
    head = ["run", "R by", "seeds", *LONG.values()]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in dict.fromkeys(row.config["row"] for row in rows):
        means = [mean_of(rows, metric, row=name) for metric in LONG]
        cells = [_plus_minus(m, of=means[0].n) for m in means]
        ways = dict.fromkeys(_way(row.config) for row in rows if row.config["row"] == name)
        first = [name, " and ".join(ways), str(means[0].n)]
        lines.append("| " + " | ".join([*first, *cells]) + " |")
    return "\n".join(lines)


def _plus_minus(mean: Mean, of: int) -> str:
    if not mean.n:
        return "—"
    error = f" ± {number(mean.stderr, 1)}" if mean.n > 1 else ""
    return number(mean.mean, 4) + error + (f" (of {mean.n})" if mean.n != of else "")


def _markdown(lines: Sequence[dict[str, Any]]) -> str:
    head = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    body = ["| " + " | ".join(_cell(line, key) for key in COLUMNS) + " |" for line in lines]
    return "\n".join([*head, *body])


def _cell(line: dict[str, Any], key: str) -> str:
    value = line[key]
    if key == "pareto":
        return "✓" if value else ""
    return number(value, 3 if key in ("lam", "temperature") else 4)


def read(results: Path, experiment: str) -> list[Row]:
    """Rows of a finished full-size run in a folder of results; none where there is none."""
    run = RunFolder(results / experiment)
    return run.rows() if run.finished and run.summary()["size"] == "full" else []


def main() -> None:
    """Write the page to the standard output, unless there is nothing to write about."""
    parser = argparse.ArgumentParser(description="docs/recipe.md from rows.")
    parser.add_argument("results", nargs="?", type=Path, default=Path("results"))
    folder = parser.parse_args().results
    rows = read(folder, "image-recipe")
    if not rows:
        parser.error(f"no finished image-recipe of full size in {folder} (--quick does not count)")
    sys.stdout.write(page(rows, read(folder, "image-table")))


if __name__ == "__main__":
    main()
