"""Peak memory of slq with gradient at a million parameters, in a process of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import torch

LIMIT = 2 * 10**9
ROWS = 512


def measure() -> dict[str, float]:
    """Run this module as a process and read what it prints."""
    command = [sys.executable, "-m", "benchmarks.limit"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    import fsmap
    from benchmarks.cells import JITTER, PROBES, cell

    here = cell("mlp-1e6", ROWS)
    f, params = fsmap.functional(here.module)
    found = {"P": here.P, "rows": here.rows}
    from fsmap.linalg.jacobian import Site
    from fsmap.linalg.slq import KINDS, slq

    eps = torch.tensor(JITTER, dtype=torch.float64)
    for kind in KINDS:
        start = time.perf_counter()
        slq(Site(f, params, here.x), eps, probes=PROBES, kind=kind).value.backward()
        found[f"seconds_{kind}"] = time.perf_counter() - start
        found[f"peak_bytes_{kind}"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(found))


if __name__ == "__main__":
    main()
