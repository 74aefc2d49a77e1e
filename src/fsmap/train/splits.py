"""Training data of a population: one tensor for all members, and who sees which rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fsmap.errors import InputError
from fsmap.train.batches import as_batch
from fsmap.types import Batch, Params


class Splits(NamedTuple):
    """Several training sets of equal size N.

    Attributes:
        data: All points that occur.
        rows: Which points belong to each set, [G, N].
        names: What the ``split`` axis calls them.
    """

    data: Batch
    rows: Tensor
    names: tuple[Hashable, ...]

    def index(self, name: Hashable) -> int:  # type: ignore[override]
        """The place of a set."""
        return self.names.index(name)

    def batch(self, place: int) -> Batch:
        """One of the sets."""
        rows = self.rows[place]
        return Batch(tree_map(lambda t: t[rows], self.data.x), self.data.y[rows])


def as_splits(data: Any, wanted: tuple[Hashable, ...] | None, params: Params) -> Splits:
    """Training data in one form.

    Args:
        data: One training set; or, where the grid has a ``split`` axis, a dict or list of them, or
            a pair of one training set and a dict or list of row indices.
        wanted: Values of the ``split`` axis, None where there is no such axis.
        params: Decide device and dtype.

    Returns:
        The sets, joined.

    Raises:
        InputError: If sets are missing or of different size.
    """
    if wanted is None:
        batch = as_batch(data, params)
        return Splits(batch, torch.arange(len(batch.y), device=batch.y.device)[None], (0,))
    if isinstance(data, tuple) and len(data) == 2 and not isinstance(data, Batch):
        whole, table = as_batch(data[0], params), _pick(data[1], wanted)
        picked = [torch.as_tensor(r, device=whole.y.device) for r in table]
        _check_sizes(wanted, [len(r) for r in picked])
        return Splits(whole, torch.stack(picked), wanted)
    batches = [as_batch(batch, params) for batch in _pick(data, wanted)]
    sizes = [len(batch.y) for batch in batches]
    _check_sizes(wanted, sizes)
    joined = Batch(
        tree_map(lambda *parts: torch.cat(parts), *(b.x for b in batches)),
        torch.cat([b.y for b in batches]),
    )
    rows = torch.arange(sum(sizes), device=joined.y.device).reshape(len(batches), sizes[0])
    return Splits(joined, rows, wanted)


def _pick(sets: Any, wanted: tuple[Hashable, ...]) -> list[Any]:
    known = dict(sets) if isinstance(sets, Mapping) else None
    if known is None and isinstance(sets, list):
        known = dict(enumerate(sets))
    if known is None:
        message = (
            "the grid has a 'split' axis, so data must be a dict or list of training sets, or a "
            f"pair of one set and a dict or list of row indices; got {type(sets).__name__}"
        )
        raise InputError(message)
    missing = [name for name in wanted if name not in known]
    if missing:
        message = f"the grid asks for the splits {missing}, and data has {list(known)}"
        raise InputError(message)
    return [known[name] for name in wanted]


def _check_sizes(wanted: tuple[Hashable, ...], sizes: list[int]) -> None:
    if len(set(sizes)) > 1:
        shown = dict(zip(wanted, sizes, strict=True))
        message = (
            f"training sets of one population must have the same size, got {shown}: N is a "
            "constant of the objective. Train one population per size, or cut the sets to the "
            "smallest."
        )
        raise InputError(message)
