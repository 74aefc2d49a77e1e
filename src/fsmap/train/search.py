r"""Strengths chosen by one population: weight decay w and λ = 1/(2εN), on held-out points.

The loss per point is $-\log p(y \mid f) + \tfrac w2 \|\theta\|^2 + \lambda R$; w as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsmap.errors import DivergedError, InputError
from fsmap.functional import functional
from fsmap.objective.likelihood import Likelihood
from fsmap.objective.objective import Objective, fs_map, l_map, ps_map
from fsmap.objective.prior import Flat, Normal, Prior
from fsmap.px import EvalDistribution
from fsmap.train.fit import fit
from fsmap.train.grid import Grid
from fsmap.train.history import History
from fsmap.train.loop import Validation
from fsmap.train.optim import adam, cosine
from fsmap.train.plan import Plan
from fsmap.train.population import fit_population
from fsmap.train.state import Metric, PopulationState, TrainState, measure
from fsmap.train.strength import suggest_strength
from fsmap.types import Batch, ModelFn, Params

METHODS = ("l-map", "ps-map", "fs-map")
WEIGHT_DECAYS = (1e-5, 1e-3, 1e-2, 1e-1)
SHARES = (1e-4, 1e-3, 1e-2, 1e-1)
"""λR as a share of the loss before training: what the automatic λ are."""
VALIDATIONS = 50  # how often a run looks at the held-out points


class Config(NamedTuple):
    """The strengths of one run."""

    weight_decay: float  # w
    reg_strength: float  # λ; 0 for PS-MAP


class Trained(NamedTuple):
    """A trained network and how its strengths were chosen.

    Attributes:
        params: The parameters with the best held-out value, or the last ones.
        config: Its strengths.
        value: The held-out value, nan without held-out rows.
        step: Steps taken when ``params`` were found.
        search: One line per configuration: ``weight_decay``, ``reg_strength``, ``value``, ``step``.
        curve: Steps and held-out values of the chosen run.
    """

    params: Params
    config: Config
    value: float
    step: int
    search: list[dict[str, float]]
    curve: list[tuple[int, float]]


def at_edges(found: Trained) -> list[str]:
    """Which chosen strengths are the largest or smallest of the automatic ones.

    The largest: a larger one may do better. The smallest, of a grid that reaches down to where λR
    is a ten-thousandth of the loss: hardly any of it is wanted, and a smaller one changes nothing.

    Args:
        found: A search.

    Returns:
        A sentence for each.
    """
    told = []
    for name, word in (("weight_decay", "weight decay"), ("reg_strength", "λ")):
        values = sorted({line[name] for line in found.search})
        chosen = getattr(found.config, name)
        if len(values) < 3 or chosen not in (values[0], values[-1]):
            continue
        tried = f"of the {len(values)} tried ({values[0]:g} to {values[-1]:g})"
        if chosen == values[-1]:
            told.append(f"{word} = {chosen:g} is the largest {tried}: a larger one may do better")
        else:
            told.append(f"{word} = {chosen:g} is the smallest {tried}: hardly any of it helps here")
    return told


def strengths(module: nn.Module, px: EvalDistribution, loss: float, *, seed: int) -> list[float]:
    """The automatic λ: those at which λR is the ``SHARES`` of the loss before training.

    Args:
        module: The network before training.
        px: Evaluation distribution.
        loss: The loss of the best constant: 1 for a standardized target, the entropy of classes.
        seed: Seed of the draws.

    Returns:
        λ, rounded to one digit, ascending.
    """
    found = suggest_strength(module, px, loss=loss, share=1.0, seed=seed)
    return sorted({float(f"{share * found.reg_strength:.0e}") for share in SHARES})


def objective(
    method: str,
    likelihood: Likelihood,
    px: EvalDistribution,
    *,
    num_data: int,
    num_points: int,
    weight_decay: float | Tensor,
    reg_strength: float | Tensor,
    reg_nats: float | None = None,
) -> Objective:
    """The objective of one configuration.

    Args:
        method: One of ``METHODS``.
        likelihood: log p(y | f).
        px: Evaluation distribution.
        num_data: N.
        num_points: S.
        weight_decay: w; the prior is $N(0, 1/(wN))$, flat for w = 0.
        reg_strength: λ; FS-MAP takes the jitter ε = 1/(2λN) that it stands for.
        reg_nats: c of L-MAP, instead of λ.

    Returns:
        The objective.
    """
    prior: Prior = Flat()
    if isinstance(weight_decay, Tensor) or weight_decay > 0:
        prior = Normal((weight_decay * num_data) ** -0.5)
    if method == "ps-map":
        return ps_map(likelihood, prior, num_data=num_data)
    if method == "fs-map":
        jitter = 1 / (2 * reg_strength * num_data)
        return fs_map(
            likelihood, prior, px, num_points=num_points, jitter=jitter, num_data=num_data
        )
    return l_map(
        likelihood,
        prior,
        px,
        num_points=num_points,
        num_data=num_data,
        reg_strength=reg_strength if reg_nats is None else None,
        reg_nats=reg_nats,
    )


def train(
    module: nn.Module,
    method: str,
    data: Batch,
    held_out: Batch | None,
    /,
    *,
    likelihood: Likelihood,
    by: Metric,
    px: EvalDistribution,
    weight_decays: Sequence[float],
    reg_strengths: Sequence[float],
    reg_nats: float | None = None,
    plan: Plan,
    seed: int,
    progress: bool = False,
) -> Trained:
    """Train one configuration, or choose among several by one population on held-out rows.

    Args:
        module: The network; where it starts. Not changed.
        method: One of ``METHODS``.
        data: Training rows.
        held_out: Rows that decide when to stop and which configuration wins; None: neither.
        likelihood: log p(y | f).
        by: The held-out value ``(outputs, y)``, smaller is better.
        px: Evaluation distribution.
        weight_decays: w to choose from.
        reg_strengths: λ to choose from; PS-MAP does not look at them.
        reg_nats: c of L-MAP, instead of λ; the result says λ = 0.
        plan: Sizes.
        seed: Seed of batches and draws.
        progress: Show a progress bar.

    Returns:
        The parameters, and the search.

    Raises:
        InputError: If there is something to choose and nothing to choose by.
    """
    if method not in METHODS:
        message = f"method must be one of {', '.join(METHODS)}, got {method!r}"
        raise InputError(message)
    without = method == "ps-map" or reg_nats is not None
    chosen = [0.0] if without else list(reg_strengths)
    configs = [Config(w, s) for w in weight_decays for s in chosen]
    if len(configs) > 1 and held_out is None:
        message = (
            f"{len(configs)} configurations are to be compared and no rows are held out to compare "
            "them on. Hold some out, or give one weight decay and one strength."
        )
        raise InputError(message)
    f, start = functional(module)
    N = len(data.y)

    def build(weight_decay: float | Tensor, reg_strength: float | Tensor) -> Objective:
        return objective(
            method,
            likelihood,
            px,
            num_data=N,
            num_points=plan.num_points,
            weight_decay=weight_decay,
            reg_strength=reg_strength,
            reg_nats=reg_nats,
        )

    loop: dict[str, Any] = {
        "steps": plan.steps,
        "optimizer": adam(plan.lr),
        "schedule": cosine(),
        "batch_size": None if plan.batch_size >= N else plan.batch_size,
        "validate_every": max(1, plan.steps // VALIDATIONS),
        "patience": plan.patience if held_out is not None else None,
        "log_every": max(1, plan.steps // 100),
        "progress": progress,
    }
    if len(configs) > 1:
        grid = Grid([{**config._asdict(), "seed": seed} for config in configs])
        states, history = fit_population(
            build, grid, f, data, init=start, on=held_out, by=by, **loop
        )
        return _winner(configs, states, history)
    check = None if held_out is None else _validation(f, held_out, by)
    first = build(*configs[0])
    return _only(configs[0], *fit(first, f, start, data, seed=seed, validation=check, **loop))


def _validation(f: ModelFn, held_out: Batch, by: Metric) -> Validation:
    return lambda params: measure(f, {n: p[None] for n, p in params.items()}, [held_out], by)[0]


def _only(config: Config, state: TrainState, history: History) -> Trained:
    params, step, value = state.best or (state.params, state.step, math.nan)
    search = [{**config._asdict(), "value": value, "step": step}]
    return Trained(params, config, value, step, search, _curve(history))


def _winner(configs: list[Config], states: PopulationState, history: History) -> Trained:
    best = states.best
    assert best is not None
    usable = torch.isfinite(best.value) & (best.step > 0) & (states.diverged < 0)
    if not usable.any():
        message = "no configuration has a finite held-out value. Lower the learning rate."
        raise DivergedError(message)
    values, steps = best.value.tolist(), best.step.tolist()
    search = [
        {**config._asdict(), "value": value, "step": step}
        for config, value, step in zip(configs, values, steps, strict=True)
    ]
    k = int(torch.where(usable, best.value, torch.inf).argmin())
    params = {n: p[k].clone() for n, p in best.params.items()}
    return Trained(params, configs[k], values[k], steps[k], search, _curve(history.member(k)))


def _curve(history: History) -> list[tuple[int, float]]:
    columns = history.validation
    pairs = zip(columns["step"].tolist(), columns["value"].tolist(), strict=True)
    return [(int(step), value) for step, value in pairs]
