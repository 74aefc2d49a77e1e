"""Tables of the README and of ``docs/benchmarks.md``, made from committed rows.

``python -m benchmarks.pages`` rewrites what stands between ``<!-- table: NAME -->`` and
``<!-- end -->``; ``tests/test_readme.py`` fails if a page differs. To add a row to the results of
image training, add a line to ``IMAGES``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = dict[str, Any]

FMNIST, CIFAR = {"dataset": "fmnist"}, {"dataset": "cifar10"}
NOISY, NOISE = "CIFAR-10, 20 % random labels", CIFAR | {"level": 0.2}
IMAGES = [
    # trained on, method, experiment (or a set of strength-images), unit of its rows
    ("FashionMNIST", "PS-MAP", "image-table", FMNIST | {"row": "ps-map"}),
    ("FashionMNIST", "weight decay, tuned (4e-3)", "image-table", FMNIST | {"row": "wd-4e-3"}),
    ("FashionMNIST", "L-MAP, λ = 1e-6", "image-table", FMNIST | {"row": "other"}),
    ("FashionMNIST", "label smoothing, 0.05", "image-table", FMNIST | {"row": "label-smoothing"}),
    ("FashionMNIST", "SAM, ρ = 0.05", "image-table", FMNIST | {"row": "sam"}),
    ("FashionMNIST", "LogTrace()", "image-table", FMNIST | {"row": "nats"}),
    ("FashionMNIST", "SAM and LogTrace()", "image-table", FMNIST | {"row": "sam+nats"}),
    ("CIFAR-10", "PS-MAP", "image-table", CIFAR | {"row": "ps-map"}),
    ("CIFAR-10", "L-MAP, λ = 1e-6", "image-table", CIFAR | {"row": "other"}),
    ("CIFAR-10", "SAM, ρ = 0.05", "image-table", CIFAR | {"row": "sam"}),
    ("CIFAR-10", "LogTrace()", "image-table", CIFAR | {"row": "nats"}),
    ("CIFAR-10", "SAM and LogTrace()", "image-table", CIFAR | {"row": "sam+nats"}),
    ("CIFAR-100, own split, 50 epochs", "PS-MAP", "cifar100-50", {"way": "plain"}),
    ("CIFAR-100, own split, 50 epochs", "LogTrace()", "cifar100-50", {"way": "nats"}),
]
NOISY_IMAGES = [
    (NOISY, "PS-MAP", "label-noise", NOISE | {"row": "ps-map"}),
    (NOISY, "L-MAP, λ = 1e-6", "label-noise", NOISE | {"row": "other"}),
    ("the same labels, 50 epochs", "PS-MAP", "cifar10-50-noise", {"way": "plain"}),
    ("the same labels, 50 epochs", "LogTrace()", "cifar10-50-noise", {"way": "nats"}),
]
METRICS = (("accuracy", 100, 1), ("nll", 1, 3), ("ece", 100, 1), ("nll_scaled", 1, 3))
"""Columns of most tables: factor and digits."""
HEAD = "accuracy, % | NLL | ECE, % | NLL, scaled"

METHODS = {  # name: a way of ``benchmarks.strength``, or a kind to tune by held-out log loss
    "plain": "plain",
    "weight decay, tuned": "wd",
    "label smoothing, 0.05": "smoothing=0.05",
    "SAM, ρ = 0.05": "sam=0.05",
    "SAM, tuned": "sam",
    "`LogTrace()`": "nats=0.05",
    "`LogTrace(c)`, tuned": "nats",
    "L-MAP, λ tuned": "share",
    "SAM and `LogTrace()`": "sam=0.05+nats=0.05",
    "`LogTrace()`, trimmed": "trim=0.05",
}


def rows_of(path: str) -> list[Row]:
    """The rows of a file below the root."""
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()]


def unit_values(experiment: str, unit: Row) -> dict[str, list[float]]:
    """Values by metric of the units that agree with ``unit``; empty if there is none."""
    if not (ROOT / "results" / experiment).exists():
        rows, wanted = rows_of("benchmarks/results/strength-images.jsonl"), {"set": experiment}
        return columns(
            r["test"] for r in rows if (wanted | unit).items() <= r.items() and "test" in r
        )
    rows = rows_of(f"results/{experiment}/rows.jsonl")
    return columns({r["metric"]: r["value"]} for r in rows if unit.items() <= r["unit"].items())


def table(head: str, lines: Iterable[Iterable[str]]) -> str:
    """A markdown table; ``head`` separates columns by ``|``."""
    names = [name.strip() for name in head.split("|")]
    first, *rest = ("| " + " | ".join(line) + " |\n" for line in [names, *map(list, lines)])
    return first + "|---" * len(names) + "|\n" + "".join(rest)


def cells(found: dict[str, list[float]], *, error: bool = False) -> list[str]:
    """Means of the usual metrics, with or without standard errors."""
    lines = []
    for name, factor, digits in METRICS:
        values = [factor * value for value in found[name]]
        lines.append(_mean(values, digits) if error else f"{fmean(values):.{digits}f}")
    return lines


def columns(rows: Iterable[Row]) -> dict[str, list[float]]:
    """The values of the usual metrics in rows."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for metric, value in row.items():
            found.setdefault("nll_scaled" if metric == "scaled_nll" else metric, []).append(value)
    return found


