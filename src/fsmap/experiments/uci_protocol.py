r"""How the networks of Table 1 are trained: one population per table and protocol.

The paper's loss is mean squared error $+\; w\|\theta\|^2 + \lambda R$. In our scale that is
Gaussian noise with $\sigma^2 = 1/2$, a Normal prior with $\alpha^2 = 1/(2wN)$, and
``reg_strength`` λ; the constants of the log-densities drop out of the gradient. PS-MAP is the
configuration λ = 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fsmap
from fsmap.data import uci
from fsmap.experiments.experiment import Context, Measured
from fsmap.models.mlp import MLP
from fsmap.objective.compose import Objective
from fsmap.train.descent import one_thread
from fsmap.train.optim import adam
from fsmap.train.state import held_out, measure
from fsmap.types import Batch

POWERS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
PAPER, FAIR, BASELINES = "paper", "fair", "baselines"
SCALING = {PAPER: "authors", FAIR: "train"}
METRICS = ("valid_rmse", "test_rmse")

NOTES = {
    PAPER: (
        "first weights N(0, 1/fan-in), not truncated at two standard deviations",
        "naval: two constant columns dropped",
    ),
    FAIR: ("not the paper's protocol: every configuration on every split",),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes.

    Attributes:
        datasets: Tables.
        protocols: ``paper``, ``fair``, ``baselines``.
        decays: Weight decays w.
        strengths: Strengths λ of L-MAP.
        seeds: Splits of the final runs of ``paper``.
        fair_splits: Splits of ``fair``.
        chunk: Splits of ``fair`` that are trained, and can be resumed, together.
        baseline_splits: Splits on which scikit-learn's slow network is tuned and tested.
        steps: Adam steps.
        batch: B.
        points: S.
        width: Units of each of the three hidden layers.
        lr: Learning rate.
        beta: β.
        max_rows: Rows of a table that are used; None is all.
        epochs: Most epochs of scikit-learn's network.
    """

    datasets: tuple[str, ...] = uci.NAMES
    protocols: tuple[str, ...] = (PAPER, FAIR, BASELINES)
    decays: tuple[float, ...] = POWERS
    strengths: tuple[float, ...] = POWERS
    seeds: int = 6
    fair_splits: int = 20
    chunk: int = 5
    baseline_splits: int = 5
    steps: int = 10_000
    batch: int = 512
    points: int = 512
    width: int = 256
    lr: float = 1e-3
    beta: float = 1e-3
    max_rows: int | None = None
    epochs: int = 200


class Setting(NamedTuple):
    """One configuration on one split."""

    decay: float
    strength: float
    split: int

    @property
    def method(self) -> str:
        """PS-MAP or L-MAP."""
        return "l-map" if self.strength else "ps-map"


class Result(NamedTuple):
    """Root mean squared errors of one setting; nan where training diverged."""

    setting: Setting
    valid: float
    test: float


def run_paper(config: Config, dataset: str, context: Context) -> Iterator[Measured]:
    """Tune on split 0, then train the best of each method on all splits.

    Args:
        config: Sizes.
        dataset: The table.
        context: Device, data, progress.

    Yields:
        Validation and test errors of every run.
    """
    tuned = train(config, dataset, PAPER, grid(config, [0]), context)
    for result in tuned:
        yield from _rows(dataset, PAPER, "tune", [result])
    context.advance(0.7)
    best = [choose(tuned, method) for method in ("ps-map", "l-map")]
    finals = [b._replace(split=split) for b in best for split in range(config.seeds)]
    for result in train(config, dataset, PAPER, finals, context):
        yield from _rows(dataset, PAPER, "final", [result])


def run_fair(
    config: Config, dataset: str, splits: Sequence[int], context: Context
) -> Iterator[Measured]:
    """Train every configuration on some of the splits.

    Args:
        config: Sizes.
        dataset: The table.
        splits: Which.
        context: Device, data, progress.

    Yields:
        Validation and test errors of every configuration, a list over the splits.
    """
    results = train(config, dataset, FAIR, grid(config, splits), context)
    by_config: dict[tuple[float, float], list[Result]] = {}
    for result in results:
        by_config.setdefault(result.setting[:2], []).append(result)
    for found in by_config.values():
        yield from _rows(dataset, FAIR, "all", found)


