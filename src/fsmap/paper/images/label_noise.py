"""``label-noise`` (Fig. 7 right): a fraction of training labels replaced by random ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fsmap.errors import InputError
from fsmap.paper.experiment import Context, Measured
from fsmap.paper.images.config import RowsConfig, RowsExperiment, quick
from fsmap.paper.images.laplacian_trace import fall_claims
from fsmap.paper.images.measure import train_and_measure
from fsmap.paper.images.pictures import draw_lines
from fsmap.paper.images.protocol import Kind, Run
from fsmap.paper.images.rows import kind_of
from fsmap.paper.images.verdict import against_plain, full_length, lines, ran
from fsmap.paper.report.records import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Config(RowsConfig):
    """Sizes; see :class:`RowsConfig`.

    Attributes:
        levels: Fractions of labels that are drawn anew.
    """

    datasets: tuple[str, ...] = ("cifar10",)
    levels: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8)

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

    def measure(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Train, then measure."""
        kind = noisy(unit["row"], unit["level"])
        return train_and_measure(config, Run(unit["dataset"], kind, unit["seed"]), context)

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
