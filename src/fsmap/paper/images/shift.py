"""``shift`` (Table 5): CIFAR-10 models on CIFAR-10.1 and on corrupted test images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fsmap.assess.shift import CORRUPTIONS, SEVERITIES, Predictions, corrupt, measure
from fsmap.data.images import read_images
from fsmap.paper.experiment import Context, Measured, Plots
from fsmap.paper.images.protocol import (
    ImageExperiment,
    RowsConfig,
    RowsExperiment,
    check_choice,
    held_out_temperature,
    quick,
    rows_of,
)
from fsmap.paper.images.table import printed
from fsmap.paper.images.verdict import command, compare, draw_lines, full_length, lines
from fsmap.paper.report import tables
from fsmap.paper.rows import Claim, Row, Rows, Unit

if TYPE_CHECKING:
    from torch import Tensor

NEW = "cifar10.1"
CORRUPTED = "corruptions"

PAPER = {
    ("cifar10", NEW, "ps-map", None): printed(89.2, 0.4, 97.8, 0.2, 0.43, 0.03, 6.2, 0.3),
    ("cifar10", NEW, "other", None): printed(89.2, 0.7, 97.9, 0.2, 0.40, 0.02, 4.1, 0.5),
}
"""Table 5: (mean, what its caption calls standard deviation); percent, and nats."""


@dataclasses.dataclass(frozen=True)
class Config(RowsConfig):
    datasets: tuple[str, ...] = ("cifar10",)
    shifts: tuple[str, ...] = (CORRUPTED, NEW)
    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)  # names; all by default
    severities: tuple[int, ...] = SEVERITIES  # 1 to 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("shifts", self.shifts, (CORRUPTED, NEW))
        check_choice("corruptions", self.corruptions, tuple(CORRUPTIONS))
        check_choice("severities", self.severities, SEVERITIES)


class Shift(RowsExperiment):
    id = "shift"
    label = "Table 5"
    title = "Distribution shift"
    see = (
        "Accuracy and calibration as corruptions grow, before and after a temperature that was "
        "fitted on clean images."
    )
    cost = "no training where image-table has trained the models; then a minute a model"
    protocol = (
        "models of image-table; temperature from clean held-out images; CIFAR-10.1 v6; the mean of "
        "ten corruptions of the test images, computed here, in each of five severities"
    )
    selecting = (*RowsExperiment.selecting, "shifts")
    departures = ImageExperiment.departures[1:]
    config = Config()
    quick = quick(
        Config,
        rows=("ps-map", "other"),
        shifts=(CORRUPTED,),
        corruptions=("gaussian-noise", "contrast"),
        severities=(2, 5),
    )

    def units(self, config: Config) -> list[Unit]:
        # corruptions first: CIFAR-10.1 cannot be had everywhere
        plain = super().units(config)
        places = [{} if shift == CORRUPTED else {"shift": shift} for shift in config.shifts]
        return [{**unit, **place} for place in sorted(places, key=len) for unit in plain]

    def run(self, config: Config, unit: Unit, context: Context) -> Iterator[Measured]:
        new = read_images(NEW, "test", context.data_dir) if unit.get("shift") == NEW else None
        run, kind = self.trained(config, unit, context)
        row, T = rows_of(run, kind), held_out_temperature(run)
        if new is not None:
            shifted = iter([({"shift": NEW}, new.x.to(run.device), new.y.to(run.device))])
        else:
            shifted = _corrupted(config, *run.task.test)
        for about, images, y in shifted:
            for name, value in measure(Predictions(run.logits_of(images), y), T).items():
                yield row(name, value, **about)

    def table(self, rows: Rows) -> tables.Table:
        found = lines(over_corruptions(rows), PAPER, by=("dataset", "shift", "row", "severity"))
        return [{k: v for k, v in line.items() if v is not None or k == "paper"} for line in found]

    def claims(self, rows: Rows) -> list[Claim]:
        long = over_corruptions(full_length(rows, "cifar10"))
        return [
            compare(f"{metric.upper()} of {method} with D' is below PS-MAP's {words}", long, metric,
                    one={"row": row, "shift": shift}, other={"row": "ps-map", "shift": shift},
                    below=0.0, paper=_printed(metric) if row == "other" and shift == NEW else None,
                    command=get + command(self.id, shifts=shift))
            for row, method in (("other", "L-MAP"), ("nats", "LogTrace"))
            for shift, words, get in ((NEW, "on CIFAR-10.1", "fsmap data get cifar10.1; "),
                                      (CORRUPTED, "over all corruptions", ""))
            for metric in ("nll", "ece")
        ]  # fmt: skip

    def draw(self, rows: Rows) -> Plots:
        graded = [row for row in rows if row.config.get("severity") is not None]
        metrics = ("accuracy", "ece", "nll")
        return {self.id: draw_lines(over_corruptions(graded), "severity", metrics, "severity")}


def over_corruptions(rows: Rows) -> list[Row]:
    """Means over corruptions, model by model: what is left to differ are seeds."""
    by = ("metric", "dataset", "shift", "row", "severity", "seed")
    return [
        some[0]._replace(value=sum(row.value for row in some) / len(some))
        for some in tables.group(rows, *by).values()
    ]


def _printed(metric: str) -> str:
    ours, plain = (PAPER["cifar10", NEW, row, None][metric][0] for row in ("other", "ps-map"))
    return f"{ours} against {plain}"


def _corrupted(config: Config, x: Tensor, y: Tensor) -> Iterator[tuple[Any, Tensor, Tensor]]:
    yield {"shift": "clean", "severity": 0}, x, y
    for severity in config.severities:
        for name in config.corruptions:
            about = {"shift": CORRUPTED, "corruption": name, "severity": severity}
            yield about, corrupt(x, name, severity), y
