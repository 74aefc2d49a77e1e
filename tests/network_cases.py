"""Experiments on small networks: tiny sizes, and rows made up for their claims."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch

from fsmap.paper.experiment import Context, Row, get
from fsmap.paper.rows import plain, revive

TINY = {
    "logdet-mc": {"draws": 3, "block": 2, "width": 3, "grid": 6, "samples": (18, 9)},
    "laplacian-vs-logdet": {"draws": 3, "block": 2, "width": 3, "grid": 6, "probes": 4},
    "moons-eigs": {
        "steps": 3, "grid": 5, "lap_points": 6, "det_points": 5, "seeds": 1, "jitters": (0.1, 10.0),
    },
    "moons-solutions": {"steps": 3, "grid": 5, "lap_points": 6, "between": 0, "pixels": 4},
    "moons-pathology": {"jitters": (1e-4,), "seeds": 2, "steps": 3, "stages": 2, "decades": 2},
}  # fmt: skip


def measure(name: str, out: Path) -> list[Row]:
    """All rows of a tiny run, as they come back from a file."""
    experiment = get(name)
    config = dataclasses.replace(experiment.quick, **TINY[name])
    shares: list[float] = []
    context = Context(torch.device("cpu"), out, lambda news: shares.append(float(news)))
    rows = []
    for unit in experiment.units(config):
        for m in experiment.run(config, unit, context):
            value = revive(plain(m.value))
            rows.append(Row(name, m.metric, value, m.method, m.seed, dict(m.config), unit=unit))
    assert shares
    assert all(0 <= share <= 1 for share in shares)
    return rows


def logdet_rows(errors: dict[int, float], *, shuffle: bool = False) -> list[Row]:
    """40 networks with exact values 0, 100, …, 3900 and estimates off by a share of s."""
    rows = []
    for draw in range(40):
        exact = 100.0 * draw
        about = {"draw": draw, "scale": 10 ** (draw / 20 - 1), "jitter": 1e-6}
        rows.append(Row("", "log_det", exact, config={**about, "points": 1600, "exact": True}))
        rows.append(Row("", "dimension", float(draw), config=about))
        for samples, error in errors.items():
            value = 100.0 * ((7 * draw) % 40) if shuffle else exact
            where = {**about, "points": samples, "exact": False}
            rows.append(Row("", "log_det", value + 3900 * error * about["scale"], config=where))
    return rows


def laplacian_rows(ratio: dict[float, float], *, shuffle: bool = False) -> list[Row]:
    """40 networks whose first-order form is ``ratio`` times the log-determinant, at each ε."""
    rows = []
    for draw in range(40):
        about = {"draw": draw, "scale": 1.0}
        trace = 2.0 + draw
        seen = 2.0 + (7 * draw) % 40 if shuffle else trace
        rows += [
            Row("", "trace", trace, config=about),
            Row("", "trace_estimate", seen, config=about),
            Row("", "parameters", 898, config=about),
        ]
        for jitter, factor in ratio.items():
            value = trace / jitter / factor
            rows.append(Row("", "log_det", value, config={**about, "jitter": jitter}))
    return rows


def eigs_rows(sums: dict[tuple[str, float | None], float]) -> list[Row]:
    """Sums of eigenvalues by method and jitter, two seeds."""
    return [
        Row("", metric, value, method, seed, {} if jitter is None else {"jitter": jitter})
        for (method, jitter), value in sums.items()
        for seed in (0, 1)
        for metric in ("eigenvalue_sum", "largest_eigenvalue", "train_accuracy", "train_nll")
    ]


def solutions_rows(
    nll: list[float], spread: list[float], amplitude: list[float], held: float = 0.6
) -> list[Row]:
    """L-MAP at the paper's four ε; probabilities 0.5 ± amplitude on a picture of 4 points.

    ``held`` is the spread at the smallest ε where training came from larger ones.
    """
    rows = []
    for start in ("random", "chain"):
        for k, jitter in enumerate((1e-2, 1e-1, 1.0, 10.0)):
            where = {"jitter": jitter, "start": start}
            width = amplitude[k] if start == "random" else (0.0, 0.15, 0.35, 0.5)[k]
            picture = [0.5 - width, 0.5 + width] * 2
            values = {
                "train_nll": nll[k], "probability": picture,
                "spread": held if start == "chain" and k == 0 else spread[k],
                "train_accuracy": 1 - nll[k], "eigenvalue_sum": 10.0 * (k + 1),
            }  # fmt: skip
            rows += [Row("", m, v, "l-map", 0, where) for m, v in values.items()]
    base = {"train_nll": 0.1, "train_accuracy": 0.9, "spread": 1.0, "eigenvalue_sum": 100.0}
    rows += [Row("", m, v, "ps-map", 0, {"start": "random"}) for m, v in base.items()]
    rows.append(Row("", "inputs", [[0.0, 0.0], [1.0, 1.0]]))
    rows.append(Row("", "labels", [0, 1]))
    return rows


def pathology_rows(
    *, slope: float = 9.0, jittered: float = 0.01, climb: float = 5.0, ratio: float = 1e-20
) -> list[Row]:
    """One network: nats per decade without and with jitter, per stage, and the last ratio."""
    rows = []
    distances = [10 ** (-k / 8) for k in range(4 * 8 + 1)]
    for jitter, gain, step in ((0.0, slope, climb), (1e-4, jittered, jittered)):
        unit = {"network": "1-2-1", "jitter": jitter}
        where = {**unit, "stages": 4}
        path = [-gain * math.log10(t) for t in distances]
        objective = [step * (k // 10) for k in range(40)]
        rows += [
            Row("", "distance", distances, config=unit),
            Row("", "path", path, "fs-map", config=unit),
            Row("", "step", list(range(10, 410, 10)), config=where),
        ]
        for seed in (0, 1):
            rows.append(Row("", "objective", objective, "fs-map", seed, where))
            rows.append(Row("", "eigenvalue_ratio", [0.1] * 39 + [ratio], "fs-map", seed, where))
    return rows
