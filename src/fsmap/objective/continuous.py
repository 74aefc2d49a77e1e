"""Evaluation points from a density: uniform on a box, and Gaussian."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from fsmap.objective.hyper import check_positive
from fsmap.objective.sampling import Coordinates, box, brief, check_draw, moved, per_point


class Uniform:
    """Uniform on a box.

    Args:
        low: Lower corner: a number for all dimensions, or one for each.
        high: Upper corner.
        shape: Shape of one point. None: the shape of the corners, and ``(1,)`` for two numbers.

    Example:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> Uniform(-1, 1).sample(5, generator).shape
        torch.Size([5, 1])
        >>> Uniform([-5, -5], [5, 5]).sample(5, generator).shape
        torch.Size([5, 2])
        >>> Uniform(0, 1, shape=(3, 32, 32)).sample(5, generator).shape
        torch.Size([5, 3, 32, 32])
    """

    def __init__(
        self,
        low: Coordinates,
        high: Coordinates,
        shape: int | Sequence[int] | None = None,
    ) -> None:
        self.low, self.high = box(low, high, shape)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw ``n`` points, ``[n, *shape]``."""
        unit = _draw(torch.rand, n, self.low, generator)
        return torch.lerp(self.low, self.high, unit)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The same distribution on another device or in another dtype."""
        other = copy.copy(self)
        other.low, other.high = moved((self.low, self.high), device, dtype)
        return other

    def __repr__(self) -> str:
        return f"Uniform({brief(self.low)}, {brief(self.high)}, shape={tuple(self.low.shape)})"


class Normal:
    """Independent Gaussians.

    Args:
        mean: Center: a number for all dimensions, or one for each.
        std: Standard deviation, likewise.
        shape: Shape of one point. None: that of ``mean`` and ``std``, and ``(1,)`` for numbers.

    Example:
        >>> import torch
        >>> Normal(shape=13).sample(5, torch.Generator().manual_seed(0)).shape
        torch.Size([5, 13])
    """

    def __init__(
        self,
        mean: Coordinates = 0.0,
        std: Coordinates = 1.0,
        shape: int | Sequence[int] | None = None,
    ) -> None:
        self.mean, self.std = per_point({"mean": mean, "std": std}, shape)
        check_positive("std", self.std)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw ``n`` points, ``[n, *shape]``."""
        return torch.addcmul(self.mean, self.std, _draw(torch.randn, n, self.mean, generator))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """The same distribution on another device or in another dtype."""
        other = copy.copy(self)
        other.mean, other.std = moved((self.mean, self.std), device, dtype)
        return other

    def __repr__(self) -> str:
        shape = tuple(self.mean.shape)
        return f"Normal(mean={brief(self.mean)}, std={brief(self.std)}, shape={shape})"


def _draw(kind: Callable[..., Tensor], n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard draws ``[n, *like.shape]``, made where the generator lives, in float32 or better."""
    check_draw(n, generator, like.device)
    fine = torch.promote_types(like.dtype, torch.float32)
    unit = kind((n, *like.shape), generator=generator, dtype=fine, device=generator.device)
    return unit.to(like)
