"""Experiments on a CPU: tiny sizes, and rows made up so that all claims agree."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from fsmap.paper.closed_form.fourier import NARROW, WIDE
from fsmap.paper.closed_form.mixture import TRUE
from fsmap.paper.closed_form.theory import FUNCTION, PARAMETER
from fsmap.paper.experiment import Context, get
from fsmap.paper.rows import Row, plain, revive

INF = float("inf")
FOURIER = {"num_frequencies": 8, "steps": 60, "warmup": 10, "num_test": 50, "seeds": 2}
NETWORKS = {"draws": 3, "block": 2, "width": 3, "grid": 6}
TINY: dict[str, dict[str, Any]] = {
    "mixture-posterior": {"seeds": 2, "steps": 400},
    "mixture-bma": {"prior_stds": (1.2, 20.0), "panels": 24, "chain": 30, "chain_warmup": 20,
                    "seeds": 1, "steps": 300},
    "fourier": {**FOURIER, "sizes": (20, 400), "long_steps": 80},
    "fourier-points": {**FOURIER, "n_train": 40, "points": (4, 12, 18, 30)},
    "fourier-pX": {**FOURIER, "n_train": 40, "num_points": 100},
    "fourier-noise": {**FOURIER, "n_train": 40, "ratios": (1 / 3, 1.0, 10.0)},
    "reparam": {"num_centers": 40, "steps": 200, "seeds": 2, "small_steps": 100},
    "theory-metric": {"draws": 20, "points": 20, "metrics": 1},
    "theory-any-parameter": {"starts": 2, "steps": 60, "seeds": 2},
    "theory-symmetry": {"points": 20, "path": 9, "samples": 1_000, "seeds": 2},
    "theory-flat": {"num_frequencies": 4, "n_train": 30, "noise_stds": (0.01, 0.1), "seeds": 2},
    "theory-large-data": {"sizes": (50, 100, 400), "panels": 8, "seeds": 2},
    "logdet-mc": {**NETWORKS, "samples": (18, 9)},
    "laplacian-vs-logdet": {**NETWORKS, "probes": 4},
    "moons-eigs": {"steps": 3, "grid": 5, "lap_points": 6, "det_points": 5, "seeds": 1,
                   "jitters": (0.1, 10.0)},
    "moons-solutions": {"steps": 3, "grid": 5, "lap_points": 6, "between": 0, "pixels": 4},
    "moons-pathology": {"jitters": (1e-4,), "seeds": 2, "steps": 3, "stages": 2, "decades": 2},
}  # fmt: skip


def measure(name: str, folder: Path) -> list[Row]:
    """Rows of the tiny size, after a trip through JSON."""
    experiment = get(name)
    config = dataclasses.replace(experiment.quick, **TINY[name])
    shares: list[float] = []
    context = Context(torch.device("cpu"), folder, shares.append, size="quick")
    rows = []
    for unit in experiment.units(config):
        for m in experiment.run(config, unit, context):
            value, where = revive(plain(m.value)), revive(plain(m.config))
            rows.append(
                Row(name, m.metric, value, m.method, m.seed, where, deviations=m.deviations)
            )
    assert all(0 <= share <= 1 for share in shares)
    return rows


def row(metric: str, value: Any, method: str | None = None, **config: Any) -> list[Row]:
    """The same value for two seeds."""
    return [Row("made-up", metric, value, method, seed, config) for seed in (0, 1)]


def _block(metric: str, value: list[float], **config: Any) -> list[Row]:
    return [Row("made-up", metric, value, config={"first": 0, "scale": SCALE, **config})]


METHODS = ("ps-map", "fs-map")
SCALE = [10 ** (k / 20 - 1) for k in range(40)]
EXACT = [100.0 * k for k in range(40)]
TRACE = [2.0 + k for k in range(40)]
DISTANCES = [10 ** (-k / 8) for k in range(4 * 8 + 1)]
SOLUTIONS = ((1e-2, 0.69, 0.01, 0.0), (1e-1, 0.4, 0.4, 0.15), (1.0, 0.2, 0.9, 0.35),
             (10.0, 0.1, 1.0, 0.5))  # fmt: skip
"""ε, training NLL, spread, and w of the probabilities 0.5 ± w on a picture of 4 points."""

MADE: dict[str, list[list[Row]]] = {
    "mixture-posterior": [
        row(metric, value, method, objective=objective)
        for metric, *values in (("peak", -0.4, -1.1), ("right_height", 0.5, 0.25))
        for method, objective, value in zip(METHODS, ("none", TRUE), values, strict=True)
    ],
    "mixture-bma": [
        row(metric, value, method, prior_std=alpha)
        for alpha, ps, fs in ((1.2, 0.02, 0.06), (10.0, 0.09, 0.03), (20.0, 0.11, 0.02))
        for metric, value, method in (
            ("distance", ps, "ps-map"), ("distance", fs, "fs-map"),
            ("distance_of_grid", 0.001, None), ("quadrature_error", 1e-9, None),
            ("chain_z", 1.5, None),
        )
    ],
    "fourier": [
        row(metric, value, method, n_train=n, objective=objective)
        for n, train in ((100, 0.02), (400, 0.08))
        for method, objective, better, train_rmse in (
            ("ps-map", "none", 1.0, train), ("fs-map", "exact", 0.6, 0.1),
            ("fs-map", "paper", 0.6, 0.1),
        )
        for metric, value in (
            ("test_rmse", 0.1 * better), ("curvature", 0.01 * better), ("train_rmse", train_rmse),
            ("log_posterior_gain", 2_000.0), ("log_posterior_gain_long", 5_000.0),
        )
        if method == "fs-map" or "gain" not in metric
    ],
    "fourier-points": [
        row("test_rmse", 0.07, "ps-map", points=INF),
        *(made for points, rank, rmse in ((10, 9, 0.06), (100, 99, 0.05), (202, 200, 0.04),
                                          (300, 200, 0.04), (INF, None, 0.04))
          for made in (row("rank", rank, points=points) if rank else [],
                       *(row("test_rmse", rmse, "fs-map", points=points, jitter=jitter)
                         for jitter in (1e-32, 1e-6)))),
    ],
    "fourier-pX": [
        row("test_rmse", 0.07, "ps-map", px="none"),
        *(row("test_rmse", rmse, "fs-map", px=px, jitter=jitter)
          for jitter in (1e-32, 1e-6) for px, rmse in ((WIDE, 0.04), (NARROW, 0.05))),
    ],
    "fourier-noise": [
        row("test_rmse", ps if objective == "none" else fs,
            "ps-map" if objective == "none" else "fs-map", ratio=ratio, objective=objective)
        for ratio, ps, fs in ((0.333333, 0.07, 0.065), (1.0, 0.07, 0.04), (10.0, 0.1, 0.4))
        for objective in ("none", "exact", "paper")
    ],
    "reparam": [
        *(row(metric, value, "ps-map", part="invert", parameters=name)
          for metric, *values in (("roughness", 50.0, 120.0), ("median_weight", 0.1, 1.4))
          for name, value in zip(("θ", "1/θ"), values, strict=True)),
        *(row(metric, value, method, part="sinh")
          for metric in ("function_gap", "gradient_gap")
          for method, value in (("fs-map", 1e-12), ("ps-map", 0.1))),
    ],
    "theory-metric": [
        *(row("spread", spread, model=model)
          for model, spread in (("mlp", 3.0), ("linear", 1e-13), ("square", 1e-12))),
        row("metric_gap", 1e-12),
        row("expectation_gap", 1e-15),
    ],
    "theory-any-parameter": [
        row(metric, value, method, target=[1.0, 0.5])
        for metric, *values in (("distance_to_target", 1e-90, 1.5), ("moved", 0.4, 1e-9))
        for method, value in zip(METHODS, values, strict=True)
    ],
    "theory-symmetry": [
        row("null_angle", 1e-15),
        row("null_value", 1e-16),
        *(row("growth", v, jitter=jitter) for jitter, v in ((0.0, 9.2), (1e-8, 0.2), (1e-2, 0.0))),
        *(row("expected_log_det", -27.0, family=family, samples=samples)
          for family in (FUNCTION, PARAMETER) for samples in (1_000, 10_000)),
    ],
    "theory-flat": [
        row(metric, value, "ps-map", noise_std=noise)
        for noise in (0.01, 0.1, 1.0)
        for metric, value in (("relative_gap", 0.3 * noise**2), ("residual", 0.9 * noise))
    ],
    "theory-large-data": [
        row(metric, value, method, n_train=n)
        for n in (10, 100, 1_000, 10_000)
        for metric, value, method in (
            ("distance", 1 / n, "ps-map"), ("distance", 1 / n**2, "fs-map"),
            ("quadrature_error", 1e-12, None),
        )
    ],
    # 40 networks whose estimates are off by a share of s
    "logdet-mc": [
        _block("log_det", EXACT, points=1600, exact=True, jitter=1e-6),
        _block("dimension", EXACT, jitter=1e-6),
        *(_block("log_det", [e + 3900 * error * s for e, s in zip(EXACT, SCALE, strict=True)],
                 points=samples, exact=False, jitter=1e-6)
          for samples, error in ((800, 0.0), (400, -0.005), (200, -0.01))),
    ],
    # 40 networks whose first-order form is a multiple of the log-determinant, at each ε
    "laplacian-vs-logdet": [
        *(_block(metric, TRACE) for metric in ("trace", "trace_estimate")),
        _block("parameters", [898] * 40),
        *(_block("log_det", [t / jitter / factor for t in TRACE], jitter=jitter)
          for jitter, factor in ((1e-3, 200.0), (1.0, 5.0), (1e3, 1.02))),
    ],
    "moons-eigs": [
        row("eigenvalue_sum", 100.0, "ps-map"),
        *(row("eigenvalue_sum", value, method, jitter=jitter)
          for method in ("fs-map", "l-map") for jitter, value in ((1e-10, 2.0), (100.0, 90.0))),
    ],
    "moons-solutions": [
        *(row(metric, value, "ps-map", start="random")
          for metric, value in (("train_nll", 0.1), ("train_accuracy", 0.9))),
        *(row(metric, value, "l-map", jitter=jitter, start=start)
          for start in ("random", "chain") for jitter, nll, spread, width in SOLUTIONS
          for metric, value in (
              ("train_nll", nll), ("train_accuracy", 1 - nll), ("eigenvalue_sum", 10 * jitter),
              ("spread", 0.6 if (jitter, start) == (1e-2, "chain") else spread),
              ("probability", [0.5 - width, 0.5 + width] * 2),
          )),
    ],
    "moons-pathology": [
        row(metric, value, method, network="1-2-1", jitter=jitter, stages=4)
        for jitter, slope, climb in ((0.0, 9.0, 5.0), (1e-4, 0.01, 0.01))
        for metric, value, method in (
            ("distance", DISTANCES, None),
            ("path", [-slope * math.log10(t) for t in DISTANCES], "fs-map"),
            ("objective", [climb * (k // 10) for k in range(40)], "fs-map"),
            ("eigenvalue_ratio", [0.1] * 39 + [1e-20], "fs-map"),
        )
    ],
}  # fmt: skip


def good(name: str) -> list[Row]:
    """Rows on which every claim of an experiment agrees."""
    return [made for rows in MADE[name] for made in rows]
