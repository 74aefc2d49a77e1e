"""``landscape`` (Fig. 6 left): training loss along random filter-normalized directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fsmap.assess.landscape import check_walk, flatness, landscape
from fsmap.errors import InputError
from fsmap.paper.experiment import Context, Measured
from fsmap.paper.images.protocol import (
    RowsConfig,
    RowsExperiment,
    Run,
    kind_of,
    quick,
    rows_of,
    trained,
)
from fsmap.paper.images.verdict import NAMES, command, compare, long_enough, once_named
from fsmap.paper.report import figures, tables
from fsmap.paper.rows import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Config(RowsConfig):
    """Sizes; see :class:`RowsConfig`."""

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
    config = Config()
    quick = quick(Config, directions=3, steps=11, reach=2.5, images=48)

    def measure(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
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
        """How much the loss rises within one filter norm."""
        return tables.summarize(tables.select(rows, metric="rise"), "dataset", "row", "metric")

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """That L-MAP's is flatter."""
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
        """Loss over steps."""
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
