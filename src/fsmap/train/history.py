"""What happened during training: every term in nats, step by step, fetched in blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

from fsmap.errors import DivergedError
from fsmap.train.step import COLUMNS, PARTS

FLUSH_STEPS = 100
"""Steps whose numbers stay on the device before they are fetched together and looked at."""


class PartsView(Sequence[dict[str, float | Tensor]]):
    """The three terms of each recorded step: ``parts[-1]["geometry"]``."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self._columns = {name: columns[name] for name in PARTS}

    def __len__(self) -> int:
        return len(self._columns["prior"])

    @overload
    def __getitem__(self, index: int) -> dict[str, float | Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, float | Tensor]]: ...
    def __getitem__(
        self, index: int | slice
    ) -> dict[str, float | Tensor] | list[dict[str, float | Tensor]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = {name: column[index] for name, column in self._columns.items()}
        return {n: float(v) if v.ndim == 0 else v for n, v in row.items()}

    def __iter__(self) -> Iterator[dict[str, float | Tensor]]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"PartsView({len(self)} steps of {', '.join(PARTS)})"


class History(NamedTuple):
    """Numbers of the recorded steps, measured before each step's update; float64 on the CPU.

    Attributes:
        columns: ``step``, ``lr``, ``seconds`` [T]; ``loss``, ``likelihood``, ``prior``,
            ``geometry``, ``grad_norm`` [T], for a population [T, M]. The terms are in nats for the
            whole data set, the loss is per point.
        validation: ``step`` [V] (steps taken so far) and ``value`` [V] or [V, M].
        diverged: For a population: the step at which a member stopped being finite, -1 for the
            others, [M]. None for one model, where divergence is an error.
    """

    columns: dict[str, Tensor]
    validation: dict[str, Tensor]
    diverged: Tensor | None = None

    @property
    def parts(self) -> PartsView:
        """The terms by step: ``history.parts[-1]["geometry"]``."""
        return PartsView(self.columns)

    @property
    def loss(self) -> Tensor:
        """Loss per training point."""
        return self.columns["loss"]

    def member(self, index: int) -> History:
        """The history of one member of a population."""
        columns = {n: c[:, index] if c.ndim == 2 else c for n, c in self.columns.items()}
        validation = {n: c[:, index] if c.ndim == 2 else c for n, c in self.validation.items()}
        return History(columns, validation)

    def __repr__(self) -> str:
        steps, validations = len(self.columns["step"]), len(self.validation["step"])
        return f"History({steps} steps, {validations} validations)"


class Recorder:
    """Collects rows while training runs; fetches, checks and thins them in blocks."""

    def __init__(self, *, every: int, saved: History | None = None) -> None:
        """Start empty, or where a checkpoint stopped."""
        self.every = every
        self.first = 0  # the step of the first row of the last flush
        self._blocks: list[dict[str, Tensor]] = [saved.columns] if saved else []
        self._validation: list[dict[str, Tensor]] = [saved.validation] if saved else []
        self._rows: list[tuple[int, float, float, Tensor]] = []
        elapsed = (
            float(saved.columns["seconds"][-1]) if saved and len(saved.columns["step"]) else 0.0
        )
        self._start = time.perf_counter() - elapsed

    def add(self, step: int, lr: float, row: Tensor) -> None:
        """Keep the numbers of one step; nothing is fetched."""
        self._rows.append((step, lr, time.perf_counter() - self._start, row))

    def full(self) -> bool:
        """Whether it is time to flush."""
        return len(self._rows) >= FLUSH_STEPS

    def flush(self, last: bool = False) -> Tensor:
        """Fetch what was added since the last flush.

        Args:
            last: Training is over: the last row is kept whatever ``every`` says.

        Returns:
            All fetched rows, thinned or not, [T, C] or [T, C, M].
        """
        if not self._rows:
            return torch.empty(0, len(COLUMNS))
        values = torch.stack([row for *_, row in self._rows]).cpu().double()  # [T, C, (M)]
        steps, lrs, seconds = zip(*(row[:3] for row in self._rows), strict=True)
        keep = [
            i for i, s in enumerate(steps) if s % self.every == 0 or (last and i == len(steps) - 1)
        ]
        block = {name: values[keep, c] for c, name in enumerate(COLUMNS)}
        for name, column in (("step", steps), ("lr", lrs), ("seconds", seconds)):
            block[name] = torch.tensor(column, dtype=torch.float64)[keep]
        self._blocks.append(block)
        self.first = int(steps[0])
        self._rows = []
        return values

    def validated(self, step: int, value: Tensor) -> None:
        """Keep a validation value, [] or [M]."""
        kept = value.detach().cpu().double()[None]
        self._validation.append(
            {"step": torch.tensor([float(step)], dtype=torch.float64), "value": kept}
        )

    def history(self, diverged: Tensor | None = None) -> History:
        """Everything flushed so far."""
        return History(
            _joined(self._blocks, ("step", "lr", "seconds", *COLUMNS)),
            _joined(self._validation, ("step", "value")),
            diverged,
        )


def stop_if_diverged(recorder: Recorder, values: Tensor) -> None:
    """Refuse to go on when a number of the last flush is not finite.

    Args:
        recorder: Where the numbers came from.
        values: What ``flush`` returned, [T, C].

    Raises:
        DivergedError: With the step, the term to blame, the last finite values and what to do.
    """
    bad = ~torch.isfinite(values)  # [T, C]
    if not bad.any():
        return
    at = int(bad.any(1).nonzero()[0])
    step = recorder.first + at
    names = [name for name, is_bad in zip(COLUMNS, bad[at].tolist(), strict=True) if is_bad]
    before = values[at - 1] if at > 0 else _row_before(recorder.history(), step)
    raise DivergedError(_story(step, names, before))


def _story(step: int, names: list[str], before: Tensor | None) -> str:
    blamed = [name for name in names if name in PARTS]
    if len(blamed) == 1:
        what = f"the {blamed[0]} term is not finite"
    elif blamed:
        what = f"the {', '.join(blamed)} terms are not finite"
    elif names == ["grad_norm"]:
        what = "the gradient is not finite, while all terms are"
    else:
        what = f"the {' and '.join(names)} is not finite, while all terms are"
    last = "there is no finite value before it"
    if before is not None:
        last = "last finite values: " + ", ".join(
            f"{name} {v:.6g}" for name, v in zip(COLUMNS, before.tolist(), strict=True)
        )
    advice = ADVICE.get(blamed[0] if blamed else "grad_norm", "")
    return f"training diverged at step {step}: {what}; {last}. {advice}"


ADVICE = {
    "likelihood": "Lower the learning rate, clip the gradient (clip=1.0), or look for outliers in "
    "the data.",
    "prior": "The parameters themselves left the finite numbers: lower the learning rate, or clip "
    "the gradient (clip=1.0).",
    "geometry": "J(theta; p_X) + eps*I is singular or overflows here: raise jitter or num_points, "
    "lower the learning rate, or ask fsmap.doctor.",
    "grad_norm": "A term has no derivative here, or an infinite one: lower the learning rate, "
    "raise jitter, or move the starting point.",
}


def _row_before(history: History, step: int) -> Tensor | None:
    earlier = history.columns["step"] < step
    earlier &= torch.stack([torch.isfinite(history.columns[n]) for n in COLUMNS]).all(0)
    if not earlier.any():
        return None
    index = int(earlier.nonzero()[-1])
    return torch.stack([history.columns[n][index] for n in COLUMNS])


def _joined(blocks: list[dict[str, Tensor]], names: tuple[str, ...]) -> dict[str, Tensor]:
    if not blocks:
        return {name: torch.empty(0, dtype=torch.float64) for name in names}
    return {name: torch.cat([block[name] for block in blocks]) for name in names}
