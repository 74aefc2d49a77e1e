"""``laplacian-trace`` and ``label-noise`` (Figs. 6 right, 7 right): R(θ), and random labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fsmap.errors import InputError
from fsmap.paper.images.measure import RowsExperiment
from fsmap.paper.images.protocol import Kind, RowsConfig, kind_of, quick
from fsmap.paper.images.verdict import (
    NAMES,
    against_plain,
    draw_lines,
    full_length,
    lines,
    long_enough,
    once_named,
    ran,
)
from fsmap.paper.report import figures, tables
from fsmap.paper.rows import Claim, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AT_LEAST = 4.0
"""How many times lower L-MAP's Laplacian has to be; the authors' logs have about 7."""

PAPER = {
    ("cifar10", "ps-map"): {"laplacian_joint": (7e4, None)},
    ("cifar10", "other"): {"laplacian_joint": (1e4, None)},
}
"""From the authors' results (the figure prints no numbers)."""

WHERE = {"laplacian_joint": "in training mode", "laplacian_other": "at D' as deployed"}
"""Two quantities: weights in front of BatchNorm can be scaled at will, which changes the second."""


@dataclasses.dataclass(frozen=True)
class TraceConfig(RowsConfig):
    """Sizes; see :class:`RowsConfig`."""

    seeds: int = 1


class LaplacianTrace(RowsExperiment):
    """R in training mode and of the deployed network, after every epoch."""

    id = "laplacian-trace"
    label = "Fig. 6 right"
    title = "Laplacian during training"
    see = "R ends several times lower with L-MAP than with PS-MAP."
    cost = "two runs of a set; none where image-table has trained them"
    protocol = (
        "rows of image-table: PS-MAP and L-MAP with D'; R(θ) in training "
        "mode at 128 training images and 128 of D' in one batch, as the authors log it, and of the "
        "deployed network at 256 images of D'; one draw of ψ (the same after every epoch)"
    )
    config = TraceConfig()
    quick = quick(TraceConfig, rows=("ps-map", "other"))

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """R at the end of training."""
        wanted = ("laplacian_joint", "laplacian_other", "laplacian_train", "accuracy", "ece")
        return lines(rows, PAPER, by=("dataset", "row"), metrics=wanted)

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """That L-MAP holds it down."""
        return [*ran(rows), *fall_claims(rows)]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """R over epochs: a panel for each set and quantity that all its runs have a curve of."""
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
            _draw(ax, some)
            ax.set(title=NAMES[dataset], xlabel="epoch")
            ax.set_ylabel(rf"$R(\theta)$ {WHERE[metric]}", fontsize="small")
        return {self.id: figure}


def _draw(ax: Axes, rows: Sequence[Row]) -> None:
    for row, look in once_named(rows, marker="", linewidth=1.2):
        ax.plot(row.config.get("at", range(1, len(row.value) + 1)), row.value, **look)
    ax.set_yscale("log")
    ax.locator_params(axis="x", integer=True)
    ax.legend()


def fall_claims(rows: Sequence[Row], by: str | None = None) -> Iterator[Claim]:
    """L-MAP's final Laplacian beside PS-MAP's, for runs of some length on the real data.

    A network that has taken a dozen steps has no Laplacian worth comparing: its running statistics
    are still those of its first weights.
    """
    for metric, words in WHERE.items():
        long = long_enough(tables.select(rows, metric=metric))
        for key, some in tables.group(long, "dataset", *([by] if by else [])).items():
            where = ", ".join(
                f"{100 * k:g} % random labels" if isinstance(k, float) else k for k in key
            )
            clean = not by or not key[1]
            for kind, name, mine, plain in against_plain(some, metric):
                times = plain.mean / max(mine.mean, 1e-30)
                logged = clean and (key[0], kind) in PAPER and metric in PAPER[key[0], kind]
                yield Claim(
                    f"{where}: the final Laplacian {words} of {name} is at least {AT_LEAST:g} "
                    "times lower than PS-MAP's",
                    times >= AT_LEAST,
                    f"{plain.mean:.3g} against {mine.mean:.3g}, {times:.1f} times",
                    "about 7 times (authors' logs)" if logged else None,
                )


@dataclasses.dataclass(frozen=True)
class Config(RowsConfig):
    """Sizes; see :class:`RowsConfig`."""

    datasets: tuple[str, ...] = ("cifar10",)
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
        "Whether L-MAP stays more accurate and better calibrated than PS-MAP as labels become "
        "random (in the paper it is slightly more accurate at every level)."
    )
    cost = "10 runs of a seed, about an hour on an H200"
    protocol = (
        "rows of image-table: PS-MAP and L-MAP with D'; round(fraction · N) "
        "training labels replaced by uniformly random ones; held-out and test labels are clean"
    )
    selecting = (*RowsExperiment.selecting, "levels")
    config = Config()
    quick = quick(Config, datasets=("cifar10",), levels=(0.0, 0.4), rows=("ps-map", "other"))

    def units(self, config: Config) -> list[dict[str, Any]]:
        """One training run each: seeds outermost, then levels."""
        plain = super().units(config)
        units = [{**unit, "level": level} for level in config.levels for unit in plain]
        return sorted(units, key=lambda unit: int(unit["seed"]))

    def kind(self, unit: dict[str, Any]) -> Kind:
        """With so many labels drawn anew."""
        return noisy(unit["row"], unit["level"])

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """One line per level, method and metric; the paper's figure prints no numbers."""
        return lines(rows, {}, by=("dataset", "label_noise", "row"))

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Accuracy and calibration at every level, and the Laplacian."""
        return [*ran(rows), *_claims(rows), *fall_claims(rows, "label_noise")]

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """Accuracy and ECE over the level."""
        return draw_lines(
            rows,
            "label_noise",
            ("accuracy", "ece", "nll_scaled"),
            xlabel="fraction of random labels",
            name=self.id,
            log=False,
        )


def noisy(row: str, level: float) -> Kind:
    """A row of the table at a level of noise; without noise as ``image-table`` has it."""
    kind = kind_of(row)
    return kind._replace(changes={**kind.changes, "label_noise": level}) if level else kind


def _claims(rows: Sequence[Row]) -> Iterator[Claim]:
    for dataset in ("fmnist", "cifar10"):
        mine = full_length(rows, dataset)
        levels = sorted({row.config["label_noise"] for row in mine if row.config["label_noise"]})
        for level in levels:
            for metric, words in (("accuracy", "more accurate"), ("ece", "better calibrated")):
                for kind, name, ours, plain in against_plain(mine, metric, label_noise=level):
                    more = ours.mean > plain.mean
                    printed = (kind, metric) == ("other", "accuracy")
                    yield Claim(
                        f"{dataset}: with {100 * level:g} % random labels {name} is {words} than "
                        "PS-MAP",
                        more if metric == "accuracy" else ours.mean < plain.mean,
                        f"{ours.mean:.2f} against {plain.mean:.2f} %",
                        "slightly more accurate" if printed else None,
                    )
