"""What a step of a population consumes: rows of the data and draws, each made once per seed.

Random numbers belong to a seed, not to a member: all configurations of a seed see the same batches,
evaluation points and ψ, and they are those that ``fit`` makes for that seed. So a member does not
depend on its neighbors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from fsmap.errors import InputError
from fsmap.linalg.probes import Stream
from fsmap.objective.compose import Objective
from fsmap.train.batches import Batches, as_batch
from fsmap.train.grid import SEED, SPLIT, Grid
from fsmap.train.step import layer_noise
from fsmap.types import Batch, Draws, ModelFn, Params


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


class Feed(NamedTuple):
    """One step's worth: groups stacked in the first dimension."""

    rows: Tensor | None  # [G, B]  None: all points of the only training set, in order
    draws: Draws  # leaves [D, ...]
    step: int = 0


class Chunk(NamedTuple):
    """Inputs of some members, and which of them differ between members (0) or are shared (None)."""

    batch: Batch
    draws: Draws
    dims: tuple[Any, Any]


class Feeder:
    """Makes the feed of every step, and hands each member its part."""

    def __init__(
        self,
        f: ModelFn,
        grid: Grid,
        objective: Callable[[int], Objective],
        starts: Callable[[int], Params],
        splits: Splits,
        batches: Callable[[int], Batches],
    ) -> None:
        """Group the members.

        Args:
            f: The model function.
            grid: The members.
            objective: The objective of a member, on plain numbers.
            starts: The first parameters of a member: shapes are all that matters here.
            splits: Training data.
            batches: The order of the data for a seed.
        """
        self.f, self.splits = f, splits
        self._seeds = [int(member.get(SEED, 0)) for member in grid]
        device = splits.data.y.device
        whole = batches(0).size is None  # every step sees all data: then seeds do not matter
        streams = grid.groups(SPLIT) if whole else grid.groups(SEED, SPLIT)
        places = [splits.index(key[-1]) if SPLIT in grid.names else 0 for key in streams]
        orders = [batches(self._seeds[members[0]]) for members in streams.values()]
        self._streams = list(zip(orders, places, strict=True))
        self._table = splits.rows.cpu()  # [splits, N]
        self._everything = splits.rows[places] if whole else None  # [G, N]
        points = torch.arange(len(splits.data.y))
        self._in_order = len(self._streams) == 1 and torch.equal(self._table[0], points)
        self._stream_of = _index(streams, len(grid), device)  # [M]
        by_seed = grid.groups(SEED)
        self.adaptive = any(objective(k).adaptive for k in range(len(grid)))
        if self.adaptive:  # draws depend on the parameters of a member
            by_seed = {(k,): [k] for k in range(len(grid))}
        elif not _same_draws(f, objective, starts, by_seed):
            by_seed = grid.groups(SEED, *grid.hyper_names)  # p_X depends on a hyper-parameter
        self._drawing = [
            (self._seeds[members[0]], objective(members[0]), starts(members[0]))
            for members in by_seed.values()
        ]
        self._draw_of = _index(by_seed, len(grid), device)  # [M]

    def make(self, step: int, present: Callable[[int], Params] | None = None) -> Feed:
        """Rows and draws of one step; adaptive draws see the present parameters of a member."""
        if self.adaptive and present is not None:
            self._drawing = [(seed, o, present(k)) for k, (seed, o, _) in enumerate(self._drawing)]
        if self._everything is not None:
            return Feed(None if self._in_order else self._everything, self._draws(step), step)
        picked = torch.stack([self._table[g][b.rows(step)] for b, g in self._streams])  # [G, B]
        device = self.splits.rows.device
        if device.type == "cuda":
            picked = picked.pin_memory()  # one transfer for all, which nobody waits for
        return Feed(picked.to(device, non_blocking=True), self._draws(step), step)

    def _draws(self, step: int) -> Draws:
        drawn = [o.draw(self.f, p, Stream(seed, step)) for seed, o, p in self._drawing]
        return _stack(drawn)

    def chunk(self, feed: Feed, members: slice) -> Chunk:
        """The inputs of some members.

        Args:
            feed: What :meth:`make` made.
            members: Which.

        Returns:
            Shared where all members of the population share, else gathered, [c, ...].
        """
        data = self.splits.data
        shared_batch, shared_draws = len(self._streams) == 1, len(self._drawing) == 1
        batch = data
        if feed.rows is not None:
            rows = (
                feed.rows[0] if shared_batch else feed.rows[self._stream_of[members]]
            )  # [B] or [c, B]
            batch = Batch(tree_map(lambda t: t[rows], data.x), data.y[rows])
        which: Any = 0 if shared_draws else self._draw_of[members]
        draws = _map(lambda t: t[which], feed.draws)
        dims = _map(lambda _: None if shared_draws else 0, feed.draws)
        return Chunk(batch, draws, (None if shared_batch else 0, dims))

    def single(self, feed: Feed, member: int) -> tuple[Batch, Draws]:
        """The inputs of one member, as ``fit`` would have them."""
        chunk = self.chunk(feed, slice(member, member + 1))
        batch_dim, _ = chunk.dims
        batch = chunk.batch if batch_dim is None else tree_map(lambda t: t[0], chunk.batch)
        shared = len(self._drawing) == 1
        return batch, chunk.draws if shared else _map(lambda t: t[0], chunk.draws)

    def noise(self, feed: Feed, member: int) -> AbstractContextManager[None]:
        """Random layers of one member, as ``fit`` seeds them."""
        return layer_noise(
            self.f, Stream(self._seeds[member], feed.step), self.splits.data.y.device
        )


def _same_draws(
    f: ModelFn,
    objective: Callable[[int], Objective],
    starts: Callable[[int], Params],
    by_seed: dict[tuple[Hashable, ...], list[int]],
) -> bool:
    """Whether configurations of a seed draw the same numbers: not if p_X has a hyper-parameter."""
    members = next(iter(by_seed.values()))
    first = objective(members[0]).draw(f, starts(members[0]), Stream(0, 0))
    return all(_equal(first, objective(k).draw(f, starts(k), Stream(0, 0))) for k in members[1:])


def _equal(a: Draws, b: Draws) -> bool:
    (left, one), (right, two) = tree_flatten(a), tree_flatten(b)
    if one != two:
        return False
    return all(
        s is t if s is None or t is None else torch.equal(s, t)
        for s, t in zip(left, right, strict=True)
    )


def _map(function: Callable[[Tensor], Any], draws: Draws) -> Any:
    """``tree_map`` that leaves None alone."""
    return tree_map(lambda t: None if t is None else function(t), draws)


def _stack(drawn: list[Draws]) -> Draws:
    def join(*leaves: Tensor | None) -> Tensor | None:
        return None if leaves[0] is None else torch.stack(leaves)  # type: ignore[arg-type]

    joined: Draws = tree_map(join, *drawn)
    return joined


def _index(
    groups: dict[tuple[Hashable, ...], list[int]], size: int, device: torch.device
) -> Tensor:
    """The group of every member, [M]."""
    found = torch.empty(size, dtype=torch.long)
    for place, members in enumerate(groups.values()):
        found[members] = place
    return found.to(device)
