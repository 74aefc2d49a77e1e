"""Which training points a step sees: a function of (seed, step), so a resumed run sees the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsmap.errors import InputError
from fsmap.functional import check_points, move_points, num_points, take_points
from fsmap.linalg import probes
from fsmap.types import Batch, Params


def check_integer(name: str, value: Any) -> None:
    """Raise an InputError for what is no integer; integers of numpy are ones, booleans are not."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        message = f"{name} must be an integer, got {value!r}"
        raise InputError(message)


class Batches:
    """Rows of the training data for every step.

    Without replacement every pass over the data is a new permutation, of which the last rows, if
    they do not fill a batch, are left out. With replacement every step draws independently.
    """

    def __init__(
        self, num_data: int, size: int | None, *, seed: int, replace: bool = False
    ) -> None:
        """Check and keep the settings.

        Args:
            num_data: N.
            size: B; None is all of the data on every step.
            seed: Seed of the order.
            replace: Draw with replacement.

        Raises:
            InputError: If B is not positive, or larger than N without replacement; if B or the seed
                is no integer.
        """
        check_integer("seed", seed)
        if size is not None:
            check_integer("batch_size", size)
        if size is not None and size < 1:
            message = f"batch_size must be at least 1, or None for all data, got {size}"
            raise InputError(message)
        if size is not None and size > num_data and not replace:
            message = (
                f"batch_size={size} is larger than the data, N={num_data}. Use a smaller one, "
                "batch_size=None for all data on every step, or replace=True."
            )
            raise InputError(message)
        self.num_data, self.size, self.seed, self.replace = num_data, size, seed, replace
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def rows(self, step: int) -> Tensor | None:
        """Indices ``[B]`` of the points of one step; None means all points in their order."""
        if self.size is None:
            return None
        if self.replace:
            generator = probes.generator(self.seed, step, "batch")
            return torch.randint(self.num_data, (self.size,), generator=generator)
        per_epoch = self.num_data // self.size
        epoch, place = divmod(step, per_epoch)
        if epoch != self._epoch:
            generator = probes.generator(self.seed, epoch, "epoch")
            self._epoch, self._order = epoch, torch.randperm(self.num_data, generator=generator)
        return self._order[place * self.size : (place + 1) * self.size]


def take(data: Batch, rows: Tensor | None) -> Batch:
    """The points of one step."""
    if rows is None:
        return data
    rows = rows.to(data.y.device, non_blocking=True)
    return Batch(take_points(data.x, rows), data.y[rows])


def as_batch(data: object, params: Params) -> Batch:
    """Training data where the parameters are; floating-point tensors in their dtype.

    Args:
        data: ``Batch(x, y)``, a pair, or anything with ``x`` and ``y``.
        params: The parameters.

    Returns:
        The data.

    Raises:
        InputError: If it is neither, is empty, or is not finite.
    """
    pair = (data.x, data.y) if hasattr(data, "x") and hasattr(data, "y") else data
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        message = f"data must be Batch(x, y), a pair, or have .x and .y, got {type(data).__name__}"
        raise InputError(message)
    x, y = pair
    check_points(x)
    if not isinstance(y, Tensor) or y.ndim == 0:
        message = f"y must be a tensor with one entry per point, got {type(y).__name__}"
        raise InputError(message)
    if len(y) != num_points(x):
        message = f"x has {num_points(x)} points and y has {len(y)}"
        raise InputError(message)
    if y.is_floating_point() and not torch.isfinite(y).all():
        bad = int((~torch.isfinite(y)).reshape(len(y), -1).any(1).sum())
        message = f"y has NaN or inf in {bad} of {len(y)} points. Remove or impute them."
        raise InputError(message)
    like = next(iter(params.values()))
    device, dtype = like.device, like.dtype
    return Batch(
        move_points(x, device=device, dtype=dtype), move_points(y, device=device, dtype=dtype)
    )


def sample_batch(data: Batch, size: int | None) -> Batch:
    """A batch to check an objective on: the first points, and those with the extreme targets."""
    if size is None or size >= len(data.y):
        return data
    flat = data.y.reshape(len(data.y), -1)[:, 0]
    extremes = torch.stack([flat.argmin(), flat.argmax()])
    return take(data, torch.cat([torch.arange(size, device=extremes.device), extremes]))
