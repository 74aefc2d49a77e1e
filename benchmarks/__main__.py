"""Time, peak memory and error of every method, and of the same computation without fsmap.

    python -m benchmarks            all networks and numbers of points, ten minutes on two cores
    python -m benchmarks --quick    small ones, about a minute

Everything runs in float64: fsmap accumulates Gram matrices in float64 whatever the model's dtype,
so all do the same work in this case. ``--dtype float32`` shows the other case. Rows are written
to ``benchmarks/results/rows.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from benchmarks import cells, measure, others, ours, table
from benchmarks.cells import Cell
from benchmarks.table import Row
from fsmap.files import circumstances

WORKS = tuple(table.TITLES)
Works = dict[str, measure.Work]
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = _parser().parse_args()
    warnings.simplefilter("ignore")  # the other libraries' own
    for name in others.missing():
        print(f"{name} is not installed: its rows are skipped. To have them: {others.INSTALL}")
    header = _header(options)
    print("  ".join(f"{name} {value}" for name, value in header.items()))
    rows: list[Row] = []
    numbers = cells.QUICK_ROWS if options.quick else cells.ROWS
    networks = ("mlp-1e3", "cnn") if options.quick else tuple(cells.NETWORKS)
    for network in options.network or networks:
        for count in options.rows or numbers:
            here = cells.cell(network, count, options.device, getattr(torch, options.dtype))
            for row in _rows(here, options.work or WORKS):
                rows.append(row | header)
    print(table.summary(rows))
    path = RESULTS / ("quick.jsonl" if options.quick else "rows.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"\n{len(rows)} rows: benchmarks/results/{path.name}")


def _rows(cell: Cell, works: tuple[str, ...]) -> Iterator[Row]:
    for work in works:
        reference = _reference(cell, work)
        for gradient in (False, True):
            with torch.set_grad_enabled(gradient):
                mine, theirs = getattr(ours, work)(cell), getattr(others, work)(cell)
                found = measure.in_turns({**mine, **theirs}, cell.module, gradient=gradient)
                rivals = [name for name in theirs if not name.endswith("(reference)")]
                ratio = _ratio(cell, mine, {n: theirs[n] for n in rivals}, found, gradient)
            for index, (way, measured) in enumerate(found.items()):
                row = {"work": work, "gradient": gradient, "ours": way in mine, "ratio": None}
                row |= _row(cell, way, measured, reference)
                if index == 0:
                    row["ratio"] = ratio
                    print(table.title(row))
                print(table.line(row), flush=True)
                yield row
            if not rivals:
                print("    (none of the others does this, or its Jacobian would not fit)")


def _ratio(
    cell: Cell, mine: Works, rivals: Works, found: dict[str, measure.Measured], gradient: bool
) -> float | None:
    """Time of the best of the others over ours."""
    if not rivals:
        return None
    best, first = min(rivals, key=lambda name: found[name].median), next(iter(mine))
    once = found[best].median + found[first].median
    if once > measure.ONCE:
        return found[best].median / found[first].median
    return measure.ratio(mine[first], rivals[best], cell.module, gradient=gradient, once=once)


def _row(cell: Cell, way: str, measured: measure.Measured, reference: float) -> Row:
    (low, high), values = measured.quartiles, measured.values
    known = way.removeprefix("fsmap ") not in ("svd_clip", "pseudo", "first_order")  # other numbers
    return {
        **{"network": cell.network, "P": cell.P, "rows": cell.rows, "S": len(cell.x), "K": cell.K},
        **{"way": way, "seconds": measured.median, "low": low, "high": high, "n": len(values)},
        **{"peak_bytes": measured.peak_bytes, "reference": reference},
        "bias": statistics.mean(values) - reference if known else None,
        "std": statistics.stdev(values) if known and len(values) > 2 else math.nan,
    }


def _reference(cell: Cell, work: str) -> float:
    """The definition in float64 where its Jacobian fits; else our exact method in float64."""
    double = cells.cell(cell.network, cell.rows, str(cell.x.device), torch.float64)
    work = "exact_trace" if work.endswith("trace") else "log_det"
    with torch.no_grad():
        side = others if others.fits(double) else ours
        return float(next(iter(getattr(side, work)(double).values()))())


def _header(options: argparse.Namespace) -> dict[str, str]:
    where = circumstances(options.device)
    packages = {"curvlinops": "curvlinops-for-pytorch", "linear_operator": "linear_operator"}
    cores = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        **where,
        **{"device": f"{where['device']} ({cores})", "dtype": options.dtype},
        **{n: metadata.version(p) for n, p in packages.items() if n not in others.missing()},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, about a minute")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float64", choices=("float64", "float32"))
    parser.add_argument("--network", nargs="*", choices=tuple(cells.NETWORKS))
    parser.add_argument("--rows", nargs="*", type=int, help="S·K")
    parser.add_argument("--work", nargs="*", choices=WORKS)
    return parser


if __name__ == "__main__":
    main()
