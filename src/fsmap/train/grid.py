"""Grids: which members a population has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fsmap.errors import InputError

Value = float | int | str
SEED, SPLIT = "seed", "split"
RESERVED = (SEED, SPLIT)  # axes that say which random numbers and which data, not which objective


class Grid:
    """Members of a population: every combination of the axes, or an explicit list.

    ``seed`` and ``split`` are axes with a meaning of their own; every other axis is a
    hyper-parameter of the objective and holds numbers. The last axis runs fastest. The members of
    an explicit list all have the same names.

    Example:
        >>> grid = Grid(prior_std=[0.1, 1.0], jitter=[1e-2, 1.0, 100.0], seed=range(6))
        >>> len(grid), grid[7]
        (36, {'prior_std': 0.1, 'jitter': 1.0, 'seed': 1})
        >>> len(Grid([{"jitter": 0.1}, {"jitter": 0.5}]))
        2
    """

    def __init__(
        self, members: Sequence[Mapping[str, Value]] | None = None, /, **axes: Iterable[Value]
    ) -> None:
        if (members is None) == (not axes):
            message = (
                "a Grid is made of axes, Grid(jitter=[...], seed=range(3)), or of a list of members"
            )
            raise InputError(message)
        if members is None:
            values = {name: _values(name, axis) for name, axis in axes.items()}
            combined = itertools.product(*values.values())
            members = [dict(zip(values, row, strict=True)) for row in combined]
        self.members = tuple(dict(member) for member in members)
        _check(self.members)
        self.names = tuple(self.members[0])

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The axes that the objective is built from."""
        return tuple(name for name in self.names if name not in RESERVED)

    @property
    def axes(self) -> dict[str, tuple[Value, ...]]:
        """The distinct values of every axis, in the order of their appearance."""
        return {n: tuple(dict.fromkeys(member[n] for member in self.members)) for n in self.names}

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[dict[str, Value]]:
        return (dict(member) for member in self.members)

    def __getitem__(self, index: int) -> dict[str, Value]:
        return dict(self.members[index])

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(values)} {name}" for name, values in self.axes.items())
        return f"Grid({len(self)} members: {sizes})"

    def hypers(self, like: Tensor) -> dict[str, Tensor]:
        """Every hyper-parameter as a tensor [M], with the dtype and on the device of ``like``."""
        columns = {n: [float(member[n]) for member in self.members] for n in self.hyper_names}
        return {
            n: torch.tensor(c, dtype=like.dtype, device=like.device) for n, c in columns.items()
        }

    def groups(self, *names: str) -> dict[tuple[Hashable, ...], list[int]]:
        """Members with equal values on these axes; an axis that the grid lacks has the value 0."""
        found: dict[tuple[Hashable, ...], list[int]] = {}
        for index, member in enumerate(self.members):
            found.setdefault(tuple(member.get(name, 0) for name in names), []).append(index)
        return found


def _values(name: str, axis: Iterable[Value]) -> list[Value]:
    if isinstance(axis, str | bytes) or not isinstance(axis, Iterable):
        message = f"axis {name!r} needs a list of values, got {axis!r}. Write {name}=[{axis!r}]."
        raise InputError(message)
    values = axis.tolist() if isinstance(axis, Tensor) else list(axis)
    if not values or len(set(values)) < len(values):
        message = f"axis {name!r} needs at least one value and none twice, got {values}"
        raise InputError(message)
    return values


def _check(members: tuple[dict[str, Value], ...]) -> None:
    if not members:
        message = "the list of members is empty: a grid needs at least one"
        raise InputError(message)
    for index, member in enumerate(members):
        if set(member) != set(members[0]):
            message = (
                f"members must have the same names: {list(members[0])}, but member {index} has "
                f"{list(member)}"
            )
            raise InputError(message)
        seed = member.get(SEED, 0)
        if isinstance(seed, bool) or not isinstance(seed, int):
            message = f"seed must be an integer, got {seed!r} in member {index}"
            raise InputError(message)
        for name, value in member.items():
            if name in RESERVED:
                continue
            if isinstance(value, bool | str) or not math.isfinite(value):
                message = (
                    f"axis {name!r} holds {value!r}: members of one population may differ in "
                    "finite numbers only. Train one population for every choice of the kind."
                )
                raise InputError(message)
