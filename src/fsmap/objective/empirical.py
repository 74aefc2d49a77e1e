"""Evaluation points out of a finite set: data, and regular lattices."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from fsmap.errors import InputError
from fsmap.linalg import points
from fsmap.objective.sampling import (
    Coordinates,
    box,
    brief,
    check_draw,
    choose,
    device_of,
    moved,
)
from fsmap.types import Inputs

MAX_BYTES = 4 * 2**30
"""A Dataset or DataLoader that holds more than this is not read into memory unless told to."""


class Empirical:
    """Points of a data set, each equally likely.

    A tensor is shared with the caller and with every ``copy.deepcopy`` (so with an EMA copy of a
    model), and never changed. A Dataset or DataLoader is read through **once**, kept in memory
    (twice its size while reading) and read with a fixed seed, so a shuffling loader gives the same
    points in every run. Random augmentation inside it is thereby frozen: put it into ``transform``.

    Args:
        data: A tensor or array ``[D, ...]``; a tuple or dict of them, for modules with several
            inputs; a map-style Dataset or a DataLoader with items ``x`` or ``(x, y, ...)``, of
            which ``x`` is taken.
        transform: ``(x, generator) -> x``, applied to every draw: augmentation, normalization.
        replace: Whether a point may come twice in one draw; None: only if n > D.
        max_bytes: Largest Dataset or DataLoader to read into memory.

    Raises:
        InputError: If the data are empty, hold nan or inf, do not fit together, or are too large.

    Example:
        >>> import torch
        >>> px = Empirical(torch.arange(10.0))
        >>> sorted(px.sample(10, torch.Generator().manual_seed(0)).tolist()) == list(range(10))
        True
    """

    def __init__(
        self,
        data: Any,
        transform: Callable[[Inputs, torch.Generator], Inputs] | None = None,
        *,
        replace: bool | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.data = _in_memory(data, max_bytes)  # [D, ...]
        points.check(self.data)
        self.transform = transform
        self.replace = replace

    def sample(self, n: int, generator: torch.Generator) -> Inputs:
        """Draw ``n`` points, in random order.

        Args:
            n: How many.
            generator: Source of randomness, on the CPU or where the data are.

        Returns:
            ``[n, ...]``, as the data are: a tensor, a tuple or a dict.
        """
        device = device_of(self.data)
        check_draw(n, generator, device)
        rows = choose(len(self), n, self.replace, generator).to(device, non_blocking=True)
        x = points.take(self.data, rows)
        return x if self.transform is None else self.transform(x, generator)

    def all(self) -> Inputs:
        """All D points in their order, not transformed."""
        return self.data

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The same points on another device, floating-point ones in another dtype."""
        other = copy.copy(self)
        other.data = moved(self.data, device, dtype)
        return other

    def __len__(self) -> int:
        return points.count(self.data)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # never changed, so a copy of a model need not carry a copy of the data

    def __repr__(self) -> str:
        leaves: list[Tensor] = tree_leaves(self.data)
        shapes = ", ".join(str(tuple(t.shape[1:])) for t in leaves)
        name = getattr(self.transform, "__name__", type(self.transform).__name__)
        extra = f", transform={name}" if self.transform is not None else ""
        return (
            f"{type(self).__name__}({len(self)} points, shape={shapes}, "
            f"dtype={str(leaves[0].dtype)[6:]}, device={leaves[0].device}{extra})"
        )


