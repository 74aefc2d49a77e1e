"""``log_det`` and ``trace`` against another commit, run by run in turns.

    python -m benchmarks.against d066ad2             small cells
    python -m benchmarks.against d066ad2 --full      all of them

Two processes, one with the code of each commit, run the networks of ``benchmarks.cells`` through
the public functions, in float64 on one thread. A run of the one is followed by the same run of the
other, so a busy machine slows both. The placement of a process's memory changes its times by up to
30 %, so there are three such pairs of processes: the ratio is the median over all pairs of runs of
the time of this checkout over that of the commit. Above 1 is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import cells, measure
from benchmarks.cells import JITTER, PROBES

ROOT = Path(__file__).parents[1]
LIMIT = 1.1
PROCESSES = 3  # of each commit
RESULTS = Path(__file__).parent / "results" / "against.jsonl"


class Worker:
    """A process that runs cells with the code of one tree."""

    def __init__(self, tree: Path) -> None:
        path = os.pathsep.join([str(tree / "src"), str(ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.against", "--worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def ask(self, **question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def ways_of(cell: Any) -> dict[str, Callable[[], Any]]:
    """Everything that is timed at a cell, by name."""
    import fsmap

    f, params = fsmap.functional(cell.module)
    exact = ("auto", "dense", "dual", "svd_clip", "pseudo") if cell.P <= 2_000 else ("auto",)
    found: dict[str, Callable[[], Any]] = {}
    for name in (*exact, "first_order", "slq"):
        given = {"jitter": JITTER} | ({"probes": PROBES} if name == "slq" else {})
        found[f"log_det {name}"] = partial(fsmap.log_det, f, params, cell.x, method=name, **given)
    for name in ("exact", "jvp", "vjp", "fd", "fd_central"):
        probes = {} if name == "exact" else {"probes": PROBES}
        run = partial(fsmap.trace, f, params, cell.x, method=name, **probes)
        found[f"trace {name}"] = lambda run=run: run().value
    return found


def work_for_ever() -> None:
    """Answer requests: the ways of a cell, or the time of one."""
    import torch

    torch.set_num_threads(1)
    known: dict[tuple[str, int], Any] = {}
    for line in sys.stdin:
        question = json.loads(line)
        key = (question["network"], question["rows"])
        try:
            if key not in known:
                cell = cells.cell(*key, "cpu", torch.float64)
                known[key] = cell.module, ways_of(cell)
            module, ways = known[key]
            if "way" not in question:
                answer: Any = list(ways)
            else:
                gradient = question["gradient"]
                with torch.set_grad_enabled(gradient):
                    answer = measure.run(ways[question["way"]], module, gradient)[0]
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The tree of a commit in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "src"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def compare(
    pairs: Sequence[tuple[Worker, Worker]], seconds: float, least: int, **question: Any
) -> tuple[float, int]:
    """Median ratio of the times, and the number of pairs of runs."""
    first = sum(new.ask(**question) + old.ask(**question) for new, old in pairs)  # warm-up
    ratios: list[float] = []
    end = time.monotonic() + max(seconds, 3 * first)
    while len(ratios) < least or (time.monotonic() < end and len(ratios) < 150):
        number, place = divmod(len(ratios), len(pairs))
        new, old = pairs[place]
        order = [new, old] if number % 2 else [old, new]
        taken = {id(worker): worker.ask(**question) for worker in order}
        ratios.append(taken[id(new)] / taken[id(old)])
    return statistics.median(ratios), len(ratios)


def main() -> None:
    """Compare all cells, print a line each, append rows."""
    from fsmap.files import circumstances

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("--full", action="store_true", help="all networks and numbers of points")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one comparison, about")
    parser.add_argument("--pairs", type=int, default=45, help="of runs, at least (9 with --full)")
    options = parser.parse_args()
    networks = tuple(cells.NETWORKS) if options.full else ("mlp-1e3", "cnn")
    about, slower = {**circumstances("cpu"), "against": options.commit}, []
    with checkout(options.commit) as tree, RESULTS.open("a") as file:
        workers = [(Worker(ROOT), Worker(tree)) for _ in range(PROCESSES)]
        for network in networks:
            for rows in cells.ROWS if options.full else cells.QUICK_ROWS:
                where = {"network": network, "rows": rows}
                for way, gradient in [
                    (w, g) for w in workers[0][0].ask(**where) for g in (False, True)
                ]:
                    which = {**where, "way": way, "gradient": gradient}
                    ratio, pairs = compare(workers, options.seconds, options.pairs, **which)
                    file.write(json.dumps({**which, "ratio": ratio, "n": pairs, **about}) + "\n")
                    mark = "  SLOWER" if ratio > LIMIT else ""
                    slower += [which] if mark else []
                    kind = "gradient" if gradient else "value"
                    print(f"{network:8} {rows:5} {way:20} {kind:8} {ratio:5.2f} "
                          f"({pairs} pairs){mark}", flush=True)  # fmt: skip
    print(f"{len(slower)} cells are slower than {options.commit} by more than 10 %")


if __name__ == "__main__":
    work_for_ever() if "--worker" in sys.argv else main()
