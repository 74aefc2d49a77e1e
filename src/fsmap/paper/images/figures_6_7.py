"""``landscape``, ``laplacian-trace``, ``label-noise`` (Figs. 6 and 7 right).

Training loss along random filter-normalized directions, R(θ) over epochs, and random labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fsmap.assess.landscape import check_walk, flatness, landscape
from fsmap.errors import InputError
from fsmap.paper.experiment import Context, Measured, judge_all, log_ratio
from fsmap.paper.images.protocol import (
    Kind,
    RowsConfig,
    RowsExperiment,
    Run,
    curves,
    kind_of,
    measured,
    quick,
    rows_of,
    trained,
)
from fsmap.paper.images.verdict import (
    NAMES,
    command,
    compare,
    draw_lines,
    full_length,
    lines,
    long_enough,
    once_named,
)
from fsmap.paper.report import figures, tables
from fsmap.paper.rows import Claim, Row, not_tested

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = {
    ("cifar10", "ps-map"): {"laplacian_joint": (7e4, None)},
    ("cifar10", "other"): {"laplacian_joint": (1e4, None)},
}
"""From the authors' results (the figure prints no numbers)."""

WHERE = {"laplacian_joint": "in training mode", "laplacian_other": "at D' as deployed"}
"""Two quantities: weights in front of BatchNorm can be scaled at will, which changes the second."""


@dataclasses.dataclass(frozen=True)
class TraceConfig(RowsConfig):
    seeds: int = 1