class Lattice(Empirical):
    """A regular grid on a box, both ends included.

    Args:
        low: Lower corner: a number (one dimension), or one for each dimension.
        high: Upper corner.
        num: Points along each dimension, at least 2: one integer, or one for each.

    Raises:
        InputError: If the corners are not in order, or ``num`` does not fit them.

    Example:
        >>> Lattice(-1, 1, 3).all()
        tensor([[-1.],
                [ 0.],
                [ 1.]])
        >>> len(Lattice([-5, -5], [5, 5], 40))
        1600
    """

    def __init__(self, low: Coordinates, high: Coordinates, num: int | Sequence[int]) -> None:
        lower, upper = box(low, high, None)  # [dim]
        counts = [num] * lower.numel() if isinstance(num, int) else [int(k) for k in num]
        if lower.dim() != 1 or len(counts) != len(lower) or min(counts) < 2:
            message = (
                f"num must be an integer >= 2, or one for each of the {lower.numel()} dimensions "
                f"of the box, got {num} for corners of shape {list(lower.shape)}."
            )
            raise InputError(message)
        _check_size(math.prod(counts) * lower.numel() * lower.element_size(), MAX_BYTES)
        axes = [
            torch.linspace(a, b, k, dtype=lower.dtype, device=lower.device)
            for a, b, k in zip(lower.tolist(), upper.tolist(), counts, strict=True)
        ]
        grid = torch.meshgrid(*axes, indexing="ij")
        super().__init__(torch.stack([g.reshape(-1) for g in grid], -1))  # [prod(num), dim]
        self._text = f"low={brief(lower)}, high={brief(upper)}, num={num}"

    def __repr__(self) -> str:
        return f"Lattice({self._text})"


def _in_memory(data: Any, max_bytes: int) -> Inputs:
    """Data of any accepted kind as tensors, by reference where they are tensors already."""
    if isinstance(data, Tensor | np.ndarray | tuple | Mapping):
        return _tensors(data)
    if isinstance(data, DataLoader):
        return _read(data, max_bytes)
    mapped = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if mapped and not isinstance(data, list | str | IterableDataset):
        if len(data) == 0:
            message = "the data set is empty. At least one point is needed."
            raise InputError(message)
        return _read(DataLoader(data, batch_size=min(len(data), 256)), max_bytes)
    message = (
        f"Empirical cannot use a {type(data).__name__}. Allowed are a tensor or array [D, ...], a "
        "tuple or dict of them, a map-style Dataset, or a DataLoader (also around an iterable "
        "Dataset). Stack a list of points with torch.stack."
    )
    raise InputError(message)


def _read(loader: DataLoader[Any], max_bytes: int) -> Inputs:
    """Everything a loader yields, concatenated."""
    batches: list[Inputs] = []
    size = 0
    try:
        with _reading_seed():
            for batch in loader:
                x = _tensors(batch[0] if isinstance(batch, list | tuple) else batch)
                batches.append(x)
                size += sum(t.numel() * t.element_size() for t in tree_leaves(x))
                expected = size * _num_batches(loader) if len(batches) == 1 else size
                _check_size(expected, max_bytes)
        if batches:
            return tree_map(lambda *ts: torch.cat(ts), *batches)
    except (TypeError, RuntimeError) as error:
        message = (
            f"the data cannot be read as tensors: {error} Make its items tensors of one shape, for "
            "instance by the Dataset's transform or the DataLoader's collate_fn."
        )
        raise InputError(message) from error
    message = "the DataLoader yields nothing. At least one point is needed."
    raise InputError(message)


def _num_batches(loader: DataLoader[Any]) -> int:
    try:
        return len(loader)
    except TypeError:  # an iterable Dataset of unknown length: its size shows while reading
        return 1


@contextmanager
def _reading_seed() -> Iterator[None]:
    """Loaders draw from torch's global CPU generator: give them a fixed seed, and put it back."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def _tensors(x: Any) -> Inputs:
    """Plain containers of detached tensors."""
    if isinstance(x, Mapping):
        return {key: _tensors(value) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return tuple(_tensors(value) for value in x)
    try:
        return torch.as_tensor(x).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"points must be tensors or arrays of numbers, got {type(x).__name__}: {error}"
        raise InputError(message) from error


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        message = (
            f"these points need {size / 2**30:.2f} GiB in memory, the limit is "
            f"{max_bytes / 2**30:.2f} GiB. Take a random subset (torch.utils.data.Subset; some ten "
            "thousand points serve as well), keep images as uint8 and convert them in transform, "
            "raise max_bytes, or pass a function (n, generator) -> x that reads what it draws."
        )
        raise InputError(message)
