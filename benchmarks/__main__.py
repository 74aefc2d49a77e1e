"""Time, peak memory and error of every method, beside what one would write today.

    python -m benchmarks            all networks and numbers of points, ten minutes on two cores
    python -m benchmarks --quick    small ones, about a minute

Everything runs in float64: fsmap accumulates Gram matrices in float64 whatever the model's dtype,
so this is where all do the same work. ``--dtype float32`` shows the other case. Rows are written
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

from benchmarks import cells, limit, measure, others, ours, table
from benchmarks.cells import Cell
from benchmarks.table import Row
from fsmap.paper.rows import circumstances

WORKS = tuple(table.TITLES)
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
    print(table.growth(rows))
    if not options.quick and not options.network:
        rows.append(_limit() | header)
    RESULTS.mkdir(exist_ok=True)
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
                ratio = _ratio(cell, mine, theirs, rivals, found, gradient=gradient)
            for index, (way, measured) in enumerate(found.items()):
                row = _row(cell, work, gradient, way, measured, reference)
                row["ours"] = way in mine
                row["ratio"] = ratio if index == 0 else None
                if index == 0:
                    print(table.title(row))
                print(table.line(row), flush=True)
                yield row
            if not rivals:
                print("    (none of the others does this, or its Jacobian would not fit)")


def _ratio(
    cell: Cell,
    mine: dict[str, measure.Work],
    theirs: dict[str, measure.Work],
    rivals: list[str],
    found: dict[str, measure.Measured],
    *,
    gradient: bool,
) -> float | None:
    """Time of the best of the others over ours."""
    if not rivals:
        return None
    best, first = min(rivals, key=lambda name: found[name].median), next(iter(mine))
    once = found[best].median + found[first].median
    if once > measure.ONCE:
        return found[best].median / found[first].median
    return measure.ratio(mine[first], theirs[best], cell.module, gradient=gradient, once=once)


def _row(
    cell: Cell,
    work: str,
    gradient: bool,
    way: str,
    measured: measure.Measured,
    reference: float | None,
) -> Row:
    low, high = measured.quartiles
    values = measured.values
    other = way.removeprefix("fsmap ") in ("svd_clip", "pseudo", "first_order")  # other numbers
    known = reference is not None and not other
    return {
        "work": work,
        "gradient": gradient,
        "network": cell.network,
        "P": cell.P,
        "rows": cell.rows,
        "S": len(cell.x),
        "K": cell.K,
        "way": way,
        "seconds": measured.median,
        "low": low,
        "high": high,
        "n": len(values),
        "peak_bytes": measured.peak_bytes,
        "reference": reference,
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


def _limit() -> Row:
    found = limit.measure()
    print(f"\nslq with gradient at P = {found['P']:,}, S·K = {found['rows']}, whole process:")
    for kind in ("explicit", "factored", "passes"):
        peak = found[f"peak_bytes_{kind}"]
        verdict = "below" if peak < limit.LIMIT else "ABOVE"
        seconds = found[f"seconds_{kind}"]
        print(f"  {kind:10} {seconds:6.1f} s, peak {peak / 1e9:.2f} GB ({verdict} 2 GB)")
    return {"work": "limit", **found}


def _header(options: argparse.Namespace) -> dict[str, str]:
    where = circumstances(options.device)
    versions = {
        name: metadata.version(package)
        for name, package in (
            ("curvlinops", "curvlinops-for-pytorch"),
            ("linear_operator", "linear_operator"),
        )
        if name not in others.missing()
    }
    cores = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "device": f"{where.device} ({cores})",
        "dtype": options.dtype,
        "torch": where.torch,
        "commit": where.commit,
        **versions,
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
