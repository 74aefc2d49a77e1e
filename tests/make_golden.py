"""Golden numbers: what the library and the quick experiments compute at fixed seeds.

    python tests/make_golden.py           # write tests/golden.json
    python tests/make_golden.py --check   # compare with it; name each number that differs
    python tests/make_golden.py --check fourier reparam   # the library and these experiments

Numbers of float64 computations are compared to 1e-9, those of float32 to 1e-5, relative to the
number or to the largest one of its column. Experiments train for many steps, which amplifies
rounding: their numbers hold for one version of torch on one model of CPU only, which the file
names. Regenerate the file when a change is meant to change numbers, and say so in the commit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fsmap
from fsmap.cli import main as fsmap_command
from fsmap.files import revive

FILE = Path(__file__).with_name("golden.json")
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
SMALLEST = {"float64": 1e-12, "float32": 1e-7}
EXPERIMENTS = """
    mixture-posterior mixture-bma fourier fourier-points fourier-pX fourier-noise reparam
    theory-metric theory-any-parameter theory-symmetry theory-flat theory-large-data
    logdet-mc laplacian-vs-logdet moons-eigs moons-solutions moons-pathology
""".split()

Number = dict[str, Any]
"""``dtype``, ``value``, and ``scale`` if it is compared relative to more than itself."""


@contextmanager
def fixed() -> Iterator[None]:
    """One thread, a seeded global generator; both as before afterwards."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def machine() -> dict[str, str]:
    """What the numbers of the experiments depend on besides the code."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "cpu": f"{model} {capability}".strip()}


def library() -> dict[str, Number]:
    """Numbers of ``log_det``, ``trace``, ``LMAP``, ``fit`` and ``fit_population``."""
    found: dict[str, Number] = {}
    for dtype in (torch.float64, torch.float32):
        name = str(dtype).removeprefix("torch.")
        with fixed():
            torch.set_default_dtype(dtype)
            for key, value in [*_jacobian(), *_lmap(), *_fits()]:
                found[f"{key} {name}"] = {
                    "dtype": name,
                    "value": float(torch.as_tensor(value).detach()),
                }
    return found


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _jacobian() -> Iterator[tuple[str, Any]]:
    torch.manual_seed(0)
    f, params = fsmap.functional(nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = torch.randn(12, 2, generator=_generator(1))
    for method in ("auto", "dense", "dual", "slq", "svd_clip", "pseudo", "first_order"):
        jitter = 1e-4 if method == "pseudo" else 0.1
        value = fsmap.log_det(f, params, x, jitter=jitter, method=method, generator=_generator())
        yield f"log_det {method}", value
    for method in ("fd", "fd_central", "jvp", "vjp", "exact"):
        if method.startswith("fd") and torch.get_default_dtype() == torch.float32:
            continue  # differences of float32 outputs keep three digits
        found = fsmap.trace(f, params, x, method=method, probes=4, generator=_generator())
        yield f"trace {method}", found.value
        yield f"trace {method} stderr", found.stderr


def _lmap() -> Iterator[tuple[str, Any]]:
    for mode in ("joint", "frozen", "batch"):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(),
            nn.BatchNorm1d(6), nn.Linear(6, 3),
        )  # fmt: skip
        penalized = fsmap.LMAP(
            network, fsmap.px.Normal(shape=(4,)), num_points=7, batchnorm=mode, seed=3
        )
        for step in range(2):  # the second one with running statistics that have moved
            x = torch.randn(9, 4, generator=_generator(step))
            out, R = penalized(x)
            network.zero_grad()
            (out.square().mean() + 0.1 * R).backward()
            yield f"LMAP {mode} step {step} R", R
            gradients = [p.grad for p in network.parameters()]
            yield f"LMAP {mode} step {step} gradient", nn.utils.get_total_norm(gradients)


def _fits() -> Iterator[tuple[str, Any]]:
    torch.manual_seed(0)
    f, params = fsmap.functional(nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)))
    x = torch.linspace(-1, 1, 24)[:, None]
    data = (x, (3 * x).sin())
    noise, px = fsmap.Gaussian(0.2), fsmap.px.Uniform(-2.0, 2.0, shape=(1,))
    points: dict[str, Any] = {"num_points": 16, "jitter": 0.1}
    run: dict[str, Any] = {"steps": 30, "batch_size": 8, "progress": False}
    kinds = [(fsmap.ps_map, (), {}), (fsmap.fs_map, (px,), points),
             (fsmap.l_map, (px,), {**points, "estimator": "jvp"})]  # fmt: skip
    for make, where, how in kinds:
        name = make.__name__

        def build(prior_std: Any = 1.0, make=make, where=where, how=how) -> fsmap.Objective:
            return make(noise, fsmap.Normal(prior_std), *where, num_data=24, **how)

        state, history = fsmap.fit(build(), f, params, data, seed=5, clip=10.0, **run)
        yield f"fit {name} loss", history.loss[-1]
        yield from ((f"fit {name} {part}", v) for part, v in history.parts[-1].items())
        yield f"fit {name} params", nn.utils.get_total_norm(state.params.values())
        grid = fsmap.Grid(prior_std=[0.5, 2.0], seed=[0, 1])
        states, history = fsmap.fit_population(build, grid, f, data, **run)
        yield from ((f"fit_population {name} loss {k}", v) for k, v in enumerate(history.loss[-1]))
        yield f"fit_population {name} params", nn.utils.get_total_norm(states.params.values())


def experiments(names: Sequence[str], out: Path) -> dict[str, Number]:
    """Numbers of the rows of experiments at quick size, by experiment, metric and method."""
    found: dict[str, Number] = {}
    for name in names:
        with fixed():
            code = fsmap_command(
                ["run", name, "--quick", "--device", "cpu", "--out", str(out), "--resume"]
            )
        assert code == 0, f"fsmap run {name} --quick ended with {code}"
        lines = (out / name / "rows.jsonl").read_text().splitlines()
        found.update(summarize([json.loads(line) for line in lines]))
    return found


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Number]:
    """Count, mean, smallest and largest of the finite values of each column."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        if "second" in row["metric"] or "time" in row["metric"]:
            continue
        key = " ".join(str(row[k]) for k in ("experiment", "metric", "method") if row[k])
        values = torch.tensor(revive(row["value"]), dtype=torch.float64)
        columns.setdefault(key, []).extend(values.flatten().tolist())
    found: dict[str, Number] = {}
    for key, values in columns.items():
        finite = [v for v in values if math.isfinite(v)]
        for what, number in (("count", len(values)), ("finite", len(finite))):
            found[f"{key} {what}"] = {"dtype": "float64", "value": number}
        if finite:
            scale = max(map(abs, finite))
            numbers = {"mean": math.fsum(finite) / len(finite), "min": min(finite)}
            for what, value in {**numbers, "max": max(finite)}.items():
                found[f"{key} {what}"] = {"dtype": "float64", "value": value, "scale": scale}
    return found


