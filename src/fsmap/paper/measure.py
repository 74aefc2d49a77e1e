"""Measure one unit of an experiment: here, or on another machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fsmap.paper.experiment import Context, Experiment, Measured
from fsmap.paper.options import Options, choose_device
from fsmap.paper.report.circumstances import Circumstances, circumstances
from fsmap.paper.report.records import Row, plain


class Task(NamedTuple):
    """A unit and all that is needed to measure it; it can be sent to another process."""

    experiment: Experiment
    config: Any
    unit: Mapping[str, Any]
    options: Options
    folder: Path

    def anywhere(self) -> Task:
        """The same for a process that works in another folder."""
        data = self.options.data_dir
        options = self.options._replace(data_dir=None if data is None else data.absolute())
        return self._replace(options=options, folder=self.folder.absolute())

    def __str__(self) -> str:
        unit = (f"{key}={value}" for key, value in self.unit.items())
        return " ".join([self.experiment.id, *self.options.assignments, *unit])


class Result(NamedTuple):
    """The rows of a unit, and what it took."""

    rows: list[Row]
    seconds: float


def measure(task: Task, advance: Callable[[float | str], None] = lambda _: None) -> Result:
    """Measure a unit on the device of the machine this runs on.

    Args:
        task: The unit.
        advance: Moves the progress bar, see :class:`Context`.

    Returns:
        Its rows; nothing is written.
    """
    import torch

    device = choose_device(task.experiment, task.options.device)
    context = Context(
        device=torch.device(device),
        out=task.folder,
        advance=advance,
        size=task.options.size,
        data_dir=task.options.data_dir,
    )
    start = time.perf_counter()
    measured = list(task.experiment.run(task.config, dict(task.unit), context))
    seconds = time.perf_counter() - start
    around = circumstances(device)
    return Result(list(_rows(task, measured, around, seconds)), seconds)


def _rows(
    task: Task, measured: Iterable[Measured], around: Circumstances, seconds: float
) -> Iterator[Row]:
    for item in measured:
        yield Row(
            experiment=task.experiment.id,
            metric=item.metric,
            value=plain(item.value),
            method=item.method,
            seed=item.seed,
            config=dict(item.config),
            **around._asdict(),
            seconds=round(seconds if item.seconds is None else item.seconds, 4),
            unit=task.unit,
            deviations=tuple(item.deviations),
        )