class LaplacianTrace(RowsExperiment):
    """R in training mode and of the deployed network, after every epoch."""

    id = "laplacian-trace"
    label = "Fig. 6 right"
    title = "Laplacian during training"
    see = "R after every epoch, for PS-MAP and L-MAP with D'."
    cost = "two runs of a set; none where image-table has trained them"
    protocol = (
        "rows of image-table: PS-MAP and L-MAP with D'; R(θ) in training "
        "mode at 128 training images and 128 of D' in one batch, as the authors log it, and of the "
        "deployed network at 256 images of D'; one draw of ψ (the same after every epoch)"
    )
    config = TraceConfig()
    quick = quick(TraceConfig, rows=("ps-map", "other"))

    def measure(self, config: Any, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Train and measure one unit, with its curves."""
        kind = self.kind(unit)
        run = trained(config, Run(unit["dataset"], kind, unit["seed"]), context)
        yield from measured(run, kind, context)
        yield from curves(run, kind)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        metrics = ("laplacian_joint", "laplacian_other", "laplacian_train", "accuracy", "ece")
        return lines(rows, PAPER, by=("dataset", "row"), metrics=metrics)

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        claims = []
        for dataset, name in NAMES.items():
            long = long_enough(tables.select(rows, dataset=dataset))
            ratios = {}
            for metric, words in WHERE.items():
                sides = (
                    tables.values_by(long, "seed", metric=metric, row=row)
                    for row in ("ps-map", "other")
                )
                ratios[words] = log_ratio(*sides)
            text = f"{name}: PS-MAP's final Laplacian is more than 4 times that of L-MAP with D'"
            logged = "several times" if dataset == "fmnist" else "about 7 times (authors' logs)"
            if any(ratio.n for ratio in ratios.values()):
                claims.append(judge_all(text, ratios, ratio=True, above=4, paper=logged))
            else:
                claims.append(not_tested(text, command(self.id, datasets=dataset), logged))
        return claims

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        curves = {}
        for dataset, mine in tables.group(rows, "dataset").items():
            names = {row.config["row"] for row in mine}
            for metric in WHERE:
                some = tables.select(mine, metric=f"{metric}_curve")
                if {row.config["row"] for row in some} == names:
                    curves[dataset[0], metric] = some
        if not curves:
            return {}
        figure, panels = figures.axes(len(curves), panel=(4.0, 2.8), squeeze=False)
        for ax, ((dataset, metric), some) in zip(panels[0], curves.items(), strict=True):
            for row, look in once_named(some, marker="", linewidth=1.2):
                ax.plot(row.config.get("at", range(1, len(row.value) + 1)), row.value, **look)
            ax.set_yscale("log")
            ax.locator_params(axis="x", integer=True)
            ax.legend()
            ax.set(title=NAMES[dataset], xlabel="epoch")
            ax.set_ylabel(rf"$R(\theta)$ {WHERE[metric]}", fontsize="small")
        return {self.id: figure}


@dataclasses.dataclass(frozen=True)
class NoiseConfig(RowsConfig):
    datasets: tuple[str, ...] = ("cifar10",)
    rows: tuple[str, ...] = ("ps-map", "other", "nats")
    levels: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8)  # fractions of labels that are drawn anew

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [level for level in self.levels if not 0 <= level <= 1]
        if wrong:
            message = f"levels are fractions of the labels, in [0, 1], got {wrong[0]:g}"
            raise InputError(message)


class LabelNoise(RowsExperiment):
    """Test accuracy and calibration over the level of noise."""

    id = "label-noise"
    label = "Fig. 7 right"
    title = "Label noise"
    see = (
        "Accuracy and calibration as labels become random: PS-MAP, L-MAP and LogTrace with D'. In "
        "the paper L-MAP is slightly more accurate at every level."
    )
    cost = "15 runs of a seed, about 90 min on an H200"
    protocol = (
        "rows of image-table: PS-MAP and L-MAP with D'; round(fraction · N) "
        "training labels replaced by uniformly random ones; held-out and test labels are clean"
    )
    selecting = (*RowsExperiment.selecting, "levels")
    config = NoiseConfig()
    quick = quick(NoiseConfig, datasets=("cifar10",), levels=(0.0, 0.4), rows=("ps-map", "other"))

    def units(self, config: NoiseConfig) -> list[dict[str, Any]]:
        """One training run each: seeds outermost, then levels."""
        plain = super().units(config)
        units = [{**unit, "level": level} for level in config.levels for unit in plain]
        return sorted(units, key=lambda unit: int(unit["seed"]))

    def kind(self, unit: dict[str, Any]) -> Kind:
        """With so many labels drawn anew."""
        return noisy(unit["row"], unit["level"])

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        return lines(rows, {}, by=("dataset", "label_noise", "row"))

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        claims = []
        mine = full_length(rows, "cifar10")
        levels = sorted({row.config["label_noise"] for row in mine if row.config["label_noise"]})
        for level in levels or [level for level in self.config.levels if level]:
            at = f"CIFAR-10 with {100 * level:g} % random labels"
            for metric, words, bound, paper in (
                ("accuracy", "more accurate", {"above": 0.0}, "slightly more accurate"),
                ("ece", "better calibrated", {"below": 0.0}, None),
            ):
                claims.append(
                    compare(f"{at}: L-MAP with D' is {words} than PS-MAP", mine, metric,
                            one={"row": "other", "label_noise": level},
                            other={"row": "ps-map", "label_noise": level},
                            command=command(self.id, levels=f"{level:g}"), paper=paper, **bound)
                )  # fmt: skip
        return claims

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        shown = ("accuracy", "ece", "nll_scaled")
        label = "fraction of random labels"
        return draw_lines(rows, "label_noise", shown, xlabel=label, name=self.id, log=False)


def noisy(row: str, level: float) -> Kind:
    """A row of the table at a level of noise; without noise as ``image-table`` has it."""
    kind = kind_of(row)
    return kind._replace(changes={**kind.changes, "label_noise": level}) if level else kind


@dataclasses.dataclass(frozen=True)
class LandscapeConfig(RowsConfig):
    seeds: int = 1
    directions: int = 20  # how many
    steps: int = 41  # points between −reach and reach
    reach: float = 5.0  # largest step, in multiples of each filter's norm
    images: int = 2_000  # training images of which the loss is the mean

    def __post_init__(self) -> None:
        super().__post_init__()
        check_walk(self.steps, self.reach)
        if self.directions < 1 or self.images < 1:
            message = (
                f"directions and images must be at least 1, got {self.directions} and {self.images}"
            )
            raise InputError(message)


class LossLandscape(RowsExperiment):
    """Mean training loss over 20 directions."""

    id = "landscape"
    label = "Fig. 6 left"
    title = "Loss landscape"
    see = (
        "How fast the training loss rises around the minimum of each method; in the paper more "
        "slowly around L-MAP's."
    )
    cost = "two runs of a set, or none where image-table has trained them; then a minute"
    protocol = (
        "rows of image-table: PS-MAP and L-MAP with D'; cross-entropy of "
        "training images, evaluation mode; directions normalized filter by filter, biases and "
        "BatchNorm left alone"
    )
    config = LandscapeConfig()
    quick = quick(LandscapeConfig, directions=3, steps=11, reach=2.5, images=48)

    def measure(
        self, config: LandscapeConfig, unit: dict[str, Any], context: Context
    ) -> Iterator[Measured]:
        """Train, then walk."""
        wanted = Run(unit["dataset"], kind_of(unit["row"]), unit["seed"])
        run = trained(config, wanted, context)
        images = run.task.train.take(slice(config.images))
        found = landscape(
            run.module,
            run.task.normalize(images.x),
            images.y,
            steps=torch.linspace(-config.reach, config.reach, config.steps),
            directions=config.directions,
            generator=torch.Generator().manual_seed(unit["seed"]),
        )
        row = rows_of(run, wanted.kind, directions=config.directions)
        yield row("loss_along", found.mean, steps=found.steps.tolist())
        yield row("rise", flatness(found))

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        return tables.summarize(tables.select(rows, metric="rise"), "dataset", "row", "metric")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        long = long_enough(tables.select(rows, metric="rise"))
        return [
            compare(f"{name}: the loss rises less around the minimum of L-MAP with D' than around "
                    "PS-MAP's (steps up to one norm)", long, "rise",
                    one={"row": "other", "dataset": dataset},
                    other={"row": "ps-map", "dataset": dataset},
                    command=command(self.id, datasets=dataset), paper="visibly flatter", below=0.0)
            for dataset, name in NAMES.items()
        ]  # fmt: skip

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        sets = list(dict.fromkeys(row.config["dataset"] for row in rows))
        figure, panels = figures.axes(len(sets), panel=(4.0, 2.8), squeeze=False)
        for ax, dataset in zip(panels[0], sets, strict=True):
            mine = tables.select(rows, dataset=dataset, metric="loss_along")
            for row, look in once_named(mine, marker=""):
                ax.plot(row.config["steps"], row.value, **look)
            ax.set(title=NAMES[dataset], xlabel="step, filter norms", ylabel="training loss")
            ax.set_yscale("symlog", linthresh=1.0)
            ax.legend()
        return {self.id: figure}