def tuned(by_way: dict[str, list[Row]], kind: str, held_out: Callable[[Row], float]) -> str:
    """The way of a kind with the lowest log loss on held-out points."""
    ways = [way for way in by_way if way.startswith(f"{kind}=") and "+" not in way]
    return min(ways, key=lambda way: fmean(map(held_out, by_way[way])))


def compared(
    by_way: dict[str, list[Row]],
    held_out: Callable[[Row], float],
    test: Callable[[Row], Row],
    cost: str,
) -> list[list[str]]:
    """A line for each method: test metrics, least time over that of plain training, seeds."""
    plain, lines = min(row[cost] for row in by_way["plain"]), []
    done: set[str] = set()
    for name, known in METHODS.items():
        way = known if "=" in known or known == "plain" else tuned(by_way, known, held_out)
        if way not in by_way or way in done:
            continue
        done.add(way)
        number = float(way.partition("=")[2]) if way != known else 0.0
        shown = f"{100 * number:g} % of the loss" if known == "share" else f"{number:g}"
        rows = by_way[way]
        time = f"{min(row[cost] for row in rows) / plain:.1f} ×"
        label = f"{name} ({shown})" if way != known else name
        lines.append([label, *cells(columns(map(test, rows)), error=True), time, str(len(rows))])
    return lines


