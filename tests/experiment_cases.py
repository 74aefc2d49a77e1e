"""Experiments on a CPU: tiny sizes, and rows made up so that all claims agree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
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


def _mixture_posterior() -> Iterable[list[Row]]:
    for method, objective, peak, height in (
        ("ps-map", "none", -0.4, 0.5),
        ("fs-map", TRUE, -1.1, 0.25),
    ):
        yield row("peak", peak, method, objective=objective)
        yield row("right_height", height, method, objective=objective)


def _mixture_bma() -> Iterable[list[Row]]:
    for alpha, ps, fs in ((1.2, 0.02, 0.06), (10.0, 0.09, 0.03), (20.0, 0.11, 0.02)):
        yield row("distance", ps, "ps-map", prior_std=alpha)
        yield row("distance", fs, "fs-map", prior_std=alpha)
        yield row("distance_of_grid", 0.001, prior_std=alpha)
        yield row("quadrature_error", 1e-9, prior_std=alpha)
        yield row("chain_z", 1.5, prior_std=alpha)


def _fourier() -> Iterable[list[Row]]:
    for n, train in ((100, 0.02), (400, 0.08)):
        for objective in ("none", "exact", "paper"):
            method, better = ("ps-map", 1.0) if objective == "none" else ("fs-map", 0.6)
            where = {"n_train": n, "objective": objective}
            yield row("test_rmse", 0.1 * better, method, **where)
            yield row("curvature", 0.01 * better, method, **where)
            yield row("train_rmse", train if method == "ps-map" else 0.1, method, **where)
            if method == "fs-map":
                yield row("log_posterior_gain", 2_000.0, method, **where)
    for objective in ("exact", "paper"):
        where = {"n_train": 400, "objective": objective, "steps": 9}
        yield row("log_posterior_gain_long", 5_000.0, "fs-map", **where)


def _fourier_points() -> Iterable[list[Row]]:
    for jitter in (1e-32, 1e-6):
        lattices = ((10, 9, 0.06), (100, 99, 0.05), (202, 200, 0.04), (300, 200, 0.04))
        for points, rank, rmse in lattices:
            yield row("rank", rank, points=points)
            yield row("test_rmse", rmse, "fs-map", points=points, jitter=jitter)
        yield row("test_rmse", 0.04, "fs-map", points=INF, jitter=jitter)
    yield row("test_rmse", 0.07, "ps-map", points=INF)


def _fourier_px() -> Iterable[list[Row]]:
    yield row("test_rmse", 0.07, "ps-map", px="none")
    for jitter in (1e-32, 1e-6):
        yield row("test_rmse", 0.04, "fs-map", px=WIDE, jitter=jitter)
        yield row("test_rmse", 0.05, "fs-map", px=NARROW, jitter=jitter)


def _fourier_noise() -> Iterable[list[Row]]:
    for ratio, ps, fs in ((0.333333, 0.07, 0.065), (1.0, 0.07, 0.04), (10.0, 0.1, 0.4)):
        yield row("test_rmse", ps, "ps-map", ratio=ratio, objective="none")
        for objective in ("exact", "paper"):
            yield row("test_rmse", fs, "fs-map", ratio=ratio, objective=objective)


def _reparam() -> Iterable[list[Row]]:
    for name, rough, weight in (("θ", 50.0, 0.1), ("1/θ", 120.0, 1.4)):
        yield row("roughness", rough, "ps-map", part="invert", parameters=name)
        yield row("median_weight", weight, "ps-map", part="invert", parameters=name)
    for metric in ("function_gap", "gradient_gap"):
        yield row(metric, 1e-12, "fs-map", part="sinh")
        yield row(metric, 0.1, "ps-map", part="sinh")


def _metric() -> Iterable[list[Row]]:
    for model, spread in (("mlp", 3.0), ("linear", 1e-13), ("square", 1e-12)):
        yield row("spread", spread, model=model)
    yield row("metric_gap", 1e-12)
    yield row("expectation_gap", 1e-15)


def _any_parameter() -> Iterable[list[Row]]:
    for method, gap, moved in (("ps-map", 1e-90, 0.4), ("fs-map", 1.5, 1e-9)):
        yield row("distance_to_target", gap, method, target=[1.0, 0.5])
        yield row("moved", moved, method, target=[1.0, 0.5])


def _symmetry() -> Iterable[list[Row]]:
    yield row("null_angle", 1e-15)
    yield row("null_value", 1e-16)
    for jitter, growth in ((0.0, 9.2), (1e-8, 0.2), (1e-2, 0.0)):
        yield row("growth", growth, jitter=jitter)
    for family in (FUNCTION, PARAMETER):
        for samples in (1_000, 10_000):
            yield row("expected_log_det", -27.0, family=family, samples=samples)


def _flat() -> Iterable[list[Row]]:
    for noise in (0.01, 0.1, 1.0):
        yield row("relative_gap", 0.3 * noise**2, "ps-map", noise_std=noise)
        yield row("residual", 0.9 * noise, "ps-map", noise_std=noise)


def _large_data() -> Iterable[list[Row]]:
    for n in (10, 100, 1_000, 10_000):
        yield row("distance", 1 / n, "ps-map", n_train=n)
        yield row("distance", 1 / n**2, "fs-map", n_train=n)
        yield row("quadrature_error", 1e-12, n_train=n)


def _block(metric: str, value: list[float], scale: list[float], **config: Any) -> list[Row]:
    return [Row("made-up", metric, value, config={"first": 0, "scale": scale, **config})]


def _logdet() -> Iterable[list[Row]]:
    """40 networks with exact values 0, 100, …, 3900 and estimates off by a share of s."""
    scale = [10 ** (k / 20 - 1) for k in range(40)]
    exact = [100.0 * k for k in range(40)]
    yield _block("log_det", exact, scale, points=1600, exact=True, jitter=1e-6)
    yield _block("dimension", exact, scale, jitter=1e-6)
    for samples, error in ((800, 0.0), (400, -0.005), (200, -0.01)):
        estimate = [e + 3900 * error * s for e, s in zip(exact, scale, strict=True)]
        yield _block("log_det", estimate, scale, points=samples, exact=False, jitter=1e-6)


def _laplacian() -> Iterable[list[Row]]:
    """40 networks whose first-order form is a multiple of the log-determinant, at each ε."""
    scale, trace = [1.0] * 40, [2.0 + k for k in range(40)]
    for metric in ("trace", "trace_estimate"):
        yield _block(metric, trace, scale)
    yield _block("parameters", [898] * 40, scale)
    for jitter, factor in ((1e-3, 200.0), (1.0, 5.0), (1e3, 1.02)):
        yield _block("log_det", [t / jitter / factor for t in trace], scale, jitter=jitter)


def _eigs() -> Iterable[list[Row]]:
    yield row("eigenvalue_sum", 100.0, "ps-map")
    for method in ("fs-map", "l-map"):
        yield row("eigenvalue_sum", 2.0, method, jitter=1e-10)
        yield row("eigenvalue_sum", 90.0, method, jitter=100.0)


def _solutions() -> Iterable[list[Row]]:
    """L-MAP at the paper's four ε; probabilities 0.5 ± width on a picture of 4 points."""
    for start in ("random", "chain"):
        for jitter, nll, spread, width in (
            (1e-2, 0.69, 0.01, 0.0), (1e-1, 0.4, 0.4, 0.15), (1.0, 0.2, 0.9, 0.35),
            (10.0, 0.1, 1.0, 0.5),
        ):  # fmt: skip
            where = {"jitter": jitter, "start": start}
            values = {"train_nll": nll, "train_accuracy": 1 - nll, "eigenvalue_sum": 10 * jitter}
            values["spread"] = 0.6 if where == {"jitter": 1e-2, "start": "chain"} else spread
            for metric, value in values.items():
                yield row(metric, value, "l-map", **where)
            yield row("probability", [0.5 - width, 0.5 + width] * 2, "l-map", **where)[:1]
    for metric, value in (("train_nll", 0.1), ("train_accuracy", 0.9)):
        yield row(metric, value, "ps-map", start="random")


def _pathology() -> Iterable[list[Row]]:
    distances = [10 ** (-k / 8) for k in range(4 * 8 + 1)]
    for jitter, slope, climb in ((0.0, 9.0, 5.0), (1e-4, 0.01, 0.01)):
        unit = {"network": "1-2-1", "jitter": jitter}
        where = {**unit, "stages": 4}
        yield row("distance", distances, **unit)[:1]
        yield row("path", [-slope * math.log10(t) for t in distances], "fs-map", **unit)[:1]
        yield row("objective", [climb * (k // 10) for k in range(40)], "fs-map", **where)
        yield row("eigenvalue_ratio", [0.1] * 39 + [1e-20], "fs-map", **where)


MAKERS: dict[str, Callable[[], Iterable[list[Row]]]] = dict(
    zip(TINY, (
        _mixture_posterior, _mixture_bma, _fourier, _fourier_points, _fourier_px, _fourier_noise,
        _reparam, _metric, _any_parameter, _symmetry, _flat, _large_data, _logdet, _laplacian,
        _eigs, _solutions, _pathology,
    ), strict=True)
)  # fmt: skip


def good(name: str) -> list[Row]:
    """Rows on which every claim of an experiment agrees."""
    return [made for rows in MAKERS[name]() for made in rows]