def grid(config: Config, splits: Sequence[int]) -> list[Setting]:
    """Every configuration of both methods on every split."""
    strengths = (0.0, *config.strengths)
    return [Setting(w, s, split) for split in splits for w in config.decays for s in strengths]


def choose(results: Sequence[Result], method: str) -> Setting:
    """The configuration of a method with the lowest validation error.

    Args:
        results: Runs on one split.
        method: ``"ps-map"`` or ``"l-map"``.

    Returns:
        Its setting; of equals, the first in the order of the grid.
    """
    mine = [r for r in results if r.setting.method == method]
    return min(mine, key=lambda r: math.inf if math.isnan(r.valid) else r.valid).setting


def train(
    config: Config,
    dataset: str,
    protocol: str,
    settings: Sequence[Setting],
    context: Context,
) -> list[Result]:
    """Train settings as one population.

    Args:
        config: Sizes.
        dataset: The table.
        protocol: Decides the scaling, and whether all runs start from the same weights.
        settings: What to train.
        context: Device and data.

    Returns:
        Their errors, in order.
    """
    table = uci.read_table(dataset, context.data_dir)
    parts = {
        split: uci.split(table, split, scaling=SCALING[protocol], max_rows=config.max_rows)
        for split in dict.fromkeys(s.split for s in settings)
    }
    data = {split: part.train for split, part in parts.items()}
    features, num_data = table.x.shape[1], len(next(iter(data.values())).y)
    f, _ = fsmap.functional(network(config, features, 0, context.device))

    def build(decay: Tensor, strength: Tensor) -> Objective:
        return objective(config, features, num_data, decay, strength)

    members = fsmap.Grid(
        [
            {"decay": s.decay, "strength": s.strength, "seed": s.split, "split": s.split}
            for s in settings
        ]
    )
    # The authors start all runs from the same weights; in `fair` every split has its own.
    shared = protocol == PAPER
    with one_thread():
        states, _ = fsmap.fit_population(
            build,
            members,
            f,
            data,
            steps=config.steps,
            init=lambda seed: network(config, features, 0 if shared else seed, context.device),
            optimizer=adam(config.lr),
            batch_size=config.batch,
            replace=True,
            log_every=100,
            compile=context.device.type == "cuda",
            progress=False,
        )
        errors = [
            _errors(states, {k: getattr(p, name) for k, p in parts.items()})
            for name in ("valid", "test")
        ]
    return [Result(s, *pair) for s, *pair in zip(settings, *errors, strict=True)]


def network(config: Config, features: int, seed: int, device: torch.device) -> MLP:
    """The paper's network: three hidden layers, ReLU."""
    sizes = [features, config.width, config.width, config.width, 1]
    generator = torch.Generator().manual_seed(seed)
    return MLP(sizes, "relu", init="lecun", generator=generator).to(device, torch.float32)


def objective(
    config: Config, features: int, num_data: int, decay: Tensor, strength: Tensor
) -> Objective:
    """Mean squared error + w‖θ‖² + λR, as an objective."""
    return fsmap.l_map(
        fsmap.Gaussian(math.sqrt(0.5)),
        fsmap.Normal((2 * decay * num_data) ** -0.5),
        fsmap.px.Normal(shape=features),
        num_points=config.points,
        num_data=num_data,
        reg_strength=strength,
        estimator="fd",
        beta=config.beta,
    )


def _errors(states: Any, sets: Mapping[int, Batch]) -> list[float]:
    data = held_out(dict(sets), states.grid, states.params)
    return [float(v) for v in measure(states.f, states.params, data, fsmap.metrics.rmse)]


def _rows(dataset: str, protocol: str, stage: str, results: Sequence[Result]) -> Iterator[Measured]:
    """Both errors of one configuration; a list where there are several splits."""
    setting = results[0].setting
    config: dict[str, Any] = {
        "dataset": dataset,
        "protocol": protocol,
        "stage": stage,
        "weight_decay": setting.decay,
        "reg_strength": setting.strength,
    }
    several = stage == "all"
    config["split"] = [r.setting.split for r in results] if several else setting.split
    for name, values in zip(
        METRICS, ([r.valid for r in results], [r.test for r in results]), strict=True
    ):
        value = values if several else values[0]
        seed = None if several else setting.split
        yield Measured(name, value, setting.method, seed, config, NOTES[protocol])