def differences(expected: Mapping[str, Number], found: Mapping[str, Number]) -> list[str]:
    """A line for each number that is missing, new or different."""
    lines = [f"{key}: missing" for key in expected.keys() - found.keys()]
    lines += [f"{key}: new" for key in found.keys() - expected.keys()]
    for key in expected.keys() & found.keys():
        a, b, dtype = expected[key]["value"], found[key]["value"], expected[key]["dtype"]
        scale = max(abs(a), expected[key].get("scale", 0.0))
        if not abs(a - b) <= max(TOLERANCE[dtype] * scale, SMALLEST[dtype]):
            off = abs(a - b) / (scale or 1.0)
            lines.append(f"{key}: {a!r} was {b!r} now, off by {off:.1e} ({dtype})")
    return sorted(lines)


def of_experiments(numbers: Mapping[str, Number], names: Sequence[str]) -> dict[str, Number]:
    """Those of the numbers that belong to these experiments."""
    return {key: number for key, number in numbers.items() if key.split()[0] in names}


def main() -> int:
    """Write the file, or compare with it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiments", nargs="*", metavar="ID", help="default: all on a CPU")
    parser.add_argument("--check", action="store_true", help="compare; exit with 1 if it differs")
    asked = parser.parse_args()
    if asked.experiments and not asked.check:
        parser.error("the file holds all experiments: name some with --check only")
    names = asked.experiments or EXPERIMENTS
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "machine": machine(),
            "library": library(),
            "experiments": experiments(names, Path(folder)),
        }
    if not asked.check:
        parts = []
        for part, numbers in found.items():
            lines = ",\n  ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in numbers.items())
            parts.append(f" {json.dumps(part)}: {{\n  {lines}\n }}")
        FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")
        print(f"{FILE}: {len(found['library'])} + {len(found['experiments'])} numbers")
        return 0
    golden = json.loads(FILE.read_text())
    if golden["machine"] != found["machine"]:
        print(f"made on {golden['machine']}, compared on {found['machine']}", file=sys.stderr)
    lines = differences(golden["library"], found["library"])
    lines += differences(of_experiments(golden["experiments"], names), found["experiments"])
    print("\n".join(lines) if lines else "all golden numbers are the same")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
