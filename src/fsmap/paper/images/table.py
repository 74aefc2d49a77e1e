"""``image-table`` (Table 2): four rows of the paper on two sets, and baselines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fsmap.paper.experiment import Context, Measured
from fsmap.paper.images.config import BASELINES, ROWS, RowsConfig, RowsExperiment, quick
from fsmap.paper.images.measure import train_and_measure
from fsmap.paper.images.pictures import draw_table
from fsmap.paper.images.protocol import Run
from fsmap.paper.images.rows import kind_of
from fsmap.paper.images.verdict import lines, table_claims
from fsmap.paper.report.records import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PERCENT_OF_AREA = 100 / 99.9
"""The paper's selective prediction is an unnormalized area: a perfect classifier has 99.9."""


def _printed(*cells: tuple[float, float]) -> dict[str, tuple[float, float]]:
    acc, sel, nll, ece = cells
    area = (sel[0] * PERCENT_OF_AREA, sel[1] * PERCENT_OF_AREA)
    return {"accuracy": acc, "selective": area, "nll": nll, "ece": ece}


PAPER = {
    ("fmnist", "ps-map"): _printed((93.9, 0.1), (98.6, 0.1), (0.26, 0.01), (4.0, 0.1)),
    ("fmnist", "white-noise"): _printed((94.0, 0.0), (99.2, 0.0), (0.25, 0.01), (4.0, 0.2)),
    ("fmnist", "train"): _printed((93.8, 0.1), (99.2, 0.1), (0.27, 0.01), (4.3, 0.2)),
    ("fmnist", "other"): _printed((94.1, 0.1), (99.2, 0.1), (0.26, 0.01), (4.1, 0.1)),
    ("cifar10", "ps-map"): _printed((95.4, 0.1), (99.4, 0.0), (0.18, 0.00), (2.5, 0.1)),
    ("cifar10", "white-noise"): _printed((95.3, 0.1), (99.4, 0.0), (0.20, 0.00), (3.0, 0.1)),
    ("cifar10", "train"): _printed((95.6, 0.1), (99.5, 0.0), (0.18, 0.01), (2.6, 0.0)),
    ("cifar10", "other"): _printed((95.5, 0.1), (99.5, 0.0), (0.16, 0.01), (1.4, 0.1)),
}
"""Table 2: (mean, standard error); percent, and nats."""


@dataclasses.dataclass(frozen=True)
class Config(RowsConfig):
    """Sizes; see :class:`RowsConfig`."""

    rows: tuple[str, ...] = (*ROWS, *BASELINES)


class ImageTable(RowsExperiment):
    """Accuracy, selective prediction, NLL and ECE, before and after temperature scaling."""

    id = "image-table"
    label = "Table 2"
    title = "Image classification"
    see = (
        "With the paper's λ L-MAP differs little from PS-MAP on FashionMNIST and is better "
        "calibrated on CIFAR-10. Metrics marked scaled are after temperature scaling, for every "
        "method."
    )
    cost = "about 60 min FashionMNIST, 3 h CIFAR-10 on an H200"
    protocol = (
        "ResNet-18, SGD, cosine, gradient clipped to norm 1, batch 128; FashionMNIST 50 epochs, "
        "10,000 held out; CIFAR-10 200 epochs, 5,000 held out; temperature from held-out images; "
        "selective prediction as a normalized area (the paper's divided by 99.9); percent"
    )
    config = Config()
    quick = quick(Config, rows=("ps-map", "other"))

    def measure(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Train, then measure."""
        run = Run(unit["dataset"], kind_of(unit["row"]), unit["seed"])
        return train_and_measure(config, run, context)

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """One line per set, row and metric, ours beside the paper's."""
        return lines(rows, PAPER)

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """The paper's statements."""
        return list(table_claims(rows))

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        """Accuracy against calibration, before and after temperature scaling."""
        return draw_table(rows)
