"""Tiny sizes of the experiments with a closed form, and rows made up so that all claims hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from fsmap.paper.closed_form.fourier_ablations import NARROW, WIDE
from fsmap.paper.closed_form.mixture import TRUE
from fsmap.paper.closed_form.reparam import SINH_METRICS as SINH_METRICS
from fsmap.paper.closed_form.theory_symmetry import FUNCTION, PARAMETER
from fsmap.paper.experiment import Context, get
from fsmap.paper.rows import Row, plain, revive

INF = float("inf")
FOURIER = {"num_frequencies": 8, "steps": 60, "warmup": 10, "num_test": 50, "seeds": 2}
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
}  # fmt: skip


def measure(name: str, folder: Path) -> list[Row]:
    """Rows of the tiny size, after a trip through JSON."""
    experiment = get(name)
    config = dataclasses.replace(experiment.quick, **TINY[name])
    context = Context(torch.device("cpu"), folder, size="quick")
    rows = []
    for unit in experiment.units(config):
        for m in experiment.run(config, unit, context):
            value, where = revive(plain(m.value)), revive(plain(m.config))
            rows.append(
                Row(name, m.metric, value, m.method, m.seed, where, deviations=m.deviations)
            )
    return rows


def row(metric: str, value: Any, method: str | None = None, seed: int = 0, **config: Any) -> Row:
    return Row("made-up", metric, value, method, seed, config)


def _mixture_posterior() -> Iterable[Row]:
    for method, objective, peak, height in (
        ("ps-map", "none", -0.4, 0.5),
        ("fs-map", TRUE, -1.1, 0.25),
    ):
        yield row("peak", peak, method, objective=objective)
        yield row("right_height", height, method, objective=objective)


def _mixture_bma() -> Iterable[Row]:
    for alpha, ps, fs in ((1.2, 0.02, 0.06), (10.0, 0.09, 0.03), (20.0, 0.11, 0.02)):
        yield row("distance", ps, "ps-map", prior_std=alpha)
        yield row("distance", fs, "fs-map", prior_std=alpha)
        yield row("distance_of_grid", 0.001, prior_std=alpha)
        yield row("quadrature_error", 1e-9, prior_std=alpha)
        yield row("chain_z", 1.5, prior_std=alpha)


def _fourier() -> Iterable[Row]:
    for n, train in ((100, 0.02), (400, 0.08)):
        for method, objective, better in (
            ("ps-map", "none", 1.0),
            ("fs-map", "exact", 0.6),
            ("fs-map", "paper", 0.6),
        ):
            where = {"n_train": n, "objective": objective}
            yield row("test_rmse", 0.1 * better, method, **where)
            yield row("curvature", 0.01 * better, method, **where)
            yield row("train_rmse", train if method == "ps-map" else 0.1, method, **where)
            if method == "fs-map":
                yield row("log_posterior_gain", 2_000.0, method, **where)
    for objective in ("exact", "paper"):
        where = {"n_train": 400, "objective": objective, "steps": 9}
        yield row("log_posterior_gain_long", 5_000.0, "fs-map", **where)


def _fourier_points() -> Iterable[Row]:
    for jitter in (1e-32, 1e-6):
        for points, rank, rmse in (
            (10, 9, 0.06),
            (100, 99, 0.05),
            (202, 200, 0.04),
            (300, 200, 0.04),
        ):
            yield row("rank", rank, points=points)
            yield row("test_rmse", rmse, "fs-map", points=points, jitter=jitter)
        yield row("test_rmse", 0.04, "fs-map", points=INF, jitter=jitter)
    yield row("test_rmse", 0.07, "ps-map", points=INF)


def _fourier_px() -> Iterable[Row]:
    yield row("test_rmse", 0.07, "ps-map", px="none")
    for jitter in (1e-32, 1e-6):
        yield row("test_rmse", 0.04, "fs-map", px=WIDE, jitter=jitter)
        yield row("test_rmse", 0.05, "fs-map", px=NARROW, jitter=jitter)


def _fourier_noise() -> Iterable[Row]:
    for ratio, ps, fs in ((0.333333, 0.07, 0.065), (1.0, 0.07, 0.04), (10.0, 0.1, 0.4)):
        yield row("test_rmse", ps, "ps-map", ratio=ratio, objective="none")
        for objective in ("exact", "paper"):
            yield row("test_rmse", fs, "fs-map", ratio=ratio, objective=objective)


def _reparam() -> Iterable[Row]:
    for name, rough, weight in (("θ", 50.0, 0.1), ("1/θ", 120.0, 1.4)):
        yield row("roughness", rough, "ps-map", part="invert", parameters=name)
        yield row("median_weight", weight, "ps-map", part="invert", parameters=name)
    for metric in SINH_METRICS:
        yield row(metric, 1e-12, "fs-map", part="sinh")
        yield row(metric, 0.1, "ps-map", part="sinh")


def _metric() -> Iterable[Row]:
    for model, spread in (("mlp", 3.0), ("linear", 1e-13), ("square", 1e-12)):
        yield row("spread", spread, model=model)
    yield row("metric_gap", 1e-12)
    yield row("expectation_gap", 1e-15)


def _any_parameter() -> Iterable[Row]:
    for method, gap, moved in (("ps-map", 1e-90, 0.4), ("fs-map", 1.5, 1e-9)):
        yield row("distance_to_target", gap, method, target=[1.0, 0.5])
        yield row("moved", moved, method, target=[1.0, 0.5])


def _symmetry() -> Iterable[Row]:
    yield row("null_angle", 1e-15)
    yield row("null_value", 1e-16)
    for jitter, growth in ((0.0, 9.2), (1e-8, 0.2), (1e-2, 0.0)):
        yield row("growth", growth, jitter=jitter)
    for family in (FUNCTION, PARAMETER):
        for samples in (1_000, 10_000):
            for seed, noise in ((0, -0.1), (1, 0.1)):
                where = {"family": family, "samples": samples}
                yield row("expected_log_det", -27.0 + noise, seed=seed, **where)


def _flat() -> Iterable[Row]:
    for noise in (0.01, 0.1, 1.0):
        yield row("relative_gap", 0.3 * noise**2, "ps-map", noise_std=noise)
        yield row("residual", 0.9 * noise, "ps-map", noise_std=noise)


def _large_data() -> Iterable[Row]:
    for n in (10, 100, 1_000, 10_000):
        yield row("distance", 1 / n, "ps-map", n_train=n)
        yield row("distance", 1 / n**2, "fs-map", n_train=n)
        yield row("quadrature_error", 1e-12, n_train=n)


GOOD: dict[str, Callable[[], Iterable[Row]]] = {
    "mixture-posterior": _mixture_posterior,
    "mixture-bma": _mixture_bma,
    "fourier": _fourier,
    "fourier-points": _fourier_points,
    "fourier-pX": _fourier_px,
    "fourier-noise": _fourier_noise,
    "reparam": _reparam,
    "theory-metric": _metric,
    "theory-any-parameter": _any_parameter,
    "theory-symmetry": _symmetry,
    "theory-flat": _flat,
    "theory-large-data": _large_data,
}
