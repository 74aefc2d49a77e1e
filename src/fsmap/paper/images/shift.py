"""``shift`` (Table 5): CIFAR-10 models on CIFAR-10.1 and on corrupted test images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fsmap.assess.shift import CORRUPTIONS, SEVERITIES, Predictions, corrupt, measure
from fsmap.data.images import read_images
from fsmap.errors import MissingDataError
from fsmap.paper.experiment import Context, Measured
from fsmap.paper.images.protocol import (
    RowsConfig,
    RowsExperiment,
    Run,
    check_choice,
    held_out_temperature,
    kind_of,
    quick,
    rows_of,
    shown,
    trained,
)
from fsmap.paper.images.table import printed
from fsmap.paper.images.verdict import (
    NAMES,
    UNITS,
    command,
    compare,
    lines,
    long_enough,
    look_of,
)
from fsmap.paper.report import figures, tables
from fsmap.paper.rows import Claim, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from fsmap.images import ImageRun

NEW = "cifar10.1"
CORRUPTED = "corruptions"
ABSENT = "CIFAR-10.1 is not here (fsmap data get cifar10.1): only corruptions were measured"

PAPER = {
    ("cifar10", NEW, "ps-map", None): printed(89.2, 0.4, 97.8, 0.2, 0.43, 0.03, 6.2, 0.3),
    ("cifar10", NEW, "other", None): printed(89.2, 0.7, 97.9, 0.2, 0.40, 0.02, 4.1, 0.5),
}
"""Table 5: (mean, what its caption calls standard deviation); percent, and nats."""


@dataclasses.dataclass(frozen=True)
class Config(RowsConfig):
    datasets: tuple[str, ...] = ("cifar10",)
    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)  # names; all by default
    severities: tuple[int, ...] = SEVERITIES  # 1 to 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("corruptions", self.corruptions, tuple(CORRUPTIONS))
        check_choice("severities", self.severities, SEVERITIES)


class Shift(RowsExperiment):
    """The four metrics away from the training distribution, before and after scaling."""

    id = "shift"
    label = "Table 5"
    title = "Distribution shift"
    see = (
        "Accuracy and calibration as corruptions grow, before and after a temperature that was "
        "fitted on clean images."
    )
    cost = "no training where image-table has trained the models; then a minute a model"
    protocol = (
        "models of image-table; temperature from clean held-out images; CIFAR-10.1 v6 where its "
        "files are; ten corruptions of the test images in five severities, computed here"
    )
    config = Config()
    quick = quick(
        Config,
        rows=("ps-map", "other"),
        corruptions=("gaussian-noise", "contrast"),
        severities=(2, 5),
    )

    def measure(self, config: Config, unit: dict[str, Any], context: Context) -> Iterator[Measured]:
        """Train (or take the model from ``image-table``), then measure shifted images."""
        wanted = Run(unit["dataset"], kind_of(unit["row"]), unit["seed"])
        run = trained(config, wanted, context)
        row = rows_of(run, wanted.kind)
        T = held_out_temperature(run)
        for about, images, y in _shifted(config, run, context):
            found = measure(Predictions(run.logits_of(images), y), T)
            for name, value in found.items():
                item = row(name, value, **about)
                yield item._replace(deviations=(*item.deviations, *_absent(unit, context)))

    def table(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        found = lines(over_corruptions(rows), PAPER, by=("dataset", "shift", "row", "severity"))
        return [{k: v for k, v in line.items() if v is not None or k == "paper"} for line in found]

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        long = over_corruptions(long_enough(tables.select(rows, dataset="cifar10")))
        claims = []
        for shift, words in ((NEW, "on CIFAR-10.1"), (CORRUPTED, "over all corruptions")):
            for metric in ("nll", "ece"):
                cells = [PAPER["cifar10", NEW, row, None][metric][0] for row in ("other", "ps-map")]
                paper = f"{cells[0]} against {cells[1]}" if shift == NEW else None
                get = "fsmap data get cifar10.1; " if shift == NEW else ""
                claims.append(
                    compare(f"{metric.upper()} of L-MAP with D' is below PS-MAP's {words}", long,
                            metric, one={"row": "other", "shift": shift},
                            other={"row": "ps-map", "shift": shift}, below=0.0, paper=paper,
                            command=get + command(self.id))
                )  # fmt: skip
        return claims

    def draw(self, rows: Sequence[Row]) -> dict[str, Figure]:
        metrics = ("accuracy", "ece", "nll")
        graded = [row for row in rows if row.config.get("severity") is not None]
        sets = tables.group(graded, "dataset")
        figure, panels = figures.axes(len(metrics), len(sets), squeeze=False)
        for line, ((dataset,), mine) in zip(panels, sets.items(), strict=True):
            for ax, metric in zip(line, metrics, strict=True):
                for some in tables.group(tables.select(mine, metric=metric), "row").values():
                    found = tables.line(some, "severity")
                    values = [shown(metric, value) for value in found.mean]
                    ax.plot(found.x, values, **look_of(some[0]))
                ax.set(title=NAMES[dataset], xlabel="severity", ylabel=UNITS[metric])
            line[0].legend()
        return {self.id: figure}


def over_corruptions(rows: Sequence[Row]) -> list[Row]:
    """Means over corruptions, model by model: what is left to differ are seeds."""
    by = ("metric", "dataset", "shift", "row", "severity", "seed")
    return [
        some[0]._replace(value=sum(row.value for row in some) / len(some))
        for some in tables.group(rows, *by).values()
    ]


def _absent(unit: dict[str, Any], context: Context) -> tuple[str, ...]:
    return (ABSENT,) if unit["dataset"] == "cifar10" and _new_images(context) is None else ()


def _new_images(context: Context) -> Any:
    try:
        return read_images(NEW, "test", context.data_dir)
    except MissingDataError:
        return None


def _shifted(
    config: Config, run: ImageRun, context: Context
) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
    test = run.task.test
    yield {"shift": "clean", "severity": 0}, test.x, test.y
    for severity in config.severities:
        for name in config.corruptions:
            about = {"shift": CORRUPTED, "corruption": name, "severity": severity}
            yield about, corrupt(test.x, name, severity), test.y
    new = _new_images(context) if run.settings.data == "cifar10" else None
    if new is not None and not run.settings.generated:
        yield {"shift": NEW}, new.x.to(run.device), new.y.to(run.device)
