"""What evaluation distributions share: arguments of a draw, boxes, choosing among points."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fsmap.errors import InputError
from fsmap.types import Inputs

Coordinates = float | Sequence[float] | Tensor
"""One number for all dimensions of a point, or one for each."""


@runtime_checkable
class EvalDistribution(Protocol):
    """p_X, the evaluation distribution: where do we care what the function does?"""

    def sample(self, n: int, generator: torch.Generator) -> Inputs:
        """Draw ``n`` points, ``[n, ...]``."""

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The same distribution on another device or in another floating-point dtype."""


def check_draw(n: object, generator: object, device: torch.device | None = None) -> None:
    """Refuse a draw that cannot be made, or not reproducibly.

    Args:
        n: How many points.
        generator: Source of randomness: on the CPU, or where the distribution lives.
        device: Where the distribution lives; None: it has no place of its own.

    Raises:
        InputError: If ``n < 1``, or there is no generator, or it lives on a third device.
    """
    if isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 1:
        message = f"the number of points must be an integer >= 1, got {n!r}."
        raise InputError(message)
    if not isinstance(generator, torch.Generator):
        message = (
            f"sample needs a torch.Generator, got {type(generator).__name__}. "
            "Use torch.Generator().manual_seed(0)."
        )
        raise InputError(message)
    if device is not None and generator.device.type not in ("cpu", device.type):
        message = (
            f"the generator lives on {generator.device} and the distribution on {device}. Use a "
            "CPU generator, or move the distribution with .to(device)."
        )
        raise InputError(message)


def choose(total: int, n: int, replace: bool | None, generator: torch.Generator) -> Tensor:
    """Indices of ``n`` out of ``total`` points, in random order.

    Args:
        total: How many there are.
        n: How many to draw.
        replace: Whether a point may come twice; None: only if ``n > total``.
        generator: Source of randomness.

    Returns:
        ``[n]``, on the generator's device.

    Raises:
        InputError: If more points are asked for than there are, without replacement.
    """
    device = generator.device
    if replace or (replace is None and n > total):
        return torch.randint(total, (n,), generator=generator, device=device)
    if n > total:
        message = (
            f"cannot draw {n} of {total} points without replacement. Ask for at most {total}, or "
            "set replace=True."
        )
        raise InputError(message)
    if device.type == "cpu" and 4 * n <= total:
        return _first_distinct(total, n, generator)
    return torch.randperm(total, generator=generator, device=device)[:n]


def _first_distinct(total: int, n: int, generator: torch.Generator) -> Tensor:
    """As ``randperm(total)[:n]`` in law, without its cost: draw on, and skip what came before."""
    drawn = torch.randint(total, (2 * n,), generator=generator)
    while True:
        values, order = drawn.sort(stable=True)
        is_first = torch.cat([values.new_ones(1).bool(), values[1:] != values[:-1]])
        kept = order[is_first].sort().values[:n]
        if len(kept) == n:
            return drawn[kept]
        drawn = torch.cat([drawn, torch.randint(total, (n,), generator=generator)])


def per_point(
    named: dict[str, Coordinates], shape: int | Sequence[int] | None
) -> tuple[Tensor, ...]:
    """Coordinates as tensors of one shape, that of a point.

    Args:
        named: What the messages call each of them, and what came.
        shape: The shape of a point; None: as the coordinates say, and ``(1,)`` for plain numbers.

    Returns:
        One tensor for each entry of ``named``, in the dtype of the first floating-point tensor
        among them, else in torch's default dtype.

    Raises:
        InputError: If they are not finite or do not fit one shape.
    """
    dtypes = [v.dtype for v in named.values() if isinstance(v, Tensor) and v.is_floating_point()]
    dtype = dtypes[0] if dtypes else torch.get_default_dtype()
    values = [torch.as_tensor(v, dtype=dtype).detach() for v in named.values()]
    shapes = [tuple(v.shape) for v in values]
    try:
        if shape is None:
            target = tuple(torch.broadcast_shapes(*shapes)) or (1,)
        else:
            target = (shape,) if isinstance(shape, int) else tuple(shape)
        points = tuple(v.expand(target) for v in values)
    except RuntimeError as error:
        message = (
            f"{' and '.join(named)} have shapes {', '.join(map(str, shapes))}, which do not fit "
            f"points of shape {shape if shape is not None else 'common to them'}. Give numbers, or "
            "one entry for each dimension of a point."
        )
        raise InputError(message) from error
    for name, value in zip(named, values, strict=True):
        if not torch.isfinite(value).all():
            message = f"{name} must be finite, got {brief(value)}."
            raise InputError(message)
    return points


def box(
    low: Coordinates, high: Coordinates, shape: int | Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """The two corners of a box, ``[*shape]`` each.

    Args:
        low: Lower corner.
        high: Upper corner.
        shape: The shape of a point, as in :func:`per_point`.

    Returns:
        The corners.

    Raises:
        InputError: If ``low < high`` does not hold in every dimension.
    """
    lower, upper = per_point({"low": low, "high": high}, shape)
    if not (lower < upper).all():
        message = (
            f"low must be below high in every dimension, got low={brief(lower)}, "
            f"high={brief(upper)}."
        )
        raise InputError(message)
    return lower, upper


def moved(x: Inputs, device: torch.device | str | None, dtype: torch.dtype | None) -> Inputs:
    """Points on another device; floating-point tensors in another dtype, others as they are."""

    def move(t: Tensor) -> Tensor:
        return t.to(device=device, dtype=dtype if t.is_floating_point() else None)

    return tree_map(move, x)


def device_of(x: Inputs) -> torch.device:
    """Where the first tensor of the points lives."""
    first: Tensor = tree_leaves(x)[0]
    return first.device


def brief(value: Any) -> str:
    """A tensor in a few characters: a number if all entries are equal, a list if it is short."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() and (value.numel() == 1 or bool((value == value.reshape(-1)[0]).all())):
        return f"{value.reshape(-1)[0].item():g}"
    if value.numel() <= 4:
        return "[" + ", ".join(f"{v:g}" for v in value.reshape(-1).tolist()) + "]"
    return f"tensor{list(value.shape)}"
