"""``image-recipe`` (not in the paper): which λ, BatchNorm mode, estimator, S and ``every``?

Short runs, a quarter of the paper's length: a curve over fixed λ in each mode, λ steered by
held-out images from many first values, and cheaper variants of the steered run; beside PS-MAP,
before and after temperature scaling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fsmap.errors import InputError
from fsmap.experiments.experiment import Context, Measured
from fsmap.experiments.image_config import (
    SELECTING,
    ImageConfig,
    ImageExperiment,
    check_choice,
    quick,
)
from fsmap.experiments.image_measure import train_and_measure
from fsmap.experiments.image_protocol import Kind, Run
from fsmap.experiments.image_rows import recipe_changes, recipe_px
from fsmap.experiments.recipe_verdict import draw, recipe_claims, recipe_table
from fsmap.lmap.batchnorm import MODES
from fsmap.report.records import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("ps-map", "fixed", "steered", "variants")
NEEDS = {"fixed": ("modes", "strengths"), "steered": ("steered_modes", "starts")}


@dataclasses.dataclass(frozen=True)
class Config(ImageConfig):
    """Sizes; see :class:`ImageConfig`.

    Attributes:
        parts: ``ps-map``, ``fixed`` (λ in each mode), ``steered`` (from each first value),
            ``variants`` (cheaper steered runs).
        modes: BatchNorm modes of the fixed runs.
        strengths: λ of the fixed runs.
        steered_modes: BatchNorm modes of the steered runs; those other than ``joint`` have R on
            every step. They take it, as fixed runs do, at training images and D' in the proportion
            that ``joint`` has them.
        starts: First λ of the steered runs; 0: one percent of the loss. The ceiling keeps λ at zero
            until half time at least, so that most end alike.
        few_points: S of the cheaper variants.
        some_steps: ``every`` of the cheaper variants.
    """

    seeds: int = 1
    fmnist_epochs: int = 12
    cifar10_epochs: int = 50
    fmnist_weight_decay: float = 5e-4
    estimator: str = "jvp"
    parts: tuple[str, ...] = PARTS
    modes: tuple[str, ...] = ("joint", "frozen", "batch")
    strengths: tuple[float, ...] = (1e-7, 1e-6, 1e-5, 1e-4)
    steered_modes: tuple[str, ...] = ("joint", "frozen")
    starts: tuple[float, ...] = (0.0, 1e-8, 1e-5, 1e-3)
    few_points: int = 32
    some_steps: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("parts", self.parts, PARTS)
        check_choice("modes", self.modes, MODES)
        check_choice("steered_modes", self.steered_modes, MODES)
        for part, fields in NEEDS.items():
            empty = [name for name in fields if not getattr(self, name)]
            if part in self.parts and empty:
                message = f"{empty[0]} is empty: give some, or leave {part!r} out of parts"
                raise InputError(message)


def kinds(config: Config) -> list[tuple[str, Kind]]:
    """Everything that is tried, with the part it belongs to.

    Args:
        config: What to try.

    Returns:
        Part and kind, in the order of the units.
    """
    found: list[tuple[str, Kind]] = [("ps-map", Kind("ps-map", "ps-map"))]
    for start in config.starts:
        for mode in config.steered_modes:
            changes = recipe_changes(config)
            if mode != "joint":  # FashionMNIST: little hold on every second step, and R is cheap
                changes["every"] = 1
            found.append(("steered", steered(mode, start, **changes)))
    for strength in config.strengths:
        for mode in config.modes:
            changes = {"batchnorm": mode, "reg_strength": strength}
            name = f"{mode}-{strength:.0e}"
            found.append(("fixed", Kind(name, px=recipe_px(mode), changes=changes)))
    found += [("variants", kind) for kind in variants(config)]
    return [(part, kind) for part, kind in found if part in config.parts]


def steered(mode: str, start: float = 0.0, name: str = "", **changes: Any) -> Kind:
    """A steered run of a mode from a first λ."""
    name = name or (f"{mode}-auto" if not start else f"{mode}-auto-from-{start:.0e}")
    changes["batchnorm"] = mode
    return Kind(name, px=recipe_px(mode), steer=True, start=start or None, changes=changes)


def variants(config: Config) -> list[Kind]:
    """Steered runs that cost less, or use the paper's estimator."""
    few, some = config.few_points, config.some_steps
    return [
        steered("joint", name="joint-auto-fd", estimator="fd"),
        steered("joint", name=f"joint-auto-S{few}", num_points=few),
        steered("joint", name=f"joint-auto-every{some}", every=some),
        steered("frozen", name=f"frozen-auto-S{few}", num_points=few),
        steered("frozen", name=f"frozen-auto-every{some}", every=some),
        steered("joint", name=f"joint-auto-S{few}-every{some}", num_points=few, every=some),
    ]


class ImageRecipe(ImageExperiment):
    """Accuracy, NLL, ECE and NLL after scaling of everything tried, and the Pareto front."""

    id = "image-recipe"
    label = "not in the paper"
    title = "A recipe: λ, BatchNorm mode, estimator, S, every"
    see = (
        "Over-confidence turns into under-confidence as λ grows, at a λ that differs between "
        "modes; whether steering finds it, and from which first values."
    )
    cost = "27 short runs of a set, on an H200 about 20 min (FashionMNIST) and an hour (CIFAR-10)"
    protocol = (
        "as image-table with p_X = D' (and training images, as many as joint has in its batch, in "
        "the other modes) and a quarter of its epochs, 12 (FashionMNIST) and 50 (CIFAR-10); "
        "held-out images steer λ and give the temperature, test images judge"
    )
    selecting = (*SELECTING, "parts", "modes", "strengths", "steered_modes", "starts")
    config = Config()
    quick = quick(
        Config,
        datasets=("fmnist",),
        modes=("joint",),
        strengths=(1e-4, 1e-2),
        steered_modes=("frozen",),
        starts=(0.0,),
        parts=("ps-map", "fixed", "steered"),
    )

    def units(self, config: Config) -> list[dict[str, Any]]:
        """One training run each."""
        return [
            {"dataset": dataset, "part": part, "row": kind.name, "seed": seed}
            for dataset in config.datasets
            for seed in range(config.seeds)
            for part, kind in kinds(config)
        ]

    def measure(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Train, then measure."""
        kind = next(kind for _, kind in kinds(config) if kind.name == unit["row"])
        more = {"part": unit["part"], "start": kind.start}
        run = Run(unit["dataset"], kind, unit["seed"])
        for row in train_and_measure(config, run, context):
            yield row._replace(config={**row.config, **more})

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """One line per kind of run, the Pareto-optimal ones marked."""
        return recipe_table(rows)

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """What the controller has to show."""
        return list(recipe_claims(rows))

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """The curve over λ, and where steering ends."""
        return {self.id: draw(rows)}