def grouped(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by way."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["way"], []).append(row)
    return found


def images(listed: list[Any] = IMAGES) -> str:
    """Image training at the paper's length; a line appears as soon as it has rows."""
    found = ((names, unit_values(experiment, unit)) for *names, experiment, unit in listed)
    lines = (
        [*names, *cells(v, error=True), _factor(names[1]), str(len(v["nll"]))]
        for names, v in found
        if v
    )
    return table(f"trained on | method | {HEAD} | time | seeds", lines)


def _factor(method: str) -> str:
    """Time of a step over that of a plain one, ResNet-18; a dash if it was not measured alone."""
    ways = {"L-MAP": "lmap joint", "LogTrace()": "lmap joint every 2", "SAM": "sam"}
    if method.startswith("SAM and"):
        return "–"
    way = ways.get(method.split(",")[0], "plain")
    task = "resnet18" if way == "lmap joint" else "resnet18 S=32"
    return f"{_ms(task, way) / _ms(task, 'plain'):.1f} ×"


def frozen() -> str:
    """Every set and way of ``benchmarks.strength_images``."""
    rows = [r for r in rows_of("benchmarks/results/strength-images.jsonl") if "test" in r]
    pairs = sorted({(row["set"], row["way"]) for row in rows})
    found = ((s, f"`{way}`", unit_values(s, {"way": way})) for s, way in pairs)
    lines = ([*names, *cells(v), str(len(v["nll"]))] for *names, v in found)
    return table(f"set | way | {HEAD} | seeds", lines)


def small() -> str:
    """The small network of the README's picture, and other methods."""
    by_way = grouped(rows_of("benchmarks/results/reliability.jsonl"))
    lines = compared(by_way, lambda row: row["held_out_nll"], lambda row: row, "ms_a_step")
    return table(f"method | {HEAD} | time", (line[:-1] for line in lines))


COST = [
    ("ResNet-18, B = 128, S = 128, `joint`", "resnet18", "lmap joint"),
    ("ResNet-18, S = 32, `joint`", "resnet18 S=32", "lmap joint"),
    ("ResNet-18, S = 32, `joint`, `every=2`", "resnet18 S=32", "lmap joint every 2"),
    ("ResNet-18, S = 32, `frozen`", "resnet18 S=32", "lmap frozen"),
    ("ViT-S, B = 64, S = 16, `frozen`", "vit-s", "lmap frozen"),
    ("GPT-2 small, B = 16, T = 512, S = 4, `frozen`", "gpt2", "lmap frozen"),
]


def cost() -> str:
    """Milliseconds a step, compiled, in one CUDA graph."""
    lines = []
    for label, task, way in COST:
        plain, *others = (_ms(task, one) for one in ("plain", "sam", "by hand", way))
        cells = [f"{ms:.3g}" if ms else "" for ms in (plain, *others)]
        lines.append([label, *cells, f"{others[-1] / plain:.1f} ×"])
    return table("ms a step | plain | SAM | by hand | L-MAP | L-MAP over plain", lines)


def cost_short() -> str:
    """Multiples of a plain step, for the README."""
    lines = []
    for label, task, way in (COST[0], *COST[2:]):
        plain, sam, ours = (_ms(task, one) for one in ("plain", "sam", way))
        lines.append([label, f"{sam / plain:.1f} ×", f"{ours / plain:.1f} ×"])
    return table("time relative to a plain step | SAM | L-MAP", lines)


def _ms(task: str, way: str) -> float:
    """The fastest captured row; 0 if there is none."""
    rows = rows_of("benchmarks/results/loops.jsonl")
    return min(
        (r["ms"] for r in rows if (r["mode"], r["task"], r["way"]) == ("captured", task, way)),
        default=0.0,
    )


def strength() -> str:
    """Held-out log loss by c, by which the default was chosen."""
    small, large = (
        rows_of(f"benchmarks/results/{n}.jsonl") for n in ("strength", "strength-images")
    )
    ways = ["plain", "nats=0.0125", "nats=0.025", "nats=0.05", "nats=0.1", "nats=0.2", "trim=0.05"]
    ways += ["wd=1e-3", "wd=5e-3", "share=0.1"]
    lines = []
    for label, name in (
        ("8 numbers, N = 2,000, 10 % wrong", "steering"),
        ("digits, N = 1,000, 20 % wrong", "digits"),
        ("FashionMNIST, 12 epochs", "fashion-mnist, 12 epochs"),
        ("FashionMNIST, N = 2,000, width 16", "fashion-mnist, 2,000 images, width 16"),
    ):
        cells: list[float | None] = []
        for way in ways:
            nlls = [r["held-out"]["nll"] for r in small if r["set"] == name and r["way"] == way]
            nlls += [
                r["valid_nll"]
                for r in large
                if r["set"] == name and way == f"nats={r.get('nats', 0):g}"
            ]
            cells.append(fmean(nlls) if nlls else None)
        best = min(cell for cell in cells[:7] if cell is not None)
        shown = ["–" if c is None else f"**{c:.3f}**" if c == best else f"{c:.3f}" for c in cells]
        lines.append([label, *shown])
    names = ["0", *(way.partition("=")[2] for way in ways[1:6]), "trimmed"]
    head = "held-out log loss at c = | " + " | ".join(names)
    return table(head + " | weight decay 1e-3 | 5e-3 | λ: 10 %", lines)


def strength_test() -> str:
    """Test metrics by c on the first set."""
    rows = [r for r in rows_of("benchmarks/results/strength.jsonl") if r["set"] == "steering"]
    ways = ["plain", *(f"nats={c}" for c in ("0.0125", "0.025", "0.05", "0.1", "0.2"))]
    metrics = {"T": "temperature", "log loss": "nll", "accuracy, %": "accuracy", "ECE, %": "ece"}
    lines = []
    for label, name in metrics.items():
        digits = {"T": 2, "log loss": 3}.get(label, 1)
        factor = 100 if label.endswith("%") else 1
        means = (fmean(r["test"][name] for r in rows if r["way"] == way) for way in ways)
        lines.append([label, *(f"{factor * mean:.{digits}f}" for mean in means)])
    return table("c | 0 | " + " | ".join(way[5:] for way in ways[1:]), lines)


def strength_once() -> str:
    """Test metrics of the frozen default on sets that played no part in its choice."""
    rows = rows_of("benchmarks/results/strength.jsonl")
    lines: list[list[str]] = []
    for label, name in (
        ("wine, red", "wine_red"),
        ("wine, white", "wine_white"),
        ("FashionMNIST, MLP with LayerNorm", "layernorm"),
    ):
        found = grouped(r for r in rows if r["set"] == name and r["epochs"] > 1)
        made = compared(
            found, lambda row: row["held-out"]["nll"], lambda row: row["test"], "cpu_seconds"
        )
        lines += ([label, *line] for line in made)
    return table(f"set | way | {HEAD} | time | seeds", lines)


def modes() -> str:
    """Log loss by where R is taken and by how many points: the rows of ``LogTrace()``."""
    rows = [r for r in rows_of("benchmarks/results/strength.jsonl") if r["set"] == "layernorm"]
    rows += rows_of("benchmarks/results/modes.jsonl")
    sets = {
        "8 numbers, held-out": ("steering", "held-out"),
        "digits, held-out": ("digits", "held-out"),
        "wine, red": ("wine_red", "test"),
        "wine, white": ("wine_white", "test"),
        "ResNet-18, width 8, held-out": ("narrow", "held-out"),
        "LayerNorm MLP": ("layernorm", "test"),
    }
    usual = {"batchnorm": "joint", "num_points": 50, "every": 1}  # of rows that do not name it
    lines = []
    for mode, points, every in (
        ("joint", 50, 1), ("joint", 12, 2), ("batch", 12, 2), ("frozen", 50, 1), ("frozen", 12, 2),
    ):  # fmt: skip
        wanted = {"way": "nats=0.05", "batchnorm": mode, "num_points": points, "every": every}
        found = [r for r in rows if wanted.items() <= (usual | r).items()]
        cells = [f"`{mode}`", "B" if points == 50 else "B/4", str(every)]
        for name, split in sets.values():
            values = [r[split]["nll"] for r in found if r["set"] == name]
            cells.append(_mean(values) if values else "–")
        lines.append(cells)
    return table("R | S | every | " + " | ".join(sets), lines)


def _mean(values: list[float], digits: int = 3) -> str:
    """Mean and standard error."""
    error = f" ± {stdev(values) / math.sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{error}"


def other_points() -> str:
    """R at KMNIST and temperature on FashionMNIST."""
    lines = []
    for name, row in (("PS-MAP", "ps-map"), ("L-MAP, λ = 1e-6, p_X = KMNIST", "other")):
        found = unit_values("image-table", {"dataset": "fmnist", "row": row})
        R = f"{fmean(found['laplacian_other']):,.0f}"
        lines.append([name, R, f"{fmean(found['test_temperature']):.2f}"])
    return table("trained on FashionMNIST | R at KMNIST | T on test images", lines)


def gradients() -> str:
    """How far the gradient of ``fd`` is from that of ``jvp``."""
    rows = rows_of("benchmarks/results/estimator_gradients.jsonl")
    lines = []
    for activation in ("relu", "gelu"):
        base = next(r for r in rows if (r["activation"], r["estimator"]) == (activation, "jvp"))
        for r in rows:
            if r["activation"] == activation and r["estimator"] == "fd":
                cells = [f"{r['beta']:.0e}".replace("e-0", "e-"), f"{r['R'] / base['R']:.2f}"]
                cells += [f"{r['norm'] / base['norm']:.1f}", f"{r['cosine']:.2f}"]
                lines.append([activation, *cells])
    head = "activation | β | R over that of `jvp` | gradient's norm over that of `jvp` | cosine"
    return table(head, lines)


TABLES: dict[str, Callable[[], str]] = {
    "images": images,
    "images-noise": lambda: images(NOISY_IMAGES),
    "frozen": frozen,
    "small": small,
    "cost": cost,
    "cost-short": cost_short,
    "strength": strength,
    "strength-test": strength_test,
    "strength-once": strength_once,
    "modes": modes,
    "other-points": other_points,
    "gradients": gradients,
}


def filled(text: str) -> str:
    """The page with new tables."""
    return MARK.sub(lambda found: found[1] + "\n" + TABLES[found[2]]() + "\n" + found[3], text)


def main() -> None:
    """Rewrite the tables of all pages."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
